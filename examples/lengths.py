"""Sentences of different lengths: batches by length, padding, and a loss per word.

PYTHONPATH=. torchrun --standalone --nproc_per_node=2 examples/lengths.py

On any number of ranks it ends with the same weights, up to rounding.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import ddp_train as ddp

BATCH = 32  # sentences per step, over all ranks
PADDING = -100  # the label of padding: cross_entropy() ignores it


class BatchesByLength(ddp.ResumableSampler):
    """Batches of sentences of similar length. Its dataset is the list of lengths."""

    def __len__(self):
        return (len(self.dataset) - self.start) // BATCH

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator).tolist()
        # Leave out less than a batch. After sorting, it would always be the longest.
        order = order[: len(order) // BATCH * BATCH]
        by_length = []
        for i in range(0, len(order), 8 * BATCH):  # all at once: no epoch would differ
            by_length += sorted(order[i : i + 8 * BATCH], key=self.dataset.__getitem__)
        batches = torch.randperm(len(order) // BATCH, generator=generator).tolist()
        for i in batches[self.start // BATCH :]:
            # All ranks make the same batch, and each takes its share of it.
            yield by_length[i * BATCH : (i + 1) * BATCH][self.rank :: self.num_replicas]


def collate(samples):
    words, labels = zip(*samples)
    labels = pad_sequence(labels, batch_first=True, padding_value=PADDING)
    return pad_sequence(words, batch_first=True), labels


def dropout(x, width, training, p=0.1):
    """Draw the mask for the whole global batch, and keep the rows of this rank."""
    if not training:
        return x
    mask = torch.rand(BATCH, width, x.shape[2], device=x.device) >= p
    mask = mask[dist.get_rank() :: dist.get_world_size(), : x.shape[1]]
    return x * mask / (1 - p)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.rnn = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, 16)

    def forward(self, words, width=None):
        # A GRU reads from left to right and never sees the padding, which comes last.
        # Attention does, unless you pass it a key_padding_mask.
        hidden, _ = self.rnn(self.embed(words))
        return self.head(dropout(hidden, width, self.training))


def score(model, batch):
    """Two scores with a denominator each: words, and sentences, the "count"."""
    words, labels = batch
    is_word = labels != PADDING
    wrong = is_word & (model(words).argmax(2) != labels)
    sums = {"wrong_words": wrong.sum(), "words": is_word.sum()}
    return sums | {"wrong_sentences": wrong.any(1).sum(), "count": len(words)}


def main(device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    lengths = torch.randint(5, 50, (1300,)).tolist()
    data = [torch.randint(16, (length,)) for length in lengths]
    data = [(words, words.cummax(0).values) for words in data]  # the largest so far
    sampler = BatchesByLength(lengths[:1001], seed=0)
    loader = DataLoader(data[:1001], batch_sampler=sampler, collate_fn=collate)
    val_samples = range(1001 + rank, 1300, world_size)
    val_loader = DataLoader(data, 64, sampler=val_samples, collate_fn=collate)
    model = Tagger().to(device)
    wrapped = DistributedDataParallel(model) if world_size > 1 else model
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    step = 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        results = []
        for words, labels in loader:
            mine = int((labels != PADDING).sum()), words.shape[1]
            counts, widths = zip(*ddp.all_gather(mine))  # of all ranks
            ddp.seed_all("step", 0, step)  # not the rank: all draw the same masks
            step += 1
            logits = wrapped(words.to(device), max(widths)).flatten(0, 1)
            labels = labels.to(device).flatten()
            loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
            # DDP divides by the number of ranks. We want to divide by all their words.
            loss = loss * world_size / sum(counts)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            results.append({"loss": loss.detach()})
        loss = ddp.mean_over_ranks(results)["loss"]
        means = ddp.evaluate(model, score, val_loader, device)
        words = means["wrong_words"] / means["words"]
        sentences = means["wrong_sentences"]
        ddp.say(f"epoch {epoch}: loss {loss:.6f}  wrong {words:.6f} {sentences:.6f}")
    if rank == 0:
        torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    with ddp.distributed() as device:
        main(device)
