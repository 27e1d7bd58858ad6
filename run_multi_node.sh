#!/usr/bin/env bash
#SBATCH --job-name=ddp_train
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
# Several machines. The same line on every node, in any order:
#   MASTER_ADDR=10.0.0.1 NNODES=2 ./run_multi_node.sh --epochs 3
# or once, under Slurm (add --gpus-per-node=N where GPUs are asked for):
#   sbatch --nodes=4 run_multi_node.sh --epochs 3
# Environment: MASTER_ADDR (an address or a name of one of the nodes), NNODES (2; 1:2 is elastic),
# NPROC_PER_NODE (the GPUs of this node, or 1), MASTER_PORT (29500), NODE_RANK (the ranks follow it), RDZV_ID,
# RDZV_TIMEOUT (600 s), MAX_RESTARTS (3), DRY_RUN=1 (print the command). What is set already of GLOO_SOCKET_IFNAME,
# NCCL_SOCKET_IFNAME, OMP_NUM_THREADS stays.
set -u
fail() { echo "run_multi_node.sh: $*" >&2; exit 2; }
run() { # a signal ends `wait`, not the command
  "$@" &
  while wait $!; rc=$?; kill -0 $! 2>/dev/null; do :; done
}

if [ -n "${SLURM_JOB_ID:-}" ] && [ -z "${DDP_NODE:-}" ]; then # Slurm's batch step, once, on the first node
  first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  export MASTER_ADDR="${MASTER_ADDR:-$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')}"
  export MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}" # two jobs may share a node
  export NNODES="${NNODES:-$SLURM_NNODES}" RDZV_ID="${RDZV_ID:-$SLURM_JOB_ID}" DDP_NODE=1
  command=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p') # $0 is Slurm's own copy
  cd "$SLURM_SUBMIT_DIR" || exit 2
  trap : USR1 TERM # the steps get the signal from Slurm, and stop
  run srun --cpu-bind=none bash "${command%" $*"}" "$@"
  if [ "$rc" -eq 85 ] && [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ]; then # not what scancel ends
    echo "run_multi_node.sh: stopped by a signal; back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60
  fi
  exit "$rc"
fi

here=$(dirname "$0")
PYTHON=${PYTHON:-$(command -v "$here/.venv/bin/python" || echo python3)}
NNODES=${NNODES:-2} MASTER_PORT=${MASTER_PORT:-29500} RDZV_TIMEOUT=${RDZV_TIMEOUT:-600}
[ -n "${MASTER_ADDR:-}" ] || fail "MASTER_ADDR is not set: give every node the address of one of them," \
  "as in MASTER_ADDR=10.0.0.1 NNODES=2 ./run_multi_node.sh"
[[ "$NNODES" =~ ^[1-9][0-9]*(:[1-9][0-9]*)?$ ]] || fail "NNODES=$NNODES: give a number of nodes, or MIN:MAX"
[[ "$NNODES" != *:* || -z "${NODE_RANK:-}" ]] ||
  fail "NODE_RANK needs a fixed number of nodes, NNODES is $NNODES: leave it out"

# Which address of this node leads to MASTER_ADDR, over which interface, and is it ours? Nothing is sent to find out.
look_around() {
  "$PYTHON" - "$MASTER_ADDR" "$MASTER_PORT" <<'EOF'
import ctypes, os, socket, sys
name, port = sys.argv[1], int(sys.argv[2])

def fail(line):
    sys.exit(f"run_multi_node.sh: {line}")

def towards(address):
    """The address of this node from which the kernel would send there."""
    with socket.socket(family, socket.SOCK_DGRAM) as s:
        s.connect((address, 9))
        return s.getsockname()[0]

def interfaces():
    """{address: interface} of this node, from the C library: not every machine has `ip` or `ifconfig`."""
    libc, text, entry, found = ctypes.CDLL(None), ctypes.create_string_buffer(99), ctypes.c_void_p(), {}
    libc.getifaddrs(ctypes.byref(entry))
    entry = entry.value
    while entry:
        entry, interface, _, address = (ctypes.c_void_p * 4).from_address(entry)  # struct ifaddrs
        for size in (16, 28) if address else ():  # of an IPv4 and of an IPv6 address; others are refused
            if libc.getnameinfo(ctypes.c_void_p(address), size, text, 99, None, 0, socket.NI_NUMERICHOST) == 0:
                found[text.value.decode()] = ctypes.string_at(interface).decode()
    return found

try:
    family, _, _, _, (master, *_) = socket.getaddrinfo(name, None)[0]
except OSError:
    fail(f"MASTER_ADDR={name} does not resolve on this node: use the IP address of that node")
try:
    local = towards(master)
except OSError:
    fail(f"this node has no route to MASTER_ADDR={name} ({master}): check the address and the network of this node")
is_host = local == master or master.startswith("127.")
if master.startswith("127.") and not name.startswith(("127.", "localhost")):
    # On Debian /etc/hosts gives the name of the host itself the address 127.0.1.1, which nobody else can reach.
    try:
        local = towards("192.0.2.1")
    except OSError:  # no default route
        local = next((a for a in interfaces() if ":" not in a and not a.startswith("127.")), local)
    master = local
interface = interfaces().get(local) or os.environ.get("GLOO_SOCKET_IFNAME")
if not interface:
    fail(f"no interface has the address {local}: set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME")
rank = os.environ.get("NODE_RANK")
if rank and (rank == "0") != is_host:
    fail(f"NODE_RANK={rank} on this node: the node that has MASTER_ADDR={name} must be NODE_RANK=0, and no other")
if is_host:
    try:
        with socket.socket(family) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind((master, port))
    except OSError as e:
        fail(f"port {port} is taken on this node, {name}: set another MASTER_PORT on every node ({e.strerror})")
try:
    import torch
except ImportError:
    fail(f"torch is not installed for {sys.executable}: run make setup on this node")
gpus = 0 if torch.backends.mps.is_available() else torch.accelerator.device_count()  # MPS: one process only
print(str(is_host).lower(), local, interface, master, gpus, torch.get_num_threads())
EOF
}
found=$(look_around) || exit 2
read -r is_host local_addr interface master gpus threads <<<"$found"
case " $* " in *" --device cpu "* | *" --device=cpu "*) gpus=0 ;; esac
nproc=${NPROC_PER_NODE:-$((gpus > 0 ? gpus : 1))}
omp=${OMP_NUM_THREADS:-$((threads > nproc ? threads / nproc : 1))}

