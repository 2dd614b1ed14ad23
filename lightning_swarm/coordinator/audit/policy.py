"""Decides whose work is audited, and what follows from what auditors found. Pure: numbers in, decisions out."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.audits import CLAIM_BYTES, DIGEST_BYTES
from lightning_swarm.protocol.messages.calls import Receipt

PROBATION: Final = 20  # steps in which all of a new server's work is audited
WATCHED_STEPS: Final = 100  # likewise, once a peer of the same invitation was convicted, or this one fell silent
FORGIVEN_AFTER: Final = 5_000  # steps, that a server gave no answer while it was audited
MAX_SILENCES: Final = 5  # of an audited server, in steps that are forgiven later, before it is convicted
_FIRST_LEFT_OUT_S: Final = 10.0  # twice as long with each further silence
_MAX_DOUBLINGS: Final = 10
_EXCUSED_STEPS: Final = 20  # in which a server audits nothing, after it was silent as an auditor for the first time
_SHARE_OF_STEP: Final = 0.75  # of the servers, drawn in a step that has audits
LAST_STEPS: Final = 5  # of a run, in which a lie is hardly found out later
WORTHWHILE_SHARE: Final = 0.5  # of the servers, drawn at least in a step that is worth a lie
SCREEN: Final = 6.0  # noise radii from the median, beyond which a sum is suspicious
_SMALL: Final = 6  # servers of a stage, below which no median is worth the name
_JUMP: Final = 4.0  # factor by which a stage's sums may differ from those of the steps before
_DECAY: Final = 0.9  # of what is known of the steps before
_WARM_UP: Final = 3  # steps of a small stage without a history, in which all of it is audited
# Sums of what adds up to no more overflow in no order; with room for rounding.
_LARGEST: Final = {"float64": 1e308, "float32": 3e38}
# How far results may be apart that machines of two kinds compute, relative to their norms.
_OTHER_MACHINE: Final = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 5e-3, "float16": 5e-3}


class Unit(NamedTuple):
    """One server's work of one step in one stage: what is audited as a whole."""

    stage_index: int
    peer: PeerId


class WorkClaim(NamedTuple):
    """Digests of what came into and out of one microbatch."""

    input: bytes
    output: bytes
    output_gradient: bytes
    input_gradient: bytes


def read_claims(packed: bytes, receipts: Collection[Receipt]) -> dict[Receipt, WorkClaim]:
    """Unpack the claims on some microbatches; `ProtocolError` refuses another number of them."""
    if len(packed) != CLAIM_BYTES * len(receipts):
        raise ProtocolError(
            f"each of {len(receipts)} microbatches has a claim of {CLAIM_BYTES} bytes, got {len(packed)} bytes"
        )
    digests = [packed[begin : begin + DIGEST_BYTES] for begin in range(0, len(packed), DIGEST_BYTES)]
    return {receipt: WorkClaim(*digests[4 * i : 4 * i + 4]) for i, receipt in enumerate(sorted(receipts))}


def disagreeing(claims: Mapping[Unit, Mapping[Receipt, WorkClaim]]) -> dict[Receipt, set[Unit]]:
    """Find microbatches of which two servers side by side claim different things, and these servers."""
    holders: dict[tuple[int, Receipt], Unit] = {
        (unit.stage_index, receipt): unit for unit, its in claims.items() for receipt in its
    }
    found: dict[Receipt, set[Unit]] = {}
    for (stage, receipt), unit in holders.items():
        after = holders.get((stage + 1, receipt))
        if after is None:
            continue
        sent, came = claims[unit][receipt], claims[after][receipt]
        if (sent.output, sent.output_gradient) != (came.input, came.input_gradient):
            found.setdefault(receipt, set()).update((unit, after))
    return found


# ------------------------------------------------------------------ the screen


@dataclass
class StageHistory:
    """What the sums of one stage were like in the steps before."""

    norm: float = 0.0
    spread: float = 0.0
    num_steps: int = 0

    def note(self, norm: float, spread: float) -> None:
        """Take in a step that was decided."""
        old = _DECAY if self.num_steps else 0.0
        self.norm = old * self.norm + (1 - old) * norm
        self.spread = old * self.spread + (1 - old) * spread
        self.num_steps += 1

    def fits(self, norm: float, spread: float) -> bool:
        """Tell whether a step is like those before."""
        if not self.num_steps:
            return False
        return norm <= _JUMP * self.norm and self.norm <= _JUMP * norm and spread <= _JUMP * self.spread


