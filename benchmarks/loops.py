"""The loops that bench.py compares. Each trains a new model for args.max_steps.

The bare loop is the shortest there is: the same model, the same order of samples, and
batches that are loaded in the same way. So the GPU sees the same numbers.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import ddp_train


def new_parts(args, device):
    model = ddp_train.build_model(args).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, fused=True)
    dataset = ddp_train.load_data(args)[0]
    options = ddp_train.loading_options(device, args.workers)
    sampler = ddp_train.ResumableSampler(dataset, args.seed)
    options |= {"batch_size": args.batch_size, "drop_last": True}
    return model, optimizer, DataLoader(dataset, sampler=sampler, **options)


def bare(args, device, clip=None):
    model, optimizer, loader = new_parts(args, device)
    if dist.get_world_size() > 1:
        ddp = ddp_train.DistributedDataParallel
        model = ddp(model, gradient_as_bucket_view=True)
    if args.compile:
        model = torch.compile(model)
    bf16 = args.precision == "bf16"
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)
    for _, batch in zip(range(args.max_steps), loader, strict=False):
        batch = ddp_train.to_device(batch, device)
        with autocast:
            loss = ddp_train.compute_loss(model, batch)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def clipped(args, device):
    """The bare loop, with clipping."""
    bare(args, device, args.grad_clip)


def ours(args, device):
    ddp_train.train(args, device)


def permuted(args, device):
    """Ours, but a block lays out q, k and v by permute(): copies of their gradients."""
    forward = ddp_train.Block.forward
    ddp_train.Block.forward = forward_by_permute
    try:
        ours(args, device)
    finally:
        ddp_train.Block.forward = forward


def forward_by_permute(self, x):
    qkv = self.query_key_value(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + self.dropout(self.project(y.transpose(1, 2).flatten(2)))
    y = self.narrow(nn.functional.gelu(self.widen(self.norm2(x))))
    return x + self.dropout(y)
