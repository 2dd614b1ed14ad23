"""Decides which work is audited, and evaluates auditors' findings. Pure: numbers in, decisions out."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.calls import Receipt
from lightning_swarm.protocol.messages.step import CLAIM_BYTES, DIGEST_BYTES

PROBATION: Final = 20  # steps in which all of a new server's work is audited
WATCHED_STEPS: Final = 100  # steps of full audits after a silence, or if a peer of the same invitation is convicted
FORGIVEN_AFTER: Final = 5_000  # steps after which a silence under audit no longer counts
MAX_SILENCES: Final = 5  # recent steps with a silence under audit that are tolerated; one more convicts
_FIRST_EXCLUSION_S: Final = 10.0  # time until a silent server may join again; doubles with each further silence
_MAX_DOUBLINGS: Final = 10  # of `_FIRST_EXCLUSION_S`
_SPARED_STEPS: Final = 20  # steps in which a server is assigned no audits after its first silence as an auditor
_SHARE_OF_STEP: Final = 0.75  # fraction of the servers whose work is drawn in a step with audits
LAST_STEPS: Final = 5  # final steps of a run, after which too few steps follow to find false work
IRREVERSIBLE_SHARE: Final = 0.5  # least fraction drawn in a step whose false work could stay; see `is_irreversible`
SCREEN: Final = 6.0  # a sum is suspicious beyond this many times the median noise radius; see `screen`
_SMALL: Final = 6  # in a stage with fewer servers, the median proves little
_JUMP: Final = 4.0  # factor by which a stage's statistics may differ from those of earlier steps
_DECAY: Final = 0.9  # factor per step on the weight of earlier steps
_WARM_UP: Final = 3  # first steps of a small stage, in which all its servers are suspects
# dtype -> sum of magnitudes up to which no order of adding overflows, with room for rounding.
_LARGEST: Final = {"float64": 1e308, "float32": 3e38}
TOUCHED: Final = "list of parameters with gradients"  # an entry of `WorkComparison.wrong`
# dtype -> largest distance between results of two kinds of machines, relative to their norms.
_OTHER_MACHINE: Final = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 5e-3, "float16": 5e-3}


class Unit(NamedTuple):
    """One server's work of one step in one stage, which is audited as a whole."""

    stage_index: int
    peer: PeerId


class WorkClaim(NamedTuple):
    """Digests of the inputs and results of one microbatch in a stage."""

    input: bytes
    output: bytes
    output_gradient: bytes
    input_gradient: bytes


def read_claims(packed: bytes, receipts: Collection[Receipt]) -> dict[Receipt, WorkClaim]:
    """Unpack the claims on these microbatches; raise ProtocolError if there are more or fewer."""
    if len(packed) != CLAIM_BYTES * len(receipts):
        raise ProtocolError(
            f"each of {len(receipts)} microbatches has a claim of {CLAIM_BYTES} bytes, got {len(packed)} bytes"
        )
    digests = [packed[begin : begin + DIGEST_BYTES] for begin in range(0, len(packed), DIGEST_BYTES)]
    return {receipt: WorkClaim(*digests[4 * i : 4 * i + 4]) for i, receipt in enumerate(sorted(receipts))}


def disagreeing(claims: Mapping[Unit, Mapping[Receipt, WorkClaim]]) -> dict[Receipt, set[Unit]]:
    """Find microbatches on which servers of adjacent stages make contradictory claims, and these servers."""
    holders = {(unit.stage_index, receipt): unit for unit, receipts in claims.items() for receipt in receipts}
    disagreements: dict[Receipt, set[Unit]] = {}
    for (stage, receipt), unit in holders.items():
        next_unit = holders.get((stage + 1, receipt))
        if next_unit is None:
            continue
        claim, next_claim = claims[unit][receipt], claims[next_unit][receipt]
        if (claim.output, claim.output_gradient) != (next_claim.input, next_claim.input_gradient):
            disagreements.setdefault(receipt, set()).update((unit, next_unit))
    return disagreements


# ------------------------------------------------------------------ the screen

# Servers of a stage compute on samples of the same data, so their mean gradients differ only by noise. A sum that is
# too far from the others, or from earlier steps, is suspicious, and is audited. The screen itself convicts no server.


