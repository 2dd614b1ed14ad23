"""What shall go wrong, when, and whether it did: `FaultPlan`.

A plan only decides; `sabotage.py` does what it says, on the in-memory network and in real processes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self, TypeAlias, TypedDict

from typing_extensions import Unpack

from lightning_swarm.errors import ConfigError
from lightning_swarm.network import PeerId
from lightning_swarm.testing.phases import LEAVING, Passing, Phase

Kind: TypeAlias = Literal["kill", "freeze", "delay", "drop", "duplicate", "corrupt", "partition"]


class Moment(TypedDict, total=False):
    """What narrows down when a fault strikes."""

    of: str  # whose phase it is, if not the peer's own
    step: int
    stage: int
    microbatch: int  # of its batch, counted from 0
    nth: int  # from the nth such message on, counted from 1


class DidNotHappen(AssertionError):
    """Faults were planned that did not strike: what was to be tested was not."""


@dataclass(eq=False, kw_only=True)
class Fault:
    """One thing that shall happen; made by the methods of `FaultPlan`.

    Args:
        kind: What.
        peer: To whom; None: to whoever answers.
        at: In which phase; None: with any message.
        when: What else must hold.
        for_s: How long it lasts, in seconds, if it does.
        times: How often; None: again and again.
        groups: Who is parted from whom.

    Attributes:
        fired: How often it has happened.
    """

    kind: Kind
    peer: PeerId | None
    at: Phase | None
    when: Moment
    for_s: float = 0.0
    times: int | None = 1
    groups: tuple[frozenset[PeerId], ...] = ()
    fired: int = field(default=0, init=False)
    _seen: int = field(default=0, init=False)

    def strikes(self, passing: Passing) -> bool:
        """Take note of a message; whether it is one with which this happens."""
        if (self.times is not None and self.fired >= self.times) or not self._matches(passing):
            return False
        self._seen += 1
        if self._seen < self.when.get("nth", 1):
            return False
        self.fired += 1
        return True

    def _matches(self, passing: Passing) -> bool:
        doer = self.when.get("of", self.peer)
        return (
            (self.at is None or self.at in passing.phases)
            and (doer is None or doer in passing.doers)
            and self.when.get("step", passing.step) == passing.step
            and self.when.get("stage", passing.stage) == passing.stage
            and self.when.get("microbatch", passing.microbatch) == passing.microbatch
        )

    def __str__(self) -> str:
        at = self.at.name if self.at else "any message"
        where = "".join(f", {name} {value}" for name, value in self.when.items())
        whom = " | ".join(" ".join(sorted(group)) for group in self.groups) or self.peer or "whoever answers"
        return f"{self.kind} {whom} at {at}{where}"


class FaultPlan:
    """Faults for a swarm under test, each with the moment at which it strikes.

    ``FaultPlan().kill("peer-2", at=Phase.BACKWARD, step=3).freeze("peer-1", for_s=30.0, at=Phase.APPLY)``

    Each method adds one fault and returns the plan. They have these arguments in common:

    - ``peer``: whom it strikes, by name; None: whoever answers.
    - ``at``: a `Phase`. Whoever asks and whoever answers are both in it, where it does not say otherwise.
    - ``of``, ``step``, ``stage``, ``microbatch``, ``nth``: see `Moment`.

    A test must look at `fired`, or call `check`: one whose faults did not strike has shown nothing.
    """

    def __init__(self) -> None:
        self.faults: list[Fault] = []

    def kill(self, peer: str | None, *, at: Phase, **when: Unpack[Moment]) -> Self:
        """End a peer at once, as `kill -9` does."""
        return self._add("kill", peer, at, when)

    def freeze(self, peer: str | None, *, for_s: float, at: Phase, **when: Unpack[Moment]) -> Self:
        """Let nothing reach or leave a peer for a time, as SIGSTOP and SIGCONT do; no connection breaks."""
        return self._add("freeze", peer, at, when, for_s=for_s)

    def delay(
        self,
        peer: str | None,
        *,
        by_s: float,
        at: Phase | None = None,
        times: int | None = 1,
        **when: Unpack[Moment],
    ) -> Self:
        """Hold messages back. With neither `at` nor `times`: all of the peer's, so that it is slow."""
        return self._add("delay", peer, at, when, for_s=by_s, times=times)

    def drop(self, peer: str | None, *, at: Phase, times: int | None = 1, **when: Unpack[Moment]) -> Self:
        """Lose a message without a word: who waits for the answer waits until its deadline."""
        return self._add("drop", peer, at, when, times=times)

    def duplicate(
        self, peer: str | None, *, at: Phase, again_after_s: float = 0.0, times: int | None = 1, **when: Unpack[Moment]
    ) -> Self:
        """Have a request come once more, `again_after_s` seconds after it was answered."""
        if at in LEAVING:
            raise ConfigError(f"requests come twice, and {at.name} is when an answer leaves. Choose a request's phase.")
        return self._add("duplicate", peer, at, when, for_s=again_after_s, times=times)

    def corrupt(self, peer: str | None, *, at: Phase, times: int | None = 1, **when: Unpack[Moment]) -> Self:
        """Turn a bit of a message over on its way. In memory only: an encrypted connection would break."""
        return self._add("corrupt", peer, at, when, times=times)

    def partition(self, *groups: Collection[str], for_s: float, at: Phase, **when: Unpack[Moment]) -> Self:
        """Let nothing pass between groups of peers for a time; who is in none reaches all. In memory only."""
        if len(groups) < 2:
            raise ConfigError(f"a partition parts at least two groups of peers, got {groups}. Name both sides.")
        parted = tuple(frozenset(map(PeerId, group)) for group in groups)
        return self._add("partition", None, at, when, for_s=for_s, groups=parted)

    def _add(
        self,
        kind: Kind,
        peer: str | None,
        at: Phase | None,
        when: Moment,
        *,
        for_s: float = 0.0,
        times: int | None = 1,
        groups: tuple[frozenset[PeerId], ...] = (),
    ) -> Self:
        if when.get("nth", 1) < 1 or for_s < 0.0 or (times is not None and times < 1):
            raise ConfigError(
                f"`nth` and `times` count from 1, and no time is negative, got {dict(when)}, times={times}, {for_s} s"
            )
        name = None if peer is None else PeerId(peer)
        fault = Fault(kind=kind, peer=name, at=at, when=when, for_s=for_s, times=times, groups=groups)
        self.faults.append(fault)
        return self

    # ------------------------------------------------------------------ what came of it

    @property
    def fired(self) -> int:
        """How often faults of this plan have struck."""
        return sum(fault.fired for fault in self.faults)

    @property
    def unfired(self) -> list[Fault]:
        """The faults that have not struck."""
        return [fault for fault in self.faults if not fault.fired]

    def check(self) -> None:
        """Raise `DidNotHappen`, which names the faults that did not strike, if there are any."""
        if self.unfired:
            raise DidNotHappen(f"These faults did not happen: {'; '.join(map(str, self.unfired))}.")

    def strike(self, passing: Passing, kinds: Collection[Kind]) -> Sequence[Fault]:
        """The faults of these kinds that happen with a message. Counts them."""
        return [fault for fault in self.faults if fault.kind in kinds and fault.strikes(passing)]
