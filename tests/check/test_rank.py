"""Tests of ddp_check/rank: what runs inside each rank, function by function.

They take seconds. Whole launches are in test_check.py.
"""

import collections
import copy
import dataclasses
import sys
import typing
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ddp_check import trace
from ddp_check.rank import patch
from ddp_check.rank.loaders import fingerprint
from ddp_check.rank.losses import Means, counts_of, own_factors, sums_in
from ddp_check.rank.merge import (
    Merge,
    find_rows,
    guess_padding,
    has_rows,
    known_padding,
    numbered,
)
from ddp_check.rank.record import Recorded, Recording
from ddp_check.rank.replay import Reference, Relaunch, Replay
from ddp_check.rank.steps import Steps
from ddp_check.rank.tensors import checksum, comparison, rows_of, signatures
from ddp_check.rank.weights import (
    Weights,
    can_change_weights,
    plain_name,
    set_options,
)
from harness import ROOT, launch, processes


@pytest.mark.parametrize("name", patch.PRIVATE)
def test_private_name_of_torch_exists(name):
    assert patch.private(name) is not None


# ---- Batches of all ranks
@pytest.fixture
def merge():
    return Merge("rank by rank")


def test_batches_are_joined(merge):
    a, b = torch.tensor([1, 2]), torch.tensor([3, 4])

    def join(*parts, stacked=False):
        return merge.join(parts, [2, 2], stacked)

    assert join(a, b).tolist() == [1, 2, 3, 4]
    joined = join({"x": a, "n": ["p", "q"]}, {"x": b, "n": ["r", "s"]})
    assert joined["x"].tolist() == [1, 2, 3, 4] and joined["n"] == ["p", "q", "r", "s"]
    columns = join([a, a], [b, b])
    assert [column.tolist() for column in columns] == [[1, 2, 3, 4]] * 2
    images = [torch.zeros(3, 4), torch.zeros(3, 5)]  # samples, not columns
    joined = merge.join([images, [torch.ones(3, 6), torch.ones(3, 7)]], [2, 2], False)
    assert [image.shape[1] for image in joined] == [4, 5, 6, 7]
    assert join(torch.zeros(5, 2), torch.ones(5, 2)).shape == (5, 4)  # time first
    assert merge.notes.problems == []
    join(torch.zeros(3), torch.ones(3))  # no samples, as nothing has two rows
    assert merge.notes.problems == []
    merge.order = "row by row"
    assert join(a, b).tolist() == [1, 3, 2, 4]
    assert join(("a", "b"), ("c", "d")) == ("a", "c", "b", "d")


class Pair(typing.NamedTuple):
    x: torch.Tensor
    name: list


def test_joined_batches_keep_their_types(merge):
    one, two = [Pair(torch.tensor([i]), [str(i)]) for i in (0, 1)]
    pair = merge.batch([one, two], [1, 1])
    assert type(pair) is Pair and pair.x.tolist() == [0, 1] and pair.name == ["0", "1"]
    one, two = [collections.UserDict(x=torch.tensor([i]), n=3) for i in (0, 1)]
    joined = merge.batch([one, two], [1, 1])
    assert type(joined) is collections.UserDict
    assert joined["x"].tolist() == [0, 1] and joined["n"] == 3
    number = torch.tensor(5)  # for all samples
    assert merge.batch([(one["x"], number), (two["x"], number)], [1, 1])[1] is number
    assert merge.notes.problems == []


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_joined(merge):
    rows = [[torch.ones(2), torch.ones(n)] for n in (3, 4)]
    parts = [
        torch.nested.nested_tensor(of_rank, layout=torch.jagged) for of_rank in rows
    ]
    (joined,) = merge.batch([(part,) for part in parts], [2, 2])
    assert [len(row) for row in joined.unbind()] == [2, 3, 2, 4]
    assert merge.notes.problems == []


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_tensors_are_joined_or_a_problem(merge):
    for make, problems in (
        (torch.Tensor.to_sparse, 0),
        (torch.Tensor.to_sparse_csr, 1),
    ):
        (joined,) = merge.batch(
            [(make(torch.eye(2)),), (make(torch.ones(2, 2)),)], [2, 2]
        )
        assert joined.layout is not torch.strided
        assert len(joined.to_dense()) == (2 if problems else 4)
        assert len(merge.take_notes().problems) == problems


@pytest.mark.parametrize(
    "parts, problem",
    [
        ([torch.tensor(1), torch.tensor(2)], "a number that differs between ranks"),
        ([(object(), torch.ones(2)), (object(), torch.zeros(2))], "type object"),
        ([None, torch.ones(2)], "could not be recorded"),
        (
            [
                torch.tensor([[0, 2, 1], [5, 3, 4]]),
                torch.tensor([[0, 0, 2], [3, 5, 5]]),
            ],
            "counts through its rows",
        ),
        (
            [(torch.ones(2), torch.ones(3, 6)), (torch.ones(2) + 1, torch.ones(1, 6))],
            "may hold sample numbers",
        ),
        ([torch.ones(2, 3), torch.ones(2)], "batches of [[2, 3], [2]]"),  # squeeze()
    ],
)
def test_what_cannot_be_joined_is_a_problem(merge, parts, problem):
    merge.batch(parts, [2, 2])
    assert problem in merge.take_notes().problems[0]
    assert merge.notes.problems == []


