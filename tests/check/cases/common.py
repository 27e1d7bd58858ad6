"""What these scripts share: the imports, some data, a model, and the usual loop.

Each is right, or it has the fault that its first argument names. Its head says what the
check must find. tests/check/test_check.py reads these lines, and runs each case:

    # options: quick
    # case: ARGUMENTS | EXPECTED; EXPECTED; ... | OPTIONS

EXPECTED is a word, a row of ddp_check/rows.py, and values: `WRONG gradient off=..0.6`.
Every WRONG, LOSES and note must be there; an ok is looked for where it is named, and
`no ok rest` says that it is not there. The first of the OPTIONS may be a name from
test_check.py. CI runs each `case ci`, too.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import *

names = "RANK", "LOCAL_RANK", "WORLD_SIZE"
rank, local, size = [int(os.environ[name]) for name in names]
case = sys.argv[1]
if case != "unseeded":
    torch.manual_seed(0)
x_all = torch.randn(320, 8)
dataset = TensorDataset(x_all, x_all.sin())
sampler = DistributedSampler(dataset, size, rank, seed=0)
loader = DataLoader(dataset, 32 // size, sampler=sampler)
mse = nn.functional.mse_loss


def mlp(*middle):
    return nn.Sequential(nn.Linear(8, 16), *middle or [nn.Tanh()], nn.Linear(16, 8))


def train(optimizer, loss_of, loader=loader, epochs=(0, 1)):
    for epoch in epochs:
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            loss = loss_of(*batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
