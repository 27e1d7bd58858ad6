# Accelerate.
# needs: accelerate
# case ci: plain | ok gradient
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import *

accelerator = Accelerator()
set_seed(0)
model = mlp()
optimizer = torch.optim.Adam(model.parameters(), 0.01)
loader = DataLoader(dataset, 32 // size, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(mse(model(x), y))
        optimizer.step()
accelerator.end_training()
