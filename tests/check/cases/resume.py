# Stopped or killed, and launched again.
# options: resume
# case ci: right | ok gradient; ok masks; ok lost lost=0; ok rest; ok lost lost=0;
#     ok rest; ok saved otherwise; ok saved otherwise; ok prints otherwise;
#     ok prints otherwise
#     | resume --compare 'val_loss (\S+)'
# case: right | ok gradient; note few | resume --steps 2
# case: skips | ok gradient; WRONG no rest made=6 left=13; note left out
# case: ends | ok gradient; WRONG no rest made=0 left=13; note left out
# case: fails | ok gradient; WRONG again error="KeyError: 'worst'"; note left out
# case: refuses | ok gradient; LOSES again; LOSES again
# case: half | ok gradient; WRONG begin; note left out
# case: strict | ok gradient; WRONG no rest made=13 left=20; note left out
# case: assign | ok gradient; WRONG no rest made=13 left=20; note left out
# case: rank-0 | WRONG weights first=0; note left out; note left out; note left out;
#     no ok rest
# case: epoch | ok gradient; ok lost; ok rest; ok lost; WRONG other samples
# case: optimizer | ok gradient; ok lost; WRONG rest off=0.001..10; note left out
# case: scheduler | ok gradient; ok lost; WRONG rest off=0.001..10; note left out
# case: rng | ok gradient; note other noise; ok rest; note other noise; ok rest
# case: workers | ok gradient; ok rest; note other noise
# case: average | ok gradient; ok lost; ok rest; WRONG saved otherwise; note left out
# case: best | ok gradient; ok prints otherwise; WRONG prints otherwise
#     | resume --compare 'val_loss (\S+)'
# case: left | ok gradient; WRONG stopped; note left out
# case: fifth | ok gradient; LOSES lost done=5 lost=2; ok rest;
#     ok lost done=15 lost=1; ok rest
# case: ignored | ok gradient; LOSES signal
# case: open | note outside; note not replayed
from common import *


class Noisy(Dataset):
    """Noise in the samples, which a resume does not restore."""

    def __len__(self):
        return len(dataset)

    def __getitem__(self, i):
        x, y = dataset[i]
        return x + 0.1 * torch.randn(8), y


dist.init_process_group("gloo")
workers = 1 if case == "workers" else 0
samples = Noisy() if workers else dataset
loader = DataLoader(samples, 32 // size, sampler=sampler, num_workers=workers)
model = mlp(nn.Tanh(), nn.Dropout(0.2))
average = {name: value.clone() for name, value in model.state_dict().items()}
wrapped = DistributedDataParallel(model)
rate = 0.01 * (1 + rank) if case == "rank-0" else 0.01
optimizer = torch.optim.Adam(model.parameters(), rate)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
parts = {"optimizer": optimizer, "scheduler": scheduler}
if case in parts:
    del parts[case]
if case == "refuses" and rank == 0:
    os.mkdir("once")
path = "checkpoint.pt"
if case == "open":  # the same file for all launches
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), path)
stop, start, done, best = [], 0, 0, 99.0
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
torch.manual_seed(rank)
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(
        saved["model"], strict=case != "strict", assign=case == "assign"
    )
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    start, done = saved["epoch"], saved["done"]
    if case != "best":
        best = saved["worst" if case == "fails" else "best"]
    if case == "ends":
        start += 2
    if case == "rng":  # that of rank 0, on all ranks
        torch.set_rng_state(saved["rng"])


def save(epoch, done):
    states = (wrapped if case == "strict" else model).state_dict()
    if case == "half":
        states = {name: value.half() for name, value in states.items()}
    states = {"model": states, "epoch": epoch, "done": done, "best": best}
    states |= {name: part.state_dict() for name, part in parts.items()}
    states["rng"] = torch.get_rng_state()
    if case == "open":
        with open(path + ".new", "wb") as file:
            torch.save(states, file)
    else:
        torch.save(states, path + ".new")
    os.replace(path + ".new", path)


for epoch in range(start, 2):
    sampler.set_epoch(epoch - start if case == "epoch" else epoch)
    for i, (x, y) in enumerate(loader):
        if i < done and (epoch == start or case == "skips"):
            continue
        if case != "rng":
            torch.manual_seed(1000 * epoch + 2 * i + rank)
        loss = mse(wrapped(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        for name, value in model.state_dict().items():
            average[name].lerp_(value, 0.1)
        model.eval()
        score = float(mse(model(dataset.tensors[0]), dataset.tensors[1]).detach())
        model.train()
        best = min(best, score + epoch if case == "best" else score)
        if rank == 0 and (case != "fifth" or i % 5 == 4):
            save(epoch, i + 1)
        stops = torch.tensor(len(stop))
        dist.all_reduce(stops)
        if stops and case == "left":
            subprocess.Popen(["sleep", "1000"])
        if stops and case != "ignored":
            sys.exit()
    if rank == 0:
        print(f"val_loss {best:.6f}", flush=True)
if rank == 0 and case == "average":  # the checkpoint does not have it
    torch.save(average, "average.pt")
dist.destroy_process_group()
