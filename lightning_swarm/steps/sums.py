"""The sums of a step that closes, brought to what the step counts: each microbatch once in each stage that trains.

``FREEZE -> plan -> (discards and holes: FREEZE, naming them -> REPLAY) -> FREEZE -> ...`` until nothing is amiss.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from lightning_swarm.clock import now_s
from lightning_swarm.errors import (
    NotMember,
    PeerError,
    StageLost,
    StepError,
    SwarmError,
)
from lightning_swarm.events import EventLog
from lightning_swarm.network import PeerId
from lightning_swarm.rebalancing.said import Load
from lightning_swarm.run_state import RunState
from lightning_swarm.selection import first_trained
from lightning_swarm.steps.attendance import Attendance
from lightning_swarm.steps.ledgers import Ledger, Ledgers, check_tied, loads, named, read, touched, version_hash
from lightning_swarm.steps.planning import Plan, plan_replays
from lightning_swarm.steps.policy import OpenStep
from lightning_swarm.steps.replays import Replays
from lightning_swarm.steps.servers import Servers
from lightning_swarm.steps.vigil import Vigil
from lightning_swarm.types.calls import Receipt
from lightning_swarm.types.many import pack, to_runs
from lightning_swarm.types.runs import Member, Selection
from lightning_swarm.types.steps import (
    Closing,
    FreezeReply,
    FreezeRequest,
    Named,
)

_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0


@dataclass(frozen=True)
class Closed:
    """The sums are what the step counts.

    Args:
        closing: What that is.
        named: What each server holds of it, for each of its stages.
        version_hashes: For each stage, of the weights that its replicas agree on. None: it has one, and nobody joined.
    """

    closing: Closing
    named: Mapping[PeerId, list[Named]]
    version_hashes: Sequence[int | None]


class Sums:
    """Of one step, whose batches are through.

    Args:
        run: As the coordinator's server knows it.
        servers: All that hold a stage.
        step: Which.
        selection: What it trains.
        joining: Whether somebody may enter with the step's record.
        first_round: From here on nobody else counts rounds of this step.
        fence: Has servers give up what is under way of batches that are struck.
        vigil: Of the coordinator.
        events: Of the coordinator.

    Attributes:
        attendance: Who takes part in the step.
        loads: Of those that are there, once it has closed: by peer and stage.
    """

    def __init__(
        self,
        run: RunState,
        servers: Servers,
        step: OpenStep,
        selection: Selection | None,
        *,
        joining: Callable[[], bool],
        first_round: int,
        fence: Callable[[OpenStep, Sequence[int]], None],
        vigil: Vigil,
        events: EventLog,
    ) -> None:
        self._run = run
        self._servers = servers
        self._step = step
        self._first_trained = first_trained(selection, run.manifest.stages)
        self._joining = joining
        self._fence = fence
        self._vigil = vigil
        self._events = events
        self._rounds = itertools.count(first_round)
        self._replays = Replays(run, servers, step, events)
        self._pause_s = _FIRST_PAUSE_S
        self.attendance = Attendance(run, servers, step.step, events)
        self.loads: dict[PeerId, dict[int, Load]] = {}

    def are_of(self, step: OpenStep) -> bool:
        """Whether these are the sums of this step, and not of one of an earlier generation, say."""
        return self._step is step

    async def close(self) -> Closed | None:
        """Freeze the sums, have done what is missing, and freeze them again.

        Returns:
            None: batches were struck, and the step takes others.

        Raises:
            StepError: A stage has nobody left, or its replicas are not alike.
        """
        while True:
            round_ = next(self._rounds)
            ledgers = await self._frozen(round_)
            if not all(ledgers):
                await self._pause([index for index, stage in enumerate(ledgers) if not stage])
                continue
            self._vigil.end(step=self._step.step)
            self._pause_s = _FIRST_PAUSE_S
            hashes = [version_hash(index, stage.values(), step=self._step.step) for index, stage in enumerate(ledgers)]
            check_tied(ledgers, step=self._step.step)
            plan = self._plan(ledgers)
            if plan.done:
                self.loads = loads(ledgers)
                return Closed(self._closing(ledgers, round_), named(ledgers), hashes)
            for first in plan.lost:
                self._check_excused(first, ledgers)
            lost = set(plan.lost) or await self._repair(plan)
            if lost and await self._strike(self._with_their_sums(lost, ledgers), ledgers):
                return None

    # ------------------------------------------------------------------ freezing

    def _request(
        self, round_: int, *, named: list[Named] | None = None, struck: list[int] | None = None
    ) -> FreezeRequest:
        return FreezeRequest(
            generation=self._run.manifest.generation,
            step=self._step.step,
            attempt=0,
            round=round_,
            named=named,
            struck=struck,
            joining=self._joining(),
        )

    async def _frozen(self, round_: int) -> Ledgers:
        """What the sums hold, to which nothing is added any more. Who does not say is gone."""
        request = self._request(round_)
        there = self.attendance
        replies = await self._ask(dict.fromkeys(there.peers, request))
        found: Ledgers = [{} for _ in self._run.rosters]
        for index, roster in enumerate(there.rosters):
            for member in roster:
                try:
                    found[index][member] = read(replies[member.peer_id], member, index)
                except SwarmError as error:
                    there.lose(member.peer_id, error)
        return [{one: ledger for one, ledger in stage.items() if one.peer_id not in there.gone} for stage in found]

    async def _ask(self, requests: Mapping[PeerId, FreezeRequest]) -> dict[PeerId, FreezeReply]:
        replies = {}
        for peer, reply in (await self._servers.freeze(requests)).items():
            if isinstance(reply, SwarmError):
                self.attendance.lose(peer, reply)
            else:
                replies[peer] = reply
                self._events.learn({peer: reply.noted})
        return replies

    def _expected(self, stage_index: int) -> list[Receipt]:
        """The receipts that count in a stage."""
        return self._step.batches if self._run.manifest.stages[stage_index].on_trainers else self._step.counted

    def _closing(self, ledgers: Ledgers, round_: int) -> Closing:
        step = self._step
        return Closing(
            generation=self._run.manifest.generation,
            step=step.step,
            attempt=0,
            round=round_,
            batches=to_runs([first for first, _, _ in step.batches]),
            num_samples=step.num_granted,
            total_weight=step.total_weight,
            absent=sorted(self.attendance.gone),
            touched=[touched(stage.values()) for stage in ledgers],
            gradient_scale=step.gradient_scale or 1.0,  # with no batch at all the sums are nothing
        )

    # ------------------------------------------------------------------ what is missing

    def _plan(self, ledgers: Ledgers) -> Plan:
        expected = [self._expected(index) for index in range(len(ledgers))]
        sums = [{member.peer_id: one.held for member, one in stage.items()} for stage in ledgers]
        trainers = {first: self._step.trainer_of(first) for first, _, _ in self._step.batches}
        return plan_replays(
            expected,
            sums,
            first_trained=self._first_trained,
            replayable=[not stage.on_trainers for stage in self._run.manifest.stages],
            barred={first: self._replays.unreached(trainer) for first, trainer in trainers.items()},
        )

    def _check_excused(self, first: int, ledgers: Ledgers) -> None:
        """What trainers hold of a batch may go with its trainer, or with a sum that begins anew. Else it is a bug.

        Raises:
            StepError: The trainer is there, and did not add it.
        """
        trainer = self._step.trainer_of(first)
        for index, member, ledger in self._on_trainers(ledgers):
            added = ledger.batches
            if member.peer_id == trainer and not added - self._places and first not in added:
                raise StepError(
                    f"step {self._step.step}: trainer {trainer} is there, and to its sum of stage {index} its "
                    f"batch at {first} was added not at all"
                )

    async def _repair(self, plan: Plan) -> set[int]:
        """Have sums begun anew and holes filled; returns the batches that cannot be computed again."""
        for index, peers in enumerate(plan.discards):
            for peer in peers:
                self._events.note("discard", peer=peer, stage=index, step=self._step.step)
        concerned = {peer for peers in plan.discards for peer in peers}
        concerned |= {holder for holders in plan.holes.values() for holder in holders.values()}
        round_ = next(self._rounds)
        requests = {
            peer: self._request(
                round_,
                named=[
                    Named(stage_index=index, receipts=pack(stage[peer]))
                    for index, stage in enumerate(plan.named)
                    if peer in stage
                ],
            )
            for peer in sorted(concerned)
        }
        if len(await self._ask(requests)) < len(requests):
            return set()  # somebody is gone: others shall hold it
        return await self._replays.fill(plan.holes, self.attendance.gone)

    def _with_their_sums(self, lost: set[int], ledgers: Ledgers) -> set[int]:
        """And the batches that share a trainer's sum with them: it begins anew, and none can be sent there again."""
        held = [ledger.batches & self._places for _, _, ledger in self._on_trainers(ledgers)]
        return lost.union(*(batches for batches in held if batches & lost))

    def _on_trainers(self, ledgers: Ledgers) -> Iterator[tuple[int, Member, Ledger]]:
        """The ledgers of what trainers hold, with their stages."""
        for index, (stage, held) in enumerate(zip(self._run.manifest.stages, ledgers, strict=True)):
            if stage.on_trainers:
                yield from ((index, member, ledger) for member, ledger in held.items())

    @property
    def _places(self) -> set[int]:
        """Of the batches that the step counts."""
        return {first for first, _, _ in self._step.batches}

    async def _strike(self, firsts: set[int], ledgers: Ledgers) -> bool:
        """Batches count nowhere; whether the step takes others."""
        for first in sorted(firsts):
            reason = f"the batch at {first} cannot be computed again"
            self._events.note("strike", peer=self._step.trainer_of(first), step=self._step.step, reason=reason)
        reopens = not self._step.closes_without(firsts, self._run.manifest.lead)
        if reopens:
            # Before a place is free: what is granted must find open sums.
            added = set[int]().union(*(one.batches for stage in ledgers for one in stage.values()))
            request = self._request(next(self._rounds), struck=sorted(firsts | (added - self._places)))
            await self._ask(dict.fromkeys(self.attendance.peers, request))
            self._step.reopen()
        self._step.strike(firsts)
        self._fence(self._step, sorted(firsts))
        return reopens

    # ------------------------------------------------------------------ a stage with nobody

    async def _pause(self, empty: Sequence[int]) -> None:
        """Wait a little for somebody of each stage to come back.

        Raises:
            StageLost: Nobody can, or nobody did for too long.
        """
        at_s = now_s()
        address = await self._servers.address()
        for index in empty:
            errors = {member.peer_id: self.attendance.gone[member.peer_id] for member in self._run.rosters[index]}
            reason = "; ".join(str(error) for error in errors.values())
            # Who says that it is no member has lost what it held: it does not come back as one.
            silent = [
                peer
                for peer, error in errors.items()
                if isinstance(error, PeerError) and not isinstance(error, NotMember)
            ]
            if not silent:
                raise StageLost(f"stage {index} has nobody left: {reason}")
            self._vigil.keep(index, errors, step=self._step.step, address=address, now_s=at_s)
            self.attendance.look_again(silent)
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
