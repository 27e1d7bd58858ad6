# Batches of other sizes, without a DataLoader. A resume restores the random generator.
# options: resume
# case: right | note not replayed; ok lost; ok rest; ok lost; ok rest
# case: shifts | note not replayed; ok lost; note other inputs; ok lost;
#     note other inputs
from common import *

dist.init_process_group("gloo")
batches = x_all[rank::size].split([4, 9, 6, 5, 8] * 5)
wrapped = DistributedDataParallel(mlp(nn.Tanh(), nn.Dropout(0.2)))
optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
torch.manual_seed(rank)
path, start, shift, stop = f"rank{rank}.pt", 0, 0, []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
if os.path.exists(path):
    saved = torch.load(path, map_location=torch.device("cpu", 0))  # as in Accelerate
    wrapped.load_state_dict(saved["model"])
    torch.set_rng_state(saved["rng"])
    start, shift = saved["step"], case == "shifts"
for step in range(start, len(batches)):
    x = batches[(step + shift) % len(batches)]
    loss = mse(wrapped(x), x.sin())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    states = {"model": wrapped.state_dict(), "rng": torch.get_rng_state()}
    torch.save(states | {"step": step + 1}, path + ".new")
    os.replace(path + ".new", path)
    stops = torch.tensor(len(stop))
    dist.all_reduce(stops)
    if stops:
        break
dist.destroy_process_group()
