"""Batches are cut into microbatches, joined again, and, if large, sent one after the other."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lightning_swarm.client.pipeline.microbatch_run import turns_apart
from lightning_swarm.client.pipeline.microbatches import (
    CallArguments,
    concat,
    concat_gradients,
    num_rows,
    split,
    split_gradients,
)
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.network import SMALL_BYTES
from lightning_swarm.protocol.serialization import Tree, unflatten

X = torch.arange(10.0).view(5, 2)
Y = torch.arange(5)
MASK = torch.ones(3, 3)


@dataclass
class Part:
    num_rows: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def count_rows(args: tuple[Any, ...], kwargs: dict[str, Any], shared: tuple[str, ...] = ()) -> int:
    return num_rows(CallArguments.of(args, kwargs), shared)


def parts(size: int, *args: Any, shared: tuple[str, ...] = (), **kwargs: Any) -> list[Part]:
    arguments = CallArguments.of(args, kwargs)
    found = split(arguments, rows=num_rows(arguments, shared), size=size, shared=shared)
    return [Part(part.num_rows, unflatten(arguments.structure, part.tensors), part.kwargs) for part in found]


def joined(outputs: Any, sizes: list[int]) -> Any:
    return unflatten(*concat(outputs, sizes))


def test_rows_are_split_and_the_last_microbatch_may_be_smaller() -> None:
    microbatches = parts(2, X, {"y": (Y, "name", None)}, targets=Y, mask=MASK, scale=2.0, shared=("mask",))

    assert [m.num_rows for m in microbatches] == [2, 2, 1]
    last = microbatches[2]
    assert torch.equal(last.args[0], X[4:])
    assert torch.equal(last.args[1]["y"][0], Y[4:])
    assert last.args[1]["y"][1:] == ("name", None)
    assert torch.equal(last.kwargs["targets"], Y[4:])
    assert last.kwargs["mask"] is MASK
    assert last.kwargs["scale"] == 2.0
    assert list(last.kwargs) == ["targets", "mask", "scale"]


def test_what_is_broadcast_goes_whole() -> None:
    tables, heat = (torch.ones(1, 7), torch.zeros(1, 5)), torch.tensor(0.5)

    microbatches = parts(2, X, tables=tables, heat=heat, mixed=[Y, tables[0]])

    assert all(m.kwargs["tables"] == tables for m in microbatches)
    assert all(m.kwargs["heat"] is heat for m in microbatches)
    assert [len(m.kwargs["mixed"][0]) for m in microbatches] == [2, 2, 1]
    assert all(m.kwargs["mixed"][1] is tables[0] for m in microbatches)
    assert count_rows((X,), {"heat": heat, "tables": tables}) == 5


def test_values_of_one_argument_are_shared_by_its_name() -> None:
    microbatches = parts(2, X, **{"mask": MASK, "mask#2": MASK}, shared=("mask",))

    assert all(m.kwargs["mask#2"] is MASK for m in microbatches)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 100])
def test_split_copies_nothing_and_concat_undoes_it(size: int) -> None:
    microbatches = parts(size, X)
    sizes = [m.num_rows for m in microbatches]

    assert sum(sizes) == 5
    assert all(m.args[0].untyped_storage().data_ptr() == X.untyped_storage().data_ptr() for m in microbatches)
    assert torch.equal(joined([m.args[0] for m in microbatches], sizes), X)


def test_one_microbatch_is_not_copied() -> None:
    assert joined([X], [5]) is X


def test_a_shared_value_may_have_any_shape() -> None:
    (only,) = parts(5, X, config=[MASK, "name"], factor=torch.tensor(2.0), shared=("config", "factor", "absent"))

    assert only.kwargs["config"][0] is MASK
    assert only.kwargs["config"][1] == "name"
    assert count_rows((X,), {"factor": torch.tensor(2.0)}, ("factor",)) == 5


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {"x": X}, ["at least one positional tensor", "got 0", "Pass the batch first"]),
        ((1, None), {"x": X}, ["at least one positional tensor", "got 2", "Pass the batch first"]),
        ((X, Y[:3]), {}, ["same length", "5 in positional argument 0 and 3 in positional argument 1", "as a keyword"]),
        ((X,), {"mask": MASK}, ["same length", "3 in `mask`", "name it in `shared=(...)`"]),
        ((X, torch.tensor(1.0)), {}, ["0-dimensional tensor in positional argument 1", "Pass it as a keyword"]),
        ((X[:0],), {}, ["at least one row", "got 0 in positional argument 0", "Skip"]),
        ((X, object()), {}, ["must be tensors, None", "got builtins.object", "Convert it"]),
    ],
)
def test_what_cannot_be_split_is_refused(args: Any, kwargs: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parts(2, *args, **kwargs)

    assert all(word in str(error.value) for word in words), str(error.value)


def test_size_must_be_positive() -> None:
    with pytest.raises(ConfigError, match=r"`microbatch_size` must be at least 1, got 0\. Raise it"):
        parts(0, X)


def test_concat_works_leaf_by_leaf() -> None:
    outputs = [{"loss": X[:3, 0], "rest": (X[:3], "kind")}, {"loss": X[3:, 0], "rest": (X[3:], "kind")}]

    whole = joined(outputs, [3, 2])

    assert torch.equal(whole["loss"], X[:, 0])
    assert torch.equal(whole["rest"][0], X)
    assert whole["rest"][1] == "kind"


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ([X.sum(), X.sum()], ["0-dimensional", "reduction='none'", "reduce them in training_step"]),
        ([X[:3], X[2:]], ["each of the 2 samples of microbatch 1", "got shape (3, 2)", "reduction='none'"]),
        ([(X[:3],), [X[3:]]], ["same structure", "['tuple'", "['list'", "Return tensors"]),
        ([(X[:3], 0.5), (X[3:], 0.6)], ["equal constants", "0.6", "Return tensors"]),
        ([X[:3], X[3:, :1]], ["same shape and dtype", "(2, 1)", "Pad"]),
        ([X[:3], X[3:].double()], ["same shape and dtype", "torch.float64", "Pad"]),
    ],
)
def test_outputs_that_do_not_fit_are_refused(outputs: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        concat(outputs, [3, 2])

    assert all(word in str(error.value) for word in words), str(error.value)


def test_gradients_are_split_as_views_and_joined_again() -> None:
    gradients = [X, None, torch.ones(1).expand(5)]

    split_up = split_gradients(gradients, [3, 2])

    assert [len(g) for g in split_up] == [3, 3]
    assert split_up[0][1] is None
    assert split_up[1][0] is not None
    assert split_up[1][0].untyped_storage().data_ptr() == X.untyped_storage().data_ptr()
    whole = concat_gradients(split_up, [3, 2])
    assert whole[0] is not None
    assert torch.equal(whole[0], X)
    assert whole[1] is None


def test_a_microbatch_without_a_gradient_counts_as_zero() -> None:
    (whole,) = concat_gradients([(None,), (X[3:],)], [3, 2])

    assert whole is not None
    assert torch.equal(whole, torch.cat([torch.zeros(3, 2), X[3:]]))


@pytest.mark.parametrize(
    ("sent", "are_apart"),
    [
        (torch.zeros(SMALL_BYTES, dtype=torch.uint8), False),
        (torch.zeros(SMALL_BYTES + 1, dtype=torch.uint8), True),
        ({"hidden": torch.zeros(SMALL_BYTES, dtype=torch.uint8), "mask": [torch.zeros(1)]}, True),
        ([], False),
    ],
    ids=["small", "large", "large together", "nothing"],
)
def test_what_does_not_travel_beside_calls_begins_apart(sent: Tree, are_apart: bool) -> None:
    assert (turns_apart(sent) > 0) == are_apart
