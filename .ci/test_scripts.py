"""Tests of run_single.sh and run_multi_node.sh.

    pytest .ci/test_scripts.py              about a minute on two cores
    pytest -m faults .ci/test_scripts.py    nodes that do not come, die, are cut off

Two hosts are two network namespaces with a wire between them: this needs root on Linux.
Slurm is played by two small shell scripts, `srun` and `scontrol`.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.launcher.api import LaunchConfig

from test_ddp_train import (
    DEADLINE,
    STARTED,
    descendants,
    finish,
    free_port,
    kill,
    report,
    start,
    wait_for,
)

HERE = Path(__file__).resolve().parent.parent
SINGLE = HERE / "run_single.sh"
MULTI = HERE / "run_multi_node.sh"
TINY = "--device cpu --dim 16 --layers 1 --heads 2 --seq-len 32".split()
TINY += "--batch-size 4 --log-every 1".split()


# ---- What the tests share ------------------------------------------------------------
SETTINGS = "MASTER_ADDR MASTER_PORT NNODES NODE_RANK NPROC NPROC_PER_NODE MAX_RESTARTS"
SETTINGS += (
    " RDZV_TIMEOUT DRY_RUN OMP_NUM_THREADS GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME"
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """Variables of the user, or of a Slurm job around the tests, must not matter."""
    for name in os.environ:
        if name in SETTINGS.split() or name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")


@pytest.fixture
def tiny(tmp_path):
    """The arguments of a small model and small data."""
    data = tmp_path / "data"
    data.write_bytes((HERE / "ddp_train.py").read_bytes()[:20_000])
    return [*TINY, "--data", data]


@pytest.fixture
def small_torch(tmp_path, monkeypatch):
    """A stand-in for torch: four GPUs and eight threads. The real one takes seconds."""
    folder = tmp_path / "small_torch"
    folder.mkdir()
    (folder / "torch.py").write_text(SMALL_TORCH)
    monkeypatch.setenv("PYTHONPATH", str(folder))


SMALL_TORCH = """
class accelerator:
    def device_count():
        return 4

def get_num_threads():
    return 8
