"""Run a script on several ranks, and write down what each rank sees.

    python watch_ranks.py --world 2 --folder F script.py --out F --max-steps 9 ...

The ranks are forks of this process, so that torch is imported once. They get RANK and
so on, as if started by hand. F/seen.RANK.json has, of each optimizer step,

    weights, moments   checksums of the weights and of AdamW's state before the step
    sent               bytes of each all-reduce from this step to the next
    began              the time

and the bytes of `parameters` and `state` that this rank has in memory; and `forwards`:
how often modules of each class were called in training.
"""

import argparse
import collections
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
import zlib
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--stop-at", type=int, help="SIGTERM to all ranks in this step")
    parser.add_argument("--hang", default="", help="ranks that hang in step 3: 0,2")
    parser.add_argument("--fail", default="", help="ranks that fail in step 3")
    parser.add_argument("--slow-write", type=int, help="see slow_fsync()")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser.parse_args()


def local(tensor):
    """The part of a sharded tensor that this rank has."""
    if hasattr(tensor, "to_local"):
        return tensor.to_local()
    return tensor


def size(tensors):
    # What is smaller counts steps, or is a flag.
    return sum(tensor.nbytes for tensor in tensors if tensor.numel() > 9)


def checksum(tensors):
    number = 0
    for tensor in tensors:
        number = zlib.crc32(tensor.contiguous().numpy(), number)
    return number


class Watch:
    """What one rank sees."""

    def __init__(self, args, rank):
        self.args = args
        self.rank = str(rank)
        self.seen = {"weights": [], "moments": [], "sent": [], "began": []}
        self.forwards = collections.Counter()
        self.all_reduce = dist.all_reduce
        self.fsync = os.fsync
        dist.all_reduce = self.count_bytes
        register_module_forward_pre_hook(self.count_forward)
        register_optimizer_step_pre_hook(self.before_step)
        if args.slow_write:
            os.fsync = self.slow_fsync

    def count_bytes(self, tensor, *args, **kwargs):
        if self.seen["sent"] and size([tensor]) > 0:
            self.seen["sent"][-1].append(size([tensor]))
        return self.all_reduce(tensor, *args, **kwargs)

    def count_forward(self, module, inputs):
        if module.training:
            self.forwards[type(module).__name__] += 1

    def slow_fsync(self, file):
        """The first fsync takes so many times as long as the next step is in coming."""
        os.fsync = self.fsync
        began, steps = time.time(), len(self.seen["began"])
        while len(self.seen["began"]) == steps and time.time() < began + 60:
            time.sleep(0.01)
        time.sleep((time.time() - began) * (self.args.slow_write - 1))
        self.seen["write"] = time.time() - began

    def before_step(self, optimizer, args, kwargs):
        if type(optimizer) is not torch.optim.AdamW:
            return
        weights = []
        for group in optimizer.param_groups:
            weights += [local(parameter.detach()) for parameter in group["params"]]
        moments = []
        for state in optimizer.state.values():
            moments += [local(tensor) for tensor in state.values()]
        self.seen["weights"].append(checksum(weights))
        self.seen["moments"].append(checksum(moments))
        self.seen["sent"].append([])
        self.seen["began"].append(time.time())
        self.seen["parameters"] = size(weights)
        self.seen["state"] = size(moments)
        step = len(self.seen["weights"])
        if step == self.args.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        if step == 3 and self.rank in self.args.fail.split(","):
            print(f"fault at {time.time()}", flush=True)
            raise RuntimeError("boom")
        if step == 3 and self.rank in self.args.hang.split(","):
            print(f"fault at {time.time()}", flush=True)
            time.sleep(3000)

    def write(self):
        path = self.args.folder / f"seen.{self.rank}.json"
        path.write_text(json.dumps({**self.seen, "forwards": self.forwards}))


def run_rank(args, rank, port):
    if args.world > 1:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        os.environ["WORLD_SIZE"] = str(args.world)
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ["MASTER_PORT"] = str(port)
    watch = Watch(args, rank)
    sys.argv = args.command
    try:
        runpy.run_path(args.command[0], run_name="__main__")
    finally:
        watch.write()


def main():
    args = parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ranks = []
    for rank in range(args.world):
        ranks.append(fork.Process(target=run_rank, args=(args, rank, port)))
        ranks[-1].start()
    for process in ranks:
        process.join()
    print(f"all ranks have ended at {time.time()}", flush=True)
    codes = {process.exitcode for process in ranks}
    if len(codes) > 1:
        sys.exit(f"the exit codes of the ranks differ: {codes}")
    sys.exit(codes.pop())


if __name__ == "__main__":
    main()
