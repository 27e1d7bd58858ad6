"""The script computes in float64, also where it asks for another dtype.

Then rounding gives differences of 1e-15, and everything else shows. Where that fails,
it computes in float32, and not in half precision.
"""

import contextlib
import functools
import inspect

import torch
from torch.overrides import TorchFunctionMode

from ddp_check.rank.patch import PRIVATE, always, private, wrap

MODES = []  # that change what the script calls: this one, and that of gpus.py


class Cast(TorchFunctionMode):
    """Casts every floating-point number of a lower precision to this dtype."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype
        self.less = torch.float16, torch.bfloat16
        if dtype == torch.float64:
            self.less += (torch.float32,)

    def is_less(self, dtype):
        return type(dtype) is torch.dtype and dtype in self.less

    def __call__(self, tensor):
        return tensor.to(self.dtype) if tensor.dtype in self.less else tensor

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in ("half", "bfloat16") and torch.is_tensor(args[0]):
            if not args[0].requires_grad:
                rounded = function(*args, **kwargs)  # as in a checkpoint
                if not rounded.is_meta and rounded.isfinite().all():
                    return rounded.to(self.dtype)
            return args[0].to(self.dtype)
        if name == "float" and torch.is_tensor(args[0]):
            return args[0].to(self.dtype)
        if name in ("view", "frombuffer"):  # these look at bytes: cast the result
            return self(function(*args, **kwargs))
        args = [self.dtype if self.is_less(value) else value for value in args]
        if self.is_less(kwargs.get("dtype")):
            kwargs = {**kwargs, "dtype": self.dtype}
        result = function(*args, **kwargs)
        if name in ("tensor", "as_tensor", "asarray"):  # of a numpy array
            return self(result)
        return result


def hide_modes():
    """From copies of torch's functions in a script, which ask has_torch_function().

    With a mode that is true of plain tensors as well. Then these call themselves by
    handle_torch_function(), which old copies do without all of their arguments.
    """
    ask = {"": lambda _, args: any(map(is_of_other_type, args))}
    ask["_unary"] = lambda _, arg: is_of_other_type(arg)
    ask["_variadic"] = lambda _, *args: any(map(is_of_other_type, args))
    for ending, answer in ask.items():
        wrap(torch.overrides, f"has_torch_function{ending}", answer)


def is_of_other_type(value):
    of_torch = torch.Tensor.__torch_function__, private("no override")
    return getattr(type(value), "__torch_function__", None) not in (None, *of_torch)


def enter(mode):
    if not MODES:
        hide_modes()
    MODES.append(mode)
    mode.__enter__()


def run_in_modes(run, *args, **kwargs):
    """A mode is off while it handles backward(), where checkpointed layers run."""
    with contextlib.ExitStack() as stack:
        for mode in MODES:
            stack.enter_context(mode)
        return run(*args, **kwargs)


def disable_autocast(create, context, device_type, *args, **kwargs):
    create(context, device_type, enabled=False)


def scale_by_one(create, scaler, *args, **kwargs):
    """A GradScaler stays enabled, for a script that reads its state."""
    call = inspect.signature(create).bind(scaler, *args, **kwargs)
    call.arguments["init_scale"] = 1.0
    create(*call.args, **call.kwargs)


def step_at_once(step, scaler, optimizer, *args, **kwargs):
    """Without the scale, which fused optimizers expect in float32."""
    return optimizer.step(*args, **kwargs)


def cast_everything(dtype):
    """To be called once, before the script runs. Returns a function that casts."""
    cast = Cast(dtype)

    def cast_result(make, *args, **kwargs):
        return cast(make(*args, **kwargs))

    def rebuild(make, *args):
        """torch.load() makes an empty tensor first, with the dtype of the file."""
        with private("without modes")():
            tensor = make(*args)
        return cast(tensor)

    def keep_default(set_dtype, kind):
        """Transformers sets the dtype of a checkpoint while it makes a model."""
        set_dtype(dtype if cast.is_less(kind) else kind)

    wrap(torch.autocast, "__init__", disable_autocast)
    wrap(torch.amp.GradScaler, "__init__", scale_by_one)
    wrap(torch.amp.GradScaler, "unscale_", functools.partial(always, None))
    wrap(torch.amp.GradScaler, "step", step_at_once)
    wrap(torch.amp.GradScaler, "update", functools.partial(always, None))
    torch.set_default_dtype(dtype)
    wrap(torch, "from_numpy", cast_result)
    wrap(*PRIVATE["load a tensor"], rebuild)
    wrap(torch, "set_default_dtype", keep_default)
    wrap(*PRIVATE["backward"], run_in_modes)
    enter(cast)
    return cast
