# The loop of most tutorials: right, and with what scripts do around it.
# case ci: right | ok alone; ok moves steps=20; ok left; ok steps; ok weights;
#     ok samples; ok order; ok gradient ranks=2 steps=20; ok global batch one=32;
#     ok alone weights; ok gradient ranks=4 steps=20; LOSES all lost lost=6;
#     LOSES all lost lost=16; ok failure; ok machines | all
# case: right | ok moves steps=5; ok gradient steps=5 | quick --steps 5
# case: right --logs x | ok gradient
# case: compiled | ok gradient
# case: bf16 | ok gradient
# case: anew | ok gradient
# case: float32 | note float32 error="AssertionError: torch.float64";
#     ok gradient off=1e-9..1e-4
# case: half | note float32; ok gradient off=1e-9..1e-4
# case: look-0 | ok gradient
# case: look | ok gradient; ok global batch one=32; ok alone weights | alone
from common import *

dist.init_process_group("gloo")
wrapped = DistributedDataParallel(mlp())
optimizer = torch.optim.Adam(wrapped.parameters(), 0.01)
if case == "compiled":
    wrapped = torch.compile(wrapped, backend="eager")
if case == "look" or case == "look-0" and rank == 0:
    next(iter(loader))
kind = {"bf16": torch.bfloat16, "half": torch.float16}.get(case)
for epoch in range(2):
    sampler.set_epoch(epoch)
    if case == "anew":
        loader = DataLoader(dataset, 32 // size, sampler=sampler)
    for x, y in loader:
        if case in ("float32", "half"):
            assert x.dtype == torch.float32, x.dtype
        with torch.autocast("cpu", kind, enabled=kind is not None):
            loss = mse(wrapped(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