@dataclass
class StageHistory:
    """Moving averages over the sums of one stage in earlier steps."""

    norm: float = 0.0  # see `Screening`
    spread: float = 0.0
    num_steps: int = 0

    def note(self, norm: float, spread: float) -> None:
        """Add a decided step."""
        old = _DECAY if self.num_steps else 0.0
        self.norm = old * self.norm + (1 - old) * norm
        self.spread = old * self.spread + (1 - old) * spread
        self.num_steps += 1

    def fits(self, norm: float, spread: float) -> bool:
        """Return whether these statistics of a step are like those of earlier steps."""
        if not self.num_steps:
            return False
        return norm <= _JUMP * self.norm and self.norm <= _JUMP * norm and spread <= _JUMP * self.spread


@dataclass(frozen=True)
class Screening:
    """Suspects and statistics from the sketches of one stage's sums."""

    suspects: frozenset[PeerId]
    norm: float  # median norm of the servers' mean gradients
    spread: float  # median noise radius of the servers


def screen(
    sketches: Mapping[PeerId, Sequence[float]],  # server -> sketch of its sum
    shares: Mapping[PeerId, float],  # server -> total weight of the samples in its sum; 0: it is not screened
    history: StageHistory,
) -> Screening:
    """Find servers of a stage whose sums differ from the other servers' sums, or from the sums of earlier steps."""
    peers = sorted(peer for peer in sketches if shares[peer] > 0)
    means = {peer: np.asarray(sketches[peer], dtype=np.float64) / shares[peer] for peer in peers}
    # A sketch whose squared norm is not finite is no sketch of a plausible gradient.
    with np.errstate(over="ignore", invalid="ignore"):
        broken = {peer for peer, mean in means.items() if not np.isfinite(mean @ mean)}
    sound = [peer for peer in peers if peer not in broken]
    if not sound:
        return Screening(frozenset(broken), 0.0, 0.0)
    middle = _geometric_median(np.stack([means[peer] for peer in sound]))
    # A mean over more samples is less noisy, by the root of their weight. So the distance from the median times this
    # root, the noise radius, is similar for all honest servers.
    radii = {peer: math.sqrt(shares[peer]) * float(np.linalg.norm(means[peer] - middle)) for peer in sound}
    norms = {peer: float(np.linalg.norm(means[peer])) for peer in sound}
    norm, spread = float(np.median([*norms.values()])), float(np.median([*radii.values()]))
    suspects = broken | _outliers(norms, radii, spread, history)
    if len(sound) >= _SMALL and history.num_steps and not history.fits(norm, spread):
        suspects |= set(sound)  # most sums may be false, and so the median, too
    return Screening(frozenset(suspects), norm, spread)


def _outliers(
    norms: Mapping[PeerId, float], radii: Mapping[PeerId, float], spread: float, history: StageHistory
) -> set[PeerId]:
    """Find servers far from the median; in a small stage, return all if one is far, because any may be false."""
    if len(norms) >= _SMALL:
        return {peer for peer, radius in radii.items() if radius > SCREEN * spread}
    if history.num_steps < _WARM_UP or not all(history.fits(norm, 0.0) for norm in norms.values()):
        return set(norms)
    return set(norms) if max(radii.values()) > SCREEN * history.spread else set()


