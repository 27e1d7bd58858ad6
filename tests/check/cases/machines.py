# Two machines with one rank each, in place of one with two.
# options: machines
# case: right | ok gradient; ok masks; ok machines
# case: file | ok gradient; note shared disk; ok machines
# case: clean | ok gradient; note shared disk; ok machines | machines --timeout 40
# case: save | ok gradient; ok machines; note both save names=model.pt
# case: url | ok gradient; ok machines
# case: address | note address address=tcp://127.0.0.1:23456; ok gradient;
#     WRONG machines start
#     error="RuntimeError: each machine has its own tcp://127.0.0.1:23456"
# case: seed | ok gradient; WRONG machines
# case: sampler | ok gradient; WRONG machine samples
import glob

from common import *

options = {"init_method": "env://", "rank": rank, "world_size": size}
if case == "url":
    options["init_method"] = "tcp://{MASTER_ADDR}:{MASTER_PORT}".format(**os.environ)
if case == "address":
    options["init_method"] = "tcp://127.0.0.1:23456"
dist.init_process_group("gloo", **options)
if case == "file":
    if rank == 0:
        torch.save(dataset.tensors, "data.pt")
    dist.barrier()
    dataset = TensorDataset(*torch.load("data.pt"))
share = local if case == "sampler" else rank
sampler = DistributedSampler(dataset, size, share, seed=0)
loader = DataLoader(dataset, 32 // size, sampler=sampler)
model = mlp(nn.Tanh(), nn.Dropout(0.2))
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
torch.manual_seed(local if case == "seed" else rank)
for epoch in range(2):
    train(optimizer, lambda x, y: mse(wrapped(x), y), loader, epochs=[epoch])
    if case == "clean" and rank == 0:
        torch.save(model.state_dict(), f"epoch{epoch}.pt")
    dist.barrier()
    old = sorted(glob.glob("epoch*.pt"))[:-1]
    dist.barrier()
    for path in old:  # all ranks wait for each file that is removed
        if rank == 0:
            os.remove(path)
        dist.broadcast_object_list([True], src=0)
    dist.all_reduce(torch.ones(()))
if case == "save" and local == 0:
    torch.save(model.state_dict(), "model.pt")
dist.destroy_process_group()
