# A score that is computed by all ranks, and printed.
# options: quick --compare 'val_loss (\S+)'
# case: right | ok gradient; ok printed pattern=val_loss
# case: all | ok gradient; ok printed pattern=val_loss
# case ci: padded | ok gradient; WRONG printed
# case: local | ok gradient; WRONG printed
# case: silent | ok gradient; note not printed pattern=val_loss
import logging

from common import *

dist.init_process_group("gloo")
logging.basicConfig(level=logging.INFO)
x = torch.randn(99, 8)
val_set = TensorDataset(x, x.sin())
val_sampler = range(rank, 99, size)
if case == "padded":  # it repeats a sample, so that all ranks have as many
    val_sampler = DistributedSampler(val_set, shuffle=False)
val_loader = DataLoader(val_set, 16, sampler=val_sampler)
model = mlp()
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
for epoch in range(2):
    train(optimizer, lambda x, y: mse(wrapped(x), y), epochs=[epoch])
    total = torch.zeros(2)
    with torch.no_grad():
        for x, y in val_loader:
            total += torch.tensor([mse(model(x), y) * len(x), len(x)])
    if case != "local":
        dist.all_reduce(total)
    score = total[0] / total[1]
    if case == "all":
        logging.info("rank %d: val_loss %.4f", rank, score)
    elif rank == 0 and case != "silent":
        print(f"epoch {epoch}: val_loss {score:.4f}, lr 0.01", flush=True)
dist.destroy_process_group()
