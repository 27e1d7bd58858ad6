#!/usr/bin/env bash
# All GPUs of this machine, or NPROC processes (default 1) on the CPU where there is none.
#   ./run_single.sh --epochs 3          NPROC=2 ./run_single.sh --device cpu
# NPROC with GPUs: so many processes, a GPU each. All arguments go to ddp_train.py.
set -euo pipefail
fail() { echo "run_single.sh: $*" >&2; exit 2; }
here=$(dirname "$0")
PYTHON=${PYTHON:-$(command -v "$here/.venv/bin/python" || echo python3)}
case "${NPROC:-1}" in *[!0-9]* | 0*) fail "NPROC=$NPROC: give a number of processes" ;; esac
case " $* " in
  *" --device cpu "* | *" --device=cpu "*) gpus=0 ;;
  *) gpus=$("$PYTHON" -c 'import torch # several processes cannot use MPS
print(0 if torch.backends.mps.is_available() else torch.accelerator.device_count())') ;;
esac
if [ "$gpus" -gt 0 ]; then
  nproc=${NPROC:-$gpus}
  [ "$nproc" -le "$gpus" ] ||
    fail "$nproc processes need $nproc GPUs, this machine has $gpus: set NPROC=$gpus, or pass --device cpu"
else
  nproc=${NPROC:-1}
  [ -z "${NPROC:-}" ] || echo "run_single.sh: $nproc processes on the CPU"
fi
[ "$nproc" -eq 1 ] || set -- --spawn "$nproc" "$@" # which gives each a fair share of the CPU's cores
exec "$PYTHON" "$here/ddp_train.py" "$@"
