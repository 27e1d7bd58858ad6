#!/usr/bin/env bash
# Train on this machine: one process for each GPU, or one process if there is no GPU.
#   ./run_single.sh --epochs 3
# NPROC is another number of processes. On the CPU, two of them:
#   NPROC=2 ./run_single.sh --device cpu
# All arguments go to ddp_train.py.
set -e
fail() { echo "run_single.sh: $*" >&2; exit 2; }
here=$(dirname "$0")
PYTHON=${PYTHON:-$(command -v "$here/.venv/bin/python" || echo python3)}
case ${NPROC:-1} in
  *[!0-9]* | 0*) fail "NPROC=$NPROC: give a number of processes, 1 or more" ;;
esac

case " $* " in
  *" --device cpu "* | *" --device=cpu "*)
    gpus=0
    ;;
  *)
    # Several processes cannot share Apple's GPU (MPS). They train on the CPU.
    gpus=$("$PYTHON" -c 'import torch
print(0 if torch.backends.mps.is_available() else torch.accelerator.device_count())')
    ;;
esac
if [ "$gpus" -gt 0 ]; then
  processes=${NPROC:-$gpus}
  [ "$processes" -le "$gpus" ] ||
    fail "NPROC=$NPROC, but there are $gpus GPUs: take fewer, or give --device cpu"
else
  processes=${NPROC:-1}
  [ -z "$NPROC" ] || echo "run_single.sh: NPROC=$NPROC, on the CPU"
fi

# --spawn starts the processes, and gives each a fair share of the cores.
if [ "$processes" -gt 1 ]; then
  set -- --spawn "$processes" "$@"
fi
exec "$PYTHON" "$here/ddp_train.py" "$@"
