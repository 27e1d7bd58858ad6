"""Tests of run_single.sh and run_multi_node.sh, for anyone who changes them.

    pytest tests/test_scripts.py            half a minute on two cores
    pytest -m long tests/test_scripts.py    nodes that never join, die, or are cut off

Two hosts are two network namespaces with a wire between them. They need root on Linux.
Two small shell scripts, `srun` and `scontrol`, stand in for Slurm. Tests that launch no
ranks use a fake torch, because importing the real one takes seconds.
"""

import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from harness import ROOT, SCRIPT, free_port, launch, load

pytestmark = pytest.mark.processes
SINGLE = ROOT / "run_single.sh"
MULTI = ROOT / "run_multi_node.sh"
SETTINGS = "MASTER_ADDR MASTER_PORT NNODES NODE_RANK NPROC NPROC_PER_NODE DRY_RUN"
SETTINGS += " SCRIPT MAX_RESTARTS RDZV_TIMEOUT OMP_NUM_THREADS GLOO_SOCKET_IFNAME"


# ---- What the tests share ------------------------------------------------------------
@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """Drop variables set by the user, or by a job that runs the tests."""
    for name in list(os.environ):
        if name in SETTINGS.split() or name.startswith(("SLURM_", "OMPI_", "PMI_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")


@pytest.fixture
def small_torch(tmp_path, monkeypatch):
    """A fake torch with four GPUs and eight threads."""
    text = "class cuda:\n    def device_count(): return 4\n"
    text += "def get_num_threads(): return 8\n"
    (tmp_path / "torch.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.fixture
def echo(tmp_path):
    """A Python that prints torchrun's command instead of running it, and fails.

    It fails in another way if the script has not raised the limit of open files.
    """
    path = tmp_path / "echo"
    path.write_text(f"""#!/bin/sh
        [ "$1" = -m ] || exec {sys.executable} "$@"
        [ "$(ulimit -Sn)" = "$(ulimit -Hn)" ] || exit 8
        echo "OMP_NUM_THREADS=$OMP_NUM_THREADS python $@"
        exit 7
    """)
    path.chmod(0o755)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, limits[1]))
    yield {"PYTHON": str(path)}
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def children(pid):
    """All descendants of a process (Linux)."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            found += [int(child), *children(int(child))]
    return found


# ---- run_single.sh -------------------------------------------------------------------
def test_single_ignores_what_a_cluster_has_set(tmp_path):
    """The real torchrun, with a Python that reports no GPU and eight threads."""
    script, python = tmp_path / "mine.py", tmp_path / "python"
    script.write_text(r"""if True:
        import os, sys
        pets = [f"{k}={v}" for k, v in os.environ.items() if k.startswith("PET_")]
        words = [sys.argv[1], *map(os.getenv, sys.argv[2:]), *sorted(pets)]
        os.write(1, " ".join(words).encode() + b"\n")
    """)
    shell = f'#!/bin/sh\n[ "$1" != -c ] || exec echo 0 8\nexec {sys.executable} "$@"\n'
    python.write_text(shell)
    python.chmod(0o755)
    (tmp_path / "nvidia-smi").symlink_to("/bin/true")  # it sees a GPU
    left = "RANK=5 WORLD_SIZE=7 MASTER_ADDR=x.invalid TORCHELASTIC_RESTART_COUNT=9"
    left += " PET_NNODES=3 PET_NODE_RANK=2 PET_RDZV_BACKEND=static PET_STANDALONE=yes"
    left += " PET_NPROC_PER_NODE=4 PET_MODULE=1 PET_NO_PYTHON=1 PET_RUN_PATH=1"
    env = dict(pair.split("=") for pair in left.split())
    env |= {"PYTHON": str(python), "SCRIPT": "-m mine", "NPROC_PER_NODE": "2"}
    env["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    names = "RANK WORLD_SIZE MASTER_ADDR TORCHELASTIC_RESTART_COUNT OMP_NUM_THREADS"
    names += " TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    run = launch(SINGLE, "a b", *names.split(), env=env, cwd=tmp_path)
    said = run.end().splitlines()
    assert said[0].startswith("warning: nvidia-smi sees a GPU, but torch does not")
    pets = "PET_SHUTDOWN_TIMEOUT=100 PET_SIGNALS_TO_HANDLE="
    pets += "SIGTERM,SIGINT,SIGUSR1,SIGUSR2"
    assert sorted(said[1:]) == [f"a b {r} 2 localhost 0 4 3 1 {pets}" for r in "01"]


SINGLE_COMMANDS = {  # {settings and options: (threads, processes, restarts)}
    "": (2, 4, 0),
    "--device cpu": (8, 1, 0),
    "--device=cpu": (8, 1, 0),
    "NPROC=2 NPROC_PER_NODE=3 MAX_RESTARTS=5": (4, 2, 5),
    "NPROC_PER_NODE=3 OMP_NUM_THREADS=7": (7, 3, 0),
    "NPROC=9 SCRIPT=mine.py": (1, 9, 0),
}


@pytest.mark.usefixtures("small_torch")
@pytest.mark.parametrize("words", SINGLE_COMMANDS)
def test_single_command_on_four_gpus_and_eight_threads(words, echo):
    """By `sh`, too: on Debian that is dash, which cannot run the file itself."""
    options = [word for word in words.split() if not word[0].isupper()]
    env = dict(word.split("=") for word in words.split() if word[0].isupper())
    said = launch("sh", SINGLE, *options, "a b", env=echo | env).end(code=7)
    threads, processes, restarts = SINGLE_COMMANDS[words]
    command = f"OMP_NUM_THREADS={threads} python -m torch.distributed.run --standalone"
    command += f" --local-addr=localhost --nproc-per-node={processes}"
    command += f" --max-restarts={restarts} {env.get('SCRIPT', SCRIPT)}"
    assert said.split() == [*command.split(), *options, "a", "b"]


def test_stopping_make_stops_the_run_and_leaves_no_process(tiny, out):
    """As root on Linux, in a container with a hostname that does not resolve."""
    words = " ".join(map(str, [*tiny, "--epochs", 9999]))
    python = os.path.relpath(sys.executable, ROOT)
    command = ["make", "-C", ROOT, "-o", "setup", "train-cpu"]
    in_container = ["unshare", "--net", "--uts", "sh", "-c"]
    if subprocess.run([*in_container, "true"], capture_output=True).returncode == 0:
        shell = 'hostname does-not-resolve; ip link set lo up; exec "$0" "$@"'
        command = [*in_container, shell, *command]
    run = launch(*command, f"VENV_PYTHON={python}", f"ARGS={words}")
    run.wait_for("step 3 ")
    run.send(signal.SIGTERM)
    run.wait_for("stopped by signal 15, saved")
    run.leaves_none()
    assert load(out)["step"] >= 3


@pytest.mark.usefixtures("small_torch")
def test_single_rejects_a_bad_nproc():
    for number in ("x", "0", "-1"):
        text = launch(SINGLE, env={"NPROC": number}).end(code=2)
        assert text == f"run_single.sh: NPROC={number} must be 1 or more\n"


@pytest.mark.parametrize("script", [SINGLE, MULTI])
def test_missing_torch_is_reported_in_one_line(tmp_path, script):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch')\n")
    env = {"PYTHONPATH": str(tmp_path), "MASTER_ADDR": "127.0.0.1"}
    text = launch(script, env=env).end(code=2)
    assert text == f"{script.name}: {sys.executable}: no torch\n"


# ---- run_multi_node.sh: errors, and the command that it builds -----------------------
@pytest.mark.usefixtures("small_torch")
@pytest.mark.parametrize(
    "says, settings",
    [
        ("MASTER_ADDR is not set", "NNODES=2"),
        ("MASTER_ADDR=x.invalid does", "MASTER_ADDR=x.invalid RDZV_TIMEOUT=2"),
        ("MASTER_ADDR=fd00::1 is not an IPv4", "MASTER_ADDR=fd00::1"),
        ("one process per node: mpirun -N 1", "PMI_SIZE=4 MPI_LOCALNRANKS=2"),
        ("NNODES=1: is not a number", "MASTER_ADDR=127.0.0.1 NNODES=1:"),
        ("NODE_RANK=2 does not fit", "MASTER_ADDR=127.0.0.1 NODE_RANK=2"),
        ("not work with NODE_RANK", "MASTER_ADDR=::1 NODE_RANK=0 MAX_RESTARTS=1"),
        ("NODE_RANK=0 does not", "MASTER_ADDR=127.0.0.1 NNODES=1:2 NODE_RANK=0"),
        ("MAX_RESTARTS=-1 is not a", "MASTER_ADDR=127.0.0.1 MAX_RESTARTS=-1"),
        ("NPROC=0 is not a", "MASTER_ADDR=127.0.0.1 NPROC_PER_NODE=0"),
        ("MASTER_PORT=65536 is above", "MASTER_ADDR=127.0.0.1 MASTER_PORT=65536"),
    ],
)
def test_multi_reports_a_mistake_in_one_line(says, settings):
    env = dict(setting.split("=") for setting in settings.split())
    text = launch(MULTI, env=env).end(code=2)
    *waiting, last = text.splitlines()
    assert last.startswith("run_multi_node.sh: ") and says in last
    assert len(waiting) == ("RDZV_TIMEOUT=2" in settings)


@pytest.mark.usefixtures("small_torch")
def test_multi_reports_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        assert f"port {port}: Address al" in launch(MULTI, env=env).end(code=2)


def dry_run(*arguments, **settings):
    """The command that DRY_RUN prints, split into words by a shell."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "DRY_RUN": "1"}
    text = launch(MULTI, *arguments, env={**env, **settings}).end()
    shell = ["bash", "-c", f'printf "%s\\n" {text.splitlines()[-1]}']
    words = subprocess.run(shell, capture_output=True, text=True, check=True).stdout
    return words.splitlines()


