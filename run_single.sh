#!/usr/bin/env bash
# All GPUs of this machine, or NPROC processes (default 1) on the CPU where there is none.
#   ./run_single.sh --epochs 3          NPROC=2 ./run_single.sh --device cpu
# NPROC with GPUs: so many processes, a GPU each. All arguments go to ddp_train.py.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
if [ -z "${PYTHON:-}" ]; then
  if [ -x "$here/.venv/bin/python" ]; then PYTHON=$here/.venv/bin/python; else PYTHON=python3; fi
fi

case "${NPROC:-1}" in *[!0-9]* | 0) echo "run_single.sh: NPROC=$NPROC: give a number of processes" >&2; exit 2 ;; esac
case " $* " in
  *" --device cpu "* | *" --device=cpu "*) gpus=0 ;;
  *) gpus=$("$PYTHON" -c 'import torch; a = torch.accelerator
print(a.device_count() if a.is_available() and a.current_accelerator().type != "mps" else 0)') ;;  # several processes cannot use MPS
esac
if [ "$gpus" -gt 0 ]; then
  nproc=${NPROC:-$gpus}
  if [ "$nproc" -gt "$gpus" ]; then
    echo "run_single.sh: $nproc processes need $nproc GPUs, this machine has $gpus: set NPROC=$gpus, or pass --device cpu" >&2
    exit 2
  fi
else
  nproc=${NPROC:-1}
  [ -z "${NPROC:-}" ] || echo "run_single.sh: $nproc processes on the CPU"
  [ "$nproc" -eq 1 ] || set -- --device cpu "$@"
fi
# torchrun would give each process one thread.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$("$PYTHON" -c "import os; print(max(1, len(os.sched_getaffinity(0) if hasattr(os, 'sched_getaffinity') else range(os.cpu_count())) // $nproc))")}"
[ "$nproc" -gt 1 ] || exec "$PYTHON" "$here/ddp_train.py" "$@"
exec "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node="$nproc" "$here/ddp_train.py" "$@"
