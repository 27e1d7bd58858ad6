#!/usr/bin/env bash
#SBATCH --ntasks-per-node=1 --signal=USR1@120 --requeue --open-mode=append
# Train on several machines ("nodes"). Give the same line on every node, in any order:
#   MASTER_ADDR=10.0.0.1 NNODES=2 ./run_multi_node.sh --epochs 3
# With Slurm give one line, in the folder of this file:
#   sbatch --nodes=4 --gpus-per-node=4 --exclusive run_multi_node.sh --epochs 3
# All arguments go to ddp_train.py. The script reads these variables:
#   MASTER_ADDR     the IPv4 address, or the name, of one of the nodes: the host node
#   MASTER_PORT     a free port of the host node (29500)
#   NNODES          the number of nodes (2). 1:2 is elastic: the job survives lost nodes
#   NODE_RANK       0 on the host node, then 1, 2, ... (needed only with NAT or Docker)
#   NPROC           the number of processes on this node (one for each GPU, or 1)
#   SCRIPT          another program than ddp_train.py, such as mine.py
#   MAX_RESTARTS    how often failed processes are started again (0; 3 if elastic; not
#                   with NODE_RANK, not with Slurm)
#   RDZV_TIMEOUT    how many seconds a node waits for the others (600)
#   DRY_RUN=1       print the command and stop
# Rank 0 prints and saves. Without NODE_RANK it is on the node whose address comes first
# as text: 10.0.0.10 before 10.0.0.9. The first line of the run names its host.
# Elastic jobs of ddp_train.py get --timeout 300: with --compile a first step may take
# minutes. A node whose processes die is missed after half a minute, one that loses its
# power or its network some 20 s after --timeout. You may give another --timeout.
set -e
fail() { echo "run_multi_node.sh: $*" >&2; exit 2; }
here=$(dirname "$0")

# ---- Slurm: sbatch and salloc run this file once. Then srun runs it on every node.
step=$SLURM_STEP_ID
# The shell of salloc has this number. No srun has started it.
[ "$step" != 4294967290 ] || step=
if [ -n "$SLURM_JOB_ID" ] && [ -z "$step" ]; then
  # sbatch runs a copy of this file, with this name, and in the folder of the user.
  [ "$(basename "$0")" != slurm_script ] || here=$PWD
  # One task on each node: a job script of your own may ask for other numbers.
  exec srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \
    --ntasks-per-node=1 --cpu-bind=none --export=ALL bash "$here/run_multi_node.sh" "$@"
fi
if [ -n "$step" ]; then
  [ "$SLURM_STEP_NUM_TASKS" = "$SLURM_STEP_NUM_NODES" ] ||
    fail "srun must start one task on each node: srun --ntasks-per-node=1"
  NNODES=$SLURM_STEP_NUM_NODES
  NODE_RANK=$SLURM_NODEID
  # Two jobs may share a node. So each job has a port of its own.
  MASTER_PORT=${MASTER_PORT:-$((10000 + SLURM_JOB_ID % 20000))}
  first=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)
  address=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
  MASTER_ADDR=${MASTER_ADDR:-$address}
fi

PYTHON=${PYTHON:-$(command -v "$here/.venv/bin/python" || echo python3)}
NNODES=${NNODES:-2}
MASTER_PORT=${MASTER_PORT:-29500}
wait=${RDZV_TIMEOUT:-600}
restarts=${MAX_RESTARTS:-0}
[ -n "$MASTER_ADDR" ] || fail "MASTER_ADDR is not set: give the address of one node"
NPROC=${NPROC:-$NPROC_PER_NODE}  # torchrun's word for it
for name in MASTER_PORT NPROC RDZV_TIMEOUT MAX_RESTARTS; do
  [[ "${!name}" =~ ^([1-9][0-9]*)?$ || "$name=${!name}" = MAX_RESTARTS=0 ]] ||
    fail "$name=${!name} is not a possible number"
done
[ "$MASTER_PORT" -lt 65536 ] || fail "MASTER_PORT=$MASTER_PORT is above 65535"
[[ "$NNODES" =~ ^[1-9][0-9]*(:[1-9][0-9]*)?$ ]] || fail "NNODES=$NNODES is not a number"
if [ -n "$NODE_RANK" ]; then
  [[ "$NNODES" != *:* && "$NODE_RANK" =~ ^[0-9]+$ && "$NODE_RANK" -lt "$NNODES" ]] ||
    fail "NODE_RANK=$NODE_RANK does not fit NNODES=$NNODES: the first rank is 0"
  # torchrun then keeps one store, and new processes meet the addresses of dead ones.
  [ "$restarts" = 0 ] || fail "MAX_RESTARTS does not work with NODE_RANK or with Slurm"
elif [[ "$NNODES" == *:* ]]; then
  restarts=${MAX_RESTARTS:-3}
  [ -n "$SCRIPT" ] || set -- --timeout 300 "$@"  # of two the last one counts
