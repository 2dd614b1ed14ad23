"""Selection of work for audits, and consequences of the auditors' findings."""

from __future__ import annotations

import math
import random
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_swarm.coordinator.audit.policy import (
    FORGIVEN_AFTER,
    IRREVERSIBLE_SHARE,
    PROBATION,
    WATCHED_STEPS,
    Screening,
    SilenceBackoff,
    Silences,
    StageHistory,
    StageProjection,
    Standing,
    Tolerance,
    Unit,
    WorkClaim,
    disagreeing,
    is_irreversible,
    read_claims,
    relative_deviation,
    screen,
    share_of_step,
    sum_tolerance,
)
from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.calls import Receipt
from lightning_swarm.protocol.messages.step import CLAIM_BYTES
from lightning_swarm.server.audit.handlers import magnitude_of
from lightning_swarm.server.audit.sketch import project

A, B, C, D = map(PeerId, "abcd")
RECEIPTS: list[Receipt] = [(0, 0, 0), (0, 1, 0), (4, 0, 0)]


def claim(*parts: str) -> WorkClaim:
    return WorkClaim(*(part.encode() for part in parts))


# ------------------------------------------------------------------ claims


def test_claims_come_in_the_order_of_their_receipts() -> None:
    packed = bytes(i for i in range(3) for _ in range(CLAIM_BYTES))
    found = read_claims(packed, {*RECEIPTS})
    assert [found[receipt].output[0] for receipt in RECEIPTS] == [0, 1, 2]


@pytest.mark.parametrize("length", [0, 3 * CLAIM_BYTES - 1, 4 * CLAIM_BYTES])
def test_another_number_of_claims_is_refused(length: int) -> None:
    with pytest.raises(ProtocolError, match="each of 3 microbatches has a claim"):
        read_claims(bytes(length), {*RECEIPTS})


def test_servers_that_say_different_things_of_a_transfer_are_found() -> None:
    one, two, three = RECEIPTS
    claims = {
        Unit(0, A): {one: claim("x", "y", "gy", "gx"), two: claim("x", "y", "gy", "gx")},
        Unit(0, B): {three: claim("x", "y", "gy", "gx")},
        Unit(1, C): {one: claim("y", "z", "gz", "gy"), three: claim("other", "z", "gz", "gy")},
        Unit(1, D): {two: claim("y", "z", "gz", "other")},
    }
    assert disagreeing(claims) == {
        two: {Unit(0, A), Unit(1, D)},
        three: {Unit(0, B), Unit(1, C)},
    }


# ------------------------------------------------------------------ the screen


def sketches_of(number: int, rng: np.random.Generator, *, noise: float = 1.0) -> dict[PeerId, list[float]]:
    signal = rng.normal(size=64)
    return {PeerId(f"p{i:02}"): (signal + noise * rng.normal(size=64)).tolist() for i in range(number)}


def like(sketches: dict[PeerId, list[float]]) -> StageHistory:
    """Return a history of steps like this one."""
    history = StageHistory()
    for _ in range(5):
        found = screen(sketches, dict.fromkeys(sketches, 1.0), history)
        history.note(found.norm, found.spread)
    return history


def suspects(sketches: dict[PeerId, list[float]], shares: dict[PeerId, float] | None = None) -> frozenset[PeerId]:
    rng = np.random.default_rng(0)
    history = like(sketches_of(len(sketches), rng))
    return screen(sketches, shares or dict.fromkeys(sketches, 1.0), history).suspects


@pytest.mark.parametrize("number", [2, 4, 6, 16])
def test_honest_servers_are_no_suspects(number: int) -> None:
    rng = np.random.default_rng(number)
    assert not any(suspects(sketches_of(number, rng)) for _ in range(100))