def test_the_same_batch_on_all_ranks_is_given_once(merge):
    batch = {"x": torch.arange(4)}
    joined = merge.batch([batch, copy.deepcopy(batch)], [4, 4])
    assert joined["x"].tolist() == [0, 1, 2, 3]
    assert merge.notes.problems == []


PAD = {  # batches of two ranks, and what rows of the first tensor are padded with
    "a mask of bits": ([[[1, 1, 0], [1, 1, 1]], [[1, 1], [1, 0]]], 0),
    "only at the ends": ([[[5, 6, 9], [7, 9, 9], [5, 5, 6]], [[4, 9], [6, 7]]], 9),
    "two candidates": ([[[5, 6, 9], [5, 7, 9], [5, 5, 8], [5, 6, 8]]], None),
    "in the middle, too": ([[[5, 9, 6], [7, 9, 9], [5, 9, 9]]], None),
    "times behind channels": ([[[[5, 9], [6, 9]], [[5, 5], [4, 3]]], [[[5]] * 2]], 9),
    "no padding": ([[[1.5, 2.5]], [[3.5, 4.5, 5.5]]], None),
    "bits that end in one": ([[[0, 1], [0, 1]], [[0, 1, 1]]], 0),
    "one dimension": ([[5, 6, 9], [7, 9]], None),
    "an empty batch": ([[[]], [[5, 6]]], None),
    "one feature": ([[[[5, 9], [6, 9]], [[5, 9], [4, 9]]], [[[5, 9]]] * 2], None),
    "all features": ([[[[5, 9], [9, 9]], [[6, 9], [9, 9]], [[7, 9], [8, 9]]]], 9),
    "the first feature": ([[[[5, 5], [9, 1]], [[6, 6], [9, 2]]], [[[7, 7]]]], None),
}


@pytest.mark.parametrize("name", PAD)
def test_padding_is_known_or_not(name):
    batches, value = PAD[name]
    assert known_padding([(torch.tensor(batch),) for batch in batches], (0,)) == value


def test_a_mask_shows_the_padding():
    x, mask = torch.tensor([[3, 9, 7], [9, 8, 7]]), torch.tensor([[1, 1, 0], [1, 1, 0]])
    assert known_padding([{"x": x, "mask": mask}], ("x",)) == 7
    rows = torch.rand(2, 3, 4) * mask[..., None]
    assert known_padding([{"x": rows, "mask": mask}], ("x",)) == 0
    others = {"bits": 1 - mask, "more": torch.tensor([[1, 0, 1], [1, 0, 0]])}
    others |= {"wide": torch.ones(2, 4), "labels": torch.tensor([1, 5])}
    assert known_padding([{"x": x, "mask": mask, **others}], ("x",)) == 7


def test_the_padding_is_guessed_at_the_ends_of_rows():
    rows = torch.tensor([[1, 9], [2, 9], [8, 3]])
    assert guess_padding([rows], 0) == guess_padding([rows.T], 1) == 9
    empty = rows[:, :0]
    assert guess_padding([empty, rows], 0) == 9 and guess_padding([empty], 0) == 0


def test_rows_are_padded_to_the_longest(merge):
    parts = [(torch.tensor([[1, 2, 3], [3, 0, 0]]),), (torch.tensor([[4, 5], [6, 0]]),)]
    merge.all_batches = lambda: parts
    expected = [[1, 2, 3], [3, 0, 0], [4, 5, 0], [6, 0, 0]]
    assert merge.batch(parts, [2, 2])[0].tolist() == expected
    assert not merge.notes.problems
    assert merge.take_notes().widened
    parts = [torch.tensor([[1, 2, 3], [3, 9, 9]]), torch.tensor([[4, 9]])]
    merge.paddings = {(0,): None}  # nobody knows, but two rows end in 9
    joined = merge.batch([(part,) for part in parts], [2, 1])[0]
    assert joined.tolist() == [[1, 2, 3], [3, 9, 9], [4, 9, 9]]
    assert "the value to pad with is a guess" in merge.take_notes().problems[0]


def test_as_many_tensors_as_samples_may_be_samples_or_columns(merge):
    """Such as three clouds of three points."""
    merge.batch([list(torch.rand(3, 3, 2)) for _ in range(2)], [3, 3])
    assert "3 tensors with as many rows" in merge.take_notes().problems[0]
    merge.batch([list(torch.rand(2, 3, 2)) for _ in range(2)], [3, 3])
    named = [dict(zip("abc", torch.rand(3, 3, 2))) for _ in range(2)]
    assert len(merge.batch(named, [3, 3])["a"]) == 6
    assert merge.notes.problems == []


def test_lists_beside_a_tensor_of_samples(merge):
    """Captions are joined, also if there are others than two. Tensors are not."""
    parts = [(torch.ones(2) + rank, [f"{rank}{i}" for i in "abc"]) for rank in (0, 1)]
    assert merge.batch(parts, [2, 2])[1] == ["0a", "0b", "0c", "1a", "1b", "1c"]
    assert merge.notes.problems == []
    merge.batch([(x, [torch.rand(5)] * 3) for x, _ in parts], [2, 2])
    assert "may hold sample numbers" in merge.take_notes().problems[0]


def test_flat_tensors_may_hold_places_in_others(merge):
    """Of nn.EmbeddingBag: the texts of a batch in one row, and where each begins."""
    part = torch.tensor([1, 0]), torch.arange(5), torch.tensor([0, 3])
    merge.batch([part, (1 - part[0], *part[1:])], [2, 2])
    assert "[5], which may hold sample numbers" in merge.take_notes().problems[0]