@pytest.mark.usefixtures("small_torch")
def test_multi_command_with_and_without_node_rank():
    words = dry_run("--out", "a  b", "*", "it's", MASTER_PORT="29999")
    assert words[-4:] == ["--out", "a  b", "*", "it's"]
    expected = "--rdzv-backend=c10d --local-addr=127.0.0.1 --nnodes=2 --max-restarts=0"
    expected += " --nproc-per-node=4 --rdzv-endpoint=127.0.0.1:29999 OMP_NUM_THREADS=2"
    expected += " GLOO_SOCKET_IFNAME=lo TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    expected += " TORCH_NCCL_ASYNC_ERROR_HANDLING=3"
    assert set(expected.split()) <= set(words)
    assert "is_host=True" in " ".join(words)
    mpi = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}
    for engine in (mpi, {"PMI_SIZE": "4", "PMI_RANK": "1"}):
        words = dry_run(**engine)
        assert "--node-rank=1" in words and "--nnodes=4" in words
    words = dry_run(NODE_RANK="1", NNODES="3", PET_NNODES="4", PET_NO_PYTHON="1")
    assert words[:3] == ["env", "-uPET_NNODES", "-uPET_NO_PYTHON"]
    assert "--node-rank=1" in words and "--rdzv-backend=c10d" not in words
    assert "is_host=False" in " ".join(words)


