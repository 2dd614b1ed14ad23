"""Lines for the lead's terminal: which peers joined a run, left it or died, and how many are left."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_swarm.core.readable import short_name
from lightning_swarm.monitor.survey import place_of
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.run_state import RunState

_DIED = "died or was cut off"


@dataclass(frozen=True)
class MembershipLine:
    """One peer's change, for people."""

    level: int  # as in `logging`
    text: str


class Membership:
    """The peers of a run as records named them so far; knows no clock and no network."""

    def __init__(self, run: RunState, addresses: Mapping[PeerId, Sequence[str]]) -> None:
        self._is_whole = run.manifest.is_whole
        self._places: dict[PeerId, str] = {}  # host and port
        self._locate(addresses)
        self._rosters, self._trainers = _members(run)

    def follow(self, record: Record) -> list[MembershipLine]:
        """Apply the next record. Returns a line for each peer that it adds or removes."""
        self._locate({one.member.peer_id: one.addresses for one in record.newcomers})
        came, went = defaultdict[PeerId, list[int]](list), defaultdict[PeerId, list[int]](list)
        for vacancy in record.left:
            went[vacancy.member.peer_id].append(vacancy.stage_index)
            self._rosters[vacancy.stage_index].discard(vacancy.member.peer_id)
        for newcomer in record.newcomers:
            came[newcomer.member.peer_id].append(newcomer.stage_index)
            self._rosters[newcomer.stage_index].add(newcomer.member.peer_id)
        for peer in record.retired:
            went[peer] += []
        for peer in record.enlisted:
            came[peer] += []
        self._trainers = (self._trainers - {*record.retired}) | {*record.enlisted}
        convicted = {one.peer for one in record.convicted or ()}
        movers = {one.member.peer_id for one in record.departures}
        lines = [
            self._gone(
                peer, stages, convicted=peer in convicted, died=peer in record.closing.absent and peer not in movers
            )
            for peer, stages in went.items()
        ]
        return lines + [self._joined(peer, stages) for peer, stages in came.items()]

    def catch_up(self, run: RunState) -> list[MembershipLine]:
        """Apply a rollback, which has no record. Returns a line for each peer that did not survive it."""
        before = self._all
        rosters, self._trainers = _members(run)
        stages = {peer: [i for i, roster in enumerate(self._rosters) if peer in roster] for peer in before}
        self._rosters = rosters
        return [self._gone(peer, stages[peer], died=True) for peer in sorted(before - self._all)]

    def _locate(self, addresses: Mapping[PeerId, Sequence[str]]) -> None:
        self._places |= {peer: place for peer, maddrs in addresses.items() if (place := place_of(maddrs)) is not None}

    @property
    def _all(self) -> set[PeerId]:
        return self._trainers.union(*self._rosters)

    def _joined(self, peer: PeerId, stages: Sequence[int]) -> MembershipLine:
        verb = "joined" if stages or not any(peer in roster for roster in self._rosters) else "trains now"
        return MembershipLine(logging.INFO, self._line(peer, verb, stages, "{} now has {}"))

    def _gone(self, peer: PeerId, stages: Sequence[int], *, died: bool, convicted: bool = False) -> MembershipLine:
        if convicted:
            verb = "was excluded for false work"
        elif died:
            verb = _DIED
        elif peer not in self._all:
            verb = "left"
        else:
            verb = f"left {' and '.join(self._name(stage) for stage in stages)}" if stages else "trains no more"
        level = logging.WARNING if died or convicted else logging.INFO
        return MembershipLine(level, self._line(peer, verb, stages, "{} has {} left"))

    def _line(self, peer: PeerId, verb: str, stages: Sequence[int], form: str) -> str:
        place = f" ({self._places[peer]})" if peer in self._places else ""
        counts = [
            form.format(self._name(stage), _number(len(self._rosters[stage]), "server"))
            for stage in ([] if self._is_whole else stages)
        ]
        if len(self._trainers) > 1 or not stages:
            counts.append(_number(len(self._trainers), "trainer"))
        counts.append(f"{_number(len(self._all), 'peer')} in all")
        return f"Peer {short_name(peer)}{place} {verb}: {', '.join(counts)}"

    def _name(self, stage: int) -> str:
        return "the model" if self._is_whole else f"stage {stage}"


def _members(run: RunState) -> tuple[list[set[PeerId]], set[PeerId]]:
    return [{member.peer_id for member in roster} for roster in run.rosters], {*run.trainers}


def _number(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"