THREE, TWO, NUMBER = torch.ones(3), torch.ones(2), torch.tensor(1)


@pytest.mark.parametrize(
    "value, has_three",
    [
        *((THREE, True), (TWO, False), (NUMBER, False), ("abc", False)),
        *(([1, 2, 3], True), ([1, 2], False), ([], False)),
        *(([THREE, THREE], True), ([THREE, TWO], False)),
        *(([[THREE]], True), ([[[THREE]]], False)),
        ({"x": THREE, "y": THREE, "number": NUMBER}, True),
        ({"x": THREE, "y": TWO}, False),
        *(({"names": [1, 2, 3], "of": "abc"}, True), ({"of": "abc"}, False)),
    ],
)
def test_what_has_three_rows(value, has_three):
    assert has_rows(value, 3) == has_three


@pytest.mark.parametrize(
    "numbers, may_be_places",
    [([2, 0, 1, 3], True), ([2, 0, 1], False), ([0, 0, 1, 2], False)],
)
def test_numbers_that_count_may_be_places(merge, numbers, may_be_places):
    """One process would need others: those of the second rank begin at 4."""
    count = len(numbers)
    parts = [(torch.tensor(numbers), torch.rand(count)) for _ in range(2)]
    merge.batch(parts, [count, count])
    assert bool(merge.notes.problems) == may_be_places


def test_arrays_of_numpy_are_joined(merge):
    parts = [(numpy.full((2, 3), i), numpy.full(2, i)) for i in (0.0, 1.0)]
    x, y = merge.batch(parts, [2, 2])
    assert x.shape == (4, 3) and y.tolist() == [0, 0, 1, 1]


def test_objects_that_hold_tensors_are_not_joined(merge):
    @dataclasses.dataclass
    class Batch:
        x: torch.Tensor

    merge.batch([Batch(torch.ones(2)), Batch(torch.zeros(2))], [2, 2])
    assert "type Batch, which cannot be joined" in merge.take_notes().problems[0]


def test_what_a_sum_is_multiplied_by():
    """If it is 1 / 16, and a rank has 16 samples, the loss is a mean over these."""
    x, weight = torch.rand(16, 2, requires_grad=True), torch.ones(2, requires_grad=True)
    error, penalty = nn.functional.mse_loss(x, 2 * x, reduction="sum"), weight.sum()
    assert sums_in(error / 16) == [((1 / 16,), (16, 2))]
    halves = [((1 / 16, 0.5), (16, 2)), ((1 / 16,), (16, 2))]
    assert sums_in((error - 0.5 * x.sum()) / 16) == halves
    no_sum = (), ()
    assert sums_in(error / 16 + penalty) == [((), (2,)), ((1 / 16,), (16, 2))]
    assert sums_in(x.mean() / 16) == sums_in(penalty * x.mean()) == [no_sum]
    classes = nn.functional.nll_loss(x, torch.zeros(16).long(), reduction="sum")
    assert sums_in(classes) == [((), (16,))]


def test_a_layer_that_is_computed_again_is_not_looked_into():
    """That would compute it once more."""
    calls = []
    x = torch.rand(16, 2, requires_grad=True)

    def loss_of(x):
        calls.append(1)
        return x.sum() / torch.tensor(16.0)

    loss = torch.utils.checkpoint.checkpoint(loss_of, x, use_reentrant=False)
    assert sums_in(loss) and len(calls) == 1


class Texts(list):
    def __getitem__(self, i):
        return float(super().__getitem__(i))


def test_the_data_of_a_loader_are_known_by_what_it_makes_of_them():
    """None of these are tensors before the loader makes them."""
    texts = [["1", "2", "3", "4"], ["1", "2", "3", "5"], ["1", "2", "3", "4"]]
    one, two, three = [fingerprint(DataLoader(Texts(text))) for text in texts]
    assert one == three > 0 and two not in (0, one)
    assert fingerprint(DataLoader(["a", "b"])) == fingerprint(DataLoader([])) == 0


def test_a_sum_divided_by_the_rows_or_values_of_a_rank():
    """Two ranks, with 16 samples of 6 values in a batch. Two views make 32 rows."""
    for shape, divisor, is_mean in (
        ((16, 6), 16, True),
        ((16, 6), 96, True),
        ((16, 6), 32, False),  # the samples of all ranks
        ((16, 6), 192, False),
        ((16, 2), 32, False),  # the same, though there are as many values
        ((96,), 16, True),  # one row for each token
        ((32, 6), 32, True),
    ):
        terms = [((1 / divisor,), counts_of(shape, [16], 2))]
        means = Means([{(0, 1): terms}] * 2)
        assert means.are_of_ranks((0, 1), terms) == [is_mean]
        # One process divides by another number, such as the rows of its own batch.
        assert means.are_of_ranks((0, 1), [((0.5 / divisor,), ())]) == [False]


def test_a_number_is_that_of_most_batches():
    """Ten batches of 16 samples, and a last one of two."""
    for factor, is_mean in ((1 / 16, True), (0.5, False)):
        sums = {(step, 1): [((factor,), {16})] for step in range(10)}
        sums[10, 1] = [((factor,), {2})]
        assert Means([sums] * 2).are_of_ranks((10, 1), sums[10, 1]) == [is_mean]


