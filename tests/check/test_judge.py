"""The judges of ddp_check on traces that are made up here: milliseconds for each case.

Each input that the check has been wrong about is a case. Those that need a script are
in cases/ (see test_check.py).
"""

import ast
import dataclasses
import json
import os
import subprocess
import types
from pathlib import Path

import pytest
import torch

from ddp_check import __main__ as command
from ddp_check import rows, trace
from ddp_check.judge import alone, begin, compare, first, machines, printed, resume
from ddp_check.judge.compare import Different, Excused, Same
from ddp_check.judge.samples import Samples, judge_samples, trained_on
from ddp_check.launch import TooSlow, processes_of
from ddp_check.result import PACKAGE, OwnFault, Run, first_traceback, own_words
from ddp_check.trace import Comparison, Draw, End, Fetch, RankTrace, Start, Step

WEIGHTS = "first", "middle", "last"


def compared(a, b):
    """Two vectors: of the reference, and of this launch."""
    a, b = [torch.tensor(x, dtype=torch.float64) for x in (a, b)]
    sums = a @ a, b @ b, a @ b, (a - b) @ (a - b)
    return Comparison(*map(float, sums))


def table(factor=1.0, noise=0.0, names=WEIGHTS, **own):
    """The ranks have the right gradient times a factor, plus noise."""
    found = {}
    for i, name in enumerate(names):
        right = [1.0 + i, -2.0, 3.0]
        wrong = [own.get(name, factor) * x + noise * (i + 1) * (-1) ** i for x in right]
        wrong[0] += noise
        found[name] = compared(wrong, right)
    return found


