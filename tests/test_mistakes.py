"""Classic mistakes of DDP programs: does the suite notice each of them?

    pytest tests/test_mistakes.py -k "no sampler" -s     one of them, with what is said

Each is put into ddp_train.py, in place of the right lines. Then the test that is named
beside it must fail. This runs in a fork, so torch is not imported again. A mistake
whose right lines are no longer in the program fails, too.
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
        "the model is not wrapped: nothing is averaged",
        "    if world_size > 1:\n",
        "    if world_size > 1000:\n",
        EXACT,
    ),
    (
        "a loss that is not divided by the number of batches",
        "(loss / args.accum).backward()",
        "loss.backward()",
        EXACT,
    ),
    (
        "no no_sync: gradients are averaged for each batch",
        "averaging = wrapped.no_sync()",
        "pass",
        "averaged_once_per_step",
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
        "no zero_grad: gradients pile up",
        "    wrapped.zero_grad()  #",
        "    # wrapped.zero_grad()  #",
        EXACT,
    ),
    (
        "the log has the loss of rank 0 alone",
        "    dist.all_reduce(means)\n    means /= dist.get_world_size()\n",
        "",
        EXACT,
    ),
    (
        "all ranks save into one file",
        "    if dist.get_rank() > 0:  # DDP: only rank 0 saves",
        "    if False:  #",
        "only_rank_0_writes",
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
        "each rank evaluates its own running means of batch norm",
        "            dist.broadcast(copy, src=0)",
        "            pass",
        "evaluation_is_the_same",
    ),
    ("no eval()", "    model.eval()\n", "", "modes_come_back"),
    (
        "no train() after the evaluation",
        "        module.train(was_training)",
        "        pass",
        "modes_come_back",
    ),
    (
        "NaN is trained on and saved",
        "if not all(math.isfinite(mean) for mean in means.values()):",
        "if False:",
        "nan",
    ),
    (
        "ranks with other options",
        "    check_alike(settings)\n",
        "",
        "ranks_that_differ_end",
    ),
    (
        "the optimizer begins anew after a resume",
        'optimizer.load_state_dict(saved["optimizer"])',
        "pass",
        "resumed_run_has_the_same_bits",
    ),
    (
        "the epoch begins anew after a resume",
        'return saved["step"], saved["epoch"], saved["done"]',
        'return saved["step"], saved["epoch"], 0',
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
        'state["model"] = model.state_dict()',
        'state["model"] = wrapped.state_dict()',
        "resumed_on_other_numbers",
    ),
    (
        "loading processes end at a signal, before their rank has saved",
        '        options["worker_init_fn"] = ignore_signals\n',
        "",
        "signal_to_all_processes",
    ),
    (
        "a model that sees the bytes it must predict",
        "q, k, v, is_causal=True",
        "q, k, v",
        "does_not_see_the_bytes",
    ),
    (
        "one learning rate for all groups of the optimizer",
        'group["lr"] = group["initial_lr"] * factor',
        'group["lr"] = args.lr * factor',
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
        "if not ((everyone - everyone[0]).abs() <= 1e-6 * everyone[0]).all():",
        "if ((everyone - everyone[0]).abs() > 1e-6 * everyone[0]).any():",
        "ranks_that_differ_end",
    ),
    (
        "the speed of one rank is logged",
        'means["samples_per_s"] = step_samples / seconds',
        'means["samples_per_s"] = step_samples / world_size / seconds',
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
        "file.read(64 * 2**20)",
        "file.read(64 * 2**10)",
        "text_of_the_data",
    ),
    (
        "RANK picks the GPU",
        'index = int(os.environ.get("LOCAL_RANK", 0))',
        'index = int(os.environ.get("RANK", 0))',
        "takes_the_gpu_of_its_local_rank",
    ),
]


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