"""


def has_world(processes, nodes):
    """A pattern: the line at the start of a run names the processes and the nodes."""
    return f"ranks: {processes}, nodes: {nodes}"


# ---- run_single.sh -------------------------------------------------------------------
def test_single_shares_the_cores(tiny, tmp_path):
    """Each of two processes gets half of the cores. The run finishes, in a path with a
    space."""
    out = tmp_path / "a b"
    arguments = *tiny, "--max-steps", 20, "--out", out
    run = start(SINGLE, *arguments, env={"NPROC": "2", "NPROC_PER_NODE": "7"})
    wait_for(run, "step 2 ")
    if sys.platform == "linux":
        threads = max(1, len(os.sched_getaffinity(0)) // 2)
        assert f"OMP_NUM_THREADS={threads}" in environment_of_a_rank(run)
    output = finish(run)
    assert re.search(has_world(2, 1), output), output
    assert re.search(r"^done", output, re.MULTILINE), output
    assert (out / "checkpoint.pt").exists()


def environment_of_a_rank(run):
    for pid in descendants(run.pid):
        environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
        if any(word.startswith("LOCAL_RANK=") for word in environment):
            return environment
    pytest.fail(f"there is no rank\n{report()}")


@pytest.mark.skipif(
    "signals_to_handle" not in LaunchConfig.__dataclass_fields__,
    reason="this torchrun does not pass SIGUSR1 on",
)
def test_single_passes_a_signal_on(tiny, tmp_path):
    """A signal to the process that was started is one to all ranks. They save."""
    run = start(
        SINGLE, *tiny, "--epochs", 99, "--out", tmp_path / "out", env={"NPROC": "2"}
    )
    wait_for(run, "step 2 ")
    run.send_signal(signal.SIGUSR1)
    run.wait(DEADLINE)
    number = int(signal.SIGUSR1)
    assert f"stopped by signal {number}" in run.log.read_text(), report()
    assert (tmp_path / "out/checkpoint.pt").exists()


@pytest.mark.parametrize("number", ["x", "0", "-1", "1.5", "02"])
def test_single_refuses_a_bad_number_of_processes(number):
    output = finish(start(SINGLE, env={"NPROC": number}), code=2)
    assert output.startswith(f"run_single.sh: NPROC={number}:")
    assert output.count("\n") == 1


# ---- run_multi_node.sh: what it refuses ----------------------------------------------
def refusal(**env):
    """The one line that run_multi_node.sh prints when it refuses these variables."""
    began = time.monotonic()
    output = finish(start(MULTI, env=env), code=2)
    assert output.startswith("run_multi_node.sh: ") and output.count("\n") == 1, output
    assert time.monotonic() - began < 60, "it must be refused at once"
    return output


@pytest.mark.usefixtures("small_torch")
def test_master_addr_is_missing():
    assert "MASTER_ADDR is not set" in refusal(NNODES="2")


@pytest.mark.usefixtures("small_torch")
def test_master_addr_does_not_resolve():
    assert "MASTER_ADDR=no.such.host.invalid" in refusal(
        MASTER_ADDR="no.such.host.invalid"
    )


@pytest.mark.usefixtures("small_torch")
def test_ipv6_is_refused():
    assert "MASTER_ADDR=fd00::1 (IPv4)" in refusal(MASTER_ADDR="fd00::1")


@pytest.mark.usefixtures("small_torch")
@pytest.mark.parametrize("nnodes", ["two", "0", "-1", "1:", "1:2:3", "2 "])
def test_bad_number_of_nodes(nnodes):
    output = refusal(MASTER_ADDR="127.0.0.1", NNODES=nnodes)
    assert f"NNODES={nnodes} is not a number" in output


@pytest.mark.usefixtures("small_torch")
@pytest.mark.parametrize("rank, nnodes", [("2", "2"), ("-1", "2"), ("a", "2")])
def test_node_rank_out_of_range(rank, nnodes):
    output = refusal(MASTER_ADDR="127.0.0.1", NNODES=nnodes, NODE_RANK=rank)
    assert f"NODE_RANK={rank} does not fit NNODES={nnodes}" in output


@pytest.mark.usefixtures("small_torch")
def test_elastic_job_has_no_node_rank():
    output = refusal(MASTER_ADDR="127.0.0.1", NNODES="1:2", NODE_RANK="0")
    assert "NODE_RANK=0 does not fit NNODES=1:2" in output


@pytest.mark.usefixtures("small_torch")
@pytest.mark.parametrize("rank", ["", "0"])
def test_port_is_taken_on_the_host_node(rank):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        output = refusal(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, NODE_RANK=rank)
    assert f"port {port}: Address already in use" in output


# ---- run_multi_node.sh: the command it makes -----------------------------------------
def dry_run(*arguments, **env):
    """What DRY_RUN prints: the words of the command, as a shell reads them."""
    home = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "DRY_RUN": "1"}
    output = finish(start(MULTI, *arguments, env={**home, **env}))
    head, command = output.splitlines()
    shell = ["bash", "-c", f'printf "%s\\n" {command}']
    words = subprocess.run(shell, capture_output=True, text=True, check=True).stdout
    return head, words.splitlines()


@pytest.mark.usefixtures("small_torch")
def test_command_of_two_nodes():
    """Without NODE_RANK: c10d, told which node is the host. No restarts."""
    head, words = dry_run(MASTER_PORT="29999")
    assert "127.0.0.1 on lo leads to 127.0.0.1" in head
    assert words[0] == "env" and words[-1].endswith("ddp_train.py")
    assert "--nnodes=2" in words and "--max-restarts=0" in words
    assert "--rdzv-backend=c10d" in words and "--local-addr=127.0.0.1" in words
    assert "--rdzv-endpoint=127.0.0.1:29999" in words
    assert "is_host=True" in " ".join(words)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in words


@pytest.mark.usefixtures("small_torch")
def test_command_with_node_rank():
    """With NODE_RANK the nodes keep their ranks: torchrun's static rendezvous."""
    head, words = dry_run(NODE_RANK="1", NNODES="3")
    assert "--node-rank=1" in words and "--nnodes=3" in words
    assert "--rdzv-backend=c10d" not in words
    assert "is_host=False" in " ".join(words)


@pytest.mark.usefixtures("small_torch")
def test_gloo_is_given_the_interface_and_nccl_is_not():
    head, words = dry_run()
    assert "GLOO_SOCKET_IFNAME=lo" in words
    assert "NCCL_SOCKET_IFNAME" not in " ".join(words)