def test_other_numbers_that_a_sum_is_divided_by():
    """Those that cancel, and the batches that are accumulated, are no rows of it."""
    assert own_factors((0.5, 1.0, 2.0, 0.04), 2) == {1.0, 0.04}
    assert own_factors((0.25, 0.04), 4) == {0.04}
    assert own_factors((0.25, 0.25), 4) == own_factors((0.25,), 4) == {0.25}


def test_random_numbers_are_joined(merge):
    a, b = torch.rand(8, 2), torch.rand(8, 2)
    both = torch.empty(16, 2)
    joined = merge.draw("rand", both, 0, [(0, a), (0, b)])
    assert torch.equal(joined, torch.cat([a, b]))
    assert merge.take_notes().different == {"torch.rand()"}
    merge.draw("rand", both, 0, [(0, a), (0, a)])
    assert merge.take_notes().alike == {"torch.rand()"}
    assert merge.draw("rand", a, 0, [(0, a), (0, a)]) is a  # for the whole batch
    order = torch.tensor([1, 0])
    joined = merge.draw("randperm", torch.empty(4), 4, [(2, order), (2, order)])
    assert joined.tolist() == [1, 0, 3, 2]
    assert merge.draw("rand", a, 0, [(0, a), (0, b)]) is None
    problem = "torch.rand() draws [8, 2] on one process, and other numbers on each rank"
    assert merge.take_notes().problems == [problem]
    ones = [(0, a[0, 0]), (0, b[0, 0])]
    assert merge.draw("rand", a[0, 0], 0, ones) is None
    problem = (
        "torch.rand() draws one number on one process, and other numbers on each rank"
    )
    assert merge.take_notes().problems == [problem]
    assert merge.draw("rand", both[:9], 0, [(0, a), (0, both[:7])]) is None
    shapes = "[9, 2] on one process, and on the ranks [8, 2] and [7, 2]"
    assert merge.take_notes().problems == [f"torch.rand() draws {shapes}"]
    assert merge.draw("rand", a, 0, [(0, a), None]) is None
    assert (
        "which some ranks or one process draw more often"
        in merge.take_notes().problems[0]
    )
    assert merge.draw("rrelu_with_noise", both, 0, [(0, a), (0, b)]) is None
    assert "which keeps what it draws" in merge.take_notes().problems[0]
    assert merge.draw("rand", torch.empty(16), 0, [(0, a), (0, b)]) is None
    assert "other shapes than on the ranks" in merge.take_notes().problems[0]
    shifts = torch.tensor([1, 2, 1])
    merge.draw("randint", torch.empty(6), 6, [(3, shifts), (3, shifts)])
    assert "may draw numbers of rows" in merge.take_notes().problems[0]
    merge.draw("multinomial", torch.empty(6), 0, [(0, shifts), (0, shifts)])
    notes = merge.take_notes()
    assert "may draw numbers of rows" in notes.problems[0]
    assert notes.alike == set()  # three numbers may be the same by chance
    few = torch.rand(2)
    merge.draw("rand", torch.empty(4), 0, [(0, few), (0, few)])
    assert merge.take_notes().alike == {"torch.rand()"}
    many = torch.zeros(8)
    merge.draw("bernoulli", both[:, 0], 0, [(0, many), (0, many)])
    assert merge.take_notes().alike == {"torch.bernoulli()"}


def test_random_numbers_go_where_the_rows_of_a_rank_are(merge):
    a, b = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])

    def draw(*places, like=(4, 1)):
        draws = [(0, a.view(2, -1)), (0, b.view(2, -1))]
        if like[0] == 1:
            draws = [(0, a.T), (0, b.T)]
        drawn = merge.draw("rand", torch.empty(like), 0, draws, places)
        return drawn.flatten().tolist()

    assert draw(torch.tensor([0, 3]), torch.tensor([1, 2])) == [1, 3, 4, 2]
    # Places of other rows, or of rows along another dimension
    assert draw(torch.tensor([0]), torch.tensor([1])) == [1, 2, 3, 4]
    apart = torch.tensor([0, 3]), torch.tensor([1, 2])
    assert draw(*apart, like=(1, 4)) == [1, 2, 3, 4]


def test_random_numbers_for_rows_of_other_lengths(merge):
    """Each rank draws for its own longest row: right if its batch is widened, too."""
    draws = [(0, torch.ones(1, 3)), (0, torch.ones(2, 2) / 2)]
    expected = [[1, 1, 1], [0.5, 0.5, 1], [0.5, 0.5, 1]]
    assert merge.draw("rand", torch.empty(3, 3), 0, draws).tolist() == expected
    assert "with a width of its own" in merge.take_notes().problems[0]
    merge.notes.widened = True
    assert merge.draw("rand", torch.empty(3, 3), 0, draws).tolist() == expected
    assert merge.notes.problems == []


def test_rows_that_a_script_has_moved_are_found_again():
    """Two views of each sample are in one batch: those of all ranks are elsewhere."""
    one, two = torch.tensor([5.0, 3.0, 5.0]), torch.tensor([4.0, 5.0, 2.0])
    whole = torch.tensor([5.0, 3.0, 4.0, 5.0, 5.0 + 1e-7, 2.0])
    assert [*map(list, find_rows([one, two], whole))] == [[0, 1, 3], [2, 4, 5]]
    assert find_rows([one, two], whole[1:]) is None
    assert find_rows([one, one], whole) is None  # other rows
    assert [*map(list, find_rows([whole, whole], whole))] == [[0, 1, 2, 3, 4, 5]]


