# Several optimizers, or uncommon ones. A step is not a call of an optimizer.
# case: gan | ok gradient; ok masks
# case ci: two | ok alone; ok moves steps=20; ok gradient steps=20
# case: hooks | ok alone; ok moves steps=20; ok gradient steps=20
# case: sam | ok gradient
# case: temperature | WRONG weights first=0; note left out
# case: tries | ok weights; ok gradient
# case: parts | note parts; note left out
# case: forgotten | WRONG weights first=0; note left out
from common import *


class Sam(torch.optim.SGD):
    """Climb a little, and take the gradient from there."""

    def step(self, closure):
        weights = [weight for group in self.param_groups for weight in group["params"]]
        uphill = [0.05 * weight.grad for weight in weights]
        with torch.no_grad():
            torch._foreach_add_(weights, uphill)
            with torch.enable_grad():
                closure()
            torch._foreach_sub_(weights, uphill)
        super().step()


def update(weight):
    """Called within backward(), when this weight has its gradient."""
    dist.all_reduce(weight.grad)
    weight.grad /= size
    torch.optim.SGD([weight], 0.1).step()


def backward():
    model.zero_grad()
    if case == "temperature":  # DDP does not know it
        (scale * mse(wrapped(x), y)).backward()
        return
    if case == "parts":  # such as the classes of this rank
        each = (wrapped(x)[:, rank::size] + part(x) - y[:, rank::size]).square()
        each.mean().backward()
        return
    if case == "forgotten":  # it is not in DDP
        mse(wrapped(x) + part(x), y).backward()
        return
    if case != "gan":
        mse(wrapped(x), y).backward()
        return
    fake = wrapped(torch.randn(len(x), 8))
    softplus = nn.functional.softplus
    (softplus(critic(fake.detach())).mean() + softplus(-critic(x)).mean()).backward()
    other.step()
    softplus(-critic(fake)).mean().backward()
    other.zero_grad()


dist.init_process_group("gloo")
model = mlp()
weights = list(model.parameters())
optimizers = [torch.optim.Adam(weights, 0.01)]
if case == "two":  # as Muon for the matrices, and AdamW for the rest
    optimizers = [torch.optim.SGD(weights[::2], 0.1), torch.optim.AdamW(weights[1::2])]
if case == "sam":
    optimizers = [Sam(weights, 0.1)]
if case == "hooks":
    optimizers, wrapped = [], model
    for weight in weights:
        weight.register_post_accumulate_grad_hook(update)
else:
    wrapped = DistributedDataParallel(model)
scale = torch.ones(1, requires_grad=True)
if case == "temperature":
    optimizers.append(torch.optim.SGD([scale], 0.1))
if case == "tries":  # another model, which has other weights on each rank
    torch.manual_seed(rank)
    mse(mlp()(x_all), x_all).backward()
critic = DistributedDataParallel(nn.Linear(8, 1))
other = torch.optim.Adam(critic.parameters(), 0.01)
torch.manual_seed(rank)
part = nn.Linear(8, 8 // size if case == "parts" else 8)
if case in ("parts", "forgotten"):
    optimizers.append(torch.optim.SGD(part.parameters(), 0.1))
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        backward()
        for optimizer in optimizers:
            optimizer.step(*[backward] * (case == "sam"))
dist.destroy_process_group()