@dataclass(frozen=True)
class Screening:
    """What the sketches of one stage's sums show."""

    suspects: frozenset[PeerId]
    norm: float  # of a server's mean gradient, typically
    spread: float  # between servers, likewise


def screen(
    sketches: Mapping[PeerId, Sequence[float]], shares: Mapping[PeerId, float], history: StageHistory
) -> Screening:
    """Find the servers of a stage whose sums are not like the others', or not like those of the steps before.

    Args:
        sketches: Of each server's sum.
        shares: What each sum is divided by to be the mean gradient of what is in it, which is the less noisy the
            larger it is. Servers without a share have nothing to be screened.
        history: Of the stage.
    """
    peers = sorted(peer for peer in sketches if shares[peer] > 0)
    means = {peer: np.asarray(sketches[peer], dtype=np.float64) / shares[peer] for peer in peers}
    # Numbers whose squares are none are no gradient either.
    with np.errstate(over="ignore", invalid="ignore"):
        broken = {peer for peer, mean in means.items() if not np.isfinite(mean @ mean)}
    sound = [peer for peer in peers if peer not in broken]
    if not sound:
        return Screening(frozenset(broken), 0.0, 0.0)
    middle = _geometric_median(np.stack([means[peer] for peer in sound]))
    radii = {peer: math.sqrt(shares[peer]) * float(np.linalg.norm(means[peer] - middle)) for peer in sound}
    norms = {peer: float(np.linalg.norm(means[peer])) for peer in sound}
    norm, spread = float(np.median([*norms.values()])), float(np.median([*radii.values()]))
    suspects = broken | _unlike_others(norms, radii, spread, history)
    if len(sound) >= _SMALL and history.num_steps and not history.fits(norm, spread):
        suspects |= set(sound)  # most of them may lie
    return Screening(frozenset(suspects), norm, spread)


def _unlike_others(
    norms: Mapping[PeerId, float], radii: Mapping[PeerId, float], spread: float, history: StageHistory
) -> set[PeerId]:
    """Find the servers far from the others; of a small stage all, if one of them is, for there is no telling which."""
    if len(norms) >= _SMALL:
        return {peer for peer, radius in radii.items() if radius > SCREEN * spread}
    if history.num_steps < _WARM_UP or not all(history.fits(norm, 0.0) for norm in norms.values()):
        return set(norms)
    return set(norms) if max(radii.values()) > SCREEN * history.spread else set()


