"""Test the tests: break the program in one line, and see the test fail that should.

    make test-the-tests                  all rows; with ARGS="clip mask" those that have such a word

A row: name, file, old text, new text, the test that has to fail. Each test first has to pass on the
unbroken program; an old text that is no longer there is an error; survivors are printed at the end.
Rows with a reason instead of a test cannot be shown here, and say so.
"""

import concurrent.futures
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
PROGRAM, SINGLE, MULTI = "ddp_train.py", "run_single.sh", "run_multi_node.sh"
FILES = [PROGRAM, SINGLE, MULTI, "test_ddp_train.py", "README.md", "Makefile", ".pytest.ini"]
BREAKS = [
    # ---- data
    (
        "set_epoch forgotten",
        PROGRAM,
        "            loader.sampler.set_epoch(epoch, samples)\n",
        "            loader.sampler.set_epoch(0, samples)\n",
        "test_each_sample_once_per_epoch_in_training",
    ),
    (
        "a resumed epoch starts anew",
        PROGRAM,
        "set_epoch(epoch, samples)",
        "set_epoch(epoch)",
        "test_resume_at_another_world_size",
    ),
    (
        "tail samples counted twice",
        PROGRAM,
        "        rows = len(range(at + s.rank, n, world)[:size])\n",
        "        rows = len(batch[0])\n",
        "test_same_training_at_any_world_size",
    ),
    (
        "a padded evaluation",
        PROGRAM,
        " * min(1, rows))",
        ")",
        "test_same_evaluation_at_any_world_size",
    ),
    (
        "evaluation in training mode",
        PROGRAM,
        "    model.eval()\n    with torch.no_grad",
        "    with torch.no_grad",
        "test_same_evaluation_at_any_world_size",
    ),
    (
        "evaluation leaves the model in evaluation mode",
        PROGRAM,
        "    _ = [m.train(mode) for m, mode in modes]\n    return sum_over_ranks",
        "    return sum_over_ranks",
        "test_random_numbers",
    ),
    (
        "each rank evaluates with its own batch statistics",
        PROGRAM,
        "        if buffer.is_floating_point():",
        "        if False:",
        "test_evaluation_with_batch_norm_is_that_of_the_saved_model",
    ),
    (
        "evaluation leaves the model in training mode",
        PROGRAM,
        "m.train(mode)",
        "m.train()",
        "test_evaluation_with_batch_norm_is_that_of_the_saved_model",
    ),
    (
        "a frozen layer of the model thaws in an evaluation",
        PROGRAM,
        "_ = [m.train(mode) for m, mode in modes]",
        "model.train(modes[0][1])",
        "test_evaluation_with_batch_norm_is_that_of_the_saved_model",
    ),
    (
        "DDP's first pass changes batch norm",
        PROGRAM,
        "        _ = [b.copy_(was) for b, was in zip(model.buffers(), buffers)]\n",
        "",
        "test_evaluation_with_batch_norm_is_that_of_the_saved_model",
    ),
    (
        "inference_mode",
        PROGRAM,
        "torch.no_grad()",
        "torch.inference_mode()",
        "test_evaluation_with_batch_norm_is_that_of_the_saved_model",
    ),
    (
        "held-out bytes in the training set",
        PROGRAM,
        "(data[:split], data[split:])",
        "(data, data[split:])",
        "test_held_out_bytes_are_not_trained",
    ),
    (
        "data are read, not mapped",
        PROGRAM,
        "size=where.stat().st_size, dtype=torch.uint8)",
        "size=where.stat().st_size, dtype=torch.uint8).clone()",
        "test_held_out_bytes_are_not_trained",
    ),
    (
        "a non-causal model",
        PROGRAM,
        "block(x, mask, is_causal=True)",
        "block(x)",
        "test_model_is_causal",
    ),
    (
        "all loading processes draw the same",
        PROGRAM,
        "manual_seed(world.rank)",
        "manual_seed(0)",
        "test_loading_processes_of_each_rank_draw_numbers_of_their_own",
    ),
    (
        "a data set's own collate ignored",
        PROGRAM,
        'getattr(dataset, "collate", None)',
        "None",
        "test_loading_processes_of_each_rank_draw_numbers_of_their_own",
    ),
    (
        "workers forked in each epoch",
        PROGRAM,
        "persistent_workers=workers > 0",
        "persistent_workers=False",
        "test_workers_are_forked_once",
    ),
    (
        "loading processes killed by the signal",
        PROGRAM,
        "signal.signal(s, signal.SIG_IGN)",
        "signal.signal(s, signal.SIG_DFL)",
        "test_stop_signal_to_the_launcher_and_during_evaluation",
    ),
    # ---- the step
    (
        "no all-reduce of the logged loss",
        PROGRAM,
        "sums = sum_over_ranks(torch.stack(losses).cpu().double())",
        "sums = torch.stack(losses).cpu().double()",
        "test_same_training_at_any_world_size",
    ),
    (
        "a mean of means",
        PROGRAM,
        "loss=float(sums.sum()) / seen",
        "loss=float(sums.mean()) / per_step",
        "test_logged_loss_is_the_mean_of_all_elements_since_the_last_line",
    ),
    (
        "a wrong weight of the last samples",
        PROGRAM,
        "(world.size / now)",
        "(world.size / per_step)",
        "test_gradient_of_the_last_step_is_a_mean_over_its_samples",
    ),
    (
        "an all-reduce per micro-batch",
        PROGRAM,
        'ddp.no_sync() if more and hasattr(ddp, "no_sync") else',
        "",
        "test_one_all_reduce_per_optimizer_step",
    ),
    (
        "no all-reduce of the gradients",
        PROGRAM,
        "local_gradients(ddp, left)",
        "local_gradients(ddp, 1)",
        "test_same_training_at_any_world_size",
    ),
    (
        "the same dropout everywhere",
        PROGRAM,
        "* 65_537 + rank)",
        "* 65_537)",
        "test_random_numbers",
    ),
    (
        "no seed of the step",
        PROGRAM,
        "        seed_step(args.seed, step, world.rank)\n",
        "",
        "test_stop_and_resume_is_bit_identical",
    ),
    (
        "--seed ignored by the weights",
        PROGRAM,
        "torch.manual_seed(args.seed)",
        "torch.manual_seed(0)",
        "test_seed",
    ),
    (
        "--seed ignored by the order",
        PROGRAM,
        "loader = make_loader(train_set, args.batch_size, world, args.seed",
        "loader = make_loader(train_set, args.batch_size, world, 0",
        "test_seed",
    ),
    (
        "--seed ignored by dropout",
        PROGRAM,
        "seed_step(args.seed, step",
        "seed_step(0, step",
        "test_seed",
    ),
    (
        "not clipped",
        PROGRAM,
        "        norm = nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip or math.inf)\n",
        "        norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf)\n",
        "test_mixed_precision",
    ),
    (
        "clipped before unscaling",
        PROGRAM,
        "        scaler.unscale_(optimizer)\n",
        "",
        "test_mixed_precision",
    ),
    (
        "--precision ignored",
        PROGRAM,
        "enabled=dtype is not None",
        "enabled=False",
        "test_mixed_precision",
    ),
    (
        "no warm-up",
        PROGRAM,
        "min(1, (step + 1) / max(1, args.warmup_steps))",
        "1",
        "test_saved_names_and_learning_rate",
    ),
    (
        "the rate does not grow with the world",
        PROGRAM,
        "args.lr * (world.size if args.scale_lr else 1)",
        "args.lr",
        "test_saved_names_and_learning_rate",
    ),
    (
        "NaN ignored",
        PROGRAM,
        "if not sums.isfinite().all() or",
        "if",
        "test_loss_or_gradient_that_is_not_finite",
    ),
    (
        "--compile ignored",
        PROGRAM,
        "torch.compile(ddp) if args.compile else ddp",
        "ddp",
        "test_compile",
    ),
    (
        "the epoch counted late",
        PROGRAM,
        "        if samples == n:  #",
        "        if samples == n and step % args.save_every:  #",
        "test_output_finish_and_extend",
    ),
    # ---- checkpoints
    (
        "written in place",
        PROGRAM,
        'beside = self.path.with_suffix(".tmp")',
        "beside = self.path",
        "test_checkpoint_is_replaced_in_one_step",
    ),
    (
        "no previous file",
        PROGRAM,
        "                os.link(self.path, self.previous)",
        "                pass",
        "test_checkpoint_is_replaced_in_one_step",
    ),
    (
        "no CRC",
        PROGRAM,
        "if z.testzip() or any(i.external_attr for i in z.infolist()):",
        "if False:",
        "test_damaged_checkpoints",
    ),
    (
        "a directory is believed",
        PROGRAM,
        " or any(i.external_attr for i in z.infolist())",
        "",
        "test_damaged_checkpoints",
    ),
    (
        "code in a checkpoint runs",
        PROGRAM,
        "weights_only=True",
        "weights_only=False",
        "test_checkpoint_is_data_not_code",
    ),
    (
        "weights saved by reference",
        PROGRAM,
        "kept[key].copy_(t.detach())",
        "t.detach()",
        "test_checkpoint_has_the_weights_of_its_step",
    ),
    (
        "the versions of modules are not saved",
        PROGRAM,
        "copy.deepcopy(state, copies)",
        "torch.utils._pytree.tree_map(lambda t: copies.get(id(t), t), state)",
        "test_checkpoint_of_any_parts",
    ),
    (
        "buffers of what is not saved any more are kept",
        PROGRAM,
        "self.buffers = {}, self.buffers, {}",
        "self.buffers = {}, self.buffers, self.buffers",
        "test_checkpoint_of_any_parts",
    ),
    (
        "a file that nobody can load replaces a good one",
        PROGRAM,
        "        torch.load(beside, mmap=True, weights_only=True)",
        "        pass",
        "test_checkpoint_of_any_parts",
    ),
    (
        "wrapped names",
        PROGRAM,
        '{"model": model,',
        '{"model": ddp,',
        "test_saved_names_and_learning_rate",
    ),
    (
        "optimizer not resumed",
        PROGRAM,
        '"optimizer": optimizer, ',
        "",
        "test_stop_and_resume_is_bit_identical",
    ),
    ("scaler not resumed", PROGRAM, ', "scaler": scaler}', "}", "test_scale_is_resumed"),
    (
        "each rank resumes from its own disk",
        PROGRAM,
        "step, source = max(steps), steps.index(max(steps))",
        "step, source = steps[self.rank], self.rank",
        "test_node_with_another_disk_catches_up",
    ),
    (
        "every node writes",
        PROGRAM,
        "            if world.rank == 0:\n                checkpoint.save",
        '            if os.environ.get("LOCAL_RANK", "0") == "0":\n                checkpoint.save',
        "test_two_nodes_on_loopback",
    ),
    (
        "no lock",
        PROGRAM,
        "                fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "",
        "test_two_runs_into_one_folder",
    ),
    (
        "a damaged file follows a good one",
        PROGRAM,
        '            os.replace(self.path, self.path.with_suffix(".damaged"))\n',
        "            pass\n",
        "test_damaged_checkpoints",
    ),
    (
        "another run's checkpoint is loaded",
        PROGRAM,
        'if (old := state["run"].get(k)) != v:',
        'if (old := state["run"].get(k)) is None:',
        "test_checkpoint_of_another_run",
    ),
    (
        "what does not fit is a traceback",
        PROGRAM,
        "except (RuntimeError, ValueError) as e:  # torch",
        "except ZeroDivisionError as e:  # torch",
        "test_checkpoint_of_any_parts",
    ),
    (
        "metrics repeated",
        PROGRAM,
        "        os.truncate(self.path, kept)\n",
        "",
        "test_output_finish_and_extend",
    ),
    (
        "the order of DDP's sums is not settled",
        PROGRAM,
        "        loss_fn(ddp(x.to(device)), y.to(device)).backward()\n",
        "",
        "test_stop_and_resume_is_bit_identical",
    ),
    # ---- processes
    (
        "no barrier",
        PROGRAM,
        "        sum_over_ranks(torch.zeros(1))  # one that leaves early",
        "        pass  # one that leaves early",
        "test_groups_end_cleanly",
    ),
    (
        "torch._dynamo imported after the group",
        PROGRAM,
        "        _ = torch._dynamo  #",
        "        #",
        "test_groups_end_cleanly",
    ),
    (
        "no agreement on a stop",
        PROGRAM,
        "            self.wait = dist.all_reduce(self.flag, dist.ReduceOp.MAX, async_op=True).wait",
        "",
        "test_stop_and_resume_is_bit_identical",
    ),
    (
        "the stop not saved",
        PROGRAM,
        "(evaluating or stopping or step % args.save_every == 0)",
        "(evaluating or step % args.save_every == 0)",
        "test_stop_and_resume_is_bit_identical",
    ),
    (
        "a stop waits for the evaluation",
        PROGRAM,
        "            if stop():\n                break\n",
        "",
        "test_killed_or_stopped_in_an_evaluation",
    ),
    (
        "not saved before an evaluation",
        PROGRAM,
        "(evaluating or stopping or",
        "(done or stopping or",
        "test_killed_or_stopped_in_an_evaluation",
    ),
    (
        "a rank that fails tears the group down",
        PROGRAM,
        "        try:\n            signal.signal(signal.SIGCHLD",
        "        raise\n        try:\n            signal.signal(signal.SIGCHLD",
        "test_rank_that_raises",
    ),
    (
        "what only another rank has is not compared",
        PROGRAM,
        "wanted | theirs",
        "wanted",
        "test_bad_input",
    ),
    (
        "fewer epochs than done give a negative total",
        PROGRAM,
        "max(args.epochs, epoch)",
        "args.epochs",
        "test_output_finish_and_extend",
    ),
    (
        "a reason that is not UTF-8 is lost",
        PROGRAM,
        'mine.encode(errors="backslashreplace").decode()',
        "mine",
        "test_bad_input_on_all_ranks_and_on_one",
    ),
    (
        "whatever has a code is the user's mistake",
        PROGRAM,
        "isinstance(error, SystemExit) and isinstance(error.code, str)",
        'isinstance(getattr(error, "code", 0), str)',
        "test_rank_that_raises",
    ),
    (
        "Python's exit waits for loading processes",
        PROGRAM,
        "    if workers:  # they",
        "    if False:  # they",
        "test_loading_processes_end_with_the_interpreter",
    ),
    (
        "loading processes outlive their rank",
        PROGRAM,
        "        _ = [p.kill() for p in active_children()]",
        "        pass",
        "test_rank_that_raises",
    ),
    (
        "nobody looks whether another failed",
        PROGRAM,
        "            watcher.start()\n",
        "            pass\n",
        "test_rank_that_hangs",
    ),
    (
        "ranks outlive torchrun",
        PROGRAM,
        "            torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)\n",
        "            pass\n",
        "test_ranks_die_with_torchrun",
    ),
    (
        "addresses of dead ranks",
        PROGRAM,
        'name = f"round/{zlib',
        'return "round" or f"{zlib',
        "test_restarted_ranks_find_each_other",
    ),
    (
        "preflight without data",
        PROGRAM,
        '"program of CRC-32": program, **options, **run}',
        '"program of CRC-32": program, **options}',
        "test_bad_input_on_all_ranks_and_on_one",
    ),
    (
        "preflight without arguments",
        PROGRAM,
        '"program of CRC-32": program, **options, **run}',
        '"program of CRC-32": program, **run}',
        "test_bad_input_on_all_ranks_and_on_one",
    ),
    (
        "--timeout ignored",
        PROGRAM,
        "timedelta(seconds=args.timeout)",
        "timedelta(seconds=600)",
        "test_rank_that_hangs",
    ),
    (
        "--timeout limits the start, too",
        PROGRAM,
        "seconds=max(timeout, START_LIMIT)",
        "seconds=timeout",
        "test_rank_that_hangs",
    ),
    (
        "the reader's end ends the run",
        PROGRAM,
        "        with contextlib.suppress(OSError):\n            if self.rank == 0:",
        "        with contextlib.suppress(ValueError):\n            if self.rank == 0:",
        "test_reader_of_the_output_that_is_gone",
    ),
    # ---- scripts
    ("no interface", MULTI, "GLOO_SOCKET_IFNAME=", "GLOO_IFNAME=", "test_two_bare_hosts"),
    ("no is_host", MULTI, "is_host=$", "was_host=$", "test_two_bare_hosts"),
    ("no --local-addr", MULTI, '--local-addr="$local_addr"', "", "test_two_bare_hosts"),
    (
        "all threads for every rank",
        PROGRAM,
        "torch.get_num_threads() // args.spawn",
        "torch.get_num_threads()",
        "test_run_single",
    ),
    (
        "SIGUSR1 is not handed on",
        PROGRAM,
        "SIGHUP,SIGQUIT,SIGUSR1",
        "SIGHUP,SIGQUIT",
        "test_run_single",
    ),
    # ---- what needs GPUs
    ("NCCL not bound to its device", PROGRAM, "bound = device if", "bound = None if", None),
]


