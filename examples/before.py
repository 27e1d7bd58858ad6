"""It learns the sine of 8 numbers. docs/your-script.md shows how each becomes the next:

before.py    on one GPU or the CPU: python examples/before.py
ported.py    on several: PYTHONPATH=. torchrun --nproc_per_node=2 examples/ported.py
resumed.py   and it resumes after a stop or a kill
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


def main(device):
    torch.manual_seed(0)
    x = torch.randn(1300, 8)
    train_set = TensorDataset(x[:1001], x[:1001].sin())
    val_set = TensorDataset(x[1001:], x[1001:].sin())
    order = torch.Generator()
    sampler = RandomSampler(train_set, generator=order)
    loader = DataLoader(train_set, 32, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val_set, 64)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    for epoch in range(3):
        order.manual_seed(epoch)  # a new order in each epoch, the same in every run
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        model.eval()
        loss_sum = 0.0
        with torch.no_grad():
            for x, y in val_loader:
                x, y = x.to(device), y.to(device)
                loss_sum += nn.functional.mse_loss(model(x), y).item() * len(x)
        model.train()
        print(f"epoch {epoch}: val_loss {loss_sum / len(val_set):.6f}")
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
