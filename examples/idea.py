"""The idea of data-parallel training, in 47 lines, on GPUs or on the CPU.

torchrun --standalone --nproc_per_node=2 examples/idea.py
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group, or exit may crash
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

if "RANK" not in os.environ:  # python idea.py, without torchrun: one process
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # each rank has its own GPU
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if 32 % world_size != 0:
    raise SystemExit(f"{world_size} ranks cannot share a batch of 32 equally")
dist.init_process_group()  # NCCL between GPUs, gloo between CPUs
torch.manual_seed(0)
x = torch.randn(1001, 8)
dataset = TensorDataset(x, x.sin())
sampler = DistributedSampler(dataset, drop_last=True)  # each rank has its own share
loader = DataLoader(dataset, 32 // world_size, sampler=sampler, drop_last=True)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)).to(device)
wrapped = DistributedDataParallel(model)  # now all ranks have the weights of rank 0
optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
torch.manual_seed(rank)  # from here on each rank draws different dropout
for epoch in range(3):
    sampler.set_epoch(epoch)  # shuffles differently in each epoch
    for x, y in loader:
        loss = nn.functional.mse_loss(wrapped(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()  # averages the gradients over all ranks
        optimizer.step()  # so all ranks take the same step
    mean_loss = loss.detach() / world_size  # of the last batch
    dist.all_reduce(mean_loss)  # the sum over all ranks
    if rank == 0:  # only one rank prints and saves
        print(f"epoch {epoch}: loss {mean_loss.item():.4f}")
        torch.save(model.state_dict(), "idea.pt")
del wrapped  # a DDP object that outlives the group may hang at the exit
dist.destroy_process_group()