@pytest.mark.usefixtures("small_torch")
def test_settings_of_the_user_stay():
    env = {"GLOO_SOCKET_IFNAME": "mine", "OMP_NUM_THREADS": "7", "MAX_RESTARTS": "5"}
    head, words = dry_run(**env, NPROC_PER_NODE="3", RDZV_TIMEOUT="77")
    assert "GLOO_SOCKET_IFNAME=mine" in words and "OMP_NUM_THREADS=7" in words
    assert "--max-restarts=5" in words and "--nproc-per-node=3" in words
    assert "join_timeout=77" in " ".join(words)


@pytest.mark.usefixtures("small_torch")
def test_processes_share_the_cores():
    """torchrun would give one thread to each process."""
    for processes, threads in (("1", 8), ("2", 4), ("3", 2), ("100", 1)):
        head, words = dry_run(NPROC_PER_NODE=processes)
        assert f"--nproc-per-node={processes}" in words
        assert f"OMP_NUM_THREADS={threads}" in words


@pytest.mark.usefixtures("small_torch")
def test_one_process_for_each_gpu():
    head, words = dry_run()
    assert "--nproc-per-node=4" in words and "OMP_NUM_THREADS=2" in words


@pytest.mark.usefixtures("small_torch")
@pytest.mark.parametrize("device", [["--device", "cpu"], ["--device=cpu"]])
def test_device_cpu_is_one_process(device):
    head, words = dry_run(*device)
    assert "--nproc-per-node=1" in words and "OMP_NUM_THREADS=8" in words


@pytest.mark.usefixtures("small_torch")
def test_arguments_are_passed_as_they_are():
    arguments = ["--out", "a  b", "", "*", "it's", "a:b"]
    head, words = dry_run(*arguments)
    assert words[-6:] == arguments


@pytest.mark.usefixtures("small_torch")
def test_elastic_job_has_a_short_timeout_and_restarts():
    head, words = dry_run("--epochs", "3", NNODES="1:2")
    assert words[-4:] == ["--epochs", "3", "--timeout", "20"]
    assert "--max-restarts=3" in words and "--nnodes=1:2" in words


@pytest.mark.usefixtures("small_torch")
@pytest.mark.parametrize("timeout", [["--timeout", "9"], ["--timeout=9"]])
def test_elastic_job_keeps_the_timeout_of_the_user(timeout):
    head, words = dry_run(*timeout, NNODES="1:2")
    assert words[-len(timeout) :] == timeout and "20" not in words


