# What the ranks train on.
# case: same | WRONG samples; note left out
# case: looks-first | WRONG samples; note left out
# case: everything | note whole epoch; ok gradient
# case: everything looks | note whole epoch; ok gradient
# case: other | note own data; ok gradient
# case: unseeded | note own data; ok gradient
# case: epoch | note order; ok gradient
# case: uneven | note order; ok gradient; note uneven first=9 rows="16 and 15"
# case ci: hand | ok gradient; ok masks
# case: inside | note overlap; note order; ok gradient
# case: stream | note order; ok gradient
# case: shard | ok samples; note order; ok gradient
# case: lazy | ok samples; ok gradient
# case: thread | ok samples; ok gradient
# case: agent | ok gradient
# case: rows | note no samples; note not replayed
# case: rebatch | note not replayed
# case: views | ok gradient steps=10 | quick --steps 10
# case: grows | ok gradient; note global batch one=32 two=64 how=grows | alone
import queue
import threading

from common import *


class Stream(IterableDataset):
    def __iter__(self):
        return iter([dataset[i] for i in range(rank, 320, size)])


class Lazy(TensorDataset):
    """It opens a file when it is first asked, so that each worker has its own."""

    opened_by = None

    def __getitem__(self, i):
        self.opened_by = self.opened_by or os.getpid()
        assert self.opened_by == os.getpid()
        return super().__getitem__(i)


class Changed(TensorDataset):
    """By a module, as those of torchvision do."""

    def __getitem__(self, i):
        return nn.Identity()(super().__getitem__(i))


def ahead(loader):
    """The batches, read in another thread."""
    batches = queue.Queue(2)
    put = threading.Thread(target=lambda: [batches.put(b) for b in [*loader, None]])
    put.start()
    return iter(batches.get, None)


def stack(rows):
    x = torch.tensor(rows, dtype=torch.get_default_dtype())
    return x, x.sin()


def again(loader):
    """The samples of an epoch, mixed once more, and in other batches."""
    pairs = [pair for batch in loader for pair in zip(*batch)]
    random.shuffle(pairs)
    for i in range(0, len(pairs), rows):
        yield [torch.stack(column) for column in zip(*pairs[i : i + rows])]


def seeded(epoch):
    """Without a DataLoader: drawn for all ranks, and each takes its share."""
    for i in range(6):
        torch.manual_seed(6 * epoch + i)
        x = torch.randn(32, 8)[rank::size]
        yield x, x.sin()


class Inside(nn.Module):
    """It is no DDP object, and gives its own one this rank's rows."""

    def __init__(self):
        super().__init__()
        self.ddp = DistributedDataParallel(mlp())

    def forward(self, x):
        return self.ddp(x.view(-1, 2, 8)[:, rank] if size > 1 else x)


dist.init_process_group("gloo")
rows = 32 // size
options = {"sampler": sampler}
if case == "looks-first" and rank == 0:  # its loaders have other numbers
    print(*DataLoader(TensorDataset(torch.ones(2))))
if case == "inside":
    options = {}
if case in ("same", "looks-first", "everything"):  # it has no sampler
    torch.manual_seed(rank if case == "everything" else 0)
    options = {"shuffle": True}
if case == "other":
    torch.manual_seed(rank)
    x = torch.randn(320, 8)
    dataset = TensorDataset(x, x.sin())
if case == "unseeded":
    x = torch.arange(2560).sin().view(320, 8)
    dataset, _ = random_split(TensorDataset(x, x.sin()), [256, 64])
    options["sampler"] = sampler = DistributedSampler(dataset)
if case == "uneven":
    options["sampler"] = range(rank, 319, size)
if case == "shard":  # rank r has rows r, r + W, ..., which are no tensors yet
    dataset, options = x_all[rank::size].tolist(), {"collate_fn": stack}
if case == "thread":
    dataset = Changed(*dataset.tensors)
if case == "lazy":
    dataset, options = Lazy(*dataset.tensors), options | {"num_workers": 1}
if case == "hand":
    options = {"sampler": RandomSampler(dataset)}
loader = DataLoader(dataset, 32 if case in ("hand", "grows") else rows, **options)
if "looks" in sys.argv:  # at a batch, such as for its shape
    next(iter(loader))
if case == "views":  # of a tensor of 64 MB
    large = torch.randn(640, 12800)
    views = [large[i * 32 + rank * rows :][:rows, :8] for i in range(20)]
    loader = DataLoader(views, batch_size=None)
wrapped = DistributedDataParallel(mlp(nn.Tanh(), nn.Dropout(0.2 * (case == "hand"))))
if case == "inside":
    wrapped = Inside()
optimizer = torch.optim.Adam(wrapped.parameters(), 0.01)
if case == "rows":  # a pretrained model may be in eval() mode
    wrapped.eval()
for epoch in range(2):
    if case == "hand":
        torch.manual_seed(epoch)
    elif case != "epoch":
        sampler.set_epoch(epoch)
    batches = loader
    if case == "stream":
        batches = DataLoader(Stream(), rows)
    if case == "agent":
        batches = seeded(epoch)
    if case == "rows":
        numbers = numpy.random.default_rng(2 * epoch + rank)
        batches = (dataset[numbers.integers(320, size=8)] for _ in range(6))
    if case == "rebatch":
        batches = again(loader)
    if case == "thread":
        batches = ahead(loader)
    for i, batch in enumerate(batches):
        x, y = (batch, batch.sin()) if case == "views" else batch
        if case == "hand":
            torch.manual_seed(100 * i + rank)
            x, y = x[rank::size], y[rank::size]
        if case == "inside" and size > 1:
            y = y.view(-1, 2, 8)[:, rank]
        optimizer.zero_grad()
        mse(wrapped(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