@pytest.mark.parametrize("number", [6, 16])
@pytest.mark.parametrize("factor", [-1000.0, 100.0, math.nan, math.inf, 1e200])
def test_who_stands_out_is_a_suspect(number: int, factor: float) -> None:
    sketches = sketches_of(number, np.random.default_rng(1))
    liars = sorted(sketches)[: (number - 1) // 2]
    for liar in liars:
        sketches[liar] = [factor * value for value in sketches[liar]]
    assert suspects(sketches) == {*liars}


@pytest.mark.parametrize("factor", [-1000.0, 0.0])
def test_in_a_small_stage_all_are_suspects(factor: float) -> None:
    """If two of four deviate, the malicious two cannot be identified."""
    sketches = sketches_of(4, np.random.default_rng(1))
    for liar in sorted(sketches)[:2]:
        sketches[liar] = [factor * value for value in sketches[liar]]
    assert suspects(sketches) == {*sketches}


def test_a_small_stage_without_a_history_is_audited_whole() -> None:
    sketches = sketches_of(3, np.random.default_rng(1))
    assert screen(sketches, dict.fromkeys(sketches, 1.0), StageHistory()).suspects == {*sketches}


def test_where_most_lie_all_are_suspects() -> None:
    sketches = sketches_of(16, np.random.default_rng(1))
    for liar in sorted(sketches)[:11]:
        sketches[liar] = [-1000.0 * value for value in sketches[liar]]
    assert suspects(sketches) == {*sketches}


def test_sums_of_fewer_samples_may_be_noisier() -> None:
    rng = np.random.default_rng(3)
    signal = rng.normal(size=64)
    shares = {PeerId(f"p{i:02}"): (100.0 if i else 1.0) for i in range(12)}
    sketches = {
        peer: (share * (signal + rng.normal(size=64) * 3.0 / math.sqrt(share))).tolist()
        for peer, share in shares.items()
    }
    assert not suspects(sketches, shares)


def test_who_holds_nothing_is_not_screened() -> None:
    sketches = sketches_of(7, np.random.default_rng(2))
    shares = dict.fromkeys(sketches, 1.0)
    idle = min(sketches)
    sketches[idle], shares[idle] = [0.0] * 64, 0.0
    assert not suspects(sketches, shares)
    assert screen({idle: [0.0]}, {idle: 0.0}, StageHistory()) == Screening(frozenset(), 0.0, 0.0)


# ------------------------------------------------------------------ lots


def test_new_servers_are_audited_in_each_step() -> None:
    standing = Standing()
    for step in range(PROBATION):
        assert standing.is_drawn(A, step, 0.0, lambda: 0.5)
        standing.passed[A] += 1
    assert not standing.is_drawn(A, PROBATION, 0.0, lambda: 0.5)
    assert standing.is_drawn(B, PROBATION, 0.0, lambda: 0.5)


def test_fellows_of_a_liar_are_watched_for_a_while() -> None:
    standing = Standing(passed=Counter({A: PROBATION}))
    standing.watch([A], 7)
    assert standing.is_drawn(A, 7 + WATCHED_STEPS, 0.0, lambda: 0.5)
    assert not standing.is_drawn(A, 8 + WATCHED_STEPS, 0.0, lambda: 0.5)


@pytest.mark.parametrize("share", [0.0, 1 / 16, 0.75, 1.0])
def test_a_share_is_drawn(share: float) -> None:
    rng, standing = random.Random(1), Standing(passed=Counter({A: PROBATION}))
    of_steps = [share_of_step(share, rng.random) for _ in range(16_000)]
    number = sum(standing.is_drawn(A, step, of_step, rng.random) for step, of_step in enumerate(of_steps))
    assert share * 16_000 - 150 <= number <= share * 16_000 + 150
    assert sum(map(bool, of_steps)) <= 1.65 * share * 16_000, "the step waits in few steps"


@pytest.mark.parametrize(("share", "least"), [(0.0, 0.0), (1 / 16, IRREVERSIBLE_SHARE), (1.0, 1.0)])
def test_half_is_audited_where_a_lie_would_stay(share: float, least: float) -> None:
    rng = random.Random(1)
    shares = [share_of_step(share, rng.random, irreversible=True) for _ in range(1000)]
    assert min(shares) == least
    assert max(shares) >= share


def test_the_last_steps_and_those_of_snapshots_are_worth_a_lie() -> None:
    assert [step for step in range(20) if is_irreversible(step, 20, is_snapshot_due=False)] == [15, 16, 17, 18, 19]
    assert not any(is_irreversible(step, None, is_snapshot_due=False) for step in range(20))
    assert is_irreversible(3, None, is_snapshot_due=True)


# ------------------------------------------------------------------ comparing


def projection(values: Tensor) -> StageProjection:
    return StageProjection(tuple(project(values, 5).tolist()))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_between_machines_sums_may_differ_by_a_share_of_what_is_added(dtype: str) -> None:
    total, error = torch.randn(2, 1000, dtype=torch.float64)
    tolerance = sum_tolerance(float(total.norm()), relative_deviation(dtype), dtype)
    near, far = (total + factor * tolerance.distance / float(error.norm()) * error for factor in (0.5, 2.0))
    assert projection(near).agrees(projection(total), tolerance=tolerance)
    assert not projection(far).agrees(projection(total), tolerance=tolerance)
    far[17] = math.nan
    assert not projection(far).agrees(projection(total), tolerance=tolerance)


def test_sketches_of_other_lengths_are_of_other_sums() -> None:
    assert not StageProjection((1.0,)).agrees(StageProjection((1.0, 2.0)), tolerance=Tolerance(1.0))


def test_what_overflows_is_only_like_what_overflows() -> None:
    infinite, number = StageProjection((math.inf, -math.inf)), StageProjection((1.0, 2.0))
    assert StageProjection((math.nan, 1.0)).agrees(infinite, tolerance=Tolerance(0.0))
    assert not number.agrees(infinite, tolerance=Tolerance(1e300))
    assert not infinite.agrees(number, tolerance=Tolerance(1e300))


def test_between_machines_a_codec_of_few_bits_may_choose_another_code() -> None:
    """AVX2 and AVX512 differed by 5.3e-4 with this codec, for outputs of a transformer's blocks."""
    plain, of_16_bits, of_8_bits = (relative_deviation("float32", bits) for bits in (None, 16.0, 8.0))
    assert plain == 1e-4
    assert plain < of_16_bits < 2e-4
    assert 5.3e-4 < of_8_bits < 2e-2


def test_silences_are_forgiven_after_many_steps() -> None:
    silences, peer = Silences(), PeerId("a")
    assert [silences.note(peer, step) for step in (0, 1, FORGIVEN_AFTER - 1)] == [1, 2, 3]
    assert silences.note(peer, FORGIVEN_AFTER + 1) == 2, "the first two are forgiven"
    assert silences.note(PeerId("b"), FORGIVEN_AFTER) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_that_overflow_in_one_order_alone_prove_no_lie(dtype: torch.dtype) -> None:
    """The next stage's server chooses the gradients that a server receives, and their order."""
    large = torch.full((50,), 0.7 * torch.finfo(dtype).max, dtype=dtype)
    gradients = [large, large, -large]
    magnitude = min(sum(magnitude_of([one], 1.0) for one in gradients), sys.float_info.max)
    tolerance = sum_tolerance(magnitude, 1e-10, str(dtype).removeprefix("torch."))
    one, other = (
        StageProjection(tuple(project(gradients[0] + gradients[i] + gradients[j], 1).tolist()))
        for i, j in ((1, 2), (2, 1))
    )
    assert one.is_finite != other.is_finite
    assert one.agrees(other, tolerance=tolerance)
    assert other.agrees(one, tolerance=tolerance)
    if dtype == torch.float32:  # infinite sums do not hide a false sum either
        false = StageProjection((1e38,) * len(one.values))
        assert not false.agrees(StageProjection((0.0,) * len(one.values)), tolerance=tolerance)


def test_gradients_of_any_size_have_a_magnitude_that_a_message_holds() -> None:
    large = torch.full((9,), 1e308, dtype=torch.float64)
    assert magnitude_of([large, large], 1.0) == sys.float_info.max
    assert magnitude_of([large, torch.tensor([math.inf])], 1.0) == 0.0


def test_a_silence_counts_once_a_step() -> None:
    silences, peer = Silences(), PeerId("a")
    assert [silences.note(peer, step) for step in (3, 3, 4, 4, 5)] == [1, 1, 2, 2, 3]


def test_a_server_that_answers_no_calls_is_left_out_for_twice_as_long_each_time() -> None:
    left_out, peer = SilenceBackoff(), PeerId("a")
    assert left_out.wait_s(peer, now_s=5.0) <= 0.0
    waits = []
    for step in (1, 1, 2, 3):
        left_out.note(peer, step, now_s=100.0)
        waits.append(left_out.wait_s(peer, now_s=100.0))
    assert waits == [10.0, 10.0, 20.0, 40.0], "two silences of one step are one"
    assert left_out.wait_s(peer, now_s=141.0) <= 0.0
    left_out.note(peer, 3 + 2 * FORGIVEN_AFTER, now_s=1e6)
    assert left_out.wait_s(peer, now_s=1e6) == 10.0, "earlier ones are forgiven"
    assert left_out.wait_s(PeerId("b"), now_s=1e6) <= 0.0


def test_a_silent_auditor_is_excused_for_twice_as_many_steps_each_time() -> None:
    silences, peer = Silences(), PeerId("a")
    assert not silences.is_spared_as_auditor(peer, 0)
    begins = [0]
    for _ in range(3):
        silences.note_auditor(peer, begins[-1])
        silences.note_auditor(peer, begins[-1])  # the same step
        begins.append(next(step for step in range(begins[-1], 10_000) if not silences.is_spared_as_auditor(peer, step)))
    assert begins == [0, 21, 62, 143]
