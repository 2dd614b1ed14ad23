"""Parameters that several stages hold, and the consequences for their gradients."""

from __future__ import annotations

from lightning_swarm.protocol.messages.run import StageManifest
from lightning_swarm.protocol.tied_tensors import TiedTensors

SIZES = {"embed": [4, 2], "first": [3], "second": [5], "last": [2], "shared": [], "cold": [7]}


def stage(*names: str) -> StageManifest:
    parameters = [(name, SIZES[name], "float32") for name in names]
    return StageManifest(first_block=0, end_block=1, parameters=parameters, roster=[])


STAGES = [stage("embed", "first", "cold"), stage("second", "shared"), stage("embed", "shared", "last", "cold")]
TRAINED = SIZES.keys() - {"cold"}


def test_what_stages_have_in_common() -> None:
    ties = TiedTensors(STAGES)
    assert ties
    assert ties.groups() == [[0, 2], [1, 2]]
    assert [ties.of(index) for index in range(3)] == [["embed", "cold"], ["shared"], ["embed", "shared", "cold"]]
    assert [ties.partners(index, TRAINED) for index in range(3)] == [[2], [2], [0, 1]]
    assert [ties.partners(index, {"embed", "last"}) for index in range(3)] == [[2], [], [0]]
    assert not TiedTensors(STAGES[:2])
    assert TiedTensors(STAGES[:2]).groups() == []


def test_where_they_are_in_flat_gradients() -> None:
    ties = TiedTensors(STAGES)
    assert ties.slices(0, TRAINED) == {"embed": slice(0, 8)}
    assert ties.slices(1, TRAINED) == {"shared": slice(5, 6)}
    assert ties.slices(2, TRAINED) == {"embed": slice(0, 8), "shared": slice(8, 9)}
    assert ties.slices(2, SIZES.keys()) == {"embed": slice(0, 8), "shared": slice(8, 9), "cold": slice(11, 18)}


def test_the_first_stage_that_holds_one_counts_it() -> None:
    ties = TiedTensors(STAGES)
    assert ties.counted(0, TRAINED) == [slice(0, 11)]
    assert ties.counted(1, TRAINED) == [slice(0, 6)]
    assert ties.counted(2, TRAINED) == [slice(9, 11)]
    assert ties.counted(2, SIZES.keys()) == [slice(9, 11)]
    assert ties.counted(2, {"embed"}) == []


def test_a_gradient_in_one_stage_is_one_for_all() -> None:
    ties = TiedTensors(STAGES)
    flags = {0: [False, True], 2: [True, False, False]}
    assert ties.touched(0, TRAINED, flags) == [True, True]
    assert ties.touched(2, TRAINED, {**flags, 1: [False, True]}) == [True, True, False]