def step(number, rank=0, **more):
    """A step that is right: its rows are those of this rank, its weights move."""
    mine = [1000 * rank + 4 * number + i for i in range(4)]
    fetch = Fetch((0, number // 10), ids=mine, rows=mine, parts=mine)
    fetch.data, fetch.trains = 7, True
    fields = {"bits": {name: number + 1 for name in WEIGHTS}, "trained": [*WEIGHTS]}
    fields |= {"gradient_bits": dict.fromkeys(WEIGHTS, number), "ranks": 2}
    fields |= {"fetched": [fetch], "inputs": mine, "parts": mine, "backwards": 1}
    fields |= {"ddp_forwards": 1, "gradient_values": 9, "rates": {"first": 0.1}}
    return Step(number, **fields | more)


def ranks_of(count=20, ranks=2, **more):
    return [[step(n, rank, **more) for n in range(count)] for rank in range(ranks)]


def replay_of(recorded, **more):
    """One process that got the rows of all ranks, and has the same gradient."""
    steps = []
    for of_ranks in zip(*recorded):
        inputs = sum([one.inputs for one in of_ranks], [])
        fields = {"gradients": table(), "inputs": inputs, "parts": inputs, "ranks": 1}
        steps.append(dataclasses.replace(of_ranks[0], **fields | more))
    return steps


def run_of(steps, start=0, **more):
    starts = [Start(0, dict.fromkeys(WEIGHTS, start))]
    traces = [RankTrace(list(starts), of_rank, End()) for of_rank in steps]
    return Run("2-ranks", traces, **more)


def lines(findings):
    return [f"{finding.word} {finding.row}" for finding in findings]


# ---- compare() -----------------------------------------------------------------------
def verdict_of(ranks=None, one=None, count=4, order="rank by rank", loads=True):
    """Of steps in which the ranks and one process have these fields."""
    recorded = ranks_of(count, **ranks or {})
    replayed = replay_of(recorded, **one or {})
    steps = compare.compare(recorded, replayed, order=order, loads=loads)
    return compare.summarize(steps)


def test_the_same_gradients():
    verdict = verdict_of()
    assert verdict.right and verdict.same == verdict.steps == 4 and verdict.off == 0
    verdict = verdict_of(one={"gradients": table(noise=1e-9)})
    assert verdict.right and 0 < verdict.off < 1e-8


DIFFERENT = [
    (table(0.5), 0.5, [], "It is 0.5 times as large."),
    (table(2), 2, [], "It is 2 times as large."),
    # open_clip: gathering passes no gradient, but logit_scale is right.
    (table(0.5, last=1.0), 0.5, ["last"], "0.5 times as large, but not in last."),
    (table(last=3.0), 1, ["last"], "It is right in most weights, but not in last."),
    (table(noise=0.1), None, [*WEIGHTS], "Most of it is in "),
]


@pytest.mark.parametrize("gradients, factor, names, text", DIFFERENT)
def test_the_factor_that_most_weights_share(gradients, factor, names, text):
    found = verdict_of(one={"gradients": gradients}).different
    assert found.factor == (factor and pytest.approx(factor))
    assert sorted(found.names) == sorted(names) and text in str(found)


def test_a_weight_that_is_nearly_0_has_no_factor():
    gradients = table(2) | {"tiny": compared([3e-9], [1e-9])}
    assert verdict_of(one={"gradients": gradients}).different.names == []


def test_a_weight_in_no_module_may_be_on_one_rank_alone():
    assert compare.same_weights(step(0, trained=[*WEIGHTS, "parameter 0"]), step(0))


def test_of_a_difference_only_what_is_known_is_said():
    assert str(Different(0.3)) == ""
    assert str(Different(0.3, 2.0, [], 3, "may")) == "It is 2 times as large."
    assert str(Different(0.3, None, ["last"])) == "Most of it is in last."


def test_the_step_that_shows_a_factor_is_named():
    """Others may hide it behind something small, such as unequal numbers of tokens."""
    recorded = ranks_of(3)
    replayed = replay_of(recorded)
    tables = table(0.5, noise=0.01), table(0.5), table(0.5, noise=0.01)
    for s, gradients in zip(replayed, tables):
        s.gradients = gradients
    verdict = compare.summarize(compare.compare(recorded, replayed))
    assert (verdict.first, verdict.step) == (0, 1)
    assert verdict.different.factor == pytest.approx(0.5)
    replayed[1].gradients = table(last=3.0)  # it is right in most weights
    assert compare.summarize(compare.compare(recorded, replayed)).step == 0


MOVES = ([2.0], [2.5]), ([2.0], [3.0]), ([0.0], [1e-9]), ([2.0], [float("nan")])
DRIFTS = [(0.25, None), (0.5, 0), (1, 0), (float("inf"), 0)]


def test_distances_are_distances():
    """A constant error of 50 % reads 50 %, however large the weight is."""
    right = [(-1.0) ** i for i in range(1000)]
    gradients = {"one": compared([1.5 * x for x in right], right)}
    assert compare.distance(gradients) == pytest.approx(0.5)
    assert compare.distance({"one": compared([0.0], [2.0])}) == 1
    assert compare.distance({"one": compared([0.0], [0.0])}) == 0
    drifts = [Step(0, weights={"one": compared(*pair)}) for pair in MOVES]
    assert [compare.drift([one], 0.3) for one in drifts] == DRIFTS
    assert compare.distance({"one": compared([float("nan")], [2.0])}) == float("inf")


def test_clipping():
    clipped = {"clipped": True}
    both = {"gradients": table(1.3), "unclipped": table(2), "clipped": True}
    found = verdict_of(clipped, both).different
    assert found.factor == pytest.approx(2) and found.distance == pytest.approx(0.3)
    both["gradients"] = {n: compared([1.0], [1.0]) for n in WEIGHTS}  # of length 1
    found = verdict_of(clipped, both).different
    assert "hides it" in str(found) and found.factor == pytest.approx(2)
    both["unclipped"] = table(noise=0.1)  # it is the same where it counts
    assert verdict_of(clipped, both).right
    # What each rank clips before the gradients are averaged is its own business.
    both = {"gradients": table(), "unclipped": table(2), "clipped": True}
    assert verdict_of(clipped, both).right
    only = {"gradients": table(noise=0.1), "clipped": True}
    assert "Clipping may hide" in str(verdict_of(clipped, only).different)
    assert "Clipping" not in str(verdict_of(one=OFF).different)


def test_an_optimizer_that_averages_gradients_is_known_by_what_it_changes():
    recorded = ranks_of(4)
    for number in range(4):
        recorded[1][number].gradient_bits = {"first": -1}
    more = {"gradients": table(noise=9.0), "changes": table()}
    replayed = replay_of(recorded, **more)
    assert compare.summarize(compare.compare(recorded, replayed)).right
    # Adam changes the last weight much, though its gradient is rounding.
    more["changes"] = table(last=-1.0)
    replayed = replay_of(recorded, **more)
    assert compare.summarize(compare.compare(recorded, replayed)).wrong
    for one in replayed:
        one.gradients["last"] = compared([1e-11], [3e-11])
    assert compare.summarize(compare.compare(recorded, replayed)).right


OFF = {"gradients": table(noise=0.3)}
STATE = {"random.Random": 1}
OTHER = [100, 101, 102]
EXCUSED = [
    ({}, {"problems": ["a batch"]}, "cannot get what the ranks had: a batch."),
    ({}, {"problems": ["a", "a", "b", "c"]}, "cannot get what the ranks had: a; b."),
    ({"other_draws": STATE}, {"other_draws": {}}, "random.Random draws in the"),
    ({"marks": ["hook"]}, {}, "A communication hook"),  # such as PowerSGD's
    (
        {"backwards": 2},
        {"backwards": 1, "inputs": OTHER},
        "calls backward() 2 times, one process 1",
    ),
    ({}, {"marks": ["alone"], "inputs": OTHER}, "Rank 0 reads for all ranks"),
    # webdataset's .unbatched().shuffle().batched()
    ({}, {"parts": [0, 4, 8], "inputs": []}, "are made again behind the DataLoader"),
    ({}, {"trained": ["first"]}, "other weights than the ranks: last, middle."),
    ({"gradient_bits": {}}, {"gradients": {}}, "There is no gradient"),
]


@pytest.mark.parametrize("ranks, one, reason", EXCUSED)
def test_a_step_is_excused_by_its_own_trace(ranks, one, reason):
    verdict = verdict_of(ranks, OFF | one)
    assert not verdict.right and not verdict.wrong and verdict.same == 0
    assert reason in verdict.reason


NO_EXCUSE = [
    # All have drawn the same: a decision for the whole batch
    ({"other_draws": STATE}, {"other_draws": STATE}),
    # Rows that a rank has changed, such as normalized by its own mean
    ({"inputs": [1, 2, 3, 4], "parts": [-1, -2]}, {"inputs": [5], "parts": [-3, -4]}),
    ({"backwards": 2}, {"backwards": 4}),  # one for each sample: these are the same
    # Rows that were padded further look like those of other steps
    ({}, {"parts": [0, 4, 8], "inputs": [], "widened": True}),
]


@pytest.mark.parametrize("ranks, one", NO_EXCUSE)
def test_what_is_no_excuse(ranks, one):
    assert verdict_of(ranks, OFF | one).first == 0


def test_no_excuse_explains_a_gradient_that_is_twice_as_large():
    twice = {"gradients": table(2)}
    for ranks, one, _ in EXCUSED[:3] + EXCUSED[5:7]:
        assert verdict_of(ranks, one | twice).wrong
    assert verdict_of({"marks": ["hook"]}, twice).wrong
    # One weight may be a single number, and any other one is some times as large.
    for more in ({"problems": ["a batch"]}, {"marks": ["alone"], "inputs": OTHER}):
        one = {"gradients": {"first": compared([0.8], [1.0])}} | more
        assert not verdict_of(one=one).wrong


def test_one_process_that_trains_other_weights_is_not_right():
    """Even if those that both train have the same gradient."""
    only = {"trained": ["first"], "gradients": table(names=["first"])}
    assert "other weights" in verdict_of(one=only).reason
    renamed = {"trained": ["part.first"], "gradients": {}}
    assert "other weights" in verdict_of(one=renamed).reason


def test_without_a_loader_the_rows_must_be_the_same():
    assert verdict_of(one=OFF, loads=False).wrong
    for more in ({}, {"problems": ["What it draws is a consequence."]}):
        one = OFF | {"inputs": [9]} | more
        assert "no DataLoader" in verdict_of(one=one, loads=False).reason


def test_in_turn_one_process_makes_more_micro_steps():
    assert verdict_of(one=OFF | {"backwards": 2}, order="in turn").wrong
    for other in ({"inputs": [9]}, {"draws": [Draw("rand", [4], 1, 1)]}):
        assert "micro-steps" in verdict_of(one=OFF | other, order="in turn").reason


def uneven(gradients, every=1, count=20, rows=(16, 15)):
    recorded = ranks_of(count)
    for number in range(0, count, every):
        for rank, of_rank in enumerate(recorded):
            of_rank[number].inputs = [(number, rank, i) for i in range(rows[rank])]
            of_rank[number].parts, of_rank[number].fetched = [], []
    replayed = replay_of(recorded)
    for number in range(0, count, every):
        replayed[number].gradients = gradients
    return compare.compare(recorded, replayed)


def test_uneven_rows():
    """16 and 15 rows in each step. An excused step is not counted as compared."""
    right = compare.summarize(uneven(table(noise=0.01)))
    assert not right.right and not right.wrong and right.same == 0
    assert right.uneven[:2] == (0, [16, 15]) and "(16 and 15)" in right.reason
    softmax = compare.summarize(uneven(table(noise=0.5)))
    assert softmax.first == 0
    assert compare.summarize(uneven(table(0.5))).different.factor == 0.5  # a sum
    last = compare.summarize(uneven(table(noise=0.05), every=10))
    assert last.right and last.same == 18 and last.uneven
    far = compare.summarize(uneven(table(noise=0.5), every=19))
    assert far.wrong and far.same == 18  # also if all other steps are the same
    # A rank without samples: the mean of the ranks is half of the right gradient.
    empty = compare.summarize(uneven(table(0.5), every=19, rows=(4, 0)))
    assert empty.right and empty.uneven[:2] == (0, [4, 0])
    assert compare.summarize(uneven(table(2), every=19, rows=(4, 0))).wrong


def test_boxes_are_no_samples():
    """The ranks have as many images, and so as many indices of the loader."""
    recorded = ranks_of(4)
    for s in recorded[1]:
        s.inputs = s.inputs[:2]
    replayed = replay_of(recorded, gradients=table(noise=0.01))
    assert compare.summarize(compare.compare(recorded, replayed)).wrong


def test_odd_traces():
    """One process has made fewer steps, or a rank has; or there is none."""
    recorded = ranks_of(4)
    replayed = replay_of(recorded)
    found = compare.compare(recorded, replayed[:1], missing="It fails.")
    assert [type(one) for one in found] == [Same, Excused, Excused, Excused]
    assert compare.summarize(found).reason == "It fails."
    found = compare.compare([recorded[0], recorded[1][:3]], replayed)
    assert isinstance(found[3], Excused) and compare.summarize(found).right
    assert compare.compare([[], []], []) == [] and not compare.summarize([]).right
    replayed[2].gradients["first"] = compared([1.0], [float("nan")])
    found = compare.compare(recorded, replayed)[2]
    assert found.distance == float("inf") and found.names == ["first"]
    replayed[2].gradients = {"first": compared([float("nan")], [1.0])}
    assert isinstance(compare.compare(recorded, replayed)[2], Excused)
    replayed[2].gradients = {"first": compared([0.0], [2.0])}  # it does not vanish
    assert compare.compare(recorded, replayed)[2].distance == 1


def test_most_steps_must_be_the_same():
    half = [Same(0)] * 10 + [Excused("no")] * 10
    assert not compare.summarize(half).right
    assert compare.summarize([Same(0), *half]).right
    one = compare.summarize([*half, Different(1.0)])
    assert one.wrong and one.first == 20


# ---- The first answer ----------------------------------------------------------------
def gradient_lines(steps, marks=(), **more):
    run = run_of(ranks_of(**more))
    one = run_of([[step(0, marks=marks)]])
    return lines(first.judge_gradients(compare.summarize(steps), run, one))


def test_lines_on_gradients():
    same, off = [Same(0)] * 10, [Different(0.3)]
    assert gradient_lines(same) == ["ok gradient"]
    assert gradient_lines(off + same) == ["WRONG gradient"]
    assert gradient_lines(same + off + same) == ["WRONG later gradient"]
    # A schedule of one process may count more batches in an epoch.
    longer = {"marks": ["other length"]}
    assert gradient_lines(same + off, **longer) == ["note not replayed"]
    assert gradient_lines(off + same, **longer) == ["WRONG gradient"]
    twice = [Different(0.5, 2.0, [], 3)]
    assert gradient_lines(same + twice, **longer) == ["WRONG later gradient"]
    excused = [Excused("It is so.")]
    assert gradient_lines(excused * 9 + off) == ["WRONG gradient"]
    assert gradient_lines(excused) == ["note not replayed"]
    # A step that was not judged is said, once: unequal rows have their own line.
    assert gradient_lines(same + excused) == ["ok gradient", "note not replayed"]
    widths = [Excused(f"A tensor of [{n}, 6].") for n in (3, 5)]
    assert compare.summarize(widths).reason == "A tensor of [3, 6]."
    reason = compare.summarize(widths + excused).reason
    assert reason == "A tensor of [3, 6]. (in 2 of these steps)"
    uneven = [Excused("Unequal.", [2, 1], 0.1)]
    assert gradient_lines(same + uneven) == ["ok gradient", "note uneven"]
    run = run_of(ranks_of())
    run.steps[1][3].buffers = {"center": 1}
    found = first.judge_gradients(compare.summarize(off), run, run)
    assert lines(found) == ["WRONG buffers"]
    found = first.judge_gradients(compare.summarize(same), run, run)
    assert lines(found) == ["ok gradient", "note buffers differ"]


RIGHT = ["ok alone", "ok moves", "ok left", "ok steps", "ok weights"]
# A flag that is reduced in each step trains nothing together (SpeechBrain).
FLAG = {"ddp_forwards": 0, "collectives": 1, "floats_reduced": 1, "marks": ["wrapped"]}
RUNS = [
    ({}, RIGHT),
    ({"ddp_forwards": 0, "collectives": 2, "floats_reduced": 9}, RIGHT),
    ({"ddp_forwards": 0}, ["WRONG alone"]),
    ({"ddp_forwards": 0, "marks": ["wrapped"]}, ["WRONG not called"]),
    (FLAG, RIGHT[1:]),
    ({"finite": False}, ["ok alone", "WRONG finite"]),
    ({"bits": dict.fromkeys(WEIGHTS, 0)}, ["ok alone", "WRONG moves"]),
    ({"tensor_parallel": True}, ["note tensor parallel"]),
    ({"sharded": True}, [*RIGHT[:4], "note sharded"]),
    ({"address": "x:1"}, [*RIGHT[:3], "note address", *RIGHT[3:]]),
    ({"outside": "/x.pt"}, [*RIGHT[:3], "note outside", *RIGHT[3:]]),
    ({"marks": ["shared gpu"]}, [*RIGHT[:3], "WRONG same gpu", *RIGHT[3:]]),
]


@pytest.mark.parametrize("fields, expected", RUNS)
def test_lines_on_two_ranks(fields, expected):
    assert lines(first.judge_run(run_of(ranks_of(**fields)))[0]) == expected


def test_a_number_with_an_optimizer_of_its_own_has_half_of_the_steps():
    run = run_of(ranks_of(marks=["wrapped"]))
    for s in [*run.steps[0][::2], *run.steps[1][::2]]:
        s.ddp_forwards = 0
    assert lines(first.judge_run(run)[0]) == RIGHT[1:]


PARTS = [
    ("alpha", [], "WRONG weights"),
    ("parameter 0", ["parameter 0"], "ok weights"),  # of all weights (ZeRO)
    ("centers", ["centers"], "note parts"),  # of a layer
]


@pytest.mark.parametrize("name, parts, expected", PARTS)
def test_a_rank_may_have_a_part_of_a_weight(name, parts, expected):
    run = run_of(ranks_of())
    for rank, steps in enumerate(run.steps):
        for s in steps:
            s.bits[name] = rank + s.number
    found, _, same = first.judge_run(run, parts)
    assert lines(found)[-1] == expected and same == (expected == "ok weights")


def test_parts_are_known_by_one_process():
    of_rank, differ = step(0, trained=["first", "table.0"]), {"table.0"}
    of_one = step(0, trained=["first", "table.0"], weights=table(names=["table.0"]))
    assert first.parts_of(differ, of_rank, of_one) == []
    of_one.trained.append("table.1")  # that of rank 1 (dlrm)
    assert first.parts_of(differ, of_rank, of_one) == ["table.0"]
    other_shape = step(0, trained=of_rank.trained, weights={})
    assert first.parts_of(differ, of_rank, other_shape) == ["table.0"]


def test_weights_that_differ():
    run = run_of(ranks_of())
    for s in run.steps[1][7:]:
        s.bits["last"] = -1
    found, goes_on, same = first.judge_run(run)
    assert lines(found)[-1] == "WRONG weights" and found[-1].values["first"] == 7
    assert "These do: last." in rows.as_text(found[-1])
    assert goes_on and not same
    # Local SGD: they are averaged in step 9.
    for n in (9, 13):
        run.steps[1][n].bits = run.steps[0][n].bits
    found, goes_on, same = first.judge_run(run)
    assert lines(found) == [*RIGHT[:4], "note weights meet"] and not same
    assert found[-1].values == {"first": 7, "again": 9}
    for s in [*run.steps[0], *run.steps[1]]:  # also without DDP
        s.ddp_forwards = 0
    assert "note weights meet" in lines(first.judge_run(run)[0])
    # A wrapper of an optimizer (schedulefree) changes them behind its step.
    run = run_of(ranks_of())
    for s in run.steps[1][7:-1]:
        s.bits["last"] = -1
    assert "note weights meet" in lines(first.judge_run(run)[0])
    run.traces[0].end = End(looked=False)
    assert lines(first.judge_run(run)[0])[-1] == "WRONG weights"
    run = run_of(ranks_of(**FLAG))
    run.steps[1][7].bits["last"] = -1
    assert lines(first.judge_run(run)[0]) == ["WRONG not called"]


def test_a_launch_that_fails():
    failed = {"codes": [1], "said": {"errors": "ValueError: no"}}
    assert lines(first.judge_run(run_of([[], []], **failed))[0]) == ["WRONG start"]
    assert lines(first.judge_run(run_of(ranks_of(), **failed))[0]) == ["WRONG fails"]
    stuck = run_of(ranks_of(), codes=[None], hangs=True)
    assert lines(first.judge_run(stuck)[0]) == ["WRONG hang"]
    left = run_of([ranks_of()[0], []])  # with exit code 0
    assert lines(first.judge_run(left)[0]) == ["WRONG steps"]


def test_uneven_inputs_under_join():
    """Steps that are paired by number say nothing about weights."""
    one, two = ranks_of(20, marks=["join"])
    for s in two:
        s.bits = {"last": -1}
    found = first.judge_run(run_of([one, two[:13]]))[0]
    assert lines(found) == [*RIGHT[:3], "note steps"]


NORMS = [
    ([], [], "No evaluation in eval() mode was seen."),
    ([1], [1], None),
    ([1], [2], "They evaluate with these."),
    ([1], [], "Rank 0 alone evaluates, with its own."),  # yolov5, and most
]


@pytest.mark.parametrize("one, two, detail", NORMS)
def test_batch_norm(one, two, detail):
    run = run_of(ranks_of(norms=True))
    run.steps[0][9].evaluated, run.steps[1][9].evaluated = one, two
    found = first.judge_norms(run, False)
    assert [finding.values["detail"] for finding in found] == [detail] * bool(detail)
    assert first.judge_norms(run_of(ranks_of()), False) == []
    for step in run.steps[0][1:]:
        step.norms = False  # only when it was tried
    assert first.judge_norms(run, False) == []


@pytest.mark.parametrize("same", [20, 7, 0])
def test_masks_of_other_shapes_are_known_by_the_generator(same):
    """Rank 0 may evaluate after seven steps, and draw a number. A single number may be
    a decision for all ranks."""
    recorded = ranks_of()
    for rank, steps in enumerate(recorded):
        for s in steps:
            state = s.number if s.number < same else 1000 * rank + s.number
            shape = [4, 7 + rank]  # rows are padded to each rank's longest
            mask = Draw("bernoulli_", shape, s.number + 1000 * rank, state)
            # Other shapes have set the generators apart before the next one.
            after = Draw("bernoulli_", shape, s.number + 2000 * rank, -1 - rank)
            s.draws = [mask, after, Draw("rand", [1], 1, 1)]
    replayed = replay_of(recorded, different=["torch.bernoulli_()", "torch.rand()"])
    answer = first.Replayed(compare.Verdict(), run_of([replayed]), "rank by rank")
    found = first.judge_masks(run_of(recorded), answer)
    assert lines(found) == ["note masks" if same else "ok masks"]
    assert not same or found[0].values["same"] == same


@pytest.mark.parametrize("steps, tried", [([], 1), (ranks_of(3)[0], 2)])
def test_one_process_that_fails_at_the_start_gets_no_other_order(
    steps, tried, monkeypatch
):
    failed, orders = run_of([steps], codes=[1]), []

    def replay_in_order(launcher, report, run, samples, order):
        orders.append(order)
        verdict = compare.Verdict(20, len(steps), excused=[Excused("It fails.")])
        return first.Replayed(verdict, failed, order)

    monkeypatch.setattr(first, "replay_in_order", replay_in_order)
    first.replay(None, command.Report("mine.py"), run_of(ranks_of()), None)
    assert len(orders) == tried


# ---- Samples -------------------------------------------------------------------------
def samples_of(rank_of_row, count=20, epoch=10, parts=(), inner=None):
    """rank_of_row: (rank, step, i) -> the sample. inner: of DDP in another module."""
    steps = ranks_of(count)
    for rank, of_rank in enumerate(steps):
        for s in of_rank:
            fetch, rows = s.fetched[0], [rank_of_row(rank, s.number, i) for i in (0, 1)]
            fetch.ids = fetch.rows = s.inputs = rows
            fetch.key = (0, s.number // epoch)
            if inner:
                s.ddp_inputs = [inner(rank, s.number, i) for i in (0, 1)]
    return lines(judge_samples(Samples(run_of(steps)), parts)[0])


def test_samples():
    def shuffled(rank, step, i):
        return (step // 10) * 7 % 40 + (rank + 2 * i + 4 * step) * 3

    ok = ["ok samples", "ok order"]
    assert samples_of(lambda rank, step, i: 4 * step + 2 * i + rank) == ok
    assert samples_of(lambda rank, step, i: 2 * step + i) == ["WRONG samples"]
    shared = samples_of(lambda rank, step, i: 2 * step + i, parts=["table.0"])
    assert shared[0] == "note overlap"  # by ranks that have parts of the model
    for share, word in ((1, "note overlap"), (0, "WRONG samples")):
        found = samples_of(
            lambda rank, step, i: 2 * step + i,
            inner=lambda rank, step, i, share=share: (share * rank, step, i),
        )
        assert found[0] == word
    repeated = samples_of(lambda rank, step, i: 4 * step + 2 * i + rank * i)
    assert repeated == ["note overlap", "ok order"]
    own_order = samples_of(lambda rank, step, i: (2 * step + i + 7 * rank) % 20)
    assert own_order == ["ok samples", "note whole epoch", "note order"]
    assert samples_of(lambda rank, step, i: 1) == ["note no samples", "note order"]

    def filled_up(rank, step, i):
        """Of five batches, the first one comes again, so that each rank has three."""
        return 2 * ((2 * (step % 3) + rank) % 5) + i

    assert samples_of(filled_up, 9, epoch=3) == ["ok samples", "note order"]


def test_ranks_that_go_through_all_samples():
    """Also in a run that has no second epoch, if no sample has come twice."""

    def own_order(rank, step, i):
        return (2 * step + i + 7 * rank) % 40

    found = samples_of(own_order, 20, epoch=30)
    assert found == ["ok samples", "note whole epoch"]
    assert samples_of(own_order, 30, epoch=30) == ["ok samples"]


@pytest.mark.parametrize(
    "rows, inputs, found",
    [
        (8, 4, "ok samples"),  # each rank takes half of its batch
        (0, 4, "ok samples"),  # of which nobody knows what is in it
        (3, 3, "WRONG samples"),  # lists of images that have three channels
    ],
)
def test_ranks_that_load_the_same(rows, inputs, found):
    """They may take their shares of it. Rows are other ones, by augmentation."""
    steps = ranks_of()
    for rank, of_rank in enumerate(steps):
        for s in of_rank:
            first = 1000 * rank + 10 * s.number
            s.inputs = list(range(first, first + inputs))
            s.fetched[0].ids = list(range(8 * s.number, 8 * s.number + 8))
            s.fetched[0].rows = list(range(first, first + rows))
    assert lines(judge_samples(Samples(run_of(steps)))[0])[0] == found


def test_the_same_indices_of_data_that_nobody_knows():
    """Rows may differ by augmentation, or because each rank has its own data."""
    for data, found in ((-1, "note no samples"), (0, "note no samples"), (7, "WRONG")):
        steps = ranks_of()
        for s in sum(steps, []):
            s.fetched[0].data, s.fetched[0].ids = data, [2 * s.number, 2 * s.number + 1]
        assert lines(judge_samples(Samples(run_of(steps)))[0])[0].startswith(found)


def test_epochs_of_two_data_sets():
    """The same indices, which may be of the same samples or of others."""
    for same in (False, True):
        steps = ranks_of()
        for rank, of_rank in enumerate(steps):
            for s in of_rank:
                loader, batch = divmod(s.number, 10)
                ids = [4 * batch + 2 * i + rank for i in (0, 1)]
                rows = ids if same else [100 * loader + i for i in ids]
                fetch = Fetch((loader, 0), ids, rows, data=7, trains=True)
                s.fetched, s.inputs = [fetch], rows
        found = lines(judge_samples(Samples(run_of(steps)))[0])
        assert found == ["ok samples", "note order" if same else "ok order"]


@pytest.mark.parametrize(
    "ids, inputs, found",
    [
        (1, 1, "WRONG samples"),  # other indices, but the data set draws the same
        (0, 1, "WRONG samples"),
        (0, 2, "ok samples"),  # each rank takes half of its batch
    ],
)
def test_rows_that_are_the_same_on_all_ranks(ids, inputs, found):
    steps = ranks_of()
    for rank, of_rank in enumerate(steps):
        for s in of_rank:
            rows = list(range(10 * s.number, 10 * s.number + 4))
            s.fetched[0].rows = rows
            s.fetched[0].ids = [row + 1000 * rank * ids for row in rows]
            s.inputs = rows if inputs == 1 else rows[rank::2]
    assert lines(judge_samples(Samples(run_of(steps)))[0])[0] == found


def test_epochs_that_come_again():
    """Two models train on the same ones, as in cross-validation."""

    def of_two(rank, step, i):
        return 40 * (step // 5 % 2) + 4 * (step % 5) + 2 * i + rank

    steps = ranks_of()
    for rank, of_rank in enumerate(steps):
        for s in of_rank:
            ids = [of_two(rank, s.number, i) for i in (0, 1)]
            s.fetched[0].ids, s.fetched[0].key = ids, (0, s.number // 5)
    found = judge_samples(Samples(run_of(steps)))[0][-1]
    assert found.row == "order" and found.values["period"] == "10 steps"
    assert found.values["which"] == "epochs 0 and 2 have"


def test_an_epoch_that_was_cut_has_the_order_of_another_one():
    """--steps may cut it, after more than one batch: the first one may be the same."""

    def repeated(rank, step, i):
        return 4 * (step % 8) + 2 * i + rank

    assert samples_of(repeated, 12, epoch=8) == ["ok samples", "note order"]
    assert samples_of(repeated, 9, epoch=8) == ["ok samples"]


def test_loaders_have_the_numbers_of_their_rank():
    """Rank 0 alone evaluates first, with another loader. Both train on the same."""
    steps = ranks_of()
    for rank, of_rank in enumerate(steps):
        for s in of_rank:
            s.fetched[0].key = (1 - rank, s.number // 10)
            s.fetched[0].ids = [4 * s.number, 4 * s.number + 1]
    assert lines(judge_samples(Samples(run_of(steps)))[0]) == ["WRONG samples"]


def test_the_same_index_of_two_loaders_means_two_samples():
    steps = ranks_of()
    for rank, of_rank in enumerate(steps):
        for s in of_rank:
            s.fetched = [Fetch((n, 0), data=7, trains=True) for n in (0, 1)]
            for number, fetch in enumerate(s.fetched):
                fetch.ids = [2 * s.number + (number != rank)]
                fetch.rows = [1000 * number + fetch.ids[0]]
    assert lines(judge_samples(Samples(run_of(steps)))[0])[0] == "ok samples"


def test_a_loader_may_fetch_ahead_and_another_one_is_evaluated():
    """What enters the model shows in which step a batch is trained on."""
    steps = ranks_of(6)
    expected = [[(0, row) for row in s.inputs] for s in steps[0]]
    for of_rank in steps:
        for s, after in zip(of_rank, of_rank[1:]):
            s.fetched, after.fetched = [*s.fetched, *after.fetched], []
        of_rank[2].fetched[:0] = [Fetch((1, 0), [9], [9], data=8, evaluates=True)]
    samples = Samples(run_of(steps))
    assert samples.of(0) == expected and samples.data == [7, 7]
    assert len(samples.of(0, "rows")[0]) == 4  # but not what is evaluated
    steps[0][0].inputs = [-1]  # if the model gets other rows, nobody knows
    assert len(Samples(run_of(steps)).of(0)[0]) == 8


@pytest.mark.parametrize(
    "keys, epochs",
    [
        ([(0, 0), (0, 0), (0, 1), (0, 1)], [(0, 0), (0, 1)]),
        ([(0, 0), (1, 0), (0, 1), (1, 1)], [(0, 0), (0, 1)]),  # two loaders
        ([(0, 0), (1, 0), (2, 0)], [(0, 0), (1, 0), (2, 0)]),  # one for each epoch
        ([(0, 0), (1, 0), (0, 0), (1, 0)], [(0, 0)]),  # zip() of two
        ([(0, 0), (0, 1), (0, 0), (0, 1), (0, 2)], [(0, 0), (0, 2)]),  # of the same
    ],
)
def test_iterations_at_the_same_time_are_one_epoch(keys, epochs):
    steps = ranks_of(len(keys))
    for of_rank in steps:
        for s, key in zip(of_rank, keys):
            s.fetched[0].key = key
    assert Samples(run_of(steps)).iterations() == epochs


def test_rows_that_come_always_are_no_samples():
    """Such as a noise level, which comes several times, or a prompt, in each step."""
    for common in ([5, 5], [6]):
        steps = ranks_of(6, fetched=[])
        for s in sum(steps, []):
            s.inputs = [*s.inputs, *common]
        assert Samples(run_of(steps)).share_in_step("inputs") == 0


def test_what_a_rank_evaluates_most_it_does_not_train_on():
    uses = ["trains"], ["evaluates"], [], ["trains", "evaluates"], ["evaluates"] * 2
    steps = [step(0, fetched=[]), step(1, fetched=[])]
    for number, found in enumerate([*uses, [*uses[4], "trains"]]):
        for use in found or [""]:
            fetch = Fetch((number, 0))
            fetch.trains, fetch.evaluates = use == "trains", use == "evaluates"
            steps[0].fetched.append(fetch)
    assert trained_on(steps) == [(0, 0), (3, 0)]


def test_data_of_each_rank():
    steps = ranks_of()
    for rank, of_rank in enumerate(steps):
        for s in of_rank:
            s.fetched[0].data = 1 + rank
            s.fetched[0].ids = [10_000 * rank + s.number]
    found = lines(judge_samples(Samples(run_of(steps)))[0])
    assert found == ["ok samples", "note own data", "ok order"]
    cut = [of_rank[:8] for of_rank in steps]  # before the end of its first epoch
    assert lines(judge_samples(Samples(run_of(cut)))[0]) == found[:2]
    for s in sum(steps, []):
        s.fetched[0].data = 0  # nobody knows whether they are the same
    assert Samples(run_of(steps)).kind == "rows"


# ---- One process alone ---------------------------------------------------------------
def alone_with(
    more,
    right=True,
    wrong=False,
    order="rank by rank",
    two=None,
    rows=None,
    faster=20,
    counts=20,
):
    """What is said of one process with the rows of both ranks and these fields.

    faster: the step from which on it has another learning rate. counts: the same of the
    replay, because a schedule counts its batches.
    """
    two = two or run_of(ranks_of())
    steps = replay_of(two.steps, **{"weights": table(), **more})
    for s, theirs in zip(steps, zip(*two.steps)):
        ids = sum([other.inputs for other in theirs], [])
        s.fetched = [dataclasses.replace(s.fetched[0], ids=ids, rows=rows or ids)]
        s.rates = {"first": 0.2 if s.number >= faster else 0.1}
    verdict = compare.Verdict(20, 20 * right, different=wrong or None)
    replayed = first.Replayed(verdict, run_of([replay_of(two.steps)]), order)
    for s in replayed.one.steps[0]:
        s.rates = {"first": 0.2 if s.number >= counts else 0.1}
    answer = first.First(two, Samples(two), True, replayed)
    return lines(alone.judge_alone(run_of([steps]), answer, 1e-5))


def test_one_process_alone():
    batch = ["ok global batch"]
    assert alone_with({}) == [*batch, "ok alone weights"]
    off = {"weights": table(1.2), "gradients": table(1.2)}
    assert alone_with(off) == [*batch, "WRONG alone weights"]
    # Accumulation with a loss that compares samples: the replay could not judge it.
    assert alone_with(off, right=False) == [*batch, "note alone differs"]
    assert alone_with(off, order="in turn") == [*batch, "note alone differs"]
    assert alone_with(off, right=False, rows=[7]) == [*batch, "note alone differs"]
    assert alone_with(off, rows=[7]) == batch  # made otherwise, such as padded further
    # Each rank evaluates with its own statistics, which is said already, or with one's.
    own = run_of(ranks_of(norms=True))
    assert alone_with(off | {"norms": True}, two=own) == batch
    for s in [*own.steps[0], *own.steps[1]]:
        s.evaluated = [1]
    found = alone_with(off | {"norms": True}, two=own)
    assert found == [*batch, "note alone norms"]
    assert alone_with({}, faster=2, counts=2) == [*batch, "WRONG rates"]
    assert alone_with(off, faster=2) == batch  # a schedule may follow the loss
    # Excuses are those of the replay.
    noise = {"weights": table(1.2), "gradients": table(noise=0.2)}
    assert alone_with(noise) == [*batch, "WRONG alone weights"]
    two = run_of(ranks_of())
    # Rows that are gathered, and picked by number
    assert alone_with(noise | {"parts": [0, 1]}) == [*batch, "WRONG alone weights"]
    two.steps[0][0].parts = [0]
    assert alone_with(noise | {"parts": [1]}, two=two)[1:] == ["WRONG alone weights"]
    two.steps[1][0].inputs = two.steps[1][0].inputs[:2]  # uneven rows
    assert alone_with(noise, two=two) == batch
    assert alone_with({"weights": {}}) == batch  # nothing was compared


# ---- Stop and resume -----------------------------------------------------------------
def resumed(done=5, made=6, weights=1.0, cut=0, change=None, two=None):
    """Stopped after `made` of 20 steps, and launched again from step `done`."""
    two = two or run_of(ranks_of())
    stopped = run_of([steps[:made] for steps in two.steps])
    stopped.name = "stop"
    rest = [[dataclasses.replace(s) for s in steps[done:]] for steps in two.steps]
    for steps in rest:
        for number, s in enumerate(steps):
            s.number, s.place, s.weights = number, done + number, table(weights)
    again = run_of(rest, start=done)
    if change:
        change(again, stopped)
    return resume.judge_resume(two, stopped, again, cut)


def lose_weights(again, stopped):
    again.steps[0][0].place = again.steps[1][0].place = -1


def compare_one_step(again, stopped):
    """The recording was cut after it."""
    for steps in again.steps:
        for s in steps:
            s.bits = {"last": -1}
        for s in steps[1:]:
            s.weights = {}


def lose_rank_1(again, stopped):
    again.steps[1][0].place = -1


def lose_steps(again, stopped):
    for of_rank in again.traces:
        del of_rank.steps[29 - 40 :]


def train_more(again, stopped):
    for of_rank in again.traces:
        of_rank.steps.append(of_rank.steps[-1])


def change_rank_1(again, stopped):
    again.steps[1][3].weights = table(1.3)


def other_epoch(again, stopped):
    for steps in again.steps:
        steps[2].fetched = steps[1].fetched


def change_rate(again, stopped):
    change_rank_1(again, stopped)
    again.steps[0][2].rates = {"first": 0.2}


def skip_a_batch(again, stopped):
    """A script without a DataLoader begins one batch too late."""
    for steps in again.steps:
        for s in steps:
            s.inputs = [row + 4 for row in s.inputs]
            s.weights = table(1.1)


def skip_and_draw(again, stopped):
    skip_a_batch(again, stopped)
    other_draws(again, stopped)


def other_draws(again, stopped):
    for s in again.steps[1]:
        s.draws = [Draw("bernoulli_", [4], 1, 1)]


def other_generator(again, stopped):
    """numpy's, which makes noise on the targets, goes on from elsewhere."""
    for s in again.steps[1]:
        s.other_draws = {"numpy.random": s.number}
        s.weights = table(1.1)


def fail(again, stopped):
    again.codes, again.said = [1], {"errors": "KeyError: 'worst'"}


def fail_later(again, stopped):
    """It starts from other weights."""
    lose_weights(again, stopped)
    fail(again, stopped)


def refuse(again, stopped):
    fail(again, stopped)
    again.said = {"errors": "FileExistsError: File exists: 'once'"}
    for of_rank in again.traces:
        of_rank.steps.clear()


def end_at_once(again, stopped):
    for of_rank in again.traces:
        of_rank.steps.clear()


def hang(again, stopped):
    stopped.hangs = True


RESUMES = [
    ({"done": 6}, ["ok lost", "ok rest"]),
    ({}, ["LOSES lost", "ok rest"]),
    ({"done": 0}, ["LOSES all lost"]),
    ({"made": 20}, ["LOSES signal"]),
    ({"weights": 1.1}, ["LOSES lost", "WRONG rest"]),
    ({"change": change_rank_1}, ["LOSES lost", "WRONG rest"]),
    ({"change": lose_weights}, ["WRONG begin"]),
    ({"change": lose_rank_1}, ["WRONG begin"]),
    ({"change": compare_one_step}, ["LOSES lost", "note left out"]),
    ({"change": lose_steps}, ["LOSES lost", "WRONG no rest"]),
    ({"change": train_more}, ["LOSES lost", "WRONG no rest"]),
    ({"done": 0, "change": train_more}, ["WRONG no rest"]),
    # strict=False and keys that begin with "module.": 29 steps, and 40 were left
    ({"done": 0, "change": lose_steps}, ["WRONG no rest"]),
    ({"change": other_epoch}, ["LOSES lost", "WRONG other samples"]),
    ({"change": other_draws}, ["LOSES lost", "note other noise", "ok rest"]),
    ({"change": other_generator}, ["LOSES lost", "note other noise"]),
    ({"made": 0}, ["note no step"]),  # it has resumed from another launch's file
    ({"change": fail}, ["WRONG again"]),
    ({"change": refuse}, ["LOSES again"]),
    ({"change": fail_later}, ["WRONG again"]),
    ({"change": fail_later, "cut": 20}, ["WRONG begin"]),
    ({"change": end_at_once}, ["WRONG no rest"]),
    ({"change": hang}, ["WRONG stopped"]),
]


@pytest.mark.parametrize("more, expected", RESUMES)
def test_resume(more, expected):
    assert lines(resumed(**more)) == expected


def test_rank_0_may_keep_an_average_of_the_weights():
    """In a module that is called, and that the other ranks do not have."""
    run = run_of(ranks_of())
    for s in run.steps[0]:
        s.bits["average"] = 1
    assert lines(first.judge_run(run)[0]) == RIGHT
    assert lines(resumed(two=run)) == ["LOSES lost", "ok rest"]
    for s in run.steps[0]:
        s.trained.append("average")
    assert lines(first.judge_run(run)[0])[-1] == "WRONG weights"


def test_a_repeated_launch_may_fail():
    """Then it is not the random numbers that differ."""
    run, again = run_of(ranks_of()), run_of(ranks_of(0), codes=[1])
    launcher = types.SimpleNamespace(run=lambda name: again)
    report = types.SimpleNamespace(title=lambda text: None)
    found = machines.judge_bits(launcher, report, run, run)
    assert lines([found]) == ["WRONG start"]
    assert "The same command has run before" in rows.sentences(found)[1]


def test_one_process_ends_where_the_record_does():
    run, one = run_of(ranks_of()), run_of(ranks_of(5, ranks=1))
    assert first.missing(run, one) == "One process makes fewer steps."
    run.steps[0][-1].marks.append("cut")
    assert "more than is recorded" in first.missing(run, one)


def test_a_rank_may_train_weights_of_its_own_rows():
    """Such as copies of its rows of an embedding: they are in no module."""
    run = run_of(ranks_of())
    for rank, steps in enumerate(run.steps):
        for s in steps:
            s.bits["parameter 0"] = rank
    assert lines(resumed(two=run)) == ["LOSES lost", "ok rest"]


def test_a_relaunch_of_ranks_that_differed_is_left_out():
    two = run_of(ranks_of())
    two.steps[1][3].bits["last"] = -1
    assert lines(resumed(two=two)) == ["note left out"]


def test_another_learning_rate_is_named():
    assert resumed(change=change_rank_1)[-1].values["rates"] == ""
    text = "The learning rate of its step 2 is 0.2, not 0.1."
    assert resumed(change=change_rate)[-1].values["rates"] == text


def with_draws(numbers):
    """A run of two ranks in which each rank draws a mask of its own in each step."""
    two = run_of(ranks_of())
    for of_rank, number in zip(two.steps, numbers):
        for s in of_rank:
            s.draws = [Draw("randperm", [4], s.number, 1), Draw("rand", [4], number, 1)]
    return two


def test_who_draws_other_numbers_than_before():
    def draw(*numbers, order=0):
        def change(again, stopped):
            for of_rank, number in zip(again.steps, numbers):
                for s in of_rank:
                    order_of = Draw("randperm", [4], s.place + order, 1)
                    s.draws = [order_of, Draw("rand", [4], number, 1)]

        return resumed(two=with_draws([1, 2]), change=change)[1:]

    note, rest = draw(1, 3)
    assert note.values["who"] == "rank 1" and note.values["same"] == ""
    assert note.values["then"] == "The rest was compared with the old ones."
    assert rest.word == "ok" and rest.values["apart"] == "the same bits"
    note = draw(4, 4)[0]
    assert note.values["who"] == "rank 0 and rank 1"
    assert note.values["same"] == " Now both ranks draw the same."
    assert lines(draw(1, 2, order=9)) == ["ok rest"]  # samples are compared anyway
    assert draw(3, 2)[0].values["same"] == ""
    none = resume.noises(*[ranks_of(3)[0] for _ in range(2)], str.__eq__)
    assert none is False  # nothing is drawn


def test_a_relaunch_with_other_bits_says_how_far_it_is():
    def round_differently(again, stopped):
        for steps in again.steps:
            for s in steps:
                s.bits, s.weights = {"last": -1}, table(1 + 1e-9)

    rest = resumed(change=round_differently)[-1]
    assert rest.word == "ok" and rest.values["apart"] == "1e-09 apart"


def test_samples_of_a_relaunch_are_known_by_their_rows():
    """Rows that never came before may be the same samples with other noise."""

    def rows(shift):
        two = run_of(ranks_of())

        def change(again, stopped):
            for steps in again.steps:
                for s in steps:
                    fetch = dataclasses.replace(s.fetched[0], ids=[])
                    s.fetched = [fetch]
                    fetch.rows = s.inputs = [row + shift for row in fetch.rows]

        for s in sum(two.steps, []):
            s.fetched[0].ids = []
        return resumed(two=two, change=change)[-1]

    assert rows(0).row == "rest" and rows(0).word == "ok"
    assert rows(4).row == "other samples" and rows(4).values["first"] == 0
    assert rows(100_000).row == "rest"


def test_other_numbers_do_not_say_that_the_samples_differ():
    then = "So the rest was not judged."
    assert resumed(change=other_generator)[-1].values["then"] == then
    two = run_of(ranks_of(fetched=[]))
    then = "So the samples differ, and the rest was not judged."
    assert resumed(two=two, change=skip_and_draw)[-1].values["then"] == then


def test_the_set_up_of_a_relaunch_may_draw():
    def seed(again, stopped):
        again.steps[0][0].other_draws = {"numpy.random": 1}

    assert lines(resumed(change=seed)) == ["LOSES lost", "ok rest"]


def test_a_relaunch_that_misses_a_file_has_no_other_folder():
    def miss(again, stopped):
        again.codes, again.said = [1], {"errors": "FileNotFoundError: 'x.pt'"}

    (finding,) = resumed(change=miss)
    assert finding.row == "again" and "--link" not in rows.as_text(finding)


@pytest.mark.parametrize("action, says", [("kill", True), ("stop", False)])
def test_a_kill_may_come_while_a_file_is_saved(action, says):
    def cut_off(again, stopped):
        stopped.name = action
        again.codes, again.said = [1], {"errors": "EOFError: Ran out of input"}

    (finding,) = resumed(change=cut_off)
    assert ("cut off" in rows.as_text(finding)) == says


def test_a_model_that_was_only_tried_may_differ_between_ranks():
    two = run_of(ranks_of())
    for rank, of_rank in enumerate(two.traces):
        of_rank.starts.append(Start(0, {"tried": rank}, True))
        for step in of_rank.steps:
            step.bits = step.bits | {"tried": rank}
    assert two.idle == {"tried"}
    assert lines(first.judge_run(two)[0])[-1] == "ok weights"
    assert "note left out" not in lines(resumed(two=two))
    two.steps[0][3].bits["tried"] = 7  # rank 0 changes it
    assert two.idle == set() and lines(first.judge_run(two)[0])[-1] == "WRONG weights"


def test_without_a_loader_the_inputs_are_the_samples():
    def found(change, **more):
        return lines(resumed(two=run_of(ranks_of(fetched=[])), change=change, **more))

    assert found(skip_a_batch) == ["LOSES lost", "WRONG other samples"]
    assert found(skip_and_draw) == ["LOSES lost", "note other noise"]
    assert found(None, weights=1.1) == ["LOSES lost", "WRONG rest"]
    two = run_of(ranks_of(fetched=[], draws=[Draw("bernoulli_", [4], 1, state=7)]))
    for state, row in ((7, "other inputs"), (8, "other noise")):
        drawn = [Draw("bernoulli_", [6], 2, state)]

        def change(again, stopped, drawn=drawn):
            skip_a_batch(again, stopped)
            for s in sum(again.steps, []):
                s.draws = drawn

        assert lines(resumed(two=two, change=change)) == ["LOSES lost", f"note {row}"]


def test_a_relaunch_behind_the_end_of_the_recording_is_left_out():
    two = run_of(ranks_of(marks=["cut"]))
    assert lines(resumed(two=two, change=lose_weights)) == ["note left out"]
    assert lines(resumed(two=two)) == ["LOSES lost", "ok rest"]


def test_files_that_both_runs_saved(tmp_path, monkeypatch):
    runs = []
    for name, value in (("one", 1.0), ("two", 1.1)):
        folder = tmp_path / name / "machine0/folder"
        folder.mkdir(parents=True)
        states = {"model": torch.ones(3), "note": name}
        torch.save(states, folder / "last.pt")
        torch.save({"ema": [torch.full((2,), value)]}, folder / "best.pt")
        (folder / "odd.pt").write_text("no checkpoint")
        runs.append(Run(folders=[folder]))
    (found,) = resume.judge_saved(*runs)
    assert found.row == "saved otherwise" and found.values["name"] == "best.pt"
    assert found.values["off"] == pytest.approx(0.1) and "ema.0" in str(found.values)
    (found,) = resume.judge_saved(runs[0], runs[0])
    assert found.word == "ok" and found.values["names"] == "best.pt, last.pt"
    monkeypatch.setattr(resume, "MOST_BYTES", 10)
    assert resume.judge_saved(*runs) == []


def test_tensors_that_files_do_not_share_are_not_compared():
    one, two = {"a": torch.ones(2), "b": torch.ones(1)}, {"a": torch.ones(3)}
    assert resume.compare_files(one, two) == (-1.0, [])
    nan = {"b": torch.tensor([torch.nan])}
    assert resume.compare_files(one, nan) == resume.compare_files(nan, one) == (-1, [])
    assert resume.compare_files(one, {"b": torch.tensor([1.5])}) == (0.5, ["b"])


def test_what_has_not_ended():
    two, stopped = run_of(ranks_of()), run_of(ranks_of(4), codes=[1])
    stopped.stayed = [7]  # a process that torchrun has not ended
    (found,) = resume.judge_resume(two, stopped, two, 0)
    assert found.row == "stopped" and found.values["what"] == "processes stay: [7]"
    stopped.hangs = True
    (found,) = resume.judge_resume(two, stopped, two, 0)
    assert found.values["what"] == "the ranks do not end"


def test_a_failure():
    failed = resume.judge_failure(run_of([[], []], codes=[1]))
    assert failed.word == "ok"
    assert resume.judge_failure(run_of([[], []])).values["what"] == "the exit code is 0"
    stuck = run_of([[], []], codes=[None], hangs=True)
    assert resume.judge_failure(stuck).values["what"] == "the ranks do not end"
    left = run_of([[], []], codes=[1], stayed=[7])
    assert resume.judge_failure(left).values["what"] == "processes stay: [7]"


class Launches:
    """A launcher: each launch is of two ranks that end well, or too slow."""

    def __init__(self, slow=()):
        self.slow, self.started, self.gpus = slow, [], False

    def start(self, name, *more, **options):
        self.started.append(name)
        launch = Launches(self.slow)
        launch.name = name
        return launch

    def end(self):
        if self.name in self.slow:
            raise TooSlow(60)
        return run_of([[], []])


def disturbed(launcher, two, parts):
    report = command.Report("mine.py")
    answer = first.First(two, Samples(two))
    try:
        resume.disturb(launcher, report, parts, answer, None)
    except TooSlow:
        report.say(rows.line("note", "slow", timeout="60"))
    return lines(report.findings)


def test_a_launch_that_is_too_slow_leaves_the_others():
    two, parts = run_of(ranks_of()), ["resume", "failure"]
    slow = Launches(["stop", "kill"])
    assert disturbed(slow, two, parts) == ["WRONG failure", "note slow"]


def test_one_step_is_too_few_to_fail_in():
    launcher = Launches()
    assert disturbed(launcher, run_of(ranks_of(1)), ["failure"]) == []
    assert launcher.started == []


@pytest.mark.parametrize(
    "code, error, asks",
    [
        ("device = rank % torch.cuda.device_count()", "ZeroDivisionError: 1 % 0", True),
        ("step(model)", "RuntimeError: no accelerator is available", True),
        ("model = accelerator.prepare(model)", "TypeError: model is a str", False),
        ("join(1)", "RuntimeError: rank 1 is too high\nRuntimeError: no NCCL", True),
    ],
)
def test_what_asks_for_gpus(code, error, asks):
    where = f'  File "/mine.py", line 1, in <module>\n    {code}\n'
    said = {"errors": f"Traceback (most recent call last):\n{where}{error}\n"}
    failed = run_of([[], []], codes=[1], said=said)
    launcher = Launches()
    run = begin.with_gpus(launcher, command.Report("mine.py"), failed)
    assert (launcher.started == ["2-ranks-gpu"]) == launcher.gpus == asks
    assert (run is failed) != asks


@pytest.mark.parametrize(
    "error, refuses",
    [
        ("RuntimeError: ProcessGroupGloo does not support scan", True),
        ("AssertionError: assert x.device.type == 'cuda'", True),  # it is on the CPU
        ("TypeError: 'NoneType' object is not callable", True),
        ("ModuleNotFoundError: No module named 'mine'", False),
        ("mine.py: error: unrecognized arguments: --epoch", False),
        # Its sources are named in errors that are the script's, too.
        ("RuntimeError: gloo/pair.cc:456 op.preamble.length <= op.nbytes", False),
        ("RuntimeError: gloo/pair.cc:553 Connection closed by peer", False),
    ],
)
def test_what_fails_with_pretended_gpus_is_not_judged(error, refuses, tmp_path):
    script = tmp_path / "mine.py"
    script.write_text("torch.cuda.set_device(0)")

    class Failing(Launches):
        def start(self, *more, **options):
            return self

        def end(self, timeout=None):
            return run_of([[], []], codes=[1], said={"errors": f"{error}\n"})

    launcher, report = Failing(), command.Report("mine.py")
    launcher.script = [str(script)]
    run = begin.first_launch(launcher, report)
    assert (run is None) == refuses == (lines(report.findings) == ["note imitated"])


@pytest.mark.parametrize(
    "unwatched, said",
    [
        (run_of([[], []], codes=[1]), []),
        (run_of([[], []]), ["note only here"]),
        (TooSlow(30), ["note only here"]),  # it went on
    ],
)
def test_a_failure_is_the_scripts_if_it_fails_unwatched(unwatched, said, tmp_path):
    (tmp_path / "mine.py").write_text("")

    class Both(Launches):
        def start(self, name, **options):
            super().start(name)
            self.watched = options.get("watched", True)
            return self

        def end(self, timeout=None):
            if self.watched:
                return run_of([[], []], codes=[1])
            if isinstance(unwatched, TooSlow):
                raise unwatched
            return unwatched

    launcher, report = Both(), command.Report("mine.py")
    launcher.script = [str(tmp_path / "mine.py")]
    run = begin.first_launch(launcher, report)
    assert lines(report.findings) == said and (run is None) == bool(said)
    names = ["2-ranks", "2-ranks-float32", "2-ranks-unwatched"]
    assert launcher.started == names


# ---- Two machines --------------------------------------------------------------------
def test_two_machines():
    right = run_of(ranks_of())
    missing = {"errors": "FileNotFoundError: No such file or directory: 'x.pt'"}
    failed = run_of([[], []], codes=[1, 1], said=missing)
    stuck = run_of([[], []], codes=[None, None], hangs=True)
    ended = run_of([[], []])
    assert machines.judge_start(right, None) == ([], right)
    for bad in (failed, stuck):
        found, run = machines.judge_start(bad, right)
        assert lines(found) == ["note shared disk"] and run is right
        assert lines(machines.judge_start(bad, bad)[0]) == ["WRONG machines start"]
    other = run_of(ranks_of(0), codes=[1, 1], said={"errors": "error: cuda:1"})
    assert machines.judge_start(failed, other)[0][0].values["error"] == "error: cuda:1"
    assert lines(machines.judge_start(ended, None)[0]) == ["note no step"]
    # It may have been told a number of GPUs for each machine.
    assert lines(machines.judge_start(failed, None, True)[0]) == ["note machine ranks"]
    said = {"errors": "RuntimeError: invalid device ordinal: cuda:1"}
    other = run_of(ranks_of(0), codes=[1, 1], said=said)
    found, _ = machines.judge_start(other, None, True)
    assert lines(found) == ["WRONG machines start"]
    said = {"errors": "ValueError: You set `devices=2` and `num_nodes=2` in Lightning"}
    other = run_of(ranks_of(0), codes=[1, 1], said=said)
    assert lines(machines.judge_start(other, None)[0]) == ["note machine ranks"]
    assert lines(machines.judge_machines(right, Samples(right))[0]) == ["ok machines"]
    alone = run_of(ranks_of(ddp_forwards=0))
    found, unsure = machines.judge_machines(alone, Samples(right))
    assert lines(found) == ["WRONG machines alone"] and not unsure
    other = run_of(ranks_of(bits={"last": 5}))
    assert machines.judge_machines(other, Samples(right)) == ([], True)
    smaller = run_of(ranks_of(inputs=[1, 2], fetched=[]))
    two = Samples(run_of(ranks_of(fetched=[])))
    assert lines(machines.judge_machines(smaller, two)[0]) == ["note machine batch"]


def test_numbers_that_one_rank_of_each_machine_draws():
    one, two = run_of(ranks_of()), run_of(ranks_of())
    for s in [*two.steps[0][3:], *two.steps[1][3:]]:
        s.bits = {"last": -1}
    assert machines.is_fault(one, two)
    two.steps[1][3].draws = [Draw("bernoulli_", [4], 1, 1)]
    assert not machines.is_fault(one, two)
    two.steps[0][3].draws = [Draw("bernoulli_", [4], 1, 1)]
    assert machines.is_fault(one, two)  # the seeds of the ranks are the same
    one.steps[0][3].draws = one.steps[1][3].draws = [Draw("bernoulli_", [4], 1, 2)]
    assert not machines.is_fault(one, two)  # also on one machine
    assert machines.is_fault(one, run_of([steps[:3] for steps in one.steps]))


# ---- Printed numbers -----------------------------------------------------------------
PRINTED = [
    ("loss 0.4321,", ["0.4321"]),
    ("loss 95.2%", ["95.2"]),
    ("loss tensor(0.43)", ["0.43"]),
    ("loss nan", ["nan"]),
    ("loss -1e-05", ["-1e-05"]),
    ("loss none", []),
    ("loss 1\nloss 1", ["1", "1"]),
]


@pytest.mark.parametrize("text, numbers", PRINTED)
def test_printed_numbers(text, numbers):
    assert printed.printed(Run(said={"rank0.out": text}), r"loss (\S+)") == numbers


def test_numbers_that_all_ranks_log_count_once():
    run = Run(said={"errors": "rank 0: loss 3\nrank 1: loss 3\nloss 2\n"})
    assert printed.printed(run, r"loss (\S+)") == ["3", "2"]


AGREE = [
    ("0.4321", "0.4322", True),
    ("0.4321", "0.4323", False),
    ("5", "6", False),
    ("nan", "nan", True),
    ("nan", "0.1", False),
]


@pytest.mark.parametrize("one, two, same", AGREE)
def test_numbers_agree_but_for_the_last_digit(one, two, same):
    assert printed.agree(one, two) == same


# ---- What is said --------------------------------------------------------------------
def report_of(*words):
    report = command.Report("mine.py")
    for word in words:
        kind, _, row = word.partition(" ")
        report.findings.append(trace.Finding(kind, row, Values()))
    return report


class Values(dict):
    """Any value: 1, as a number is asked for in some places."""

    def __missing__(self, name):
        return 1


SUMMARIES = [
    (["ok gradient"], 0, "Nothing of what was checked is wrong."),
    (["ok gradient", "LOSES lost"], 0, "Nothing of what was checked is wrong."),
    (["WRONG alone"], 1, "First fix this: every rank trains alone."),
    (["ok alone", "note not replayed"], 3, "The gradients were not judged. Nothing of"),
    (["note no optimizer"], 3, "Nothing was judged."),
    (["note not replayed", "WRONG rates"], 1, "The gradients were not judged. First"),
]


@pytest.mark.parametrize("words, code, text", SUMMARIES)
def test_exit_codes_and_the_last_line(words, code, text, capsys, monkeypatch):
    monkeypatch.setattr(rows, "sentences", lambda f: (rows.ROWS[f.row].bad, "", ""))
    report = report_of(*words)
    assert report.code() == code
    report.last_line()
    assert capsys.readouterr().out.startswith(f"mine.py: {text}")


def test_what_a_note_leaves_out_is_not_counted_as_checked(capsys):
    then = "So the samples differ, and the rest was not judged."
    report = command.Report("mine.py")
    report.say(rows.line("note", "other noise", who="rank 0", same="", then=then))
    report.summary()
    assert "0 checked, 1 not judged: 0 WRONG" in capsys.readouterr().out


def test_findings_as_json():
    report = command.Report("mine.py")
    report.say(rows.line("WRONG", "steps", one=3, two=2))
    record = json.loads(report.as_json(1))
    (finding,) = record["findings"]
    assert record["exit"] == 1 and finding["values"] == {"one": 3, "two": 2}
    assert finding["text"] == "rank 0 makes 3 steps, rank 1 makes 2"
    assert finding["page"] == rows.PAGES["hangs"]


BAR = """\
 67%|##    | 8/12 [00:08<00:04][rank1]: Traceback (most recent call last):
[rank1]:   File "/mine.py", line 3, in <module>
[rank1]:     draw(high)
[rank1]: ValueError: high <= 0
"""
BOX = "╭─ Error ─────────────╮\n│ No such option: --x │\n╰─────────────────────╯\n"


def test_an_error_behind_a_progress_bar_or_in_a_box():
    said = first_traceback(BAR)
    assert "/mine.py" in said and said.endswith("ValueError: high <= 0")
    assert "No such option: --x" in first_traceback(BOX)


def test_first_traceback():
    text = "[rank1]: Traceback (most recent call last):\n[rank0]: warning\n"
    text += '[rank1]:   File "mine.py", line 1\n[rank1]:     work()\n'
    text += '[rank1]:   File "/lib/python3/io.py", line 1\n'
    text += "[rank1]: ValueError: no\n[rank1]: more\n"
    last = '  File "mine.py", line 1\n    work()\nValueError: no'
    assert first_traceback(text) == last
    assert first_traceback("last words") == "last words"
    peer = "[rank0]: Traceback (most recent call last):\n"
    peer += '[rank0]:   File "mine.py", line 2\n[rank0]: RuntimeError: closed by peer\n'
    assert first_traceback(peer + text) == last
    assert first_traceback(peer).endswith("closed by peer")
    # Two ranks that write at the same time
    both = "Traceback (most recent call last):\n" * 2
    both += '  File "mine.py", line 3\n    assert x\nAssertionError\n'
    assert first_traceback(both).endswith("assert x\nAssertionError")


def test_the_words_of_an_error_may_begin_in_the_next_line():
    text = 'Traceback (most recent call last):\n  File "mine.py", line 3\n    x()\n'
    said = first_traceback(
        text + "RuntimeError: \nUnknown builtin op: cuda::x.\nmore\n"
    )
    assert said.endswith("RuntimeError: \nUnknown builtin op: cuda::x.")
    assert first_traceback(text + "KeyError: 'x'\nmore\n").endswith("KeyError: 'x'")
    said = first_traceback(text + "hydra.E: Error in call to f:\nTypeError(1)\nmore\n")
    assert said.endswith("hydra.E: Error in call to f:\nTypeError(1)")


def test_an_error_in_a_worker_of_a_loader():
    text = "Traceback (most recent call last):\n"
    text += '  File "mine.py", line 9, in <module>\n    for x in loader:\n'
    text += "ValueError: Caught ValueError in DataLoader worker process 0.\n"
    text += "Original Traceback (most recent call last):\n"
    text += '  File "data.py", line 3, in __getitem__\n    read(i)\n'
    text += "ValueError: image 7 is not readable\n"
    last = '  File "data.py", line 3, in __getitem__\n    read(i)\n'
    last += "ValueError: image 7 is not readable"
    assert first_traceback(text) == last
    of_rank = "".join(f"[rank0]: {row}\n" for row in text.splitlines())
    assert first_traceback(of_rank) == last


def test_an_error_while_another_one_is_handled():
    """The first one is in a library only, as that of a download."""
    text = "Traceback (most recent call last):\n"
    text += '  File "/lib/python3/socket.py", line 9, in connect\nOSError: no\n\n'
    text += "During handling of the above exception, another exception occurred:\n\n"
    text += 'Traceback (most recent call last):\n  File "mine.py", line 1\n'
    text += '  File "/lib/python3/urllib.py", line 5\nURLError: no name\n'
    assert first_traceback(text) == '  File "mine.py", line 1\nURLError: no name'


def test_what_failed_in_torchscript_is_said():
    text = 'Traceback (most recent call last):\n  File "mine.py", line 1\n'
    text += "torch.jit.Error: The following operation failed in the interpreter.\n"
    text += "Traceback of TorchScript (most recent call last):\n"
    text += '  File "mine.py", line 9\nbuiltins.RuntimeError: no such operator\n'
    assert first_traceback(text).endswith("\nRuntimeError: no such operator")


def test_the_scripts_own_words_come_before_a_dump():
    text = "epoch 1\nerror: rank 1: no such data\n 50%|##  | 1/2 [00:08<00:08]\n"
    assert own_words(text)[1:] == ["error: rank 1: no such data"]
    text += "Fatal Python error: Aborted\n\n"
    text += 'Thread 0x01 (most recent call first):\n  File "x.py", line 3 in wait\n'
    assert first_traceback(text) == "error: rank 1: no such data"
    assert (
        Run(said={"errors": text}, codes=[1]).words()["error"].startswith("error: ra")
    )


def test_a_warning_may_be_the_last_word():
    text = "mine.py:6: UserWarning: no NMS\n  warnings.warn('no NMS')\n"
    assert Run(said={"errors": text}, codes=[1]).words()["error"].endswith("no NMS")


def test_a_hang_says_where_the_ranks_wait():
    wait = ("/lib/python3/site-packages/torch/distributed/x.py", "9", "all_reduce")
    frames = [wait, ("mine.py", "27", "<module>")]
    run = run_of(ranks_of(), codes=[None], hangs=True, stacks={1: frames}, timeout=60)
    words = run.words()
    assert words["error"] == "it does not end within 60 s"
    where = "Rank 1 waits in all_reduce(), at mine.py, line 27, in <module>"
    assert where in words["why"]


@pytest.mark.parametrize(
    "error, hint",
    [
        ("[Errno 2] No such file or directory: 'data.pt'", "a new folder"),
        ("[Errno 2] No such file or directory: '/x/check-a1_/t10/w.pt'", "TMPDIR"),
        ("[Errno 2] No such file or directory: '/etc/other/w.pt'", "a new folder"),
        ("[Errno 2] No such file or directory: '/etc/w.pt'", ""),
        ("each machine has its own localhost:12355", "the address"),
        ("LocalEntryNotFoundError: the Hub does not answer", ""),
    ],
)
def test_what_helps_is_known_by_the_error(error, hint):
    text = f'Traceback (most recent call last):\n  File "mine.py"\nOSError: {error}\n'
    words = Run(said={"errors": text}, codes=[1]).words()
    assert hint in words["hint"] and bool(hint) == bool(words["hint"])


def test_an_error_of_more_ranks_says_so():
    for ranks, start in ((2, "it fails in"), (4, "4 ranks: it fails in")):
        words = run_of(ranks_of(1, ranks), codes=[1]).words()
        finding = rows.line("WRONG", "fails", **words)
        assert rows.sentences(finding)[0].startswith(start)
    # Where two ranks have started, the folder is not to blame.
    said = {"errors": "FileNotFoundError: 'x.pt'"}
    for ranks, hint in ((2, "a new folder"), (4, "waiting for each other")):
        run = run_of(ranks_of(0, ranks), codes=[1], said=said)
        assert hint in begin.failed(run).values["hint"]


def test_an_error_of_the_check_is_not_blamed_on_the_script():
    text = "Traceback (most recent call last):\n"
    text += (
        f'  File "mine.py", line 1\n    x\n  File "{PACKAGE}/rank/watch.py", line 1\n'
    )
    run = Run(said={"errors": f"{text}    y\nKeyError: 'y'\n"}, codes=[1])
    with pytest.raises(OwnFault, match="KeyError"):
        run.raise_own_fault()
    Run(
        said={"errors": f"{text}    y\nCannotImitate: y\n"}, codes=[1]
    ).raise_own_fault()


def test_a_wrong_call_that_the_check_passes_on_is_the_scripts_fault():
    """Such as t[7], or from_numpy() of a list: torch's C++ code has no frame."""
    for code in ("return function(*args, **kwargs)", "tensor = make(*args)"):
        text = "Traceback (most recent call last):\n"
        text += f'  File "{PACKAGE}/rank/float64.py", line 1, in call\n    {code}\n'
        run = Run(said={"errors": f"{text}IndexError: out of range\n"}, codes=[1])
        run.raise_own_fault()


def test_a_process_whose_output_is_closed_is_found(tmp_path):
    environment = {**os.environ, "CHECK_LOG": f"{tmp_path}/1"}
    more = {"env": environment, "preexec_fn": lambda: os.close(1)}
    with subprocess.Popen(["sleep", "60"], **more) as process:
        found = processes_of(tmp_path)
        process.kill()
    assert found == [process.pid]


def test_rooms():
    """judge/ and rank/ never import each other, and no room is above 450 lines."""
    for path in Path(PACKAGE).rglob("*.py"):
        text = path.read_text()
        assert text.count("\n") <= 450, path
        imports = [
            n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom)
        ]
        modules = {node.module for node in imports}
        room, other = path.parent.name, {"judge": "rank", "rank": "judge"}
        banned = f"ddp_check.{other.get(room, '-')}"
        assert not [name for name in modules if name and name.startswith(banned)], path


def test_a_number_can_be_divided_by_the_ranks_of_all_launches(tmp_path, capsys):
    script = tmp_path / "mine.py"
    script.touch()
    for few in (["--quick"], ["--skip", "ranks"]):
        assert command.parse([*few, str(script), "{10}"]).arguments == ["{10}"]
    with pytest.raises(SystemExit):
        command.parse([str(script), "{10}"])
    assert "{10} cannot be divided by 4 ranks" in capsys.readouterr().err
