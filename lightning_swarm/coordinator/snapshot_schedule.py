"""Decides when the servers take snapshots of their stages, and who keeps a stage's besides its own servers.

A stage whose last server dies takes what that one held along, so a server of another stage keeps a copy, too.
The functions are pure; `SnapshotSchedule` asks the servers what they hold, when a snapshot is due.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final

from lightning_swarm.coordinator.context import CoordinatorContext
from lightning_swarm.core.clock import now_s
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.run import Member
from lightning_swarm.protocol.messages.state import SnapshotOrder
from lightning_swarm.protocol.queries import (
    ASK_TIMEOUT_S,
    ask_held,
    newest_safe,
    version_to_keep,
)

_log = logging.getLogger(__name__)

_GIVEN_UP_AFTER: Final = 2.0  # intervals, for a snapshot that is not through


def choose_keepers(
    rosters: Sequence[Sequence[Member]],
    on_trainers: Sequence[bool],
    hosts: Mapping[PeerId, str],
    *,
    has_heirs: bool = False,
) -> list[PeerId | None]:
    """Choose for each stage a server that does not hold it itself, on another host where that is known. Pure.

    None where there is no such server: whoever is alive then holds the stage. And for what trainers hold, unless the
    run has standby leads: with the trainers the loop is gone, too, and nobody could go on.
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


class SnapshotSchedule:
    """Decides when the servers take a snapshot."""

    def __init__(self, context: CoordinatorContext) -> None:
        self._transport, self._run = context.transport, context.run
        self._interval_s = context.limits.snapshot_interval  # at least, between two snapshots; None: there are none
        self._timeout = min(context.limits.call_timeout, ASK_TIMEOUT_S)
        self._last: tuple[int, float] | None = None  # its version, and when it was ordered
        self.hosts: dict[PeerId, str] = {}  # machines of the servers, as far as they were asked

    def enter_generation(self) -> None:
        """Begin with the next run generation: what was kept is of the old one."""
        self._last = None

    def is_due(self, servers: Sequence[PeerId]) -> bool:
        """Return whether a snapshot should be taken soon."""
        if self._interval_s is None or len(servers) < 2:  # a run of one server has nobody to survive it
            return False
        return self._last is None or now_s() >= self._last[1] + self._interval_s

    async def order(self, step: int, next_roster: Sequence[Sequence[Member]]) -> SnapshotOrder | None:
        """Make the order for the record of `step`; None: the servers take no snapshot then."""
        at_s = now_s()
        servers = sorted({member.peer_id for roster in next_roster for member in roster})
        if self._interval_s is None or not self.is_due(servers):
            return None
        held = await ask_held(self._transport, servers, timeout=self._timeout)
        on_trainers = [stage.on_trainers for stage in self._run.manifest.stages]
        through = newest_safe(held, next_roster, on_trainers)
        if self._last is not None and through != self._last[0]:
            if at_s < self._last[1] + self._interval_s * _GIVEN_UP_AFTER:
                return None  # it is on its way still, and what is on its way takes bandwidth
            _log.warning("The snapshot of version %d never came to be kept by all: a new one is taken.", self._last[0])
        self._last = (step + 1, at_s)
        self.hosts = {peer: one.host for peer, one in held.items() if one.host}
        keep = version_to_keep(held, next_roster, on_trainers)
        has_heirs = any(one.loops for one in held.values())
        keepers = choose_keepers(next_roster, on_trainers, self.hosts, has_heirs=has_heirs)
        return SnapshotOrder(keep=keep, keepers=keepers)
