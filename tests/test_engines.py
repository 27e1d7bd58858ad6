"""Engines that start run_multi_node.sh or torchrun, run for real: make test-engines.

Two hosts, as in test_scripts.py. Open MPI starts its daemon on the other host with a
script in place of ssh. Kubernetes does not run here: its manifest is checked against
the schema, and the hosts get the variables and names that a pod would.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from harness import ROOT, fail, launch, load, ticks
from test_scripts import MULTI, children, clean_environment, hosts  # noqa: F401

pytestmark = [pytest.mark.processes, pytest.mark.engines]
ENDLESS = ["--epochs", 9999, "--log_every", 10]


# ---- Open MPI ------------------------------------------------------------------------
@pytest.fixture
def mpirun(hosts, tmp_path):
    """The words of an mpirun that knows both hosts."""
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed: apt-get install openmpi-bin")
    agent = tmp_path / "agent"  # mpirun calls it as it calls ssh: agent HOST COMMAND
    words = shlex.join(map(str, hosts.words(1, "sh", "-c")))
    agent.write_text(f'#!/bin/sh\nshift\nexec {words} "$*"\n')
    agent.chmod(0o755)
    words = ["mpirun", "--allow-run-as-root", "--mca", "plm_rsh_agent", agent]
    words += ["--host", "10.77.0.1:2,10.77.0.2:2", "-x", "MASTER_ADDR=10.77.0.1"]
    return [*words, "-x", "PYTHON", "-x", "PYTHONUNBUFFERED", "-x", "STARTED_BY"]


def test_mpirun_starts_one_script_per_node_and_a_signal_saves(hosts, mpirun, tiny, out):
    """SIGUSR1 reaches the ranks. After SIGTERM mpirun itself does not wait for them."""
    command = [*mpirun, "-N", "1", MULTI, *tiny, *ENDLESS]
    for number in (signal.SIGUSR1, signal.SIGTERM):
        run = hosts.start(0, *command)
        step = int(run.wait_for(r"ranks: 2, cpu, .*\nfrom step (\d+) ")[1])
        run.wait_for(r"\nstep \d+ ")
        run.send(number)
        run.wait_for(f"stopped by signal {number:d}, saved")
        run.leaves_none()
        assert load(out)["step"] > step
    assert step > 0  # the second run has resumed


def test_mpirun_with_two_processes_per_node_is_refused(hosts, mpirun):
    text = hosts.start(0, *mpirun, "-N", "2", MULTI).end(code=2)
    assert "mpirun must start one process per node: mpirun -N 1" in text


# ---- Ray -----------------------------------------------------------------------------
@pytest.fixture
def ray_nodes(hosts):
    """Start Ray on both hosts. Returns start(host), for a node that comes back."""
    pytest.importorskip("ray", reason="make test-engines installs Ray")
    folder = f"/tmp/ray-{os.getpid()}"  # a short path: it holds sockets

    def start(host):
        address = ["--address=10.77.0.1:6379"]
        if host == 0:
            address = ["--head", "--port=6379", "--dashboard-host=10.77.0.1"]
            address.append(f"--temp-dir={folder}")
        ray = [Path(sys.executable).parent / "ray", "start", *address]
        ray += [f"--node-ip-address=10.77.0.{host + 1}", "--num-cpus=2", "--block"]
        hosts.start(host, *ray, "--object-store-memory=100000000").wait_for("started")

    start(0)
    start(1)
    yield start
    for host in (0, 1):
        hosts.kill_all(host)
    shutil.rmtree(folder)


def test_ray_job_that_is_stopped_or_loses_a_node_resumes(hosts, ray_nodes, tiny, out):
    """`ray job stop` gives the driver 3 seconds, and kills it: the ranks save."""
    job = [Path(sys.executable).parent / "ray", "job"]
    env = {"RAY_ADDRESS": "http://10.77.0.1:8265"}

    def submit(name, *options):
        words = [*job, "submit", "--submission-id", name, "--working-dir", ROOT, "--"]
        words += [sys.executable, "examples/on_ray.py", 2, 0, *tiny]
        return hosts.start(0, *words, *options, **env)

    run = submit("stopped", *ENDLESS)
    run.wait_for(r"(?s)ranks: 2, cpu, .* step \d+  loss")
    hosts.start(0, *job, "stop", "stopped", **env).end()
    run.end()
    no_ranks(out)
    step = load(out)["step"]

    run = submit("lost", *ENDLESS, "--save_every", 10)
    run.wait_for(rf"(?s)from step {step} .* step \d+  loss.* step \d+  loss")
    hosts.kill_all(1)
    run.end(code=1)
    no_ranks(out)
    assert load(out)["step"] > step

    ray_nodes(1)
    text = submit("again", "--max_steps", load(out)["step"] + 20).end()
    assert "done: step" in text


def no_ranks(out):
    """Wait until no process has this folder in its command. Ray is not our child."""
    for _ in ticks():
        commands = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                commands.append(path.read_text())
        left = [command for command in commands if str(out) in command]
        if not left:
            return
    fail(f"these are left: {left}")


# ---- Kubernetes ----------------------------------------------------------------------
def test_kubernetes_manifest_is_valid():
    pytest.importorskip("kubernetes_validate", reason="make test-engines installs it")
    command = [sys.executable, "-m", "kubernetes_validate", "--strict"]
    launch(*command, ROOT / "examples/kubernetes.yaml").end()


def stops_within(seconds, runs, out):
    """SIGTERM to both pods, as when they are deleted: the run saves, and they end."""
    runs[0].wait_for(r"(?s)ranks: 2, .*\nstep \d+ ")
    began = time.monotonic()
    for run in runs:
        os.kill((children(run.pid)[0]) if "--pid" in run.command else run.pid, 15)
    runs[0].wait_for("stopped by signal 15, saved")
    for run in runs:
        run.end(code=1)
        run.leaves_none()
    assert time.monotonic() - began < seconds
    assert load(out)["step"] > 0


def pod_names(tmp_path, host, *names):
    """The kubelet writes the pod's own name. The cluster's DNS knows all names."""
    with open(tmp_path / f"hosts{host}", "w") as file:
        file.write(f"127.0.0.1 localhost\n10.77.0.{host + 1} host{'ab'[host]}\n")
        for name in names:
            file.write(f"10.77.0.1 {name}\n")


def test_kubernetes_job(hosts, tiny, out, tmp_path):
    """Each container as PID 1, as in a pod. The name of pod 0 appears late."""
    yaml = pytest.importorskip("yaml", reason="make test-engines installs it")
    manifest = (ROOT / "examples/kubernetes.yaml").read_text()
    _, job = yaml.safe_load_all(manifest)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["./run_multi_node.sh"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    runs = []
    for host in (0, 1):
        pod_names(tmp_path, host)
        words = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", MULTI]
        words += [*tiny, *ENDLESS]
        env = {**variables, "JOB_COMPLETION_INDEX": str(host)}
        runs.append(hosts.start(host, *words, **env))
    runs[1].wait_for("for MASTER_ADDR=train-0.train to resolve")
    for host in (0, 1):
        pod_names(tmp_path, host, variables["MASTER_ADDR"])
    stops_within(30, runs, out)


PYTORCHJOB = "PET_NNODES=2 PET_NPROC_PER_NODE=1 PET_NODE_RANK={i} WORLD_SIZE=2 RANK={i}"
PYTORCHJOB += " PET_MASTER_ADDR=train-master-0 PET_MASTER_PORT=23456"
PYTORCHJOB += " MASTER_ADDR=train-master-0 MASTER_PORT=23456"
TRAINJOB = "PET_NNODES=2 PET_NPROC_PER_NODE=1 PET_NODE_RANK={i}"
TRAINJOB += " PET_MASTER_ADDR=train-node-0-0.train PET_MASTER_PORT=29500"


@pytest.mark.parametrize("variables", [PYTORCHJOB, TRAINJOB])
def test_kubeflow_starts_plain_torchrun(hosts, tiny, out, tmp_path, variables):
    """With the variables that its controllers set (read in their source)."""
    (name,) = re.findall(r"PET_MASTER_ADDR=(\S+)", variables)
    command = [sys.executable, "-m", "torch.distributed.run", ROOT / "ddp_train.py"]
    runs = []
    for host in (1, 0):
        pod_names(tmp_path, host)
        env = dict(pair.split("=") for pair in variables.format(i=host).split())
        words = [*command, *tiny, *ENDLESS]
        runs.insert(0, hosts.start(host, *words, **env))
    for run in runs:
        run.wait_for(name)  # a warning: it is not known yet
    for host in (0, 1):
        pod_names(tmp_path, host, name)
    stops_within(30, runs, out)
