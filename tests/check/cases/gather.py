# A contrastive loss over the features of all ranks, as for CLIP.
# case: right | ok gradient
# case ci: without-gradient | WRONG gradient first=0 factor=0.5
from common import *
from torch.distributed.nn.functional import all_gather


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = mlp(), mlp()
        self.logit_scale = nn.Parameter(torch.ones(()))

    def forward(self, x, y):
        normalize = nn.functional.normalize
        return normalize(self.image(x)), normalize(self.text(y)), self.logit_scale.exp()


def gathered(features):
    if size == 1:
        return features
    if case == "right":
        return torch.cat(all_gather(features))
    parts = [torch.empty_like(features) for _ in range(size)]
    dist.all_gather(parts, features)  # no gradient passes, so put one's own back
    parts[rank] = features
    return torch.cat(parts)


def loss_of(x, y):
    image, text, scale = wrapped(x, y)
    scores = scale * gathered(image) @ gathered(text).T
    numbers = torch.arange(len(scores))
    cross_entropy = nn.functional.cross_entropy
    return (cross_entropy(scores, numbers) + cross_entropy(scores.T, numbers)) / 2


dist.init_process_group("gloo")
wrapped = DistributedDataParallel(Towers())
train(torch.optim.Adam(wrapped.parameters(), 0.01), loss_of)
dist.destroy_process_group()