# ---- Two bare hosts ------------------------------------------------------------------
# hosta is 10.77.0.1, hostb is 10.77.0.2. There is no DNS and no default route. As on
# Debian, each host's own name means 127.0.1.1.
class TwoHosts:
    def __init__(self, folder):
        self.folder = folder
        self.names = [f"ddp-{os.getpid()}-a", f"ddp-{os.getpid()}-b"]
        for name in self.names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        self.ip(0, f"link add wire type veth peer name wire netns {self.names[1]}")
        for host in (0, 1):
            self.ip(host, f"addr add 10.77.0.{host + 1}/24 dev wire")
            self.ip(host, "link set lo up")
            self.ip(host, "link set wire up")
            file = f"127.0.0.1 localhost\n127.0.1.1 host{'ab'[host]}\n"
            (folder / f"hosts{host}").write_text(file)

    def ip(self, host, line):
        """Run `ip` on host 0 or 1."""
        subprocess.run(["ip", "-n", self.names[host], *line.split()], check=True)

    def start(self, host, *command, **env):
        """Start a command on host 0 or 1."""
        shell = f"""
            hostname host{"ab"[host]}
            mount --bind '{self.folder}/hosts{host}' /etc/hosts
            mount --bind /dev/null /etc/resolv.conf
            exec "$@"
        """
        namespaces = ["ip", "netns", "exec", self.names[host], "unshare", "--uts"]
        env = {"MASTER_ADDR": "10.77.0.1", "NNODES": "2", **env}
        return start(*namespaces, "--mount", "sh", "-c", shell, "sh", *command, env=env)

    def remove(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.fixture
def hosts(tmp_path):
    probe = "unshare --net --uts --mount ip link add veth-probe type veth"
    if subprocess.run(probe, shell=True, capture_output=True).returncode != 0:
        pytest.skip("needs root on Linux with `ip` and network namespaces")
    hosts = TwoHosts(tmp_path)
    yield hosts
    for process in STARTED:
        kill(process)
    hosts.remove()


@pytest.mark.parametrize(
    "order, ranked",
    [
        pytest.param((1, 0), False, id="b first, no NODE_RANK"),
        pytest.param((0, 1), True, id="a first, NODE_RANK", marks=pytest.mark.faults),
        pytest.param((0, 1), False, id="a first", marks=pytest.mark.faults),
        pytest.param((1, 0), True, id="b first, ranks", marks=pytest.mark.faults),
    ],
)
def test_two_bare_hosts(hosts, tiny, tmp_path, order, ranked):
    """They meet in either order. Host a knows MASTER_ADDR by its own name only."""
    runs = {}
    for host in order:
        arguments = *tiny, "--max-steps", 3, "--out", tmp_path / "ab"[host]
        env = {"MASTER_ADDR": "10.77.0.1" if host == 1 else "hosta"}
        if ranked:
            env["NODE_RANK"] = str(host)
        runs[host] = hosts.start(host, MULTI, *arguments, **env)
        if host == order[0]:
            wait_for(runs[host], "leads to")
            time.sleep(2)
    outputs = [finish(runs[0]), finish(runs[1])]
    assert "hosta: 10.77.0.1 on wire leads to hosta" in outputs[0], report()
    assert "hostb: 10.77.0.2 on wire leads to 10.77.0.1" in outputs[1], report()
    printed = "".join(outputs)
    assert re.search(has_world(2, 2), printed), report()
    assert len(re.findall(r"^done", printed, re.MULTILINE)) == 1, report()
    saved = list(tmp_path.glob("?/checkpoint.pt"))
    assert len(saved) == 1
    if ranked:
        assert saved == [tmp_path / "a/checkpoint.pt"]


# It passes on what reaches 10.88.0.1, as a NAT or Docker does.
PROXY = """
import socket, threading

def copy(source, target):
    while True:
        data = source.recv(65536)
        if not data:
            target.shutdown(socket.SHUT_WR)
            return
        target.sendall(data)

with socket.create_server(("10.88.0.1", 29500)) as server:
    while True:
        here, _ = server.accept()
        there = socket.create_connection(("10.77.0.1", 29500))
        threading.Thread(target=copy, args=(here, there), daemon=True).start()
        threading.Thread(target=copy, args=(there, here), daemon=True).start()
"""


def test_master_addr_is_not_an_address_of_the_host_node(hosts, tiny, tmp_path):
    """As behind a NAT, or in a container: host b reaches host a as 10.88.0.1. Host a
    cannot reach itself under that address. NODE_RANK=0 says that it is the host."""
    hosts.ip(0, "route add default via 10.77.0.99")
    hosts.ip(1, "addr add 10.88.0.1/32 dev lo")
    runs = []
    for host in (0, 1):
        arguments = *tiny, "--max-steps", 3, "--out", tmp_path / "ab"[host]
        env = {"MASTER_ADDR": "10.88.0.1", "NODE_RANK": str(host)}
        env["GLOO_SOCKET_IFNAME"] = "wire"
        runs.append(hosts.start(host, MULTI, *arguments, **env))
        if host == 0:
            wait_until_it_listens(hosts)
            hosts.start(1, sys.executable, "-c", PROXY)
    outputs = [finish(run) for run in runs]
    assert re.search(has_world(2, 2), outputs[0]), report()
    assert re.search(r"^done", outputs[0], re.MULTILINE), report()


def wait_until_it_listens(hosts):
    """Wait until host a answers at port 29500."""
    code = "import socket; socket.create_connection(('10.77.0.1', 29500))"
    deadline = time.monotonic() + DEADLINE
    while hosts.start(1, sys.executable, "-c", code).wait(DEADLINE) != 0:
        assert time.monotonic() < deadline, report()


@pytest.mark.usefixtures("small_torch")
def test_no_route_to_master_addr(hosts):
    run = hosts.start(1, MULTI, MASTER_ADDR="10.99.0.1")
    output = finish(run, code=2)
    assert "MASTER_ADDR=10.99.0.1" in output and "Network is unreachable" in output
    assert output.count("\n") == 1


@pytest.mark.faults
def test_host_node_does_not_come(hosts):
    """torchrun says where it wanted to connect."""
    run = hosts.start(1, MULTI, RDZV_TIMEOUT="5")
    output = finish(run, code=1)
    assert "timed out" in output and "(10.77.0.1, 29500)" in output


@pytest.mark.faults
@pytest.mark.parametrize("rank", ["", "0"])
def test_other_node_does_not_come(hosts, rank):
    run = hosts.start(0, MULTI, RDZV_TIMEOUT="5", NODE_RANK=rank)
    output = finish(run, code=1)
    says = "1/2 clients joined" if rank else "RendezvousTimeoutError"
    assert says in output, output


@pytest.mark.faults
def test_mistake_is_not_repeated(hosts, tiny):
    """A wrong argument ends both nodes. It is not tried four times."""
    runs = [hosts.start(host, MULTI, *tiny, "--no-such-option") for host in (0, 1)]
    for run in runs:
        assert run.wait(DEADLINE) != 0, report()
        said = re.findall(r"error: .*--no-such-option", run.log.read_text())
        assert len(said) <= 1, report()
    assert "error: unrecognized arguments: --no-such-option" in report(), report()


@pytest.mark.faults
@pytest.mark.parametrize("fault", ["killed", "cut"])
def test_elastic_node_leaves_and_returns(hosts, tiny, tmp_path, fault):
    """Host b dies, or its wire is cut: host a goes on alone. Then b comes back.

    Each time the training goes on from a checkpoint, and steps are not left out."""

    def join(host, out):
        arguments = (
            "--epochs",
            2000,
            "--save-every",
            20,
            "--log-every",
            10,
            "--out",
            out,
        )
        env = {"NNODES": "1:2", "MAX_RESTARTS": "9"}
        return hosts.start(host, MULTI, *tiny, *arguments, **env)

    a = join(0, tmp_path / "a")
    b = join(1, tmp_path / "b")
    wait_for(a, has_world(2, 2))
    wait_for(a, r"step [4-9]\d ")
    if fault == "killed":
        kill(b)
    else:
        hosts.ip(1, "link set wire down")
    wait_for(a, rf"(?s)going on.*({has_world(1, 1)}).*step \d+ ")
    if fault == "cut":
        hosts.ip(1, "link set wire up")
    join(1, tmp_path / "b")
    alone = rf"(?s)({has_world(1, 1)}).*"
    output = wait_for(a, rf"{alone}going on.*({has_world(2, 2)}).*step \d+ ")
    starts = [int(step) for step in re.findall(r"going on from step (\d+)", output)]
    assert len(starts) == 2 and starts[0] >= 20 and starts[1] >= starts[0], output
    for file in ("a", "b"):
        metrics = tmp_path / file / "metrics.jsonl"
        if metrics.exists():
            check_steps(metrics)


def check_steps(metrics):
    """Each tenth step was logged: none is missing, and few stand there twice."""
    steps = []
    for line in metrics.read_text().splitlines():
        record = json.loads(line)
        if "loss" in record:
            steps.append(record["step"])
    for before, after in zip(steps, steps[1:], strict=False):
        assert -40 <= after - before <= 10, steps


# ---- Slurm ---------------------------------------------------------------------------
# This srun "starts" two tasks, both on this machine. It writes down its options.
SRUN = """#!/bin/bash
echo "srun $*" >> {log}
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_ID=0 SLURM_STEP_NODELIST=host[a-b] SLURM_STEP_NUM_NODES=2
export SLURM_STEP_NUM_TASKS=${{TASKS:-2}}
SLURM_NODEID=1 "$@" &
SLURM_NODEID=0 "$@"
code=$?
wait
exit $code
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >> {log}
case $* in
  "show hostnames host[a-b]") printf 'hosta\\nhostb\\n' ;;
  "show node hosta") echo '   NodeAddr=127.0.0.1 NodeHostName=hosta Version=22.05' ;;
esac
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Two scripts on PATH, and a job of two nodes. Returns the file of their calls."""
    log = tmp_path / "slurm log"
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text.format(log=f"'{log}'"))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", str(free_port() - 10000))
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("DRY_RUN", "1")
    log.touch()
    return log


