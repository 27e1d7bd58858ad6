# Lightning's Trainer, and its Fabric.
# needs: lightning
# case ci: trainer | ok gradient
# case: trainer {ranks} | ok gradient; note machine ranks | machines
# case: trainer {local_ranks} | ok gradient; ok machines | machines
# case: fabric | ok gradient
import lightning
from common import *


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def training_step(self, batch, index):
        return mse(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)


loader = DataLoader(dataset, 16, shuffle=True)
if case == "trainer":
    lightning.seed_everything(0)
    off = dict.fromkeys(
        ["logger", "enable_checkpointing", "enable_progress_bar"], False
    )
    devices = int(sys.argv[2]) if sys.argv[2:] else "auto"
    lightning.Trainer(max_epochs=2, devices=devices, **off).fit(Model(), loader)
if case == "fabric":
    fabric = lightning.Fabric()
    fabric.launch()
    fabric.seed_everything(0)
    model = mlp()
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), 0.01))
    loader = fabric.setup_dataloaders(loader)
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            fabric.backward(mse(model(x), y))
            optimizer.step()
