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
# Environment: MASTER_ADDR (an address or a name of one of the nodes), NNODES (2; 1:2 is elastic), NPROC_PER_NODE (the GPUs
# of this node, or 1), MASTER_PORT (29500), NODE_RANK (the ranks follow it), RDZV_ID, RDZV_TIMEOUT (600 s), MAX_RESTARTS (3),
# DRY_RUN=1 (print the command). What is set already of GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, OMP_NUM_THREADS stays.
set -u
fail() { echo "run_multi_node.sh: $*" >&2; exit 2; }

if [ -n "${SLURM_JOB_ID:-}" ] && [ -z "${DDP_NODE:-}" ]; then # Slurm's batch step, once, on the first node
  first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  export MASTER_ADDR="${MASTER_ADDR:-$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')}"
  export MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}" # two jobs may share a node
  export NNODES="${NNODES:-$SLURM_NNODES}" RDZV_ID="${RDZV_ID:-$SLURM_JOB_ID}" DDP_NODE=1
  script=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=\([^ ]*\).*/\1/p') # $0 is Slurm's own copy
  cd "$SLURM_SUBMIT_DIR" || exit 2
  trap : USR1 TERM # the steps get the signal from Slurm, and stop
  srun --cpu-bind=none bash "$script" "$@" &
  step=$!
  while wait "$step"; rc=$?; kill -0 "$step" 2>/dev/null; do :; done
  if [ "$rc" -eq 85 ] && [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ]; then # not what scancel ends
    echo "run_multi_node.sh: stopped by a signal; back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60
  fi
  exit "$rc"
fi

here=$(cd "$(dirname "$0")" && pwd)
if [ -z "${PYTHON:-}" ]; then
  if [ -x "$here/.venv/bin/python" ]; then PYTHON=$here/.venv/bin/python; else PYTHON=python3; fi
fi
NNODES=${NNODES:-2} MASTER_PORT=${MASTER_PORT:-29500} RDZV_TIMEOUT=${RDZV_TIMEOUT:-600} MAX_RESTARTS=${MAX_RESTARTS:-3}
[ -n "${MASTER_ADDR:-}" ] || fail "MASTER_ADDR is not set: give every node the address of one of them, as in MASTER_ADDR=10.0.0.1 NNODES=2 ./run_multi_node.sh"
[[ "$NNODES" =~ ^[1-9][0-9]*(:[1-9][0-9]*)?$ ]] || fail "NNODES=$NNODES: give a number of nodes, or MIN:MAX"
case "$NNODES:${NODE_RANK:+set}" in *:*:set) fail "NODE_RANK needs a fixed number of nodes, NNODES is $NNODES: leave it out" ;; esac

# Which address of this node leads to MASTER_ADDR, over which interface, and is it ours? Nothing is sent to find out.
# (No lone quote or parenthesis in this Python: the bash 3.2 of macOS counts them in a $(...).)
found=$("$PYTHON" - "$MASTER_ADDR" "$MASTER_PORT" 2>&1 <<'EOF'
import fcntl, re, socket, struct, subprocess, sys
name, port = sys.argv[1], int(sys.argv[2])

def towards(address):
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((address, 9))
        return s.getsockname()[0]

def interfaces():
    """(interface, address) pairs: from the kernel on Linux, from ip or ifconfig for more addresses and elsewhere."""
    for _, interface in socket.if_nameindex():
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
                request = struct.pack("256s", interface[:15].encode())
                yield interface, socket.inet_ntoa(fcntl.ioctl(s, 0x8915, request)[20:24])  # SIOCGIFADDR
        except OSError:
            pass
    for command in (["ip", "-o", "addr"], ["ifconfig"]):
        try:
            interface = ""
            for line in subprocess.run(command, capture_output=True, text=True).stdout.splitlines():
                start = re.match(r"(?:\d+: )?([\w.@-]+):? ", line)
                interface = start[1].split("@")[0] if start else interface
                for address in re.findall(r"inet6? (?:addr:)?([\da-fA-F.:]+)", line):
                    yield interface, address
        except OSError:
            pass

try:
    master = socket.getaddrinfo(name, None)[0][4][0]
except OSError:
    sys.exit(f"MASTER_ADDR={name} does not resolve on this node: use the IP address of that node")
try:
    local = towards(master)
except OSError:
    sys.exit(f"this node has no route to MASTER_ADDR={name} ({master}): check the address and the network of this node")
host = local == master or master.startswith("127.")
if host and master.startswith("127.") and not name.startswith("127.") and name != "localhost":
    # On Debian /etc/hosts gives the name of the host itself the address 127.0.1.1, which nobody else can reach.
    try:
        local = towards("192.0.2.1")
    except OSError:
        local = next((a for i, a in interfaces() if not a.startswith("127.")), local)
    master = local
interface = next((i for i, a in interfaces() if a == local), None)
if interface is None:
    sys.exit(f"no interface has the address {local}: set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME")
if host:
    try:
        with socket.socket(socket.AF_INET6 if ":" in master else socket.AF_INET) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind((master, port))
    except OSError as e:
        sys.exit(f"port {port} is taken on this node, {name}: set another MASTER_PORT on every node ({e.strerror})")
print("true" if host else "false", local, interface, master)
EOF
) || fail "$found"
read -r is_host local_addr interface master <<EOF
$found
EOF
case "$is_host:${NODE_RANK:-}" in
  true:0 | true: | false:) ;;
  true:* | false:0) fail "NODE_RANK=$NODE_RANK on this node: the node that has MASTER_ADDR=$MASTER_ADDR must be NODE_RANK=0, and no other" ;;
