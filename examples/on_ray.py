"""Train on the nodes of a Ray cluster. Ray reserves them, torchrun starts the ranks.

ray job submit --working-dir . -- python examples/on_ray.py 2 4 --out /shared/out

Two nodes with four GPUs each; 0 GPUs for the CPU. The other options go to ddp_train.py.
"""

import os
import socket
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote(max_retries=0)
def meeting_point():
    """This node's address, and a port that is free here."""
    with socket.create_server(("", 0)) as probe:
        port = probe.getsockname()[1]
    return {"MASTER_ADDR": ray.util.get_node_ip_address(), "MASTER_PORT": str(port)}


@ray.remote(max_retries=0)  # a node that dies ends the job
def run_on_node(env, options):
    # Ray kills this process when the job ends. Then torchrun gets SIGTERM, so it saves.
    command = ["setpriv", "--pdeathsig", "TERM", "bash", "run_multi_node.sh"]
    env = {**os.environ, "PYTHON": sys.executable, **env}
    del env["OMP_NUM_THREADS"]  # Ray sets it to 1; the script divides the cores
    subprocess.run([*command, *options], env=env, check=True)


def main(nodes, gpus, *options):
    ray.init()
    # STRICT_SPREAD: each bundle of resources is on another node.
    group = placement_group([{"CPU": 1, "GPU": gpus}] * nodes, strategy="STRICT_SPREAD")
    if not group.wait(600):
        sys.exit(f"after 600 s Ray does not have {nodes} nodes with {gpus} free GPUs")
    places = []
    for i in range(nodes):
        bundle = PlacementGroupSchedulingStrategy(group, i)
        places.append({"num_gpus": gpus, "scheduling_strategy": bundle})
    env = ray.get(meeting_point.options(**places[0]).remote())
    runs = []
    for i in range(nodes):
        env |= {"NNODES": str(nodes), "NODE_RANK": str(i)}
        runs.append(run_on_node.options(**places[i]).remote(env, options))
    while runs:
        done, runs = ray.wait(runs)
        ray.get(done)  # fails if the node has died, or its run has failed


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
