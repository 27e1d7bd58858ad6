"""Start the ranks with mp.spawn instead of torchrun.

PYTHONPATH=. python examples/spawn.py 4 --epochs 3
"""

import os
import sys

import torch.multiprocessing as mp

import ddp_train


def run(rank, world_size, options):
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
    os.environ |= {"WORLD_SIZE": f"{world_size}", "MASTER_ADDR": "localhost"}
    os.environ.setdefault("MASTER_PORT", "29500")  # each run on a machine has its own
    ddp_train.main(options)


if __name__ == "__main__":
    world_size = int(sys.argv[1])
    mp.spawn(run, (world_size, sys.argv[2:]), world_size)
