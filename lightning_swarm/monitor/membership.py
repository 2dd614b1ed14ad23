"""Lines for the lead's terminal: which peers joined a run, left it or died, and how many are left."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_swarm.core.readable import short_name, shorten
from lightning_swarm.monitor.survey import place_of
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.bans import banned_among
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.run_state import RunState

_DIED = "died or was cut off"


@dataclass(frozen=True)
class MembershipLine:
    """A log line about one peer, or about the kinds of machines that hold one stage."""

    level: int  # a level of `logging`
    text: str


class Membership:
    """Follows the members of a run through its records. Uses no clock and no network."""

    def __init__(self, run: RunState, addresses: Mapping[PeerId, Sequence[str]]) -> None:
        self._is_whole = run.manifest.is_whole
        self._places: dict[PeerId, str] = {}  # host and port
        self._set_places(addresses)
        self._rosters, self._trainers = _members(run)
        self._mixed: frozenset[int] = frozenset()  # stages that the newest record steps by portable arithmetic
        self._tied = {index for group in run.ties.groups() for index in group}  # stages that share parameters
        self.num_deaths = 0  # peers that died or were cut off, so far
        self._dead: set[PeerId] = set()  # peers reported as dead that no record has removed from the trainers yet

    def follow(self, record: Record, run: RunState) -> list[MembershipLine]:
        """Apply the next record; return lines for added and removed peers, and for changed kinds of machines."""
        self._set_places({newcomer.member.peer_id: newcomer.addresses for newcomer in record.newcomers})
        joined, gone = defaultdict[PeerId, list[int]](list), defaultdict[PeerId, list[int]](list)
        for vacancy in record.left:
            gone[vacancy.member.peer_id].append(vacancy.stage_index)
            self._rosters[vacancy.stage_index].discard(vacancy.member.peer_id)
        for newcomer in record.newcomers:
            joined[newcomer.member.peer_id].append(newcomer.stage_index)
            self._rosters[newcomer.stage_index].add(newcomer.member.peer_id)
        gone |= {peer: gone[peer] for peer in record.retired if peer not in self._dead}
        joined |= {peer: joined[peer] for peer in record.enlisted}
        self._trainers = (self._trainers - {*record.retired}) | {*record.enlisted}
        movers = {vacancy.member.peer_id for vacancy in record.departures}  # servers that move to another stage
        died = {peer for peer in gone if peer in record.closing.absent} - movers
        self.num_deaths += len(died - self._dead)
        self._dead |= died
        reasons = dict.fromkeys(self._dead & gone.keys(), _DIED)
        reasons |= {
            vacancy.member.peer_id: f"was left out, because its weights differ ({shorten(vacancy.reason)})"
            for vacancy in record.left
            if vacancy.reason
        }
        reasons |= dict.fromkeys(banned_among(gone, run.bans, run.invitations), "was expelled by the run's owner")
        reasons |= {conviction.peer: "was convicted of false work" for conviction in record.convicted or ()}
        lines = [self._gone_line(peer, stages, reasons.get(peer)) for peer, stages in gone.items()]
        self._dead -= joined.keys()
        lines += [self._joined_line(peer, stages) for peer, stages in joined.items()]
        self._dead &= self._trainers
        if gone:
            self._places = {peer: place for peer, place in self._places.items() if peer in self._all}
        return lines + self._kind_lines(record)

    def _kind_lines(self, record: Record) -> list[MembershipLine]:
        """Return a line for each stage whose servers are of several kinds now, or are again of one kind."""
        before, self._mixed = self._mixed, frozenset(record.portable or ())
        changed = sorted(before ^ self._mixed)
        return [MembershipLine(logging.INFO, self._kind_line(stage, record.step)) for stage in changed]

    def _kind_line(self, stage: int, step: int) -> str:
        name = "The model" if self._is_whole else f"Stage {stage}"
        if stage in self._tied:
            name += ", or a stage with which it shares parameters,"
        if stage in self._mixed:
            return (
                f"{name} is on machines of several kinds from step {step} on: portable arithmetic gives all of them "
                "the same weights, and the optimizer's step takes about three times as long"
            )
        return f"{name} is on machines of one kind again from step {step} on: the optimizer steps at full speed"

    def catch_up(self, run: RunState) -> list[MembershipLine]:
        """Apply a rollback, which has no record, and return a line for each peer that the run lost or gained."""
        former_peers, former_rosters = self._all, self._rosters
        self._rosters, self._trainers = _members(run)
        self._dead.clear()
        lost, new = sorted(former_peers - self._all), sorted(self._all - former_peers)
        self.num_deaths += len(lost)
        lines = [self._gone_line(peer, _stages_of(peer, former_rosters), _DIED) for peer in lost]
        return lines + [self._joined_line(peer, _stages_of(peer, self._rosters)) for peer in new]

    def _set_places(self, addresses: Mapping[PeerId, Sequence[str]]) -> None:
        self._places |= {peer: place for peer, maddrs in addresses.items() if (place := place_of(maddrs)) is not None}

    @property
    def _all(self) -> set[PeerId]:
        return self._trainers.union(*self._rosters) - self._dead

    def _joined_line(self, peer: PeerId, stages: Sequence[int]) -> MembershipLine:
        # A peer without new stages is a new trainer; if it serves stages, it was in the run before.
        verb = "joined" if stages or not _stages_of(peer, self._rosters) else "trains now"
        return MembershipLine(logging.INFO, self._line(peer, verb, stages, "{} now has {}"))

    def _gone_line(self, peer: PeerId, stages: Sequence[int], reason: str | None) -> MembershipLine:
        verb = reason
        if verb is None and peer in self._all:  # it remains in another part of the run
            verb = f"left {' and '.join(f'stage {stage}' for stage in stages)}" if stages else "no longer trains"
        elif verb is None:  # the record does not state whether a trainer left or died
            verb = "left" if stages else "is no longer in the run"
        level = logging.INFO if reason is None else logging.WARNING
        return MembershipLine(level, self._line(peer, verb, stages, "{} has {} left"))

    def _line(self, peer: PeerId, verb: str, stages: Sequence[int], template: str) -> str:
        place = f" ({self._places[peer]})" if peer in self._places else ""
        stages = () if self._is_whole else stages
        counts = [template.format(f"stage {stage}", self._num_servers(stage)) for stage in stages]
        trainers = self._trainers - self._dead
        if len(trainers) > 1 or not counts:
            counts.append(_number(len(trainers), "trainer"))
        return f"Peer {short_name(peer)}{place} {verb}: {', '.join(counts)}, {_number(len(self._all), 'peer')} in all"

    def _num_servers(self, stage: int) -> str:
        return _number(len(self._rosters[stage]), "server")


def _members(run: RunState) -> tuple[list[set[PeerId]], set[PeerId]]:
    return [{member.peer_id for member in roster} for roster in run.rosters], {*run.trainers}


def _stages_of(peer: PeerId, rosters: Sequence[set[PeerId]]) -> list[int]:
    return [stage for stage, roster in enumerate(rosters) if peer in roster]


def _number(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"