fi

# ---- The network: which address and which interface of this node lead to the others?
# ---- torchrun and gloo would ask for the node's name. On Debian that is 127.0.1.1.
look_around() {
  "$PYTHON" - "$MASTER_ADDR" "$MASTER_PORT" "$NODE_RANK" <<'EOF'
import ctypes, fcntl, socket, struct, sys
try:
    import torch
except ImportError as e:
    sys.exit(f"run_multi_node.sh: {sys.executable}: {e}")
name, port, node_rank = sys.argv[1:]
udp = socket.socket(type=socket.SOCK_DGRAM)
# 0x8912 is SIOCGIFCONF: all IPv4 addresses of this node, 40 bytes each.
table = ctypes.create_string_buffer(40 * 1000)
request = struct.pack("iP", len(table), ctypes.addressof(table))
size, _ = struct.unpack("iP", fcntl.ioctl(udp, 0x8912, request))
interfaces = {}
for i in range(0, size, 40):
    label = table[i : i + 16].split(b"\0")[0].decode()
    interfaces[socket.inet_ntoa(table[i + 20 : i + 24])] = label.split(":")[0]
try:
    master = socket.gethostbyname(name)
    if master.startswith("127.") and not name.startswith(("127.", "localhost")):
        # This node's own name, on Debian. Others know the node by its first address.
        master = next((a for a in interfaces if not a.startswith("127.")), master)
    udp.connect((master, 9))  # This sends nothing: the kernel only looks for the way.
    address = udp.getsockname()[0]
    is_host = node_rank == "0" or (node_rank == "" and address == master)
    if is_host:
        master = address  # MASTER_ADDR may not lead back to the host node itself (NAT).
        socket.create_server(("", int(port))).close()  # Is the port free?
except OSError as e:
    sys.exit(f"run_multi_node.sh: MASTER_ADDR={name} (IPv4), port {port}: {e.strerror}")
threads, gpus = torch.get_num_threads(), torch.cuda.device_count()
print(is_host, master, address, threads, gpus, interfaces.get(address, ""))
EOF
}
found=$(look_around) || exit 2
read -r is_host master address threads gpus interface <<<"$found"
[ "$gpus" -gt 0 ] || ! nvidia-smi -L >/dev/null 2>&1 ||
  echo "warning: nvidia-smi sees a GPU, but torch does not" >&2
case " $* " in *" --device cpu "* | *" --device=cpu "*) gpus=0 ;; esac

# ---- torchrun
nproc=${NPROC:-$((gpus > 0 ? gpus : 1))}
threads=${OMP_NUM_THREADS:-$((threads > nproc ? threads / nproc : 1))}
interface=${GLOO_SOCKET_IFNAME:-$interface}
# Without NODE_RANK torchrun gives the nodes their ranks.
[ -n "$NODE_RANK" ] && ranks=--node-rank=$NODE_RANK || ranks=--rdzv-backend=c10d
conf="is_host=$is_host,timeout=$wait,join_timeout=$wait,read_timeout=$wait"
# Without TORCH_DISABLE_... a node that comes later would wait for ever. PET_X is the
# option --x of torchrun (torch 2.9 does not have these two, and ignores them). For
# TORCH_NCCL_... torchrun sets 1: then NCCL's time-out waits for the GPU before it ends
# the rank.
command=(env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 PET_SHUTDOWN_TIMEOUT=100
  PET_SIGNALS_TO_HANDLE="SIGTERM,SIGINT,SIGUSR1" OMP_NUM_THREADS="$threads"
  TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-3}"
  GLOO_SOCKET_IFNAME="$interface" "$PYTHON" -m torch.distributed.run "$ranks"
  --nnodes="$NNODES" --nproc-per-node="$nproc" --max-restarts="$restarts"
  --rdzv-endpoint="$master:$MASTER_PORT" --rdzv-conf="$conf,last_call_timeout=10"
  --local-addr="$address" "${SCRIPT:-$here/ddp_train.py}" "$@")
echo "run_multi_node.sh: $(uname -n): $address on $interface leads to $MASTER_ADDR"
[ -z "$DRY_RUN" ] || { printf '%q ' "${command[@]}"; echo; exit 0; }
[ -n "$step" ] || exec "${command[@]}"

# ---- Slurm sends SIGUSR1 before the time is over, to the ranks and to this shell. The
# ---- ranks save and stop. Then this shell puts the job back into the queue.
trap 'signaled=yes' USR1
trap : TERM
# torch 2.9 cannot handle SIGUSR1 and must ignore it. There the ranks save when the time
# is over: Slurm sends SIGTERM, and kills them 30 seconds later.
(trap '' USR1; exec "${command[@]}") || code=$?
[ -z "$signaled" ] || [ "$NODE_RANK" != 0 ] || scontrol requeue "$SLURM_JOB_ID"
exit "${code:-0}"
