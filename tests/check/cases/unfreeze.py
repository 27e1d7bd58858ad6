# After three steps a second optimizer trains the layer that was frozen.
# options: resume
# case: {out} | ok moves steps=24; ok gradient steps=24; LOSES lost done=12 lost=1;
#     ok rest; ok lost done=12; ok rest
from common import *

dist.init_process_group("gloo")
first, last = nn.Linear(8, 16), nn.Linear(16, 8)
model = nn.Sequential(first, nn.Tanh(), last)
wrapped = DistributedDataParallel(model, find_unused_parameters=True)
heads, bodies = torch.optim.AdamW(last.parameters(), 1e-2), None
os.makedirs(sys.argv[1], exist_ok=True)
path = os.path.join(sys.argv[1], "checkpoint.pt")
step = 0
if os.path.exists(path):
    saved = torch.load(path)
    step = saved["step"]
    model.load_state_dict(saved["model"])
    heads.load_state_dict(saved["heads"])
    if saved["bodies"] is not None:
        bodies = torch.optim.AdamW(first.parameters(), 1e-3)
        bodies.load_state_dict(saved["bodies"])
while step < 24:
    if step >= 3 and bodies is None:
        bodies = torch.optim.AdamW(first.parameters(), 1e-3)
    x, y = dataset[range(step * 13 + rank, step * 13 + 12, size)]
    model.zero_grad()
    mse(wrapped(x), y).backward()
    heads.step()
    if bodies is not None:
        bodies.step()
    step += 1
    if step % 2 == 0 and rank == 0:
        states = {
            "step": step,
            "model": model.state_dict(),
            "heads": heads.state_dict(),
        }
        states["bodies"] = bodies and bodies.state_dict()
        torch.save(states, path + ".new")
        os.replace(path + ".new", path)
    dist.barrier()
dist.destroy_process_group()
