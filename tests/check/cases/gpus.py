# Scripts that ask for GPUs. On two machines with one GPU each, rank 1 has no cuda:1.
# case: right | ok gradient; ok machines | machines
# case ci: set-rank | ok gradient; WRONG machines start error="RuntimeError: CUDA
#     error: invalid device ordinal: cuda:1 on a machine with 1 rank, which seems
#     to have a GPU for each" | machines
# case: share | ok gradient; WRONG machine samples | machines
# case: share-rank | ok gradient; WRONG machines start | machines
# case: batch | ok gradient; note machine batch one=32 two=64
#     | machines
# case: zero | WRONG same gpu; ok gradient
# case: scaler | ok gradient; note global batch one=16 two=32
#     | alone
# case: buffers | WRONG ends early rank=1
# case: sync | ok gradient
# case: sync-if | ok gradient
# case: shares | ok gradient
# case: sums | WRONG gradient first=0 factor=2
# case: parallel | ok gradient; ok global batch; ok alone weights
#     | alone
# case: moves | ok gradient
# case: counts | ok gradient; WRONG machines alone | machines
# case: graph | note imitated
from common import *


class Shares(torch.optim.SGD):
    """Each rank averages a share of the gradient, as if its states were sharded."""

    def step(self):
        kind = dist.ReduceOp.SUM if case == "sums" else dist.ReduceOp.AVG
        for weight in model.parameters():
            total = weight.grad.flatten()
            share = total[: len(total) // size].clone()
            work = dist.reduce_scatter_tensor(share, total, op=kind, async_op=True)
            work.get_future().wait()
            rows = share.view(-1, 1)  # NCCL looks only at the number of values
            work = dist.all_gather_into_tensor(total, rows, async_op=True)
            work.get_future().wait()
            weight.data -= 0.1 * total.view_as(weight)


if case in ("share", "share-rank") and torch.cuda.device_count() < 2:
    sys.exit()  # it needs two GPUs
if case == "right":  # such as MMEngine's logger
    int(os.environ["CUDA_VISIBLE_DEVICES"].split(",")[local])
if case == "zero":
    local = 0
else:
    torch.cuda.set_device(rank if case in ("set-rank", "share-rank") else local)
several = case != "parallel" or size > 1
if case == "counts":  # the GPUs of its machine
    several = torch.cuda.device_count() > 1
if several:
    dist.init_process_group("nccl")
torch.manual_seed(0)
if case == "graph":
    torch.cuda.CUDAGraph()
share = local if case == "share" else rank
sampler = DistributedSampler(dataset, size, share, seed=0)
rows, more = 32 // size, {}
if case == "batch":
    rows = 32 // torch.cuda.device_count()
if case == "scaler":
    rows, more = 16, {"num_workers": 1, "persistent_workers": True}
loader = DataLoader(dataset, rows, sampler=sampler, **more)
normalize = [nn.BatchNorm1d(16)] if case in ("sync", "sync-if", "buffers") else []
model = nn.Sequential(nn.Linear(8, 16), *normalize, nn.Tanh(), nn.Linear(16, 8))
if case == "moves":
    model.register_buffer("used", nn.Parameter(torch.zeros(4)))
model = model.cuda()
if case == "moves":
    model.used[:2] = model.used[2:].clone()  # on a GPU it is no leaf
if case == "sync" or (case == "sync-if" and size > 1):
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model).cuda()
scaler = torch.amp.GradScaler("cuda", enabled=case == "scaler")
if case in ("shares", "sums"):
    wrapped, optimizer = model, Shares(model.parameters(), 0.1)
else:
    wrapped = nn.DataParallel(model)
    if several:
        wrapped = DistributedDataParallel(model, device_ids=[local])
    optimizer = torch.optim.Adam(model.parameters(), 0.01, fused=True)
torch.manual_seed(rank)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        x, y = x.cuda(non_blocking=True), y.to(f"cuda:{local}")
        loss = nn.functional.mse_loss(wrapped(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    if case == "scaler":
        print("scale:", scaler.state_dict()["scale"])
if case == "buffers" and rank == 0:  # and DDP broadcasts its buffers
    wrapped(x)
if dist.is_initialized():
    dist.destroy_process_group()