# A node that vanishes without a word is missed after --timeout: an elastic job wants to know soon.
[[ "$NNODES" != *:* || " $*" == *" --timeout"* ]] || set -- "$@" --timeout 20
set -- "$here/ddp_train.py" "$@"
if [ -n "${NODE_RANK:-}" ]; then
  set -- --node-rank="$NODE_RANK" --master-addr="$master" --master-port="$MASTER_PORT" "$@"
else
  set -- --rdzv-backend=c10d --rdzv-id="${RDZV_ID:-ddp_train}" --rdzv-endpoint="$master:$MASTER_PORT" \
    --rdzv-conf="is_host=$is_host,join_timeout=$((RDZV_TIMEOUT + 60)),last_call_timeout=10" "$@"
fi
set -- "$PYTHON" -m torch.distributed.run --nnodes="$NNODES" --nproc-per-node="$nproc" \
  --local-addr="$local_addr" --max-restarts="${MAX_RESTARTS:-3}" "$@"
# PET_X=value is torchrun's option --x=value, if this torch has it: time to save, and one more signal to stop by.
set -- PET_SHUTDOWN_TIMEOUT=100 PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 "$@"
# Where torchrun shares its store, rank 0 tells its address in the first round only: who comes later waits for ever.
set -- TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 "$@"
# Without the = NCCL would take the name for a prefix.
set -- env OMP_NUM_THREADS="$omp" GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$interface}" \
  NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-=$interface}" "$@"
[ "$is_host" = true ] && which=", which is this node" || which=
echo "run_multi_node.sh: $(uname -n): $local_addr on $interface leads to $MASTER_ADDR$which;" \
  "NNODES=$NNODES, $nproc process(es), OMP_NUM_THREADS=$omp"
if [ -n "${DRY_RUN:-}" ]; then
  printf '%q ' "$@"
  echo
  exit 0
fi

# All nodes meet at the store that the master's torchrun serves, to see that they are complete and agree on NNODES.
meet() { # takes the place of its subshell
  exec "$PYTHON" - "$is_host" "$master" "$MASTER_PORT" "$NNODES" "$RDZV_TIMEOUT" <<'EOF'
import datetime, os, signal, socket, sys, time
_, is_host, master, port, nnodes, limit = sys.argv
is_host, port, end, parent = is_host == "true", int(port), time.monotonic() + float(limit), os.getppid()

def give_up(line):
    print(f"run_multi_node.sh: {line}", file=sys.stderr, flush=True)
    if is_host:
        os.kill(parent, signal.SIGKILL)  # torchrun, which only waits for the others: nothing runs yet
    sys.exit(2)

def wait(line):
    if time.monotonic() > end:
        give_up(line)
    time.sleep(0.5)
    if os.getppid() != parent:  # it has ended
        sys.exit(2)

while True:
    try:
        socket.create_connection((master, port), timeout=5).close()
        break
    except OSError as e:
        wait(f"nobody serves {master}:{port} after {limit} s ({e}): "
             "start the same line on the node that has MASTER_ADDR, and open the port")
from torch.distributed import TCPStore
left = datetime.timedelta(seconds=max(5, end - time.monotonic()))
store = TCPStore(master, port, is_master=False, wait_for_workers=False, timeout=left)
if is_host:
    store.set("run_multi_node/nnodes", nnodes)
elif (there := store.get("run_multi_node/nnodes").decode()) != nnodes:
    give_up(f"NNODES is {nnodes} on this node, {socket.gethostname()}, and {there} on {master}: "
            "give every node the same")
here = store.add("run_multi_node/nodes", 1)
while is_host and here < int(nnodes.split(":")[0]):
    wait(f"only {here} of {nnodes} nodes came within {limit} s: start the same line on the others")
    here = store.add("run_multi_node/nodes", 0)
EOF
}
if [ "$is_host" = true ]; then meet & else (meet) || exit 2; fi
[ -n "${DDP_NODE:-}" ] || exec "$@"
# Under Slurm a signal reaches every process of the step, torchrun too. This shell only remembers that there was one.
signaled=
trap 'signaled=1' USR1 TERM
run "$@"
[ -z "$signaled" ] || [ "$rc" -eq 0 ] || exit 85
exit "$rc"