def _geometric_median(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """The point of the least sum of distances, by Weiszfeld's iteration."""
    middle: NDArray[np.float64] = np.median(points, axis=0)
    for _ in range(50):
        distances = np.linalg.norm(points - middle, axis=1)
        weights = 1.0 / np.maximum(distances, 1e-12 * (1.0 + float(np.linalg.norm(middle))))
        after: NDArray[np.float64] = (weights[:, None] * points).sum(axis=0) / weights.sum()
        if float(np.linalg.norm(after - middle)) <= 1e-9 * float(np.linalg.norm(after)):
            return after
        middle = after
    return middle


# ------------------------------------------------------------------ lots


def is_worth_a_lie(step: int, max_steps: int | None, *, is_kept: bool) -> bool:
    """Tell whether a lie of a step may stay: the run ends before it is found out, or what is stored has it.

    Args:
        step: The step.
        max_steps: The number of steps after which the run ends; None: nobody knows.
        is_kept: A snapshot is due, which would hold the lie.
    """
    return is_kept or (max_steps is not None and step >= max_steps - LAST_STEPS)


def share_of_step(share: float, draw: Callable[[], float], *, worth_a_lie: bool = False) -> float:
    """Draw the share of the servers whose work of one step is audited: `share` on average, but in most steps none.

    Audits of one step run side by side, so the step waits for many no longer than for one.

    Args:
        share: Of all work.
        draw: Gives uniform numbers of [0, 1).
        worth_a_lie: See `is_worth_a_lie`; at least `WORTHWHILE_SHARE` is audited then, if anything ever is.
    """
    in_step = max(share, _SHARE_OF_STEP)
    drawn = in_step if draw() < share / in_step else 0.0
    return max(drawn, WORTHWHILE_SHARE) if worth_a_lie and share else drawn


@dataclass
class Standing:
    """What a run knows of its servers from audits."""

    passed: dict[PeerId, int] = field(default_factory=dict)  # audited steps without a fault
    watched: dict[PeerId, int] = field(default_factory=dict)  # until which step all of a peer's work is audited
    # The newest step in which a peer's work counted without an audit; and, by auditor, with one.
    unaudited: dict[PeerId, int] = field(default_factory=dict)
    audited: dict[PeerId, dict[PeerId, int]] = field(default_factory=dict)

    def note_passed(self, peer: PeerId) -> None:
        """Count an audit that found nothing."""
        self.passed[peer] = self.passed.get(peer, 0) + 1

    def note_counted(self, peer: PeerId, step: int, auditor: PeerId | None) -> None:
        """Note that a peer's work of a step counts, and who audited it; None: nobody."""
        if auditor is None:
            self.unaudited[peer] = step
        else:
            self.audited.setdefault(peer, {})[auditor] = step

    def has_counted(self, peer: PeerId, version: int, convicted: Collection[PeerId]) -> bool:
        """Tell whether work of a peer counted since a version that nobody audited, or only who was convicted."""
        vouched = (step for auditor, step in self.audited.get(peer, {}).items() if auditor in convicted)
        return max(self.unaudited.get(peer, -1), *vouched, -1) >= version

    def doubt(self, auditor: PeerId) -> None:
        """Audit as new ones the servers whose work a peer audited: it may have covered them."""
        for peer, auditors in self.audited.items():
            if auditor in auditors:
                self.passed.pop(peer, None)

    def watch(self, peers: Iterable[PeerId], step: int) -> None:
        """Audit all work of some peers for a while, from a step on."""
        self.watched.update(dict.fromkeys(peers, step + WATCHED_STEPS))

    def is_drawn(self, peer: PeerId, step: int, share: float, draw: Callable[[], float]) -> bool:
        """Draw whether a server's work of a step is audited. `draw` gives uniform numbers of [0, 1)."""
        drawn = draw() < share  # drawn always, so that the lots of others do not depend on standings
        return drawn or self.passed.get(peer, 0) < PROBATION or self.watched.get(peer, -1) >= step


@dataclass
class Silences:
    """When servers gave no answer while they were audited."""

    noted: dict[PeerId, list[int]] = field(default_factory=dict)  # in which steps
    # By auditor: silences, each of which excuses it for twice as many steps, and the step until which it is excused.
    as_auditor: dict[PeerId, tuple[int, int]] = field(default_factory=dict)

    def note_auditor(self, peer: PeerId, step: int) -> None:
        """Give a server that was silent as an auditor no audits for a while."""
        number, until = self.as_auditor.get(peer, (0, -1))
        if step > until:
            self.as_auditor[peer] = number + 1, step + min(_EXCUSED_STEPS * 2**number, FORGIVEN_AFTER)

    def is_excused(self, peer: PeerId, step: int) -> bool:
        """Return whether a server was silent as an auditor a while ago."""
        return self.as_auditor.get(peer, (0, -1))[1] >= step

    def note(self, peer: PeerId, step: int) -> int:
        """Count a silence, one a step, and return how many there are that are not forgiven."""
        recent = [at for at in self.noted.get(peer, ()) if at != step and step - at < FORGIVEN_AFTER]
        self.noted[peer] = [*recent, step]
        return len(self.noted[peer])


@dataclass
class LeftOut:
    """Servers that answered pings and not the coordinator's calls, and until when they may not join again.

    No silence of this kind convicts: a machine that compiles, swaps or was suspended is silent, too.
    """

    silences: Silences = field(default_factory=Silences)
    _until_s: dict[PeerId, float] = field(default_factory=dict)

    def note(self, peer: PeerId, step: int, *, now_s: float) -> None:
        """Keep a server out for a while, for twice as long with each step in which it was silent."""
        number = self.silences.note(peer, step)
        self._until_s[peer] = now_s + _FIRST_LEFT_OUT_S * 2.0 ** min(number - 1, _MAX_DOUBLINGS)

    def wait_s(self, peer: PeerId, *, now_s: float) -> float:
        """Return the seconds until a server may join again; not positive: it may now."""
        return self._until_s.get(peer, now_s) - now_s


@dataclass
class AuditMemory:
    """What a coordinator knows from the audits of steps before."""

    standing: Standing = field(default_factory=Standing)
    histories: dict[int, StageHistory] = field(default_factory=dict)  # by stage
    # Pairs of servers that said different things of one transfer, and how often: neighbours, or in an audit.
    disputes: Counter[frozenset[Unit]] = field(default_factory=Counter)
    convicted: dict[PeerId, str] = field(default_factory=dict)  # and why; also those that no record tells yet
    # In how many closings servers gave a trainer something else than was claimed.
    contested: Counter[PeerId] = field(default_factory=Counter)
    silences: Silences = field(default_factory=Silences)
    left_out: LeftOut = field(default_factory=LeftOut)
    refuted: Silences = field(default_factory=Silences)  # accusations that the coordinator refuted, likewise
    unrepeatable: set[str] = field(default_factory=set)  # kinds of machines that compute other bits each time

    def following(self) -> AuditMemory:
        """Return what stays known once the run has gone back: all servers are as new ones, but suspects are known."""
        standing = Standing(watched=self.standing.watched)
        return AuditMemory(
            standing,
            disputes=self.disputes,
            convicted=self.convicted,
            contested=self.contested,
            silences=self.silences,
            left_out=self.left_out,
            refuted=self.refuted,
            unrepeatable=self.unrepeatable,
        )


# ------------------------------------------------------------------ comparing


class Tolerance(NamedTuple):
    """How far two sums of the same numbers may be apart."""

    distance: float
    may_overflow: bool = False  # one of them may have overflowed on its way, and the other not


@dataclass(frozen=True)
class StageProjection:
    """A sketch of a sum, of whichever kind."""

    values: tuple[float, ...]

    def agrees(self, other: StageProjection, *, tolerance: Tolerance) -> bool:
        """Tell whether this may be of the sum that `other` is of, if machines of two kinds computed them."""
        if len(self.values) != len(other.values):
            return False
        if not (self.is_finite and other.is_finite):  # gradients overflow now and then, with a scaled loss in 16 bits
            return tolerance.may_overflow or self.is_finite == other.is_finite
        return math.dist(self.values, other.values) <= tolerance.distance

    @property
    def is_nothing(self) -> bool:
        """Tell whether the sum holds nothing."""
        return not any(self.values)

    @property
    def is_finite(self) -> bool:
        """Tell whether the sum is of numbers."""
        return all(map(math.isfinite, self.values))


@dataclass(frozen=True)
class WorkComparison:
    """How a server's claims differ from what an auditor found."""

    wrong: frozenset[str] = frozenset()
    is_whole: bool = True  # all was computed
    is_silent: bool = False  # not all, for the server gave no answer
    is_misweighed: bool = False  # not all as it counts, for a trainer sent a batch with another weight

    @property
    def is_equal(self) -> bool:
        """Tell whether the server did what it claims."""
        return self.is_whole and not self.wrong

    @property
    def has_false_outputs(self) -> bool:
        """Tell whether what the server gave to others is, or may be, false."""
        return bool(self.wrong - {"sum", "list of what has a gradient"})

    @property
    def rests_on_bits(self) -> bool:
        """Tell whether only results are false, which another computation of the same inputs gave."""
        return bool(self.wrong) and self.wrong.isdisjoint({"refused", "input", "output_gradient"})

    def describe(self) -> str:
        """Say what the server did."""
        if "refused" in self.wrong:
            return "does not give what it says it has computed from"
        return f"gave a false {' and '.join(sorted(self.wrong)).replace('_', ' ')}"


def deviation_of(magnitude: float, relative: float, dtype: str) -> Tolerance:
    """Bound how far two sums may be apart whose numbers two kinds of machines computed.

    One may overflow on its way, and the other not: a peer that gives a server such gradients could have it convicted.
    Gradients that overflow are false already, so they are audited where they were computed.

    Args:
        magnitude: The sum of the norms of the gradients.
        relative: The distance that is allowed for each gradient, relative to its norm.
        dtype: Of the sum.
    """
    # The largest magnitude that a message holds may stand for any larger one.
    distance = relative * magnitude if magnitude < sys.float_info.max else math.inf
    return Tolerance(distance, may_overflow=magnitude >= _LARGEST[dtype])


def tolerance_between_machines(dtype: str, codec_bits: float | None = None) -> float:
    """Return how far results of two kinds of machines may be apart, relative to their norms.

    Args:
        dtype: That they are computed in.
        codec_bits: Of an element as it travels: numbers that rounding parts may be encoded by two codes.
    """
    return _OTHER_MACHINE.get(dtype, _OTHER_MACHINE["bfloat16"]) + (0.0 if codec_bits is None else 4 * 2**-codec_bits)
