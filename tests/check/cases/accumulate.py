# Gradient accumulation. A step has as many batches as the first argument says.
# case ci: 3 | ok gradient
# case: 4-for-all | ok gradient
# case: 5-for-all | note not replayed
# case: 4-for-all contrast | ok gradient; note alone differs | alone
# case: pieces | note not replayed reason="One process cannot get what the ranks had:
#     torch.bernoulli_(), which some ranks or one process draw more often." left=20
from common import *

dist.init_process_group("gloo")
wrapped = DistributedDataParallel(mlp(*[nn.Dropout(0.1)] * (case == "pieces")))
optimizer = torch.optim.Adam(wrapped.parameters(), 0.01)
if case == "pieces":  # four rows each, of batches that always have the same size
    for x, y in DataLoader(dataset, 16 // size, sampler=sampler):
        assert len(x) == 16 // size
        for part, target in zip(x.split(4), y.split(4)):
            (mse(wrapped(part), target) * len(part) / len(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    sys.exit()
count = 3 if case == "3" else int(case[0]) // size  # the ranks share the batches
loader = DataLoader(dataset, 8 // size if case == "3" else 8, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        last = i % count == count - 1 or i == len(loader) - 1
        wrapped.require_backward_grad_sync = last
        found = wrapped(x)
        loss = mse(found, y)
        if "contrast" in sys.argv:
            loss = nn.functional.cross_entropy(found @ y.T, torch.arange(len(y)))
        (loss / count).backward()
        if last:
            nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
