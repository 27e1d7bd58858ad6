# The same training, written in other ways.
# case: zipped | ok gradient
# case: twice | ok order; ok gradient
# case: goes-on | ok samples; ok gradient
# case: keeps | ok samples; ok gradient
# case: averaged | ok alone; ok gradient
# case: fixed | ok gradient
# case: fixed values | ok gradient
# case: fixed regularized | note not replayed
# case: fixed-global | WRONG gradient factor=0.5
# case: by-hand | ok gradient
# case: by-hand twice | WRONG gradient factor=2
# case: functional | ok gradient
# case: flat | note not replayed
# case: nested | ok gradient
# case: unknown | note not replayed
# case: masked | ok gradient
# case: views | ok gradient; ok masks; note batch norm
# case: neighbors | note not replayed
# case: forgot-eval | ok samples; ok gradient
# case: checkpoint | ok gradient
# case: traced | ok masks; ok gradient
# case: lazy | ok gradient
# case: copied | ok gradient
# case: kept | ok weights; ok gradient
# case: tried | ok weights; ok gradient
from common import *
from torch.func import functional_call, grad
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.checkpoint import checkpoint


def reduce(tensor, divisor=size):
    """The sum over the ranks, divided by their number."""
    dist.all_reduce(tensor)
    tensor /= divisor


def flatten(samples):
    """As for nn.EmbeddingBag: all in one row, and where each begins."""
    values = torch.cat([x for x, _ in samples])
    return values, 8 * torch.arange(len(samples))


def nest(samples):
    """Sequences of one row or two."""
    rows = [x.repeat(1 + int(y[0] > 0), 1) for x, y in samples]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged)
    return x, torch.stack([y for _, y in samples])


class Unknown(list):
    """A batch that cannot be recorded."""

    def __init__(self, samples):
        super().__init__(default_collate(samples))
        self.later = lambda: self


def old_linear(x, weight, factor=None):
    """A copy of one of torch's: with tensors of other types, it calls itself."""
    if has_torch_function((x, weight)):
        return handle_torch_function(old_linear, (x, weight), x, weight)
    return factor * x @ weight


class Copied(nn.Linear):
    def forward(self, x):
        return old_linear(x, self.weight, 1)


class Drops(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, 0.3)


class Keeps(DataLoader):
    """It has its own iterator, as that of torchdata."""

    def _get_iterator(self):
        return torch.utils.data.dataloader._SingleProcessDataLoaderIter(self)

    def __iter__(self):
        iterator = self._get_iterator()
        assert iterator._num_workers == 0
        return iterator


class GoesOn(DataLoader):
    """Its second iteration is the rest of the first one."""

    def __iter__(self):
        return self._iterator or super().__iter__()


def set_gradients(x, y):
    """Without backward(), and without DDP."""
    if case == "functional":
        named = dict(model.named_parameters())
        found = grad(lambda named: mse(functional_call(model, named, (x,)), y))(named)
        gradients = found.values()
    else:
        gradients = torch.autograd.grad(mse(model(x), y), weights)
    for weight, gradient in zip(weights, gradients):
        weight.grad = gradient
        reduce(gradient, 1 if "twice" in sys.argv else size)


def each(found, y):
    return (found - y).square().sum() / torch.tensor(len(y))


def loss_of(x, y, u):
    if case.startswith("fixed"):  # a mean over the samples of a rank, which has 16
        divisor = 16 * 8 if "values" in sys.argv else 16 if case == "fixed" else 32
        loss = mse(wrapped(x), y, reduction="sum") / divisor
        penalty = 0.1 * weights[0].square().sum()
        return loss + penalty if "regularized" in sys.argv else loss
    if case == "flat":
        x = torch.stack([x[begin : begin + 8] for begin in y])
        y = x.sin()
    if case == "nested":
        x = torch.stack([rows[0] for rows in x.unbind()])
    if case in ("zipped", "twice"):
        both = wrapped(torch.cat([x, u]))
        return mse(both[: len(x)], y) + both[len(x) :].square().mean()
    if case == "neighbors":  # negatives
        found = wrapped(x)
        return (1 + mse(found, y) - mse(found, y.roll(1, 0))).square()
    if case == "checkpoint":  # such as a head that is large
        return checkpoint(lambda found: each(found, y), wrapped(x), use_reentrant=False)
    if case == "views":  # with two frames each: rows of a rank are in many places
        rows = wrapped(torch.cat([x, x]).repeat_interleave(2, 0))
        p, q = rows.view(2, len(x), 2, 8).mean(2)
        return mse(p, y) + mse(q, y) + mse(p, q)
    return mse(wrapped(x), y)


dist.init_process_group("gloo")
layers = {"views": [nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3)]}
layers["traced"] = [nn.Tanh(), Drops()]
layers["copied"] = [Copied(16, 16, bias=False)]
model = mlp(*layers.get(case, ()))
if case == "tried":  # each rank makes a model of its own and tries it, but trains this
    other = nn.Linear(8, 8)
    nn.init.normal_(other.weight, generator=torch.Generator().manual_seed(rank))
    other(torch.zeros(1, 8))
if case == "lazy":
    model[0] = nn.LazyLinear(16)
    model(x_all[:2])
torch.manual_seed(1 + rank)
if case == "traced":  # as TensorBoard's add_graph() does
    torch.fx.symbolic_trace(model), torch.export.export(model, (x_all[:2],))
    model = torch.jit.trace(model, x_all[:2], check_trace=False)
weights = list(model.parameters())
if case == "masked":  # such as a causal mask
    model.mask = nn.Parameter(torch.full((2, 2), -torch.inf), requires_grad=False)
optimizer = torch.optim.SGD(weights, 0.1)
alone = case in ("averaged", "by-hand", "functional")
wrapped = model if alone else DistributedDataParallel(model)
batch_size = 16 if case.startswith("fixed") else 32 // size
collate = {"flat": flatten, "nested": nest, "unknown": Unknown}.get(case)
loader = DataLoader(dataset, batch_size, sampler=sampler, collate_fn=collate)
if case == "keeps":
    loader = Keeps(dataset, batch_size, sampler=sampler)
if case == "goes-on":
    workers = {"num_workers": 1, "persistent_workers": True}
    loader = GoesOn(dataset, batch_size, sampler=sampler, **workers)
others = TensorDataset(torch.randn(320, 8))
unlabeled = DataLoader(others, batch_size, sampler=DistributedSampler(others))
if case == "twice":  # one loader, iterated twice at the same time
    unlabeled = loader
if case == "goes-on":
    unlabeled = [(x_all,)] * 4
for epoch in (0, 1):
    sampler.set_epoch(epoch)
    for (x, y), (u, *_) in zip(loader, unlabeled):
        optimizer.zero_grad()
        if case in ("by-hand", "functional"):
            set_gradients(x, y)
        else:
            loss_of(x, y, u).backward()
        optimizer.step()
        if case == "averaged":
            for weight in weights:
                reduce(weight.data)
    if case == "forgot-eval":  # all ranks have the same samples
        print(sum(mse(model(x), x).item() for (x,) in DataLoader(others, 16)))
if case == "kept" and rank == 0:  # such as an average, put into the model to save it
    for weight in weights:
        weight.data.zero_()
dist.destroy_process_group()
