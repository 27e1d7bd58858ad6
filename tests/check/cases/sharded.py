# Sharded weights, and tensor parallelism.
# case ci: fsdp2 | ok gradient
# case: unshard | ok gradient
# case: held | ok gradient
# case: fsdp1 | note sharded
# case: tensor | note tensor parallel
# case: sequence | note tensor parallel
from common import *
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, parallel


def loss_of(x, y):
    if case == "sequence":  # each rank brings its own rows
        x = torch.rand(10, 8)
        return model(x).square().mean()
    if case == "held":  # FSDP2 has put whole weights into the layer
        return mse(held(model(x)), y)
    if case == "unshard":  # ahead of the first call
        model.unshard()
    return mse(model(x), y)


dist.init_process_group("gloo")
model = mlp()
if case == "fsdp1":
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    model = nn.Sequential(model)  # as Fabric puts it into a module of its own
if case == "held":
    held = nn.Sequential(*model)
if case in ("fsdp2", "unshard", "held"):
    for module in (model[0], model[2], model) if case == "fsdp2" else [model]:
        fully_shard(module)
if case == "unshard":  # each rank draws its part
    for weight in model.parameters():
        weight.to_local().detach().normal_()
first, last = parallel.ColwiseParallel(), parallel.RowwiseParallel()
if case == "sequence":
    first = parallel.ColwiseParallel(input_layouts=Shard(0))
    last = parallel.RowwiseParallel(output_layouts=Shard(0))
    torch.manual_seed(rank)
if case in ("tensor", "sequence"):
    mesh = init_device_mesh("cpu", (size,))
    model = parallel.parallelize_module(model, mesh, {"0": first, "2": last})
train(torch.optim.Adam(model.parameters(), 0.01), loss_of)
dist.destroy_process_group()
