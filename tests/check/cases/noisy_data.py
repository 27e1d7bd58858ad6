# Random numbers in the data set, and in the step.
# case: torch | ok gradient; ok masks; note batch norm;
#     note global batch one=16 two=32 how=grows | alone
# case: torch softmax | WRONG gradient first=0 off=0.01..1; note batch norm
# case: numpy | ok gradient; ok masks; note batch norm
# case: sum | WRONG gradient first=0 off=0.49..0.51; note batch norm
# case: repeated | note overlap; ok gradient; ok masks; note batch norm
from common import *


class Noisy(Dataset):
    def __len__(self):
        return 320

    def __getitem__(self, i):
        noise = torch.randn(8)
        if case in ("numpy", "sum"):  # seeded per sample, in the main process
            numpy.random.seed(i)
            noise = torch.as_tensor(numpy.random.randn(8)).to(x_all)
        return x_all[i] + 0.1 * noise, x_all[i].sin()


class Repeated(DistributedSampler):
    """Repeated augmentation: three times each sample, one behind the other."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(320, generator=generator).repeat_interleave(3)
        return iter(order[rank::size][: 320 // size].tolist())


def loss_of(x, y):
    x = x + 0.1 * torch.randn_like(x)
    each = (wrapped(x) - y).square().mean(1)
    if "softmax" in sys.argv:
        return (each * torch.softmax(each.detach(), 0)).sum()
    return (
        each.sum() / 32 if case == "sum" else each.mean()
    )  # 32 are those of two ranks


dist.init_process_group("gloo")
dataset = Noisy()
if size == 1:
    sampler = RandomSampler(dataset)
    sampler.set_epoch = print
if case == "repeated":
    sampler = Repeated(dataset)
wrapped = DistributedDataParallel(mlp(nn.BatchNorm1d(16), nn.Tanh()))
optimizer = torch.optim.Adam(wrapped.parameters(), 0.01)
loader = DataLoader(dataset, 16, sampler=sampler)
length = 2 * len(loader)  # one step more would be an error
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, length)
optimizer.register_step_post_hook(lambda *_: scheduler.step())
torch.manual_seed(rank)
train(optimizer, loss_of, loader)
dist.destroy_process_group()