@pytest.mark.usefixtures("small_torch")
def test_multi_keeps_user_settings():
    kept = "GLOO_SOCKET_IFNAME=mine OMP_NUM_THREADS=7 TORCH_NCCL_ASYNC_ERROR_HANDLING=1"
    env = dict(pair.split("=") for pair in kept.split())
    env |= {"MAX_RESTARTS": "5", "NPROC_PER_NODE": "3", "RDZV_TIMEOUT": "77"}
    words = dry_run("--device=cpu", **env)
    assert {*kept.split(), "--max-restarts=5", "--nproc-per-node=3"} <= set(words)
    assert "join_timeout=77" in " ".join(words)
    words = dry_run(SCRIPT="mine.py", NPROC="2", NNODES="1:2")
    assert words[-1] == "mine.py" and "--nproc-per-node=2" in words
    assert dry_run("x", SCRIPT="-m a.b")[-3:] == ["-m", "a.b", "x"]
    words = dry_run("--device", "cpu", NNODES="1:2")  # elastic, without a GPU
    assert words[-4:-2] == ["--timeout", "300"] and "--max-restarts=3" in words
    assert "--nproc-per-node=1" in words
    # The program uses the last one.
    words = dry_run("--timeout=9", NNODES="1:2")
    assert words[-3:] == ["--timeout", "300", "--timeout=9"]
    assert "--timeout" not in dry_run()


