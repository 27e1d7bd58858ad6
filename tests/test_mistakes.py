"""Classic mistakes of DDP programs: does the suite notice each of them?

    make test-lines                                            all, and then lines.py
    pytest -m mistakes tests/test_mistakes.py -k "no sampler"  one of them

Each replaces the right lines of ddp_train.py. Then the test named beside it must fail.
Mistakes that leave a line out are not here: lines.py makes all of these. Everything
runs in a fork, so torch is not imported again.
"""

import os
import sys

import pytest

import ddp_train
from harness import SCRIPT, fork_ranks, processes

EXACT = "any_split_of_a_batch"
# (name, the right lines, the mistake, the test that notices)
MISTAKES = [
    (
        "no sampler: all ranks train on the same samples",
        "order[self.start + self.rank :: self.num_replicas]",
        "order[self.start :: self.num_replicas]",
        EXACT,
    ),
    (
        "no set_epoch: each epoch has the same order",
        "manual_seed(self.seed + self.epoch)",
        "manual_seed(self.seed)",
        EXACT,
    ),
    (
        "a loss that is not divided by the number of batches",
        "(loss / args.accum).backward()",
        "loss.backward()",
        EXACT,
    ),
    (
        "the same dropout on all ranks",
        'seed_all("step", args.seed, step, rank)',
        'seed_all("step", args.seed, step)',
        "draws_its_own_random_numbers",
    ),
    (
        "the same augmentation on all ranks",
        'seed_all("load", args.seed, step, rank)',
        'seed_all("load", args.seed, step)',
        "workers_of_each_rank",
    ),
    (
        "the evaluation counts padded samples twice",
        "val_samples = range(rank, len(val_set), world_size)",
        "val_samples = DistributedSampler(val_set, shuffle=False)",
        EXACT,
    ),
    (
        "the evaluation of rank 0 alone",
        "in all_gather({name: float(value) for name, value in sums.items()}):",
        "in [{name: float(value) for name, value in sums.items()}]:",
        "evaluation_is_the_same",
    ),
    (
        "the epoch starts over after a resume",
        'saved["epoch"], saved["done"]',
        'saved["epoch"], 0',
        "resumed_run_has_the_same_bits",
    ),
    (
        "a kill in a save leaves half a file",
        'beside = path.with_suffix(".tmp")',
        "beside = path",
        "full_disk_or_a_kill",
    ),
    (
        "code in a checkpoint runs",
        'torch.load(path, "cpu", weights_only=True)',
        'torch.load(path, "cpu", weights_only=False)',
        "code_in_a_file",
    ),
    (
        "the names of the weights begin with module.",
        '"model": model.state_dict()}',
        '"model": wrapped.state_dict()}',
        "resumed_on_other_numbers",
    ),
    (
        "a model that sees the bytes it must predict",
        "block(x, mask, is_causal=True)",
        "block(x)",
        "does_not_see_the_bytes",
    ),
    (
        "one learning rate for all groups of the optimizer",
        'group["lr"] = group["initial_lr"] * factor',
        'group["lr"] = optimizer.param_groups[0]["initial_lr"] * factor',
        EXACT,
    ),
    (
        "only the first group is clipped",
        "clip_grad_norm_(wrapped.parameters(), args.grad_clip)",
        'clip_grad_norm_(optimizer.param_groups[0]["params"], args.grad_clip)',
        EXACT,
    ),
    (
        "--compile does nothing on two ranks",
        "    if args.compile:",
        "    if args.compile and world_size == 1:",
        "compiled_ranks",
    ),
    (
        "NaN in the weights is saved",
        "if not ((rows - rows[0]).abs() <= 1e-6 * rows[0]).all():",
        "if ((rows - rows[0]).abs() > 1e-6 * rows[0]).any():",
        "ranks_that_differ_end",
    ),
    (
        "the speed of one rank is logged",
        'means["samples_per_s"] = global_batch / seconds',
        'means["samples_per_s"] = global_batch / world_size / seconds',
        "speed_in_the_log",
    ),
    (
        "the ranks ask for a stop only when a log line is due",
        "stopped_by = stop.requested()",
        "stopped_by = step % args.log_every == 0 and stop.requested()",
        "takes_effect_after_the_step",
    ),
    (
        "half of a model is loaded",
        'model.load_state_dict(saved["model"])',
        'model.load_state_dict(saved["model"], strict=False)',
        "changed_code",
    ),
    (
        "the checksum of the data reads 64 KiB",
        "zlib.crc32(data.numpy())",
        "zlib.crc32(data[:65536].numpy())",
        "text_of_the_data",
    ),
    (
        "RANK picks the GPU",
        'index = int(os.environ.get("LOCAL_RANK", 0))',
        'index = int(os.environ.get("RANK", 0))',
        "takes_the_gpu_of_its_local_rank",
    ),
    (
        "a closed terminal ends the run before it has saved",
        "contextlib.suppress(OSError)",
        "contextlib.suppress(BrokenPipeError)",
        "nobody_reads",
    ),
    (
        "a step on the whole training set is refused",
        "if n < global_batch:",
        "if n <= global_batch:",
        "without_a_held_out_set",
    ),
    (
        "the clock starts once per epoch",
        "            if not results:\n",
        "            if i == 0:\n",
        "speed_in_the_log",
    ),
    (
        "the time left is that of this epoch",
        "seconds * (last_step - step)",
        "seconds * (steps - i - 1)",
        "speed_in_the_log",
    ),
    (
        "a score below zero is lost",
        "total[name] = total.get(name, 0) + value",
        "total[name] = max(0, total.get(name, 0) + value)",
        "evaluation_is_the_same",
    ),
    (
        "nothing is held out from a small data set",
        "held_out = max(1, n // 20)",
        "held_out = n // 20",
        "sample_is_bytes",
    ),
    (
        "--dropout is ignored",
        "ByteTransformer(*shape, args.dropout)",
        "ByteTransformer(*shape, 0.0)",
        "options_of_the_model",
    ),
    (
        "dropout does not depend on --seed",
        'seed_all("step", args.seed, step, rank)',
        'seed_all("step", step, rank)',
        "draws_its_own_random_numbers",
    ),
    (
        "a finished bf16 run is evaluated in fp32",
        "to a stop or a kill\n        with autocast:\n",
        "to a stop or a kill\n        if True:\n",
        "bf16_computes",
    ),
    (
        "an option that only rank 1 has is not compared",
        "for name in rows[0] | row:",
        "for name in rows[0]:",
        "ranks_that_differ_end",
    ),
    (
        "a larger global batch after a resume needs more samples than there are",
        "steps = min(last_step - step, (n - done) // global_batch)",
        "steps = min(last_step - step, n // global_batch)",
        "another_global_batch",
    ),
    (
        "compiled ranks average in each batch",
        "if i < args.accum - 1 and dist.get_world_size() > 1:",
        "if i < args.accum - 1 and isinstance(wrapped, DistributedDataParallel):",
        "compiled_ranks",
    ),
]


@pytest.mark.mistakes
@processes
@pytest.mark.parametrize("mistake", MISTAKES, ids=[row[0] for row in MISTAKES])
def test_mistake_is_noticed(tmp_path, mistake):
    _, right, wrong, test = mistake
    text = SCRIPT.read_text()
    assert text.count(right) == 1, "the right lines are not in ddp_train.py: mend them"
    script = tmp_path / "ddp_train.py"
    script.write_text(text.replace(right, wrong))

    def run_test():
        """pytest in pytest, with the mistake in the functions of ddp_train."""
        ddp_train.__file__ = str(script)
        exec(compile(script.read_text(), script, "exec"), vars(ddp_train))
        words = ["-x", "-q", "-p", "no:xdist", "--rootdir", SCRIPT.parent, "-k", test]
        words += [
            "--basetemp",
            tmp_path / "nested",
            SCRIPT.parent / "test_ddp_train.py",
        ]
        for variable in list(os.environ):
            if variable.startswith("PYTEST_"):
                del os.environ[variable]
        sys.exit(int(pytest.main([str(word) for word in words])))

    [run] = fork_ranks(1, run_test)
    said = run.end(code=1)  # 1: a test failed. 5: there is no such test.
    assert "FAILED" in said or "ERROR" in said