def test_signatures_of_any_tensor():
    x = torch.rand(3, 4, 2)
    other = signatures(x.flip(2))
    assert len(signatures(x)) == 3 and not torch.equal(signatures(x), other)
    assert len(signatures(x[0, 0])) == 2
    for odd in (torch.ones(()), torch.ones(0, 4)):
        assert len(signatures(odd)) == 0
    assert find_rows([torch.zeros(0)] * 2, torch.zeros(0)) is None


def test_rows_are_numbered():
    assert [rows.tolist() for rows in numbered("rank by rank", [2, 1])] == [[0, 1], [2]]
    assert [rows.tolist() for rows in numbered("row by row", [2, 1])] == [[0, 2], [1]]


# ---- Tensors, and what is recorded
def test_comparison_has_exact_sums():
    a, b = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 2.0])
    assert comparison(a, b) == trace.Comparison(aa=25, bb=13, ab=17, off=4)
    assert comparison(None, b) == trace.Comparison(aa=0, bb=13, ab=0, off=13)
    constant = torch.full((1024, 1024), 1e-3)
    assert comparison(constant, 1.5 * constant).off == pytest.approx(
        0.25 * 1e-6 * 2**20
    )


def test_rows_are_known_by_their_content():
    x, y = torch.arange(6.0).view(3, 2), torch.arange(3)
    samples, parts = rows_of([x, y])
    assert len(samples) == 3 and len(parts) == 6
    assert rows_of([x[1:], y[1:]])[0] == samples[1:]


def test_views_are_recorded_without_the_rest(tmp_path):
    recording = Recording(tmp_path, 0)
    view = torch.arange(10**6)[5:8]
    odd = torch.ones(2, 3, dtype=torch.bfloat16).T
    recording.keep("batch", (0, 0, 0), (3, {"x": view, "odd": odd, "kind": "b"}, 1))
    recording.keep("batch", (0, 0, 1), (0, lambda: None, 1))  # cannot be pickled
    recording.close()
    assert Path(tmp_path, "rank0.pickle").stat().st_size < 2000
    recorded = Recorded(tmp_path, 0)
    rows, batch, turn = recorded.get("batch", (0, 0, 0))
    assert batch["x"].tolist() == [5, 6, 7] and torch.equal(batch["odd"], odd)
    assert recorded.get("batch", (0, 0, 1)) == (0, None, 1)
    assert recorded.keys("batch") == [(0, 0, 0), (0, 0, 1)]


def test_a_killed_rank_has_recorded_what_it_had(tmp_path):
    recording = Recording(tmp_path, 0)
    for step in range(3):
        recording.keep("bits", step, {"weight": step})
    recording.close()
    path = tmp_path / "rank0.pickle"
    path.write_bytes(path.read_bytes()[:-1])
    assert Recorded(tmp_path, 0).steps == 2


# ---- Names and steps
def test_names_are_those_of_the_model():
    assert plain_name("module._orig_mod.module.0.weight") == "0.weight"
    assert (
        plain_name("layers._checkpoint_wrapped_module.module.bias").count("module") == 1
    )
    weights = Weights({})
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    assert weights.see_module(one) == ["weight", "bias"]
    assert weights.see_module(nn.Sequential(one)) == []
    assert weights.see_module(two) == ["weight#2", "bias#2"]
    assert weights.see_optimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], 1)) == [
        "parameter 0"
    ]
    alone = Weights({"model.0.weight": (2, 2), "model.1.weight": (3, 2)})
    assert alone.see_module(nn.Linear(2, 3, bias=False)) == ["model.1.weight"]
    assert alone.see_module(nn.Sequential(nn.Linear(2, 2, False))) == ["model.0.weight"]


@pytest.fixture
def steps(tmp_path):
    steps = Steps(trace.LaunchOptions(record=str(tmp_path)), tmp_path, 0)
    steps.folder = tmp_path
    yield steps
    steps.close(nothing)


def nothing(step):
    """Nothing else is known when a step ends."""


def train(steps, model, *optimizers, after=nothing):
    steps.begin(nothing)
    steps.see_module(model)
    model(torch.ones(1, 2)).sum().backward()
    for optimizer in optimizers:
        steps.optimize(optimizer, True)
        optimizer.step()
        steps.end(optimizer, nothing)
    after(model)


def clamp(model):
    model.weight.data.clamp_(-1e-3, 1e-3)


def test_several_optimizers_make_one_step(steps, tmp_path):
    model = nn.Linear(2, 1)
    both = [torch.optim.SGD([weight], 0.1) for weight in (model.weight, model.bias)]
    train(steps, model, *both)
    train(steps, model, both[0])  # the other one is frozen
    written = trace.read_trace(tmp_path, 0).steps
    assert [step.trained for step in written] == [["weight", "bias"], ["weight"]]
    assert written[0].rates == {"weight": 0.1, "bias": 0.1}
    assert written[0].gradient_values == 3 and set(written[0].bits) == {
        "weight",
        "bias",
    }
    start = trace.read_trace(tmp_path, 0).starts[0]
    assert start.step == 0 and set(start.bits) == {"weight", "bias"}


def test_gradients_are_known_as_they_were_before_any_clipping(steps):
    model = nn.Linear(2, 1)
    steps.see_module(model)
    model(torch.ones(1, 2)).sum().backward()
    for weight in model.parameters():  # one after another
        steps.clip()
        weight.grad *= 0.5
    assert steps.unclipped["weight"].tolist() == [[1, 1]]
    assert steps.unclipped["bias"].tolist() == [1]


