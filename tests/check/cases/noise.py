# Random numbers in the step. The second argument says how the ranks are seeded.
# case: dropout rank | ok gradient; ok masks
# case: dropout one | ok gradient; note masks names="torch.bernoulli_()"
# case: dropout time | ok gradient; ok masks; note random; note random; note random
#     | --skip ranks,failure
# case: scripted rank | ok gradient; ok masks
# case: checkpoint rank | ok gradient; ok masks
# case: mixup rank | ok gradient; ok masks
# case: diffusion rank | ok gradient; ok masks
# case: shape one | ok gradient; note masks names="torch.randn_like()"
# case: default_rng one | note not replayed
# case ci: Random one | note not replayed
# case: decision rank | note not replayed
from common import *
from torch.utils.checkpoint import checkpoint


def noisy(x, y):
    if case == "mixup":
        order = torch.randperm(len(x))
        x, y = x + x[order], y + y[order]
    if case == "diffusion":
        level = torch.randint(0, 100, (len(x), 1)).to(x) / 100
        noise = torch.randn_like(x)
        x, y = x * (1 - level) + noise * level, noise
    if case == "shape":
        x = x + torch.randn_like(x)
    if case == "default_rng":
        x = x + torch.as_tensor(numpys.standard_normal(x.shape)).to(x)
    if case == "Random":
        x = x + pythons.random()
    if case == "decision" and torch.rand(()) < 0.5:
        x = -x
    return x, y


dist.init_process_group("gloo")
numpys, pythons = numpy.random.default_rng(rank), random.Random(rank)
model = mlp()
if case in ("dropout", "scripted", "checkpoint"):
    model = mlp(nn.Tanh(), nn.Dropout(0.2))
if case == "scripted":
    model = torch.jit.script(model)
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
torch.manual_seed({"rank": rank, "one": 0, "time": time.time_ns()}[sys.argv[2]])


def loss_of(x, y):
    x, y = noisy(x, y)
    if case == "checkpoint":
        return mse(checkpoint(lambda x: wrapped(x.float()), x, use_reentrant=False), y)
    return mse(wrapped(x), y)


train(optimizer, loss_of)
dist.destroy_process_group()
