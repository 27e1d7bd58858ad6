"""The idea of data-parallel training, as right as 40 lines can be.

python idea.py                                     one process
torchrun --standalone --nproc_per_node=2 idea.py   two, on two GPUs or on the CPU
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn  # DDP needs it: imported too late, the exit may crash
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

if "RANK" not in os.environ:  # started without torchrun: one process
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))  # a GPU of its own
    torch.cuda.set_device(device)
dist.init_process_group()  # NCCL between GPUs, gloo between CPUs
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(1001, 8)
dataset = TensorDataset(x, x.sin())
sampler = DistributedSampler(dataset, drop_last=True)  # each rank has other samples
loader = DataLoader(dataset, 32 // world_size, sampler=sampler, drop_last=True)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)).to(device)
wrapped = DistributedDataParallel(model)  # now all ranks have the weights of rank 0
optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
for epoch in range(3):
    sampler.set_epoch(epoch)  # another order in each epoch
    for x, y in loader:
        loss = nn.functional.mse_loss(wrapped(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()  # averages the gradients over all ranks
        optimizer.step()  # so all ranks take the same step
    mean_loss = loss.detach() / world_size  # of the last batch
    dist.all_reduce(mean_loss)  # the sum over all ranks
    if rank == 0:  # one rank of all machines
        print(f"epoch {epoch}: loss {mean_loss.item():.4f}")
if rank == 0:
    torch.save(model.state_dict(), "idea.pt")
del wrapped  # a DDP object that outlives the group may hang at the exit
dist.destroy_process_group()
