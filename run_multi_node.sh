#!/usr/bin/env bash
#SBATCH --ntasks-per-node=1 --signal=USR1@120 --requeue --open-mode=append
# Train on several machines ("nodes"). Run the same command on each node, in any order:
#   MASTER_ADDR=10.0.0.1 NNODES=2 ./run_multi_node.sh --epochs 3
# With Slurm, run one command, in the folder that contains this file:
#   sbatch --nodes=4 --gpus-per-node=4 --exclusive run_multi_node.sh --epochs 3
# With Open MPI, run one process per node. MASTER_ADDR is the first of its hosts:
#   mpirun -N 1 -x MASTER_ADDR=10.0.0.1 ./run_multi_node.sh --epochs 3
# Kubernetes and Ray: see examples/kubernetes.yaml and examples/on_ray.py.
# All arguments are passed to ddp_train.py. The script reads these variables:
#   MASTER_ADDR     IPv4 address or name of one of the nodes, the host node
#   MASTER_PORT     a free port on the host node (29500)
#   NNODES          number of nodes (2). 1:2 is elastic: the job survives lost nodes
#   NODE_RANK       0 on the host node, then 1, 2, ... (needed only with NAT or Docker)
#   NPROC           number of processes on this node (one per GPU, or 1)
#   SCRIPT          script to run instead of ddp_train.py: mine.py, or "-m package.train"
#   MAX_RESTARTS    restarts on failure (0; 3 if elastic; not with NODE_RANK or Slurm)
#   RDZV_TIMEOUT    seconds to wait for MASTER_ADDR to resolve, then for all nodes (600)
#   DRY_RUN=1       print the command and exit
# Rank 0 prints and saves. Without NODE_RANK it is on the node whose address sorts first
# as text: 10.0.0.10 before 10.0.0.9. The line "rank 0 waits" names its address.
# Elastic jobs run ddp_train.py with --timeout 300: the first step may take minutes with
# --compile. A job notices dead processes after half a minute, and a node without power
# or network about 20 s after --timeout. You can pass a different --timeout.
[ -n "$BASH_VERSION" ] || exec bash "$0" "$@"  # called as `sh run_multi_node.sh`
set -e
fail() { echo "run_multi_node.sh: $*" >&2; exit 2; }
here=$(dirname "$0")

# ---- mpirun runs this file on every node. MPICH and Intel MPI set PMI_SIZE; srun may.
size=$OMPI_COMM_WORLD_SIZE
[ -n "$size$SLURM_JOB_ID" ] || size=$PMI_SIZE
if [ -n "$size" ]; then
  [ "${OMPI_COMM_WORLD_LOCAL_SIZE:-${MPI_LOCALNRANKS:-1}}" = 1 ] ||
    fail "mpirun must start one process per node: mpirun -N 1 (MPICH: -ppn 1)"
  NNODES=$size
  NODE_RANK=${OMPI_COMM_WORLD_RANK:-$PMI_RANK}
  unset SLURM_JOB_ID SLURM_STEP_ID  # mpirun can run in a Slurm job, too
fi
# ---- Kubernetes sets JOB_COMPLETION_INDEX in each pod of an Indexed Job.
NODE_RANK=${NODE_RANK:-$JOB_COMPLETION_INDEX}

# ---- Slurm: sbatch and salloc run this file once. Then srun runs it on every node.
step=$SLURM_STEP_ID
# This is the step ID of the shell that salloc opens. srun has not run yet.
[ "$step" != 4294967290 ] || step=
if [ -n "$SLURM_JOB_ID" ] && [ -z "$step" ]; then
  # sbatch runs a copy named slurm_script, in the directory you submit from.
  [ "$(basename "$0")" != slurm_script ] || here=$PWD
  # One task per node, even if your own job script asks for more.
  exec srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \
    --ntasks-per-node=1 --cpu-bind=none --export=ALL bash "$here/run_multi_node.sh" "$@"
fi
if [ -n "$step" ]; then
  [ "$SLURM_STEP_NUM_TASKS" = "$SLURM_STEP_NUM_NODES" ] ||
    fail "srun must start one task per node: srun --ntasks-per-node=1"
  NNODES=$SLURM_STEP_NUM_NODES
  NODE_RANK=$SLURM_NODEID
  # Two jobs may share a node, so each job gets its own port.
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
[ -n "$MASTER_ADDR" ] || fail "MASTER_ADDR is not set: use the address of one node"
NPROC=${NPROC:-$NPROC_PER_NODE}  # torchrun's name for it
for name in MASTER_PORT NPROC RDZV_TIMEOUT MAX_RESTARTS; do
  [[ "${!name}" =~ ^([1-9][0-9]*)?$ || "$name=${!name}" = MAX_RESTARTS=0 ]] ||
    fail "$name=${!name} is not a valid number"
done
[ "$MASTER_PORT" -lt 65536 ] || fail "MASTER_PORT=$MASTER_PORT is above 65535"
[[ "$NNODES" =~ ^[1-9][0-9]*(:[1-9][0-9]*)?$ ]] || fail "NNODES=$NNODES is not a number"
if [ -n "$NODE_RANK" ]; then
  [[ "$NNODES" != *:* && "$NODE_RANK" =~ ^[0-9]+$ && "$NODE_RANK" -lt "$NNODES" ]] ||
    fail "NODE_RANK=$NODE_RANK does not fit NNODES=$NNODES: ranks start at 0"
  # torchrun keeps its store here: restarted ranks would find addresses of dead ones.
  [ "$restarts" = 0 ] || fail "MAX_RESTARTS does not work with NODE_RANK or Slurm"
elif [[ "$NNODES" == *:* ]]; then
  restarts=${MAX_RESTARTS:-3}
  [ -n "$SCRIPT" ] || set -- --timeout 300 "$@"  # the last --timeout wins
