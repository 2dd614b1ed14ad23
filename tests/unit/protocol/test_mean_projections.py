"""Projections of sums and means: honest values always pass, false values never do."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from msgspec.structs import replace as replaced
from torch import Tensor

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.mean_projections import (
    DType,
    StageScale,
    agreed_norm,
    check_shape,
    choose_accused,
    is_sound,
    num_buckets,
    same_numbers,
)
from lightning_swarm.protocol.messages.parts import Contradiction, PartProjections
from lightning_swarm.server.audit.projection import (
    bucket_norms,
    part_digests,
    parts_of,
    project_parts,
    sum_parts,
)
from lightning_swarm.server.averaging import deterministic
from lightning_swarm.server.averaging.all_reduce import squared_norm

DTYPES: dict[DType, torch.dtype] = {"float32": torch.float32, "float64": torch.float64}
WEIGHT = 12.7


def project(sums: Sequence[Tensor], mean: Tensor, seed: int) -> list[PartProjections]:
    """Return the answers of honest members."""
    count, size = len(sums), num_buckets(len(sums))
    means = project_parts(parts_of(mean, count), seed, num_buckets=size)
    return [
        PartProjections(
            stage_index=0,
            sums=project_parts(sum_parts(own, count), seed, num_buckets=size),
            norms=bucket_norms(sum_parts(own, count), num_buckets=size),
            means=means,
            parts=part_digests(mean, count),
            given=[bytes(32)] * count,
            squared_norm=squared_norm(mean),
        )
        for own in sums
    ]


def mean_of(sums: Sequence[Tensor], gradient_scale: float = 1.0) -> Tensor:
    """Return the mean as servers compute it."""
    total = sums[0]
    for own in sums[1:]:
        total = torch.add(total, own)
    mean = torch.div(total, WEIGHT)
    return mean if gradient_scale == 1.0 else mean / gradient_scale


def sized(values: Tensor, rng: random.Random) -> Tensor:
    """Scale values to any size of the dtype that does not overflow when summed."""
    highest = 120 if values.dtype == torch.float32 else 1000
    return values * 2.0 ** rng.uniform(-1.2 * highest, 0.9 * highest)


def spread(values: Tensor, rng: random.Random) -> Tensor:
    """Give elements very different sizes."""
    return values * torch.exp(torch.randn(len(values), dtype=torch.float64) * rng.choice([1.0, 10.0])).to(values.dtype)


SHAPES: dict[str, Callable[[int, random.Random], Tensor]] = {
    "normal": lambda length, _: torch.randn(length, dtype=torch.float64),
    "equal": lambda length, rng: torch.full((length,), rng.uniform(1.0, 2.0), dtype=torch.float64),
    "sparse": lambda length, _: torch.randn(length, dtype=torch.float64) * (torch.rand(length) < 0.01),
    "one": lambda length, rng: torch.nn.functional.one_hot(torch.tensor(rng.randrange(length)), length).double(),
    "spread": lambda length, rng: spread(torch.randn(length, dtype=torch.float64), rng),
    "cancelling": lambda length, rng: torch.full((length,), rng.choice([1e6, -1e6 + 1e-3]), dtype=torch.float64),
    "nothing": lambda length, _: torch.zeros(length, dtype=torch.float64),
}


def honest_cases(dtype: DType, number: int) -> Iterator[tuple[list[Tensor], Tensor, StageScale]]:
    rng = random.Random(f"{dtype} {number}")
    torch.manual_seed(rng.getrandbits(60))
    for _ in range(200):
        count, length = rng.choice([1, 2, 3, 4, 7, 16]), rng.choice([1, 2, 5, 30, 300, 3000])
        shape = SHAPES[rng.choice([*SHAPES])]
        sums = [sized(shape(length, rng).to(DTYPES[dtype]), rng) for _ in range(count)]
        if rng.random() < 0.5:  # all sums of one size
            factor = sized(torch.ones(1, dtype=DTYPES[dtype]), rng)
            sums = [shape(length, rng).to(DTYPES[dtype]) * factor for _ in range(count)]
        gradient_scale = rng.choice([1.0, 1.0, 1024.0, 3.0])
        mean = mean_of(sums, gradient_scale)
        yield sums, mean, StageScale(length, dtype, WEIGHT * gradient_scale)


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_honest_passes(dtype: DType, number: int) -> None:
    passed = 0
    for sums, mean, scale in honest_cases(dtype, number):
        answers = project(sums, mean, random.getrandbits(62))
        if not (mean.isfinite().all() and math.isfinite(squared_norm(mean))):
            assert not is_sound(answers, scale)
            continue
        assert is_sound(answers, scale), (sums, mean)
        passed += 1
    assert passed > 120


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_honest_in_fixed_point_passes(dtype: DType) -> None:
    rng = random.Random(dtype)
    torch.manual_seed(3)
    for _ in range(200):
        count, length = rng.choice([1, 2, 3, 4, 16]), rng.choice([1, 2, 30, 300, 3000])
        sums = [deterministic.empty_sum(length, torch.device("cpu")) for _ in range(count)]
        size = 2.0 ** rng.uniform(-60, 20)
        for own in sums:
            for _ in range(rng.randrange(3)):
                deterministic.add(own[:, :-1], torch.randn(length, dtype=torch.float64) * size, rng.uniform(0.0, 2.0))
        total = torch.stack(sums).sum(dim=0)[:, :-1]
        mean = deterministic.quotient(total, WEIGHT).to(DTYPES[dtype])
        answers = project(sums, mean, rng.getrandbits(62))
        scale = StageScale(length, dtype, WEIGHT)
        assert is_sound(answers, scale)
        if float(mean.abs().max()) > 2**16 * deterministic.FINE:  # otherwise it is within rounding
            place = int(mean.abs().argmax())
            mean[place] *= 1.001
            assert not is_sound(project(sums, mean, rng.getrandbits(62)), scale)


def lies(length: int, rng: random.Random) -> dict[str, Callable[[Tensor], Tensor]]:
    place = rng.randrange(length)

    def element(mean: Tensor) -> Tensor:
        mean[place] *= 1.001
        return mean

    return {
        "an element": element,
        "all": lambda mean: mean * 1.001,
        "nothing": torch.zeros_like,
        "sign": torch.neg,
        "noise": lambda mean: mean + 1e-4 * torch.randn(length, dtype=mean.dtype) * mean.abs().mean(),
        "order": lambda mean: mean.flip(0),
    }


@pytest.mark.each_value
@pytest.mark.parametrize("count", [1, 2, 4, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_false_mean_does_not_pass(dtype: DType, count: int) -> None:
    rng = random.Random(f"{dtype} {count}")
    torch.manual_seed(count)
    for length in (30, 3000, 30000):
        for name, lie in lies(length, rng).items():
            # No element is near zero, where a loss would be within the rounding of the other elements.
            sums = [torch.randn(length).sign() + torch.randn(length) / 10 for _ in range(count)]
            sums[0] += 2 * count * sums[0].sign()
            sums = [own.to(DTYPES[dtype]) for own in sums]
            mean = lie(mean_of(sums))
            assert not is_sound(project(sums, mean, rng.getrandbits(62)), StageScale(length, dtype, WEIGHT)), name


def test_one_element_of_millions_is_found() -> None:
    """The element is of typical size and changed by a thousandth; it is found nine times of ten."""
    count, length = 4, 1 << 22
    torch.manual_seed(0)
    sums = [torch.randn(length) for _ in range(count)]
    mean, scale = mean_of(sums), StageScale(length, "float32", WEIGHT)
    size, seed = num_buckets(count), 7
    answers = project(sums, mean, seed)
    assert is_sound(answers, scale)
    rng, found = random.Random(0), 0
    for _ in range(200):
        place, bucket = (rng.randrange(length) for _ in range(2))
        part, bucket = divmod(place, length // count)
        means = [*answers[0].means]
        means[part * size + bucket % size] += 1e-3 * float(mean[place])
        found += not is_sound([replaced(answers[0], means=means), *answers[1:]], scale)
    assert found > 180


def test_all_members_must_hold_the_same() -> None:
    torch.manual_seed(0)
    sums = [torch.randn(100) for _ in range(3)]
    honest, scale = project(sums, mean_of(sums), 7), StageScale(100, "float32", WEIGHT)
    assert is_sound(honest, scale)
    changes: list[dict[str, object]] = [
        {"parts": [bytes(32), *honest[1].parts[1:]]},
        {"squared_norm": 1.00001 * honest[1].squared_norm},
        {"squared_norm": math.nan},
        {"squared_norm": math.inf},
        {"means": [1.001 * number for number in honest[1].means]},
        {"sums": [1.001 * number for number in honest[1].sums]},
        {"norms": [math.inf for _ in honest[1].norms]},
    ]
    for change in changes:
        for place in range(3):
            answers = [*honest]
            answers[place] = replaced(answers[place], **change)
            assert not is_sound(answers, scale), change
    assert agreed_norm([replaced(honest[0], squared_norm=1e9), *honest[1:]]) == honest[1].squared_norm


def test_answers_of_another_form_are_refused() -> None:
    sums = [torch.randn(100) for _ in range(3)]
    answer = project(sums, mean_of(sums), 7)[0]
    check_shape(answer, 3)
    for change in (
        {"sums": answer.sums[1:]},
        {"norms": [*answer.norms, 1.0]},
        {"means": []},
        {"parts": answer.parts[1:]},
        {"given": [*answer.given, bytes(32)]},
    ):
        with pytest.raises(
            ProtocolError, match="a projection of 3 parts must have 768 numbers of each kind and 3 digests"
        ):
            check_shape(replaced(answer, **change), 3)
    for change in ({"norms": [-1.0, *answer.norms[1:]]}, {"squared_norm": -1.0}):
        with pytest.raises(ProtocolError, match="norms must not be negative"):
            check_shape(replaced(answer, **change), 3)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 64, 65, 1000])
def test_the_answers_of_large_rosters_stay_small(count: int) -> None:
    size = num_buckets(count)
    assert (1 << 20) % size == 0
    assert 512 < count * size <= max(1024, 16 * count)


def test_parts_are_those_of_the_all_reduce() -> None:
    for length in (0, 1, 7, 100):
        for count in (1, 3, 8):
            vector = torch.arange(length)
            bounds = StageScale(length, "float32", 1.0).bounds(count)
            parts = zip(parts_of(vector, count), bounds, strict=True)
            assert all(torch.equal(part, vector[one]) for part, one in parts)


def against(*pairs: str) -> list[Contradiction]:
    return [Contradiction(reducer=PeerId(one), other=PeerId(other), reason="so") for one, other in pairs]


def test_only_whom_most_contradict_is_accused() -> None:
    assert choose_accused([], 3) == {}
    assert choose_accused(against("ab"), 2) == {}
    assert choose_accused(against("ab", "ba"), 3) == {}
    assert choose_accused(against("ab", "cb"), 3) == {PeerId("b"): "so"}
    assert choose_accused(against("ba", "bc"), 4) == {}
    assert choose_accused(against("ba", "bc", "db"), 4) == {PeerId("b"): "so"}


def test_a_stage_in_which_all_contradict_each_other_keeps_its_members() -> None:
    """One of them may be honest, and a server must hold the stage."""
    assert choose_accused(against("ab", "ac", "bc"), 3) == {}
    assert set(choose_accused(against("ab", "ac", "bc", "da", "db", "dc"), 5)) == {*"abcd"}


def test_numbers_that_are_added_up_in_another_order_are_the_same() -> None:
    assert same_numbers([1.0, math.inf], [1.0 + 1e-12, math.nan])
    assert same_numbers([1e-12], [0.0], [1.0])
    assert not same_numbers([1e-12], [0.0])
    assert not same_numbers([1.0], [math.nan])
    assert not same_numbers([math.nan], [1.0])
    assert not same_numbers([1.001], [1.0])
    assert replace(StageScale(1, "float32", 2.0), divisor=3.0).smallest == torch.finfo(torch.float32).tiny
    assert StageScale(1, "float64", 2.0).smallest == torch.finfo(torch.float64).tiny
