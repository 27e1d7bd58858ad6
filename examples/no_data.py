"""Training without a data set: an actor-critic learns to balance poles on carts.

PYTHONPATH=. torchrun --standalone --nproc_per_node=2 examples/no_data.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_train as ddp

ENVS, LENGTH = 16, 32  # environments over all ranks; actions of each per step


class CartPoles(nn.Module):  # a module, so that state_dict() returns its buffers
    def __init__(self, numbers):
        super().__init__()
        self.register_buffer("seeds", torch.tensor(numbers))  # one row per environment
        self.register_buffer("states", torch.zeros(len(numbers), 4))
        self.register_buffer("scores", torch.zeros(len(numbers)))
        self.reset(torch.ones(len(numbers)))

    def reset(self, ended):
        for i in ended.nonzero().flatten():
            generator = torch.Generator().manual_seed(int(self.seeds[i]))
            self.states[i] = 0.1 * torch.rand(4, generator=generator) - 0.05
            self.scores[i] = 0
            self.seeds[i] += ENVS  # no two episodes share a seed

    def step(self, push):
        """Returns which episodes end with this step."""
        _, speed, angle, spin = self.states.unbind(1)
        fall = 1.5 * (9.8 * angle.sin() - push * angle.cos())
        self.states += 0.02 * torch.stack([speed, push, spin, fall], 1)
        self.scores += 1
        return (self.states[:, 0].abs() > 2.4) | (self.states[:, 2].abs() > 0.2)


def gather(rows):
    """The rows of all environments, by global number. All ranks call it."""
    by_rank = torch.stack(ddp.all_gather(rows))  # rank 0's rows, then rank 1's, ...
    return by_rank.transpose(0, 1).flatten(0, 1)


def main():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if ENVS % world_size != 0:
        raise SystemExit(f"{world_size} ranks cannot share {ENVS} environments equally")
    envs = CartPoles(range(rank, ENVS, world_size))  # global numbers, also as seeds
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    wrapped = DistributedDataParallel(model) if world_size > 1 else model
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    ddp.lock("out")
    step, recent = 0, []  # recent: the last 50 scores, over all ranks
    saved = ddp.load_checkpoint("out/no_data.pt")
    if saved is not None:
        step, recent = saved["step"], saved["recent"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        rows = saved["envs"].items()  # rows of all environments: keep ours
        envs.load_state_dict({name: x[rank::world_size] for name, x in rows})

    def save():
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        states["envs"] = {name: gather(x) for name, x in envs.state_dict().items()}
        ddp.save_checkpoint("out/no_data.pt", step, recent=recent, **states)

    save()  # before training: what cannot be saved fails now
    stop = ddp.StopSignal()
    while step < 80:
        ddp.seed_all("actions", 0, step)  # the same on all ranks
        noise = torch.rand(ENVS, LENGTH)[rank::world_size]  # draw for all, keep ours
        states = torch.zeros(*noise.shape, 4)
        actions, scores, targets = torch.zeros(3, *noise.shape)
        with torch.no_grad():
            for t in range(LENGTH):
                states[:, t] = envs.states
                logits = model(envs.states)[:, 0]  # act with the model itself
                actions[:, t] = torch.where(noise[:, t] < logits.sigmoid(), 1, -1)
                ended = envs.step(10 * actions[:, t])
                scores[:, t] = envs.scores * ended  # 0: the episode continues
                envs.reset(ended)
            target = model(envs.states)[:, 1]
            for t in reversed(range(LENGTH)):
                target = 1 + 0.95 * target * (scores[:, t] == 0)
                targets[:, t] = target
        logits, values = wrapped(states).unbind(2)  # update through the DDP object
        advantages = targets - values.detach()
        everyone = gather(advantages)  # normalize over all ranks
        advantages = (advantages - everyone.mean()) / everyone.std()
        policy_loss = -nn.functional.logsigmoid(actions * logits) * advantages
        loss = (policy_loss + 0.02 * (targets - values) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        scores = gather(scores)  # in the same order on any number of ranks
        recent = (recent + scores[scores > 0].tolist())[-50:]
        if step % 20 == 0:
            ddp.say(f"step {step}  return {sum(recent) / len(recent)}")
        stopped = stop.requested()
        if stopped or step % 20 == 0:
            save()
        if stopped:
            return
    if rank == 0:
        torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    with ddp.distributed("cpu"):
        main()