def test_what_changes_weights_after_the_optimizer_belongs_to_the_step(steps, tmp_path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(steps, model, optimizer, after=clamp)
    before = trace.read_trace(tmp_path, 0).steps[0].bits
    steps.begin(nothing)
    (step,) = trace.read_trace(tmp_path, 0).steps
    assert step.bits["weight"] == checksum(model.weight) != before["weight"]
    assert step.bits["bias"] == before["bias"]


def reference(tmp_path, kind=Reference, **options):
    return kind(trace.LaunchOptions(reference=str(tmp_path), **options), 0)


def test_a_step_is_compared_with_that_of_the_reference(steps, tmp_path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        train(steps, model, optimizer, after=clamp)
        optimizer.zero_grad()
    steps.begin(nothing)
    steps.close(nothing)
    other = reference(tmp_path)
    values = steps.weights.values
    gradients = {"weight": torch.full((1, 2), 2.0)}  # they were 1 there
    before, after = [dict(other.values_before(place)) for place in (1, 2)]
    changes = {"weight": after["weight"] - before["weight"]}
    assert changes["weight"].abs().max() < 0.01  # -0.1 by the optimizer, and clamped
    tables = other.compare(1, gradients, {}, changes, values)
    assert tables[0]["weight"].off == pytest.approx(2)
    assert tables[0]["bias"] == trace.Comparison(1, 0, 0, 1)  # it has none here
    assert tables[1] == {}
    assert tables[2]["weight"].off == pytest.approx(0, abs=1e-12)
    assert tables[3]["weight"].off == 0 and tables[3]["weight"].aa > 0
    assert (other.place(1), other.place(2)) == (1, -1)
    again = reference(tmp_path, Relaunch, again=True)
    again.find_offset(set(steps.weights.bits.values()))
    assert again.offset is None  # these are the weights at the end
    again.find_offset({checksum(value) for value in again.values_before(1).values()})
    assert (again.offset, again.place(0), again.place(1)) == (1, 1, -1)


def test_a_relaunch_begins_behind_steps_that_changed_nothing(tmp_path):
    """By a rate of 0: such as at the end of an epoch. But the first weights are done
    none, though a warm-up begins with a rate of 0."""
    recording = Recording(tmp_path, 0)
    recording.keep("start", "weight", torch.zeros(1))
    starts = checksum(torch.zeros(1))
    for number, bits in enumerate((starts, 1, 1, 2)):
        recording.keep("bits", number, {"weight": bits})
    recording.close()
    again = reference(tmp_path, Relaunch, again=True)
    for bits, place in ((starts, 0), (1, 3), (2, None)):
        again.find_offset({bits})
        assert again.offset == place


def test_a_replay_joins_the_batches_of_a_step(tmp_path):
    for rank in (0, 1):
        recording = Recording(tmp_path, rank)
        recording.keep("length", 0, (8, 2))
        recording.keep("bits", 0, {})
        for place in (0, 1):
            x = torch.arange(2) + 10 * rank + 100 * place
            recording.keep("batch", (0, 3, place), (2, x, place))
        recording.close()
    how = trace.Replay([[(0, 3)], [(0, 3)]], "rank by rank")
    replay = reference(tmp_path, Replay, replay=how, reference_ranks=2)
    assert replay.gives((0, 3)) and not replay.gives((0, 2))
    given = [batch.tolist() for batch in replay.give((0, 3))]
    assert given == [[0, 1, 10, 11], [100, 101, 110, 111]]
    assert replay.length(0, None) == replay.length(None, 8) == 2
    assert replay.length(1, 8) is replay.length(None, 9) is None
    how.order = "in turn"
    replay = reference(tmp_path, Replay, replay=how, reference_ranks=2)
    assert [batch[0].item() for batch in replay.give((0, 3))] == [0, 10, 100, 110]


def test_a_step_that_prepares_loading_is_none():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight], lr=0.0)
    weight.grad = torch.zeros(2)
    assert not can_change_weights(optimizer)
    weight.grad += 1
    assert can_change_weights(optimizer)


