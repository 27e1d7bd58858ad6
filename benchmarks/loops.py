"""The loops that bench.py compares. Each trains a new model for args.max_steps steps.

The bare loop is as short as possible. It has the same model and the same order of
samples, and loads batches in the same way, so the GPU sees the same numbers.
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
    sampler.set_epoch(0)  # the data must last for all steps: there is no second epoch
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
    for _, batch in zip(range(args.max_steps), loader):
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