esac
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$interface}" NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$interface}"

# What this torch can: how many GPUs, and which of the newer options of torchrun.
known=$("$PYTHON" -c 'import os, torch; from torch.distributed.run import get_args_parser
print(torch.cuda.device_count(), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(), *get_args_parser()._option_string_actions)') || fail "torch is not installed for $PYTHON: run make setup on this node"
read -r gpus cores options <<EOF
$known
EOF
case " $* " in *" --device cpu "* | *" --device=cpu "*) gpus=0 ;; esac
[ "$gpus" -gt 0 ] && nproc=$gpus || nproc=1
nproc=${NPROC_PER_NODE:-$nproc}
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > nproc ? cores / nproc : 1))}"
# A node that vanishes without a word is missed after --timeout: an elastic job wants to know soon.
[[ "$NNODES" != *:* || " $*" == *" --timeout"* ]] || set -- "$@" --timeout 20
set -- "$here/ddp_train.py" "$@"
case "$options" in *--shutdown-timeout*) set -- --shutdown-timeout=100 "$@" ;; esac # time to save
case "$options" in *--signals-to-handle*) set -- --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 "$@" ;; esac
if [ -n "${NODE_RANK:-}" ]; then
  set -- --node-rank="$NODE_RANK" --master-addr="$master" --master-port="$MASTER_PORT" "$@"
else
  # Rank 0 tells where its store is in the first round only, if torchrun shares its own: a node that comes later waits for ever.
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
  set -- --rdzv-backend=c10d --rdzv-id="${RDZV_ID:-ddp_train}" --rdzv-endpoint="$master:$MASTER_PORT" \
    --rdzv-conf="is_host=$is_host,join_timeout=$((RDZV_TIMEOUT + 60)),last_call_timeout=10" "$@"
fi
set -- -m torch.distributed.run --nnodes="$NNODES" --nproc-per-node="$nproc" --local-addr="$local_addr" --max-restarts="$MAX_RESTARTS" "$@"
echo "run_multi_node.sh: $(hostname 2>/dev/null || uname -n): $local_addr on $interface leads to $MASTER_ADDR$([ "$is_host" = true ] && echo ', which is this node'); NNODES=$NNODES, $nproc process(es), OMP_NUM_THREADS=$OMP_NUM_THREADS"
if [ -n "${DRY_RUN:-}" ]; then
  printf 'GLOO_SOCKET_IFNAME=%s NCCL_SOCKET_IFNAME=%s OMP_NUM_THREADS=%s %s' "$GLOO_SOCKET_IFNAME" "$NCCL_SOCKET_IFNAME" "$OMP_NUM_THREADS" "$PYTHON"
  printf ' %q' "$@"
  exit 0
fi

# All nodes meet at the store that the master's torchrun serves, to see that they are complete and agree on NNODES.
meet() {
  "$PYTHON" - "$is_host" "$master" "$MASTER_PORT" "$NNODES" "$RDZV_TIMEOUT" "${1:-}" <<'EOF'
import datetime, os, signal, socket, sys, time
host, master, port, nnodes, limit = sys.argv[1] == "true", sys.argv[2], int(sys.argv[3]), sys.argv[4], float(sys.argv[5])
end = time.monotonic() + limit
def give_up(line):
    print(f"run_multi_node.sh: {line}", file=sys.stderr, flush=True)
    if sys.argv[6]:
        os.kill(int(sys.argv[6]), signal.SIGKILL)  # it only waits for the others: nothing runs yet
    sys.exit(2)
while True:
    try:
        socket.create_connection((master, port), timeout=5).close()
        break
    except OSError as e:
        if time.monotonic() > end:
            give_up(f"nobody serves {master}:{port} after {limit:.0f} s ({e}): start the same line on the node that has MASTER_ADDR, and open the port")
        time.sleep(0.5)
from torch.distributed import TCPStore
store = TCPStore(master, port, is_master=False, wait_for_workers=False, timeout=datetime.timedelta(seconds=max(5, end - time.monotonic())))
if host:
    store.set("run_multi_node/nnodes", nnodes)
elif (there := store.get("run_multi_node/nnodes").decode()) != nnodes:
    give_up(f"NNODES is {nnodes} on this node, {socket.gethostname()}, and {there} on {master}: give every node the same")
here = store.add("run_multi_node/nodes", 1)
while host and here < int(nnodes.split(":")[0]):
    if time.monotonic() > end:
        give_up(f"only {here} of {nnodes} nodes came within {limit:.0f} s: start the same line on the others")
    time.sleep(0.5)
    here = store.add("run_multi_node/nodes", 0)
EOF
}
if [ "$is_host" = true ]; then meet $$ & else meet || exit 2; fi
[ -n "${DDP_NODE:-}" ] || exec "$PYTHON" "$@"
# Under Slurm a signal reaches every process of the step, torchrun too. This shell only remembers that there was one.
signaled=
trap 'signaled=1' USR1 TERM
"$PYTHON" "$@" &
child=$!
while wait "$child"; rc=$?; kill -0 "$child" 2>/dev/null; do :; done
[ -z "$signaled" ] || [ "$rc" -eq 0 ] || exit 85
exit "$rc"