# ---- What replaces functions of torch: each in a process of its own
ALONE = """
import sys
sys.path.insert(0, {root!r})
import random, numpy, torch
from torch import nn
from torch.utils.data import DataLoader
"""
GENERATORS = """
from ddp_check.rank.generators import Generators
seen = Generators()
mine, own = numpy.random.default_rng(3), random.Random(2)
old = numpy.random.RandomState(1)
assert seen.take() == {}
mine.random(), own.random(), old.rand(), random.random(), numpy.random.rand()
names = list(seen.take())
assert names == ["random", "numpy.random", "numpy.random.default_rng()",
    "random.Random()", "numpy.random.RandomState()"], names
assert seen.take() == {}
with seen.pause():  # while a loader yields
    random.random(), mine.random(), numpy.random.default_rng(5).random()
assert seen.take() == {}
assert isinstance(mine, numpy.random.Generator)
del mine
seen.take()
assert "numpy.random.default_rng()" not in seen.known
"""
IN_FLOAT64 = """
from ddp_check.rank.float64 import cast_everything
cast = cast_everything(torch.float64)
model = nn.Linear(2, 2).half()
x = torch.from_numpy(numpy.ones((3, 2), numpy.float32))
torch.save({"x": torch.ones(2).numpy().astype("float32")}, "x.pt")
with torch.autocast("cpu"):
    y = model(x.float())
made = torch.zeros(2, dtype=torch.bfloat16), torch.tensor(numpy.float32(1))
for tensor in (x, y, *made):
    assert tensor.dtype == torch.float64
scaler = torch.amp.GradScaler("cpu")
optimizer = torch.optim.SGD(model.parameters(), 1.0)
scaler.scale(y.sum()).backward()
before = model.bias.detach().clone()
scaler.unscale_(optimizer), scaler.step(optimizer), scaler.update()
assert torch.allclose(model.bias, before - 3)
assert scaler.get_scale() == scaler.state_dict()["scale"] == 1
"""
IN_FLOAT32 = """
from ddp_check.rank.float64 import cast_everything
cast_everything(torch.float32)
with torch.autocast("cpu", torch.bfloat16):
    assert nn.Linear(2, 2).bfloat16()(torch.ones(1, 2)).dtype == torch.float32
assert torch.ones(1).double().dtype == torch.float64
"""
GPUS = """
from ddp_check.rank.answers import CannotImitate
from ddp_check.rank.gpus import pretend_that_the_cpu_is_a_gpu
pretend_that_the_cpu_is_a_gpu(2)
x = torch.ones(4)
assert x.cuda().is_cuda and x.to(1) is not None
torch.ones(4, 4)[:, :2].cuda().view(-1)  # a move makes it dense
activities = torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA
with torch.profiler.profile(activities=activities) as profile:
    x.sum()
assert profile.profiler.use_device is None
assert torch.cuda.get_device_capability() == (8, 0) and torch.cuda.is_bf16_supported()
assert torch.cuda.get_device_properties(0).total_memory > 0
assert torch.cuda.max_memory_allocated() == 0 and len(torch.cuda.mem_get_info()) == 2
torch.cuda.reset_peak_memory_stats()
torch.cuda.set_rng_state(torch.cuda.get_rng_state_all()[0])
torch.cuda.manual_seed_all(0)
torch.cuda.Event(enable_timing=True).record()
torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
with torch.cuda.stream(stream=torch.cuda.Stream()):
    pass
with torch.cuda.device(0), torch.device("cuda"):
    torch.zeros(2)
torch.Generator(device="cuda")
torch.amp.GradScaler("cuda").scale(x.sum())
with torch.cuda.amp.autocast():
    torch.cuda.FloatTensor([1.0])
torch.tensor([1], device=0)
nn.Linear(2, 2, device="cuda")
nn.utils.rnn.pack_sequence([x]).to("cuda")
nn.DataParallel(nn.Linear(4, 1))(x)
torch.cuda.nccl.version()
torch.save(x, "x.pt")
torch.load("x.pt", "cuda:1", weights_only=True)
torch.load("x.pt", lambda storage, place: storage.cuda(1), weights_only=True)
torch.set_default_device("cuda")
torch.zeros(2)
find = torch.cuda.get_device_properties
for use in (torch.cuda.set_device, x.to, nn.Linear(2, 2).to, x.cuda, find):
    try:
        use("cuda:2")
    except RuntimeError as error:
        assert "invalid device ordinal" in str(error)
    else:
        raise AssertionError(use)
try:
    torch.cuda.CUDAGraph()
except CannotImitate:
    pass
else:
    raise AssertionError
"""