fi

# ---- The network: find this node's address and interface that reach the other nodes.
# ---- torchrun and gloo would look up the node's name. On Debian that gives 127.0.1.1.
[[ "$MASTER_ADDR" != *:* ]] || fail "MASTER_ADDR=$MASTER_ADDR is not an IPv4 address"
SECONDS=0
until master=$(getent ahostsv4 "$MASTER_ADDR"); do
  [ "$SECONDS" -lt "$wait" ] || fail "MASTER_ADDR=$MASTER_ADDR does not resolve"
  [ -n "$waiting" ] || echo "waiting up to $wait s for MASTER_ADDR=$MASTER_ADDR to resolve"
  waiting=yes
  sleep 1
done
inspect_node() {
  "$PYTHON" - "$MASTER_ADDR" "${master%% *}" "$MASTER_PORT" "$NODE_RANK" <<'EOF'
import ctypes, fcntl, socket, struct, sys
try:
    import torch
except ImportError as e:
    sys.exit(f"run_multi_node.sh: {sys.executable}: {e}")
name, master, port, node_rank = sys.argv[1:]
udp = socket.socket(type=socket.SOCK_DGRAM)
# 0x8912 is SIOCGIFCONF: it lists the node's IPv4 addresses, 40 bytes each.
table = ctypes.create_string_buffer(40 * 1000)
request = struct.pack("iP", len(table), ctypes.addressof(table))
size, _ = struct.unpack("iP", fcntl.ioctl(udp, 0x8912, request))
interfaces = {}
for i in range(0, size, 40):
    label = table[i : i + 16].split(b"\0")[0].decode()
    interfaces[socket.inet_ntoa(table[i + 20 : i + 24])] = label.split(":")[0]
if master.startswith("127.") and not name.startswith(("127.", "localhost")):
    # This node's own name, on Debian. Other nodes know it by its first address.
    master = next((a for a in interfaces if not a.startswith("127.")), master)
try:
    udp.connect((master, 9))  # This sends nothing: the kernel only picks a route.
    address = udp.getsockname()[0]
    is_host = node_rank == "0" or (node_rank == "" and address == master)
    if is_host:
        master = address  # With NAT, the host node may not reach itself at MASTER_ADDR.
        socket.create_server(("", int(port))).close()  # Fails if the port is taken.
except OSError as e:
    sys.exit(f"run_multi_node.sh: MASTER_ADDR={name}, port {port}: {e.strerror}")
threads, gpus = torch.get_num_threads(), torch.cuda.device_count()
print(is_host, master, address, threads, gpus, interfaces.get(address, ""))
EOF
}
found=$(inspect_node) || exit 2
read -r is_host master address threads gpus interface <<<"$found"
[ "$gpus" -gt 0 ] || ! nvidia-smi -L >/dev/null 2>&1 ||
  echo "warning: nvidia-smi sees a GPU, but torch does not. Is the driver too old?" >&2
case " $* " in *" --device cpu "* | *" --device=cpu "*) gpus=0 ;; esac

# ---- torchrun
ulimit -Sn hard  # loading processes, and gloo with many ranks, open many files
script=("${SCRIPT:-$here/ddp_train.py}")
[[ $SCRIPT != "-m "* ]] || script=(-m "${SCRIPT#-m }")
nproc=${NPROC:-$((gpus > 0 ? gpus : 1))}
threads=${OMP_NUM_THREADS:-$((threads > nproc ? threads / nproc : 1))}
interface=${GLOO_SOCKET_IFNAME:-$interface}
[ -n "$NODE_RANK" ] && ranks=--node-rank=$NODE_RANK || ranks=--rdzv-backend=c10d
conf="is_host=$is_host,timeout=$wait,join_timeout=$wait,read_timeout=$wait"
# Without TORCH_DISABLE_..., a node that joins late would wait forever. PET_X sets
# torchrun's option --x: drop those that the cluster has set. torch 2.9 ignores our two.
# torchrun's default for TORCH_NCCL_... is 1: NCCL's timeout would wait for the GPU
# before ending the rank.
leftover=("${!PET_@}")
command=(env "${leftover[@]/#/-u}" TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
  PET_SHUTDOWN_TIMEOUT=100 PET_SIGNALS_TO_HANDLE="SIGTERM,SIGINT,SIGUSR1,SIGUSR2"
  TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-3}"
  OMP_NUM_THREADS="$threads" GLOO_SOCKET_IFNAME="$interface"
  "$PYTHON" -m torch.distributed.run "$ranks" --nnodes="$NNODES"
  --nproc-per-node="$nproc" --max-restarts="$restarts" --local-addr="$address"
  --rdzv-endpoint="$master:$MASTER_PORT" --rdzv-conf="$conf,last_call_timeout=10"
  "${script[@]}" "$@")
echo "run_multi_node.sh: $(uname -n): $address on $interface reaches $MASTER_ADDR"
[ -z "$DRY_RUN" ] || { printf '%q ' "${command[@]}"; echo; exit 0; }
[ -n "$step" ] || exec "${command[@]}"

# ---- Before the time limit, Slurm sends SIGUSR1 (or SIGUSR2, with --signal=USR2) to
# ---- the ranks and to this shell. The ranks save and stop. Then this shell requeues.
trap 'signaled=yes' USR1 USR2
trap : TERM
# torch 2.9 cannot handle them and must ignore them. There the ranks save at the time
# limit: Slurm sends SIGTERM, then SIGKILL 30 seconds later.
(trap '' USR1 USR2; exec "${command[@]}") || code=$?
[ -z "$signaled" ] || [ "$NODE_RANK" != 0 ] || scontrol requeue "$SLURM_JOB_ID"
exit "${code:-0}"
