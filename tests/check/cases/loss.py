# The loss, and what becomes of its gradient.
# case: sum | WRONG gradient first=0 off=0.49..0.51 factor=0.5
# case ci: later | WRONG later gradient first=10 off=0.99..1.01 factor=2
# case: softmax | WRONG gradient first=0 off=0.01..1
# case: cat | ok gradient; WRONG alone weights off=0.01..5 | alone
# case ci: uneven | note order; note uneven rows="16 and 15"; note not replayed
# case: uneven softmax | note order; WRONG gradient
# case: not-called | WRONG not called
# case: flag | no ok alone; WRONG not called
# case: alone | WRONG alone
# case: zero | WRONG moves steps=20
# case: infinite | WRONG finite
# case: changed | WRONG weights first=10; note left out
# case: local | note weights meet; note left out
# case: schedule | ok gradient; WRONG rates first=10 | alone
# case: plateau | ok gradient; ok global batch | alone
from common import *


def loss_of(found, y):
    each = (found - y).square().mean(1)
    if case == "sum":  # over the rank's samples
        return each.sum() / 10
    if "softmax" in sys.argv:  # the samples of a rank weigh each other
        return (each * torch.softmax(10 * each.detach(), 0)).sum()
    return each.mean()


dist.init_process_group("gloo")
if case == "uneven":
    rows = [range(i * 31 + rank, i * 31 + 31, size) for i in range(10)]
    loader = DataLoader(dataset, batch_sampler=rows)
model = mlp(nn.Tanh(), nn.Dropout(0.5)) if case == "plateau" else mlp()
wrapped = model if case == "alone" else DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
length = 10 * size if case == "schedule" and size > 1 else 10
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, length)
if case == "plateau":  # one process draws other numbers, so it has other losses
    torch.manual_seed(rank)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
random.random()  # before the first step, which does not matter
for epoch in range(2):
    sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        step = 10 * epoch + i
        if case == "cat":  # by number, but in the order of the ranks
            parts = [torch.empty(len(x), 16).to(x) for _ in range(size)]
            dist.all_gather(parts, torch.cat([x, y], 1))
            x, y = torch.cat(parts)[:16][rank::size].chunk(2, 1)
        with wrapped.no_sync() if case == "local" else contextlib.nullcontext():
            loss = loss_of((model if case in ("not-called", "flag") else wrapped)(x), y)
        if case == "flag":  # a collective, but not of gradients
            dist.all_reduce(torch.zeros(1))
        if case == "later" and epoch == 1:
            loss = loss * size
        if case == "zero":
            loss = 0 * loss
        if case == "infinite":
            loss = (1e300 * loss).square()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if case == "plateau":
            dist.all_reduce(loss.detach())
        scheduler.step(*[loss.item()] * (case == "plateau"))
        if case == "local" and i % 2 == 1:  # local SGD: the mean of the weights
            for weight in model.parameters():
                dist.all_reduce(weight.data, dist.ReduceOp.SUM)
                weight.data /= size
        if case == "changed" and rank == 1 and step == 10:
            model[0].bias.data += 0.1
dist.destroy_process_group()
