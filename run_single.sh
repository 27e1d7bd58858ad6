#!/usr/bin/env bash
# Train on this machine: one process for each GPU, or one process if there is no GPU.
#   ./run_single.sh --epochs 3
# All arguments go to ddp_train.py. The script reads these variables:
#   NPROC         another number of processes. On the CPU, two of them:
#                 NPROC=2 ./run_single.sh --device cpu
#   MAX_RESTARTS  how often failed processes are started again (0)
#   SCRIPT        another program than ddp_train.py: SCRIPT=mine.py ./run_single.sh
set -e
here=$(dirname "$0")
PYTHON=${PYTHON:-$(command -v "$here/.venv/bin/python" || echo python3)}
found=$("$PYTHON" -c 'import sys
try:
    import torch
except ImportError as e:
    sys.exit(f"run_single.sh: {sys.executable}: {e}")
print(torch.cuda.device_count(), torch.get_num_threads())') || exit 2
read -r gpus cores <<<"$found"
[ "$gpus" -gt 0 ] || ! nvidia-smi -L >/dev/null 2>&1 ||
  echo "warning: nvidia-smi sees a GPU, but torch does not: an old driver?" >&2
case " $* " in *" --device cpu "* | *" --device=cpu "*) gpus=0 ;; esac
NPROC=${NPROC:-${NPROC_PER_NODE:-$((gpus > 0 ? gpus : 1))}}
case $NPROC in
  *[!0-9]* | 0*) echo "run_single.sh: NPROC=$NPROC is not a number, 1 or more" >&2; exit 2 ;;
esac
# torchrun would give each process one CPU thread. Share the cores out.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NPROC ? cores / NPROC : 1))}
# Processes that are started again must not meet the addresses of dead ones.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# torchrun sets 1: then NCCL's time-out waits for the GPU before it ends the rank.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=${TORCH_NCCL_ASYNC_ERROR_HANDLING:-3}
# Options of torchrun: SIGUSR1 goes to the ranks, too, and they have time to save.
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGUSR1 PET_SHUTDOWN_TIMEOUT=100
# --local-addr: the name of this machine may lead nowhere.
exec "$PYTHON" -m torch.distributed.run --standalone --local-addr=localhost \
  --nproc-per-node="$NPROC" --max-restarts="${MAX_RESTARTS:-0}" \
  "${SCRIPT:-$here/ddp_train.py}" "$@"
