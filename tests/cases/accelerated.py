# Accelerate.
# needs: accelerate
# case ci: plain | ok gradient
# case: stream | note order; ok gradient
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import *


class Stream(IterableDataset):
    """It has no index, so rank 0 reads the batches for all ranks."""

    def __iter__(self):
        return iter(dataset)


accelerator = Accelerator()
set_seed(0)
model = mlp()
optimizer = torch.optim.Adam(model.parameters(), 0.01)
loader = DataLoader(dataset, 32 // size, shuffle=True)
if case == "stream":
    loader = DataLoader(Stream(), 32 // size)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(mse(model(x), y))
        optimizer.step()
accelerator.end_training()