def _geometric_median(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the point with the least sum of distances, by Weiszfeld's iteration."""
    middle: NDArray[np.float64] = np.median(points, axis=0)
    for _ in range(50):
        distances = np.linalg.norm(points - middle, axis=1)
        weights = 1.0 / np.maximum(distances, 1e-12 * (1.0 + float(np.linalg.norm(middle))))
        after: NDArray[np.float64] = (weights[:, None] * points).sum(axis=0) / weights.sum()
        if float(np.linalg.norm(after - middle)) <= 1e-9 * float(np.linalg.norm(after)):
            return after
        middle = after
    return middle


# ------------------------------------------------------------------ drawing the audited work


def is_irreversible(step: int, max_steps: int | None, *, is_snapshot_due: bool) -> bool:
    """Return whether false work of a step could stay: it may enter a snapshot, or the run ends too soon afterwards."""
    return is_snapshot_due or (max_steps is not None and step >= max_steps - LAST_STEPS)


def share_of_step(share: float, draw: Callable[[], float], *, irreversible: bool = False) -> float:
    """Draw the fraction of servers whose work of one step is audited: `share` on average, but none in many steps."""
    # The audits of a step run in parallel, so the step waits for many audits no longer than for one.
    in_step = max(share, _SHARE_OF_STEP)
    drawn = in_step if draw() < share / in_step else 0.0
    return max(drawn, IRREVERSIBLE_SHARE) if irreversible and share else drawn


@dataclass
class Standing:
    """The findings of audits about a run's servers."""

    passed: Counter[PeerId] = field(default_factory=Counter)  # peer -> audited steps without a fault
    watched: dict[PeerId, int] = field(default_factory=dict)  # peer -> last step in which all its work is audited
    unaudited: dict[PeerId, int] = field(default_factory=dict)  # peer -> newest step whose unaudited work counted
    # Peer -> auditor -> newest step in which the auditor audited the peer's work.
    audited: dict[PeerId, dict[PeerId, int]] = field(default_factory=dict)

    def note_counted(self, peer: PeerId, step: int, auditor: PeerId | None) -> None:
        """Record that a peer's work of a step counts, with its auditor; None: it was not audited."""
        if auditor is None:
            self.unaudited[peer] = step
        else:
            self.audited.setdefault(peer, {})[auditor] = step

    def has_counted(self, peer: PeerId, version: int, convicted: Collection[PeerId]) -> bool:
        """Return whether, since a version, work of a peer counted unaudited, or audited only by `convicted` servers."""
        falsely_audited = (step for auditor, step in self.audited.get(peer, {}).items() if auditor in convicted)
        return max(self.unaudited.get(peer, -1), *falsely_audited, -1) >= version

    def reset_audited_by(self, auditor: PeerId) -> None:
        """Treat all servers that a peer audited as new servers, because it may have covered up false work."""
        for peer, auditors in self.audited.items():
            if auditor in auditors:
                self.passed.pop(peer, None)

    def watch(self, peers: Iterable[PeerId], step: int) -> None:
        """Audit all work of these peers for `WATCHED_STEPS` steps after a step."""
        self.watched.update(dict.fromkeys(peers, step + WATCHED_STEPS))

    def is_drawn(self, peer: PeerId, step: int, share: float, draw: Callable[[], float]) -> bool:
        """Draw whether a server's work of a step is audited. `draw` returns uniform numbers of [0, 1)."""
        drawn = draw() < share  # drawn in any case, so that a server's standing does not change later draws
        return drawn or self.passed[peer] < PROBATION or self.watched.get(peer, -1) >= step


@dataclass
class RecentFaults:
    """Counts each server's recent steps with a fault of one kind."""

    noted: dict[PeerId, list[int]] = field(default_factory=dict)  # peer -> steps

    def note(self, peer: PeerId, step: int) -> int:
        """Count a fault, at most one a step, and return the number of faults that still count."""
        recent = [other for other in self.noted.get(peer, ()) if other != step and step - other < FORGIVEN_AFTER]
        self.noted[peer] = [*recent, step]
        return len(self.noted[peer])


@dataclass
class Silences(RecentFaults):
    """Counts the recent steps in which a server gave no answer while it was audited, or was silent as an auditor."""

    # Auditor -> (number of silences, each of which doubles the pause; last step in which it is assigned no audits).
    as_auditor: dict[PeerId, tuple[int, int]] = field(default_factory=dict)

    def note_auditor(self, peer: PeerId, step: int) -> None:
        """Assign no audits for a while to a server that was silent as an auditor; its own work is still audited."""
        number, until = self.as_auditor.get(peer, (0, -1))
        if step > until:
            self.as_auditor[peer] = number + 1, step + min(_SPARED_STEPS * 2**number, FORGIVEN_AFTER)

    def is_spared_as_auditor(self, peer: PeerId, step: int) -> bool:
        """Return whether a server is assigned no audits in a step."""
        return self.as_auditor.get(peer, (0, -1))[1] >= step


@dataclass
class SilenceBackoff:
    """Servers that answered pings but not the coordinator's calls, and the times at which they may join again.

    Such a silence never convicts, because a machine that compiles, swaps or was suspended is also silent.
    """

    silences: RecentFaults = field(default_factory=RecentFaults)
    _until_s: dict[PeerId, float] = field(default_factory=dict)

    def note(self, peer: PeerId, step: int, *, now_s: float) -> None:
        """Let a server not join for a while, which doubles with each further step with a silence."""
        number = self.silences.note(peer, step)
        self._until_s[peer] = now_s + _FIRST_EXCLUSION_S * 2.0 ** min(number - 1, _MAX_DOUBLINGS)

    def wait_s(self, peer: PeerId, *, now_s: float) -> float:
        """Return the seconds until a server may join again; not positive: it may now."""
        return self._until_s.get(peer, now_s) - now_s


@dataclass
class AuditMemory:
    """A coordinator's knowledge of the servers from the audits of earlier steps."""

    standing: Standing = field(default_factory=Standing)
    histories: dict[int, StageHistory] = field(default_factory=dict)  # by stage
    # Pair of servers that contradicted each other, as neighbours or as audited server and auditor -> how often.
    disputes: Counter[frozenset[Unit]] = field(default_factory=Counter)
    convicted: dict[PeerId, str] = field(default_factory=dict)  # server -> reason, until a record excludes it
    # Server -> number of closings in which it had sent trainers other results than were claimed.
    contested: Counter[PeerId] = field(default_factory=Counter)
    silences: Silences = field(default_factory=Silences)
    silence_backoff: SilenceBackoff = field(default_factory=SilenceBackoff)
    refuted: RecentFaults = field(default_factory=RecentFaults)  # steps with refuted accusations by a server
    unrepeatable: set[str] = field(default_factory=set)  # kinds of machines that compute different bits each time

    def following(self) -> AuditMemory:
        """Return the memory after a rollback: all servers count as new, but watched and convicted servers stay so."""
        return replace(self, standing=Standing(watched=self.standing.watched), histories={})


# ------------------------------------------------------------------ comparing


class Tolerance(NamedTuple):
    """The largest distance between two sums of the same numbers."""

    distance: float
    may_overflow: bool = False  # one of the sums may have overflowed, and the other not


@dataclass(frozen=True)
class StageProjection:
    """The sketch of a stage's sum: projections by which sums are compared without sending them."""

    values: tuple[float, ...]

    def agrees(self, other: StageProjection, *, tolerance: Tolerance) -> bool:
        """Return whether both sketches may be of the same sum, computed on machines of two kinds."""
        if len(self.values) != len(other.values):
            return False
        if not (self.is_finite and other.is_finite):  # with a scaled loss in 16 bits, gradients sometimes overflow
            return tolerance.may_overflow or self.is_finite == other.is_finite
        return math.dist(self.values, other.values) <= tolerance.distance

    @property
    def is_nothing(self) -> bool:
        """True if the sum is zero."""
        return not any(self.values)

    @property
    def is_finite(self) -> bool:
        """True if all values are finite."""
        return all(map(math.isfinite, self.values))


@dataclass(frozen=True)
class WorkComparison:
    """The differences between a server's claims and an auditor's findings."""

    wrong: frozenset[str] = frozenset()  # fields of `WorkClaim`, "sum", "refused" and `TOUCHED`
    is_whole: bool = True  # the auditor computed all microbatches
    is_silent: bool = False  # not whole, because the server did not answer
    is_misweighed: bool = False  # not whole, because a batch came with another weight or from another trainer

    @property
    def is_equal(self) -> bool:
        """True if the server's claims are true."""
        return self.is_whole and not self.wrong

    @property
    def has_false_outputs(self) -> bool:
        """True if tensors that the server sent to other peers are, or may be, false."""
        return bool(self.wrong - {"sum", TOUCHED})

    @property
    def rests_on_bits(self) -> bool:
        """True if only results differ, which proves a false claim only if the same computation repeats its bits."""
        return bool(self.wrong) and self.wrong.isdisjoint({"refused", "input", "output_gradient"})

    def describe(self) -> str:
        """Describe the server's false claims."""
        if "refused" in self.wrong:
            return "does not send the inputs from which it claims to have computed"
        return f"reported a false {' and '.join(sorted(self.wrong)).replace('_', ' ')}"


def sum_tolerance(magnitude: float, relative: float, dtype: str) -> Tolerance:
    """Return the tolerance between the sums of the same gradients on two kinds of machines.

    Gradients have errors up to `relative`. `magnitude` is the sum of their norms, and `dtype` is that of the sums.
    """
    # Huge gradients may overflow in only one of the sums. If that convicted a server, other peers could cause it by
    # sending such gradients, which are false, and are audited where they were computed.
    # The largest magnitude that a message can hold also stands for all larger ones.
    distance = relative * magnitude if magnitude < sys.float_info.max else math.inf
    return Tolerance(distance, may_overflow=magnitude >= _LARGEST[dtype])


def relative_deviation(dtype: str, codec_bits: float | None = None) -> float:
    """Return the largest relative deviation (distance / norm) between results of two kinds of machines.

    `codec_bits` are an element's bits in transit, where rounding may move a number to the next code; None: no codec.
    """
    return _OTHER_MACHINE.get(dtype, _OTHER_MACHINE["bfloat16"]) + (0.0 if codec_bits is None else 4 * 2**-codec_bits)