def pytest(folder, test):
    """Exit code, seconds and output of one test, with the files of a folder."""
    tmp = Path(folder, "tmp")
    tmp.mkdir(exist_ok=True)
    begin = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-n",
        "0",
        "-k",
        test,
        "-m",
        "not faults",
    ]
    p = subprocess.Popen(
        [*command, "test_ddp_train.py"],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(tmp)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = p.communicate(timeout=150)
    except subprocess.TimeoutExpired:  # what it started dies with it
        p.kill()
        output = "still running after 150 s\n" + p.communicate()[0]
    return 1 if p.returncode < 0 else p.returncode, time.monotonic() - begin, output


def try_one(name, file, old, new, test):
    """What became of it: a word and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        for f in FILES:
            shutil.copy(HERE / f, folder)
        if name is not None:
            path = Path(folder, file)
            text = path.read_text()
            if old not in text:
                return "NO LONGER APPLIES", 0.0, old
            path.write_text(text.replace(old, new))
        code, seconds, output = pytest(folder, test)
    if name is None:
        return {0: "passes", 5: "NO SUCH TEST"}.get(code, "FAILS UNBROKEN"), seconds, output
    return {0: "SURVIVED", 1: "caught"}.get(code, f"pytest ended with {code}"), seconds, output


def main(words):
    rows = [r for r in BREAKS if not words or any(w in r[0] for w in words)]
    tests = sorted({r[4] for r in rows if r[4]})
    bad, begin = [], time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        whole = pool.map(lambda test: try_one(None, None, None, None, test), tests)
        skipped = set()
        for test, (word, _, output) in zip(tests, whole):
            if " skipped" in output and " passed" not in output:
                skipped.add(test)
            elif word != "passes":
                bad.append(f"{test}: {word}\n{output[-2000:]}")
        print(
            f"{len(tests)} tests on the unbroken program: {len(bad)} fail, {len(skipped)} skip",
            flush=True,
        )
        print("| break | test | result | seconds |\n| --- | --- | --- | --- |")
        runs = {
            r: pool.submit(try_one, *r) for r in rows if r[4] is not None and r[4] not in skipped
        }
        for r in rows:
            word, seconds, output = (
                runs[r].result() if r in runs else ("not shown on this machine", 0.0, "")
            )
            print(f"| {r[0]} | `{r[4] or 'needs two GPUs'}` | {word} | {seconds:.0f} |", flush=True)
            if r in runs and word != "caught":
                bad.append(f"{r[0]}: {word}\n{output[-1500:]}")
    caught = len(runs) - sum(": SURVIVED" in b for b in bad)
    print(f"{caught} of {len(runs)} breaks caught, in {time.monotonic() - begin:.0f} s")
    print("\n".join(bad))
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
