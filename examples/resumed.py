"""It learns the sine of 8 numbers. docs/your-script.md shows how each becomes the next:

before.py    on one GPU or the CPU: python examples/before.py
ported.py    on several: PYTHONPATH=. torchrun --nproc_per_node=2 examples/ported.py
resumed.py   and it resumes after a stop or a kill
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import ddp_train as ddp


def score(model, batch):
    x, y = batch
    loss = nn.functional.mse_loss(model(x), y)
    return {"val_loss": loss * len(x), "count": len(x)}


def main(device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(1300, 8)
    train_set = TensorDataset(x[:1001], x[:1001].sin())
    val_set = TensorDataset(x[1001:], x[1001:].sin())
    sampler = ddp.ResumableSampler(train_set, seed=0)
    if 32 % world_size != 0:
        raise SystemExit(f"{world_size} ranks cannot share a batch of 32 equally")
    batch_size = 32 // world_size  # per rank
    loader = DataLoader(train_set, batch_size, sampler=sampler, drop_last=True)
    val_samples = range(rank, len(val_set), world_size)
    val_loader = DataLoader(val_set, 64, sampler=val_samples)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)).to(device)
    wrapped = DistributedDataParallel(model) if world_size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)

    ddp.lock("out")  # against a second run in this folder
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    step, epoch, done = 0, 0, 0  # done: samples of this epoch, over all ranks
    saved = ddp.load_checkpoint("out/resumed.pt")
    if saved is not None:
        step, epoch, done = saved["step"], saved["epoch"], saved["done"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])

    def save():
        states = {name: part.state_dict() for name, part in parts.items()}
        ddp.save_checkpoint("out/resumed.pt", step, epoch=epoch, done=done, **states)

    stop = ddp.StopSignal()
    while epoch < 3:
        sampler.set_epoch(epoch, done)  # it skips the samples that are done
        for x, y in loader:
            ddp.seed_all("step", 0, step, rank)  # each rank draws its own dropout
            step += 1
            x, y = x.to(device), y.to(device)
            loss = nn.functional.mse_loss(wrapped(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += batch_size * world_size
            stopped = stop.requested()
            if stopped or step % 20 == 0:
                save()
            if stopped:
                return
        scheduler.step()
        means = ddp.evaluate(model, score, val_loader, device)
        ddp.say(f"epoch {epoch}: val_loss {means['val_loss']:.6f}")
        epoch, done = epoch + 1, 0
        save()  # last, after everything that changes at the end of an epoch
    if rank == 0:
        torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    with ddp.distributed() as device:
        main(device)
