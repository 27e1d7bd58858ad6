#!/usr/bin/env bash
# Train on this machine: one process per GPU, or one process if there is no GPU.
#   ./run_single.sh --epochs 3
# All arguments are passed to ddp_train.py. The script reads these variables:
#   NPROC         number of processes. On the CPU: NPROC=2 ./run_single.sh --device cpu
#   MAX_RESTARTS  number of times to restart failed ranks (0)
#   SCRIPT        script to run instead of ddp_train.py: mine.py, or "-m package.train"
[ -n "$BASH_VERSION" ] || exec bash "$0" "$@"  # called as `sh run_single.sh`
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
  echo "warning: nvidia-smi sees a GPU, but torch does not. Is the driver too old?" >&2
case " $* " in *" --device cpu "* | *" --device=cpu "*) gpus=0 ;; esac
NPROC=${NPROC:-${NPROC_PER_NODE:-$((gpus > 0 ? gpus : 1))}}
case $NPROC in
  *[!0-9]* | 0*) echo "run_single.sh: NPROC=$NPROC must be 1 or more" >&2; exit 2 ;;
esac
ulimit -Sn hard  # loading processes, and gloo with many ranks, open many files
script=("${SCRIPT:-$here/ddp_train.py}")
[[ $SCRIPT != "-m "* ]] || script=(-m "${SCRIPT#-m }")
# By default, torchrun gives each process one CPU thread. Divide the cores among them.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NPROC ? cores / NPROC : 1))}
# Without this, restarted ranks could find the addresses of dead ones.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# torchrun's default is 1: NCCL's timeout would wait for the GPU before ending the rank.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=${TORCH_NCCL_ASYNC_ERROR_HANDLING:-3}
# PET_X sets torchrun's option --x. Drop any that the cluster set. Forward SIGUSR1
# and SIGUSR2 to the ranks, too, and give them time to save.
unset "${!PET_@}"
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGUSR1,SIGUSR2 PET_SHUTDOWN_TIMEOUT=100
# --local-addr: this machine's name may not resolve.
exec "$PYTHON" -m torch.distributed.run --standalone --local-addr=localhost \
  --nproc-per-node="$NPROC" --max-restarts="${MAX_RESTARTS:-0}" \
  "${script[@]}" "$@"
