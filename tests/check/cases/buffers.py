# Buffers: those that follow the samples of a rank, and batch norm.
# case ci: own | WRONG buffers names="['0.center']"
# case: unused | ok gradient; note buffers differ names="['0.center']"
# case: norm | ok gradient; note batch norm
# case: norm-script | note not replayed; note batch norm
# case: norm-sent | ok gradient; ok global batch; note alone norms | alone
# case: norm-0 | ok gradient; note batch norm
from common import *


class Center(nn.Module):
    """It follows the mean of the samples, as a codebook does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(8))

    def forward(self, x):
        if self.training:
            mean = x.mean(0).detach()
            self.center = 0.9 * self.center + 0.1 * mean
        return x if case == "unused" else x - self.center


def evaluate():
    model.eval()
    with torch.no_grad():
        for x, _ in DataLoader(Subset(dataset, range(80)), 16):
            model(x)
    model.train()


dist.init_process_group("gloo")
model = nn.Sequential(Center(), mlp())
if case.startswith("norm"):
    model = mlp(nn.BatchNorm1d(16), nn.Tanh())
if case == "norm-script":
    model = torch.jit.script(model)
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
for epoch in range(2):
    train(optimizer, lambda x, y: mse(wrapped(x), y), epochs=[epoch])
    if case == "norm-sent":  # all ranks evaluate with those of rank 0
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)
        evaluate()
    if case == "norm-0" and rank == 0:
        evaluate()
dist.destroy_process_group()