# ---- Two bare hosts ------------------------------------------------------------------
# hosta is 10.77.0.1, hostb is 10.77.0.2. There is no DNS and no default route. As on
# Debian, each host's own name resolves to 127.0.1.1.
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

    def words(self, host, *command):
        """The words of a command that runs this one on host 0 or 1."""
        shell = f"""
            hostname host{"ab"[host]}
            mount --bind '{self.folder}/hosts{host}' /etc/hosts
            mount --bind /dev/null /etc/resolv.conf
            exec "$@"
        """
        namespaces = ["ip", "netns", "exec", self.names[host], "unshare", "--uts"]
        return [*namespaces, "--mount", "sh", "-c", shell, "sh", *command]

    def start(self, host, *command, **env):
        """Start a command on host 0 or 1."""
        env = {"MASTER_ADDR": "10.77.0.1", "NNODES": "2", **env}
        return launch(*self.words(host, *command), env=env)

    def kill_all(self, host):
        """The host dies: kill all its processes."""
        command = ["ip", "netns", "pids", self.names[host]]
        pids = subprocess.run(command, capture_output=True, text=True).stdout
        for pid in pids.split():
            os.kill(int(pid), signal.SIGKILL)


@pytest.fixture
def hosts(tmp_path):
    probe = "unshare --net --uts --mount ip link add veth-probe type veth"
    if subprocess.run(probe, shell=True, capture_output=True).returncode != 0:
        pytest.skip("needs root on Linux with `ip` and network namespaces")
    hosts = TwoHosts(tmp_path)
    yield hosts
    for host in (0, 1):
        hosts.kill_all(host)
        subprocess.run(["ip", "netns", "del", hosts.names[host]], capture_output=True)


def test_two_hosts_resume_after_a_rank_is_killed(hosts, tiny, tmp_path):
    """b starts first. a knows MASTER_ADDR only by its own name. No shared disk.

    Rank 0 is not on the MASTER_ADDR host, but on the host whose address sorts first as
    text. That is b, with the second address of its interface.
    """
    hosts.ip(0, "addr add 10.66.0.9/24 dev wire")
    hosts.ip(1, "addr add 10.66.0.10/24 dev wire")
    options = ["--epochs", 9999, "--save_every", 10, "--log_every", 10]
    env = {"MASTER_ADDR": "10.66.0.9", "MAX_RESTARTS": "1"}
    b = hosts.start(1, MULTI, *tiny, *options, "--out", tmp_path / "b", **env)
    b.wait_for("hostb: 10.66.0.10 on wire reaches 10.66.0.9")
    env["MASTER_ADDR"] = "hosta"
    a = hosts.start(0, MULTI, *tiny, *options, "--out", tmp_path / "a", **env)
    a.wait_for("hosta: 10.77.0.1 on wire reaches hosta")
    b.wait_for("rank 0 waits for all ranks at 10.66.0.10 ")
    b.wait_for("step 30 ")
    assert not (tmp_path / "a" / "checkpoint.pt").exists()
    os.kill(children(a.pid)[-1], signal.SIGKILL)
    resumed = b.wait_for(r"(?s)ranks: 2.*ranks: 2.*from step (\d+) ")
    tens = int(resumed[1]) // 10  # every tenth step is logged
    assert tens >= 2
    b.wait_for(rf"step {tens + 2}0 ")


@pytest.mark.usefixtures("small_torch")
def test_multi_waits_for_master_addr_to_resolve(hosts, tmp_path):
    """With Kubernetes, the host node's name may appear a little later."""
    run = hosts.start(1, MULTI, MASTER_ADDR="late", DRY_RUN="1")
    run.wait_for("waiting up to 600 s for MASTER_ADDR=late to resolve\n")
    with open(tmp_path / "hosts1", "a") as file:
        file.write("10.77.0.1 late\n")
    run.wait_for("10.77.0.2 on wire reaches late\n.*rdzv-endpoint=10.77.0.1:29500")
    run.end()


@pytest.mark.usefixtures("small_torch")
def test_no_route_to_master_addr(hosts):
    text = hosts.start(1, MULTI, MASTER_ADDR="10.99.0.1").end(code=2)
    assert "MASTER_ADDR=10.99.0.1" in text and "Network is unreachable" in text


@pytest.mark.long
@pytest.mark.parametrize(
    "rank, says", [("", "RendezvousTimeout"), ("0", "clients join")]
)
def test_other_node_never_joins(hosts, rank, says):
    run = hosts.start(0, MULTI, RDZV_TIMEOUT="5", NODE_RANK=rank)
    assert says in run.end(code=1)


