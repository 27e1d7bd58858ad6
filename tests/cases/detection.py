# Images of different sizes, and as many boxes on each as there are objects.
# case ci: right | ok gradient
# case: boxes | WRONG gradient first=0 off=0.001..1
from common import *


def sample(i):
    boxes = torch.randn(1 + i * i % 7, 4)
    return torch.randn(3, 8 + i % 5, 8), {"boxes": boxes, "labels": boxes[:, 0] > 0}


def collate(samples):
    return tuple(zip(*samples))


def loss_of(images, targets):
    means = torch.stack([image.mean((1, 2)) for image in images])
    pairs = list(zip(wrapped(means), [target["boxes"] for target in targets]))
    losses = [mse(found.expand_as(boxes), boxes) for found, boxes in pairs]
    # A mean over the images, or over all boxes of this rank
    counts = [len(boxes) if case == "boxes" else 1 for _, boxes in pairs]
    return sum(n * loss for n, loss in zip(counts, losses)) / sum(counts)


dist.init_process_group("gloo")
dataset = [sample(i) for i in range(160)]
sampler = DistributedSampler(dataset, seed=0)
loader = DataLoader(dataset, 16 // size, sampler=sampler, collate_fn=collate)
wrapped = DistributedDataParallel(nn.Linear(3, 4))
train(torch.optim.SGD(wrapped.parameters(), 0.1), loss_of, loader)
dist.destroy_process_group()