VISIBLE = """
import os
from ddp_check.rank.gpus import pretend_that_the_cpu_is_a_gpu
pretend_that_the_cpu_is_a_gpu(2)
os.environ |= {"CUDA_VISIBLE_DEVICES": "7", "LOCAL_WORLD_SIZE": "2"}
assert torch.cuda.device_count() == 1
try:
    torch.cuda.set_device(1)
except RuntimeError as error:
    assert "with CUDA_VISIBLE_DEVICES=7" in str(error)
else:
    raise AssertionError
os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
torch.cuda.set_device(1)
os.environ["CUDA_VISIBLE_DEVICES"] = "7"  # too late: CUDA has started
assert torch.cuda.device_count() == 2
torch.cuda.set_device(0)
"""
RANKS = """
import os
import torch.distributed as dist
from ddp_check.rank.gpus import pretend_that_the_cpu_is_a_gpu
for rank in (1, 2, 0):
    if rank and os.fork() == 0:
        break
pretend_that_the_cpu_is_a_gpu(3)
dist.init_process_group("nccl", "file://" + os.path.abspath("x"), None, 3, rank)
{}
dist.destroy_process_group()
assert rank or os.wait()[1] == os.wait()[1] == 0
"""
DDP_INSIDE = """
from ddp_check.rank.weights import Weights
class Task(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        self.module = nn.Linear(2, 2, bias=False)
class OwnDistributedDataParallel(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = Task()
for wrapped in (Task(), OwnDistributedDataParallel()):
    names = Weights({}).see_module(nn.Sequential(wrapped))
    assert names == ["0.part.weight", "0.part.bias", "0.module.weight"], names
"""
GATHER = """
of_all = [torch.zeros(1) for _ in range(3)]
dist.all_gather(of_all, torch.tensor(rank + 1.0))  # a number, as NCCL takes it
assert of_all == [1, 2, 3]
mean = torch.tensor(3 + 2 * (rank > 0))
dist.all_reduce(mean, dist.ReduceOp.AVG)  # of integers, as Lightning has
assert mean == 4
"""
SYNC_NORM = """
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
pair = dist.new_group([0, 2])
parts = [torch.randn(3, 4, 5, 6), torch.randn(2, 4, 7, 3)]
values = [part.transpose(0, 1).flatten(1) for part in parts]
rows = torch.cat(values, 1).t().requires_grad_()
expected = nn.BatchNorm1d(4)(rows).relu()
(expected ** 2).sum().backward()
first = len(values[0].t())
mine = slice(first, None) if rank else slice(first)
if rank != 1:
    x = parts[rank // 2].requires_grad_()
    norm = nn.SyncBatchNorm(4, process_group=pair)
    y = nn.ReLU(inplace=True)(norm(x))
    (y ** 2).sum().backward()
    for tensor, all_rows in ((y, expected), (x.grad, rows.grad)):
        assert torch.allclose(tensor.transpose(0, 1).flatten(1).t(), all_rows[mine])
"""
MASKED = """
import os
from ddp_check.rank.gpus import pretend_that_the_cpu_is_a_gpu
pretend_that_the_cpu_is_a_gpu(2)
os.environ |= {"CUDA_VISIBLE_DEVICES": "0", "LOCAL_WORLD_SIZE": "2"}
torch.cuda.current_device()  # as init_process_group() does
try:
    torch.cuda.set_device(1)
except RuntimeError as error:
    assert "with CUDA_VISIBLE_DEVICES=0" in str(error)
else:
    raise AssertionError
"""
HIDDEN = """
from ddp_check.rank.float64 import cast_everything
cast_everything(torch.float64)
from torch.overrides import (
    has_torch_function as one_of,
    has_torch_function_unary as unary,
    has_torch_function_variadic as variadic,
)
class Own(torch.Tensor):
    pass
plain, own = torch.ones(2), torch.ones(2).as_subclass(Own)
weight = nn.Parameter(plain)
assert not (one_of((plain, weight, 1)) or unary(plain) or variadic(plain, weight))
assert one_of((plain, own)) and unary(own) and variadic(plain, own)
"""
AT_ONCE = """
import os, socket
from ddp_check.rank.run import write_at_once
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
if os.fork() == 0:
    os.dup2(theirs.fileno(), 2)
    sys.excepthook = write_at_once
    raise ValueError("ended: \\nno GPU!\\n")
os.wait()
packet = ours.recv(10000).decode()
assert packet.startswith("Traceback")
assert packet.endswith("ValueError: ended: no GPU!\\n")
"""
WATCHED = """
from torch.utils.data import DataLoader
from ddp_check import trace
from ddp_check.rank.watch import Watcher
watcher = Watcher(trace.LaunchOptions(), ".", 0, lambda tensor: tensor)
model = nn.Linear(2, 1)
def train(optimizer):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
def steps():
    return len(trace.read_trace(".", 0).steps)
"""
GPU_ASKED_FOR = """
for batch in DataLoader(torch.ones(2, 2), pin_memory=True):
    train(torch.optim.SGD(model.parameters(), 0.1))
assert "cuda" not in watcher.marks  # torch has asked, not the script
{}
assert "cuda" in watcher.marks
"""
FAILED_STEP = """
class Fails(torch.optim.SGD):
    def step(self):
        raise ValueError
try:
    train(Fails(model.parameters(), 0.1))
except ValueError:
    pass
optimizer = torch.optim.SGD(model.parameters(), 0.1)
train(optimizer), train(optimizer)
assert steps() == 2 and watcher.depth == 0
def closure():
    if steps() == 2 and not failed:
        failed.append(True)
        raise ValueError
    optimizer.zero_grad()
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    return loss
failed = []
try:
    optimizer.step(closure)
except ValueError:
    pass
optimizer.step(closure), optimizer.step(closure)
assert failed and steps() == 4 and watcher.depth == 0
"""
TRAINER = """
class Trainer(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model
    def forward(self):
        train(torch.optim.SGD(self.model.parameters(), 0.1))
Trainer()()
(step,) = trace.read_trace(".", 0).steps
assert len(step.inputs) == 1  # the row that the model got
"""
NESTED_STEP = """
class Outer(torch.optim.Optimizer):
    def step(self):
        inner.step()
inner = torch.optim.SGD(model.parameters(), 0.1)
outer = Outer(inner.param_groups, {"lr": 0.1})
train(outer), train(outer)
assert steps() == 2
"""


def test_one_process_keeps_the_number_of_ranks():
    group = {"lr": 1.0, "betas": (0.9, 0.9), "warmup": 3, "world_size": 1}
    optimizer = torch.optim.SGD([{"params": torch.ones(1), **group}])
    recorded = {"lr": 2.0, "betas": (0.8, 0.9), "warmup": 2, "world_size": 2}
    set_options(optimizer, [recorded], ranks=2)
    assert optimizer.param_groups[0].items() >= (recorded | {"world_size": 1}).items()


@processes
@pytest.mark.parametrize(
    "code",
    [
        *(GENERATORS, IN_FLOAT64, IN_FLOAT32, GPUS, VISIBLE, MASKED, HIDDEN, AT_ONCE),
        RANKS.format(SYNC_NORM + GATHER + DDP_INSIDE),
        WATCHED + GPU_ASKED_FOR.format("torch.accelerator.is_available()"),
        WATCHED + GPU_ASKED_FOR.format("torch.cuda.device_count()"),
        WATCHED + FAILED_STEP,
        WATCHED + NESTED_STEP,
        WATCHED + TRAINER,
    ],
)
def test_in_a_process_of_its_own(code, tmp_path):
    words = [sys.executable, "-W", "ignore", "-c", ALONE.format(root=str(ROOT)) + code]
    launch(*words, cwd=tmp_path).end()
