# Rows of different lengths, padded to the longest of each rank.
# case ci: right | ok gradient
# case: tokens | WRONG gradient off=0.001..0.5
# case: seed | ok gradient; note masks names="torch.bernoulli_()"
# case: pairs | ok gradient
from common import *


def collate(batch):
    x = nn.utils.rnn.pad_sequence(batch, batch_first=True)
    ones = [torch.ones(len(row), dtype=torch.long) for row in batch]
    return x, nn.utils.rnn.pad_sequence(ones, batch_first=True)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.gru = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 20)

    def forward(self, x):
        x = nn.functional.dropout(self.embedding(x), 0.2 if case == "seed" else 0)
        return self.head(self.gru(x)[0]).transpose(1, 2)


def loss_of(x, mask):
    if case == "seed":
        torch.manual_seed(0)  # in each step, and on all ranks
    entropy = nn.functional.cross_entropy
    each = entropy(wrapped(x[:, :-1]), x[:, 1:], reduction="none") * mask[:, 1:]
    total = mask[:, 1:].sum()
    if case != "tokens":  # a mean over the tokens of all ranks
        dist.all_reduce(total)
        total = total / size
    return each.sum() / total


dist.init_process_group("gloo")
rows = [torch.randint(1, 20, (n,)) for n in torch.randint(3, 12, (256,)).tolist()]
sampler = DistributedSampler(rows, seed=3)
# In batches of two rows for each rank, most rows end with a token, not with padding.
count = 4 if case == "pairs" else 16
loader = DataLoader(rows, count // size, sampler=sampler, collate_fn=collate)
wrapped = DistributedDataParallel(Model())
train(torch.optim.AdamW(wrapped.parameters(), 0.01), loss_of, loader)
dist.destroy_process_group()