STARTS = f"bash {MULTI} --epochs 3"
OPTIONS = "--nodes=2 --ntasks=2 --ntasks-per-node=1 --cpu-bind=none --export=ALL"


def check_two_nodes(output):
    """Both nodes printed their command. Node 0 is the host."""
    for rank in (0, 1):
        assert f"--node-rank={rank} " in output, output
    assert output.count("--nnodes=2 ") == 2, output
    assert output.count("is_host=True") == 1, output
    assert "--rdzv-endpoint=127.0.0.1:" in output, output


@pytest.mark.usefixtures("small_torch")
def test_sbatch(slurm, tmp_path, monkeypatch):
    """sbatch runs its own copy of the file, in the folder where it was called."""
    copy = tmp_path / "slurm_script"
    copy.write_text(MULTI.read_text())
    monkeypatch.chdir(HERE)
    output = finish(start("bash", copy, "--epochs", "3"))
    check_two_nodes(output)
    assert f"srun {OPTIONS} {STARTS}\n" in slurm.read_text()


@pytest.mark.usefixtures("small_torch")
def test_call_within_another_job_script(slurm, tmp_path, monkeypatch):
    """The job script lies elsewhere, and asks for more tasks than nodes."""
    job = tmp_path / "slurm_script"
    job.write_text(f"cd {tmp_path}\n'{MULTI}' --epochs 3\necho the end\n")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    output = finish(start("bash", job))
    check_two_nodes(output)
    assert output.endswith("the end\n")
    assert f"srun {OPTIONS} {STARTS}\n" in slurm.read_text()