@pytest.mark.long
@pytest.mark.parametrize("fault", ["killed", "cut"])
def test_elastic_node_leaves_and_returns(hosts, tiny, tmp_path, fault):
    """Host b dies or its wire is cut. Host a continues alone, then b returns."""
    options = [*tiny, "--epochs", 99999, "--save_every", 20, "--log_every", 10]
    options += ["--timeout", 20]
    env = {"NNODES": "1:2", "MAX_RESTARTS": "9"}

    def join(host):
        out = tmp_path / "ab"[host]
        return hosts.start(host, MULTI, *options, "--out", out, **env)

    a = join(0)
    join(1)
    a.wait_for(r"(?s)ranks: 2.*step [4-9]\d ")
    if fault == "killed":
        hosts.kill_all(1)
    else:
        hosts.ip(1, "link set wire down")
    a.wait_for(r"(?s)ranks: 1.*from step \d\d.*step \d+ ")
    if fault == "cut":
        hosts.ip(1, "link set wire up")
    join(1)
    a.wait_for(r"(?s)ranks: 1.*ranks: 2.*from step \d\d.*step \d+ ")


# ---- Slurm ---------------------------------------------------------------------------
# This srun starts two tasks, both on this machine, and logs its options.
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
SRUN_OPTIONS = "--nodes=2 --ntasks=2 --ntasks-per-node=1 --cpu-bind=none --export=ALL"


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Put both scripts on PATH, in a two-node job. Returns the log of their calls."""
    log = tmp_path / "slurm log"
    log.touch()
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text.format(log=f"'{log}'"))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", str(free_port() - 10000))
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("DRY_RUN", "1")
    return log


@pytest.mark.usefixtures("small_torch")
@pytest.mark.parametrize("call", ["sbatch", "salloc", "interactive salloc", "own srun"])
def test_slurm_starts_one_task_per_node(slurm, tmp_path, monkeypatch, call):
    command = [MULTI]
    if call == "sbatch":  # it runs a copy of the file in the submit directory
        monkeypatch.chdir(ROOT)
        monkeypatch.setenv("SLURM_EXPORT_ENV", "NONE")
        copy = tmp_path / "slurm_script"
        copy.write_text(MULTI.read_text())
        command = ["bash", copy]
    if call == "interactive salloc":  # its shell is a step with a special ID
        monkeypatch.setenv("SLURM_STEP_ID", "4294967290")
    if call == "own srun":
        command = ["srun", MULTI]
    text = launch(*command, "--epochs", 3).end()
    for rank in (0, 1):
        assert f"--node-rank={rank} " in text
    assert text.count("--nnodes=2 ") == 2 and text.count("is_host=True") == 1
    assert "--rdzv-endpoint=127.0.0.1:" in text
    assert slurm.read_text().count("srun") == 1
    if call != "own srun":
        assert f"srun {SRUN_OPTIONS} bash {MULTI} --epochs 3\n" in slurm.read_text()


@pytest.mark.usefixtures("small_torch")
def test_slurm_rejects_two_tasks_per_node(slurm, monkeypatch):
    monkeypatch.setenv("TASKS", "4")
    text = launch("srun", MULTI).end(code=2)
    assert text.count("srun --ntasks-per-node=1\n") == 2


@pytest.mark.usefixtures("small_torch")
def test_slurm_gets_the_exit_code_and_each_job_has_its_own_port(
    slurm, echo, monkeypatch
):
    """Otherwise a failed job counts as completed, and two jobs on one node collide."""
    monkeypatch.setenv("DRY_RUN", "")
    for job in (20123, 20124):
        monkeypatch.setenv("SLURM_JOB_ID", str(job))
        said = launch("sh", MULTI, env=echo).end(code=7)
        assert said.count(f"--rdzv-endpoint=127.0.0.1:{10000 + job % 20000} ") == 2


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_slurm_saves_and_requeues_before_the_time_limit(
    slurm, tiny, monkeypatch, number
):
    """Slurm sends it to the whole step. The ranks save, and node 0 requeues."""
    if "--signals-to-handle" not in get_args_parser().format_help():
        pytest.skip("this version of torchrun cannot handle it and ignores it")
    monkeypatch.setenv("DRY_RUN", "")
    run = launch(MULTI, *tiny, "--epochs", 9999, "--log_every", 10)
    run.wait_for(r"\nstep \d+ ")  # not "from step 0": signals are handled later
    for pid in children(run.pid):
        command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if not command[1].endswith("/srun"):
            os.kill(pid, number)
    run.wait_for(f"stopped by signal {number:d}, saved")
    run.wait()
    requeue = f"scontrol requeue {os.environ['SLURM_JOB_ID']}\n"
    assert slurm.read_text().count(requeue) == 1
