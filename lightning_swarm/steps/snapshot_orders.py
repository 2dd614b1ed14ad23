"""When the servers take snapshots of their stages, and who keeps a stage's besides its own servers.

A stage whose last server dies takes what that one held along, so a server of another stage keeps a copy, too.
The functions are pure; `SnapshotOrders` asks the servers what they hold, when a snapshot is due.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final

from lightning_swarm.clock import now_s
from lightning_swarm.errors import SwarmError
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.run_state import RunState
from lightning_swarm.steps import HELD
from lightning_swarm.tasks import gather
from lightning_swarm.types.runs import Member
from lightning_swarm.types.snapshots import HeldSnapshots, SnapshotOrder
from lightning_swarm.types.wire import decode

_log = logging.getLogger(__name__)

_GIVEN_UP_AFTER: Final = 2.0  # intervals, for a snapshot that is not through
_ASK_TIMEOUT_S: Final = 10.0

Held = Mapping[PeerId, HeldSnapshots]
"""What each server said that it holds."""


def choose_keepers(
    rosters: Sequence[Sequence[Member]],
    on_trainers: Sequence[bool],
    hosts: Mapping[PeerId, str],
    *,
    has_heirs: bool = False,
) -> list[PeerId | None]:
    """For each stage a server that does not hold it itself, on another host where that is known. Pure.

    None where there is no such server: whoever is alive then holds the stage. And for what trainers hold, unless the
    run has heirs: with the trainers the loop is gone, too, and nobody could go on.
    """
    servers = sorted(
        {one.peer_id for roster, own in zip(rosters, on_trainers, strict=True) for one in roster if not own}
    )
    num_kept = dict.fromkeys(servers, 0)
    keepers: list[PeerId | None] = []
    for roster, own in zip(rosters, on_trainers, strict=True):
        holders = {member.peer_id for member in roster}
        near = {hosts[peer] for peer in holders if peer in hosts}
        others = [peer for peer in servers if peer not in holders]
        if (own and not has_heirs) or not others:
            keepers.append(None)
            continue
        keeper = min(others, key=lambda peer: (hosts.get(peer) in near, num_kept[peer], peer))
        num_kept[keeper] += 1
        keepers.append(keeper)
    return keepers


def newest_through(held: Held, rosters: Sequence[Sequence[Member]], on_trainers: Sequence[bool]) -> int | None:
    """The newest version of which every stage is where the death of its servers cannot reach it. Pure."""
    servers = {one.peer_id for roster in rosters for one in roster}

    def is_safe(version: int, index: int) -> bool:
        own = {member.peer_id for member in rosters[index]}
        holders = set(holders_of(held, version, index))
        return bool(holders - own) or (bool(holders) and (on_trainers[index] or own >= servers))

    return max((v for v in _versions(held) if all(is_safe(v, i) for i in range(len(rosters)))), default=None)


def newest_complete(held: Held, num_stages: int) -> int | None:
    """The newest version of which somebody holds every stage. Pure."""
    complete = (v for v in _versions(held) if all(holders_of(held, v, index) for index in range(num_stages)))
    return max(complete, default=None)


def worth_keeping(held: Held, rosters: Sequence[Sequence[Member]], on_trainers: Sequence[bool]) -> int | None:
    """What is kept until the next snapshot is through: `newest_through`, and where none is, `newest_complete`. Pure.

    A keeper's death leaves nothing that outlives every stage, and what is left may be what the next death needs.
    """
    through = newest_through(held, rosters, on_trainers)
    return through if through is not None else newest_complete(held, len(rosters))


def holders_of(held: Held, version: int, stage_index: int) -> list[PeerId]:
    """Who holds a stage at a version. Pure."""
    return sorted(
        peer
        for peer, one in held.items()
        if any((snapshot.version, snapshot.stage_index) == (version, stage_index) for snapshot in one.snapshots)
    )


def _versions(held: Held) -> set[int]:
    return {snapshot.version for one in held.values() for snapshot in one.snapshots}


async def ask_held(transport: Transport, servers: Sequence[PeerId], *, timeout: float) -> dict[PeerId, HeldSnapshots]:
    """What the servers hold, of those that say so in time."""

    async def ask(peer: PeerId) -> tuple[PeerId, HeldSnapshots | None]:
        try:
            return peer, decode(await transport.call(peer, HELD, b"", timeout=timeout), HeldSnapshots)
        except SwarmError as error:
            _log.info("%s does not say which snapshots it holds: %s", peer, error)
            return peer, None

    return {peer: one for peer, one in await gather(ask(peer) for peer in servers) if one is not None}


class SnapshotOrders:
    """The coordinator's word on when a snapshot is taken.

    Args:
        transport: Its network.
        run: As its server knows it.
        interval_s: Between two snapshots at least; None: there are none.
        timeout: Seconds to answer.

    Attributes:
        hosts: On which machines the servers are, as far as they were asked.
    """

    def __init__(self, transport: Transport, run: RunState, *, interval_s: float | None, timeout: float) -> None:
        self._transport = transport
        self._run = run
        self._interval_s = interval_s
        self._timeout = min(timeout, _ASK_TIMEOUT_S)
        self._last: tuple[int, float] | None = None  # its version, and when it was ordered
        self.hosts: dict[PeerId, str] = {}

    def go_back(self) -> None:
        """The run entered its next generation: what was kept is of the old one."""
        self._last = None

    def is_due(self, servers: Sequence[PeerId]) -> bool:
        """Whether one should be taken soon."""
        if self._interval_s is None or len(servers) < 2:  # a run of one server has nobody to survive it
            return False
        return self._last is None or now_s() >= self._last[1] + self._interval_s

    async def order(self, step: int, next_roster: Sequence[Sequence[Member]]) -> SnapshotOrder | None:
        """What the record of `step` tells the servers; None: they take no snapshot then."""
        at_s = now_s()
        servers = sorted({member.peer_id for roster in next_roster for member in roster})
        if self._interval_s is None or not self.is_due(servers):
            return None
        held = await ask_held(self._transport, servers, timeout=self._timeout)
        on_trainers = [stage.on_trainers for stage in self._run.manifest.stages]
        through = newest_through(held, next_roster, on_trainers)
        if self._last is not None and through != self._last[0]:
            if at_s < self._last[1] + self._interval_s * _GIVEN_UP_AFTER:
                return None  # it is on its way still, and what is on its way takes bandwidth
            _log.warning("The snapshot of version %d never came to be kept by all: a new one is taken.", self._last[0])
        self._last = (step + 1, at_s)
        self.hosts = {peer: one.host for peer, one in held.items() if one.host}
        keep = worth_keeping(held, next_roster, on_trainers)
        has_heirs = any(one.loops for one in held.values())
        keepers = choose_keepers(next_roster, on_trainers, self.hosts, has_heirs=has_heirs)
        return SnapshotOrder(keep=keep, keepers=keepers)