@pytest.mark.usefixtures("small_torch")
@pytest.mark.parametrize("interactive", [False, True])
def test_salloc(slurm, monkeypatch, interactive):
    """The shell of salloc may be a step, with a special number and one node."""
    if interactive:
        monkeypatch.setenv("SLURM_STEP_ID", "4294967290")
        monkeypatch.setenv("SLURM_STEP_NUM_NODES", "1")
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    check_two_nodes(finish(start(MULTI, "--epochs", "3")))
    assert f"srun {OPTIONS} {STARTS}\n" in slurm.read_text()


@pytest.mark.usefixtures("small_torch")
def test_own_srun(slurm):
    """What srun has started does not call srun again."""
    check_two_nodes(finish(start("srun", MULTI, "--epochs", "3")))
    assert slurm.read_text().count("srun") == 1


@pytest.mark.usefixtures("small_torch")
def test_own_srun_with_two_tasks_on_a_node(slurm, monkeypatch):
    monkeypatch.setenv("TASKS", "4")
    output = finish(start("srun", MULTI), code=2)
    assert output.count("srun --ntasks-per-node=1\n") == 2


@pytest.mark.usefixtures("small_torch")
def test_export_none(slurm, monkeypatch):
    """sbatch --export=NONE asks srun for the same. The script must say --export=ALL."""
    monkeypatch.setenv("SLURM_EXPORT_ENV", "NONE")
    check_two_nodes(finish(start(MULTI, "--epochs", "3")))
    assert "--export=ALL" in slurm.read_text()


@pytest.mark.usefixtures("small_torch")
def test_settings_of_the_user_stay_under_slurm(slurm):
    env = {"MASTER_ADDR": "127.0.0.2", "MASTER_PORT": str(free_port())}
    output = finish(start(MULTI, env=env))
    assert f"--rdzv-endpoint=127.0.0.2:{env['MASTER_PORT']} " in output


# Some torchruns cannot handle SIGUSR1 (2.9): they must not die of it.
@pytest.mark.parametrize(
    "handles", [True, pytest.param(False, marks=pytest.mark.faults)]
)
def test_sigusr1_saves_and_requeues(slurm, tiny, tmp_path, monkeypatch, handles):
    """Slurm sends SIGUSR1 to all processes of the step. They save. Node 0 requeues."""
    script = tmp_path / "run_multi_node.sh"
    text = MULTI.read_text().replace('"$here/ddp_train.py"', f"{HERE}/ddp_train.py")
    if not handles:
        text = text.replace("SIGINT,SIGUSR1", "SIGINT")
    script.write_text(text)
    monkeypatch.setenv("DRY_RUN", "")
    arguments = *tiny, "--epochs", 2000, "--log-every", 10, "--out", tmp_path / "out"
    run = start("bash", script, *arguments)
    wait_for(run, r"step \d+ ")
    for pid in descendants(run.pid):
        command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if not command[1].endswith("/srun"):
            os.kill(pid, signal.SIGUSR1)
    run.wait(DEADLINE)
    assert "stopped by signal 10" in run.log.read_text(), report()
    assert (tmp_path / "out/checkpoint.pt").exists()
    requeue = f"scontrol requeue {os.environ['SLURM_JOB_ID']}\n"
    assert slurm.read_text().count(requeue) == 1, slurm.read_text()


def test_run_that_finishes_is_not_requeued(slurm, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("DRY_RUN", "")
    arguments = *tiny, "--max-steps", 3, "--out", tmp_path / "out"
    output = finish(start(MULTI, *arguments))
    assert len(re.findall(r"^done", output, re.MULTILINE)) == 1, report()
    assert "requeue" not in slurm.read_text()
