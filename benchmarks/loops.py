"""The loops that bench.py compares. Each trains a new model for args.max_steps.

The bare loop is the shortest there is: the same model, on four batches in memory.
"""

import torch

import ddp_train


def new_parts(args, world):
    model = ddp_train.build_model(args).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, fused=True)
    dataset = ddp_train.load_data(args)[0]
    return (
        model,
        optimizer,
        ddp_train.train_loader(dataset, args.batch_size, world, args.seed),
    )


def bare(args, world):
    model, optimizer, loader = new_parts(args, world)
    if world.size > 1:
        ddp = ddp_train.DistributedDataParallel
        model = ddp(model, gradient_as_bucket_view=True)
    if args.compile:
        model = torch.compile(model)
    bf16 = args.precision == "bf16"
    autocast = torch.autocast(world.device.type, torch.bfloat16, enabled=bf16)
    batches = []
    for batch, _ in zip(loader, range(4), strict=False):
        batches.append(ddp_train.to_device(batch, world.device))
    for step in range(args.max_steps):
        with autocast:
            loss = ddp_train.compute_loss(model, batches[step % 4])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def ours(args, world):
    ddp_train.train(args, world)


def usual_loop(args, model, optimizer, loader, backward, clip):
    """That of the tutorials of both peers, with a line for each --log_every steps."""
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.max_steps)
    for batch, step in zip(loader, range(args.max_steps), strict=False):
        loss = ddp_train.compute_loss(model, batch)
        backward(loss)
        clip()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % args.log_every == 0:
            loss.item()


def accelerate(args, world):
    import accelerate

    helper = accelerate.Accelerator(cpu=world.device.type == "cpu")
    model, optimizer, loader = helper.prepare(*new_parts(args, world))

    def clip():
        helper.clip_grad_norm_(model.parameters(), args.grad_clip)

    usual_loop(args, model, optimizer, loader, helper.backward, clip)


def fabric(args, world):
    import lightning_fabric

    helper = lightning_fabric.Fabric(accelerator=world.device.type, devices=1)
    model, optimizer, loader = new_parts(args, world)
    model, optimizer = helper.setup(model, optimizer)
    loader = helper.setup_dataloaders(loader)

    def clip():
        helper.clip_gradients(model, optimizer, max_norm=args.grad_clip)

    usual_loop(args, model, optimizer, loader, helper.backward, clip)
