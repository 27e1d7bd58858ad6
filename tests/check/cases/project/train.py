# A script with a module `check` of its own. It can also be run as a module.
# case ci: train | ok gradient
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

if __package__:
    from .check import RATE
else:
    from check import RATE


def collate(rows):  # it runs in the workers
    return [torch.stack(column) for column in zip(*rows)]


dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(320, 8)
dataset = TensorDataset(x, x.sin())
sampler = DistributedSampler(dataset, seed=0)
options = {"sampler": sampler, "collate_fn": collate, "num_workers": 1}
loader = DataLoader(dataset, 32 // dist.get_world_size(), **options)
wrapped = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(wrapped.parameters(), RATE)
for x, y in loader:
    loss = nn.functional.mse_loss(wrapped(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
