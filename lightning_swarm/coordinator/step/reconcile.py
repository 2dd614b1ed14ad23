"""Reconciles gradient sums when a step closes, so that each microbatch counts exactly once in each trained stage.

The servers freeze their sums and report their ledgers (`FREEZE`), from which a repair is planned. A second `FREEZE`
names the microbatches that each repaired sum must hold, and trainers resend missing ones (`REPLAY`). This is repeated
until no repair is left. A discard is a sum that begins anew; a hole is a microbatch that no sum of a stage holds.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from lightning_swarm.coordinator.context import CoordinatorContext
from lightning_swarm.coordinator.rebalancing.balancer import ReportedLoad
from lightning_swarm.coordinator.server_calls import ServerCalls
from lightning_swarm.coordinator.step.open_step import OpenStep
from lightning_swarm.coordinator.step.oversight import Verdict
from lightning_swarm.coordinator.step.reference import WeightsDiffer, check_lead_kept, choose_excluded, replicas_differ
from lightning_swarm.coordinator.step.replay_plan import (
    Ledgers,
    ReplayPlan,
    ServerLedger,
    named_receipts,
    plan_replays,
    read_ledger,
    reported_loads,
    touched_parameters,
)
from lightning_swarm.coordinator.step.replay_rounds import ReplayRounds
from lightning_swarm.coordinator.step.step_servers import StepServers
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import NotMember, PeerError, ProtocolError, StageLost, StepError, SwarmError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.calls import Receipt, pack, pack_origins, to_runs
from lightning_swarm.protocol.messages.run import HeldSnapshot, Member, Selection, first_trained, trained_names
from lightning_swarm.protocol.messages.step import AvoidRequest, Closing, FreezeReply, FreezeRequest, NamedReceipts
from lightning_swarm.protocol.messages.wire import draw_challenge, from_bitmap
from lightning_swarm.protocol.rpc import AVOID

_log = logging.getLogger(__name__)
_SPOILT: Final = "it holds gradients with another weight, or from another trainer, than their lease's"
_FALSE: Final = "its work of this step is false or disputed"
_MAX_HANDOVERS: Final = 3  # attempts to have another server coordinate
_MAX_DISCARDS: Final = 4  # discards of one server's sums in one step
_MAX_CORRECTIONS: Final = 2  # replays of a microbatch whose gradients have another weight than their lease's
_FIRST_PAUSE_S: Final = 0.5  # wait for a server of an empty stage; doubles each time
_LONGEST_PAUSE_S: Final = 30.0


@dataclass(frozen=True)
class ReconciledStep:
    """A closed step whose sums hold exactly the microbatches that it counts."""

    closing: Closing
    began_s: float  # time of the last `FREEZE`, on the monotonic clock
    touched: Sequence[bytes]  # stage -> bitmap over the parameters that got a gradient
    named: Mapping[PeerId, list[NamedReceipts]]  # server -> receipts in its sums
    # Hash of each stage's weights, the same on all replicas. None: it has one replica, and no server is joining.
    version_hashes: Sequence[int | None]
    challenge: int  # random number that entered the hashes; 0: none, so the hashes can be forged
    snapshots: Mapping[PeerId, Sequence[HeldSnapshot]]  # server -> snapshots that no record has yet


class SumReconciliation:
    """Reconciles the sums of one step with the microbatches that it counts, once all its batches are complete."""

    def __init__(
        self,
        context: CoordinatorContext,
        servers: ServerCalls,
        step: OpenStep,
        selection: Selection | None,
        *,
        late: bool,  # the next step already takes batches
        joining: Callable[[], bool],  # returns whether a server may join with the step's record
        fence: Callable[[OpenStep, Sequence[int]], None],  # makes servers abandon calls of struck batches
    ) -> None:
        run = self._run = context.run
        self._generation, self._events = context.generation, context.events
        self._servers, self.step = servers, step
        self._request = partial(FreezeRequest, generation=context.generation, step=step.step)
        self._first_trained = first_trained(selection, run.manifest.stages)
        self._late, self._joining = late, joining
        self._fence, self._step_aside = fence, context.step_aside
        self._outage, self._false_batches = context.outage, context.false_batches
        # From this number on, all numbers of rounds are this coordinator's.
        self._rounds = itertools.count(context.proposer.first_round)
        self._replays = ReplayRounds(context, servers, step)
        self._pause_s = _FIRST_PAUSE_S
        self._discards: Counter[PeerId] = Counter()  # server -> discards of its sums, without spoilt sums
        self._misweighed: set[int] = set()  # places of batches that are in a sum with a wrong weight
        self._falsified: set[int] = set()  # places of batches that trainers reported complete, but no sum holds
        self._seen: set[Receipt] = set()  # receipts that any sum ever held
        self._informed: set[PeerId] = set()  # servers that were sent the origins of all batches that they may add
        self._trained = trained_names(selection) if selection is not None else ()
        self.oversight = context.oversight.of_step(context, servers, step, self._trained)
        self.step_servers = StepServers(context, servers, step.step)
        self._snapshots: dict[PeerId, Sequence[HeldSnapshot]] = {}  # server -> new snapshots
        self._machine_kinds = context.machine_kinds
        # Server -> reason of its conviction. It stays excluded if a rollback comes before the record.
        self.convicted = context.oversight.convicted
        for peer, reason in run.electorate.new_convictions(self.convicted).items():
            self.step_servers.exclude(peer, ProtocolError(reason))
        self._tainted: set[int] = set()  # places of batches that servers with false work or wrong weights computed
        self.loads: dict[PeerId, dict[int, ReportedLoad]] = {}  # peer -> stage -> load, once closed

    async def close(self) -> ReconciledStep | None:
        """Freeze and repair the sums until they are reconciled; None if batches were struck, and new ones granted."""
        while True:
            round_, began_s = next(self._rounds), now_s()
            # Use an unforgeable digest if servers are untrusted or one is joining.
            challenge = draw_challenge() if self.oversight.examines or self._joining() else 0
            ledgers = await self._freeze(round_, challenge)
            if not all(ledgers):
                await self._pause([index for index, stage in enumerate(ledgers) if not stage])
                continue
            self._outage.stage_found(step=self.step.step)
            self._pause_s = _FIRST_PAUSE_S
            if replicas_differ(ledgers, tied=bool(self._run.ties)):
                if await self._exclude_differing(ledgers, challenge):
                    return None
                continue
            hashes = [next(iter(stage.values())).report.version_hash for stage in ledgers]
            spoilt = self._find_spoilt(ledgers)
            if self._informed & set[PeerId]().union(*spoilt):
                continue  # `_find_spoilt` has excluded these servers
            self._replays.check_claims(ledgers)
            self._seen.update(*(ledger.held for stage in ledgers for ledger in stage.values()))
            plan = self._plan(ledgers, spoilt)
            if plan.done:
                verdict = await self.oversight.examine(ledgers, self._machine_kinds, round_)
                if not verdict.is_clean:
                    if await self._apply_verdict(verdict, ledgers):
                        return None
                    continue
                self.loads = reported_loads(ledgers)
                touched = [touched_parameters(stage.values()) for stage in ledgers]
                named_held, closing = named_receipts(ledgers), self._closing(round_)
                return ReconciledStep(closing, began_s, touched, named_held, hashes, challenge, self._snapshots)
            for first in plan.lost:
                self._check_excused(first, ledgers)
            lost = set(plan.lost) or self._never_corrected(plan)
            if not lost:
                unfillable = self._replays.unfillable_batches(plan.holes)
                if self._trust_lead(unfillable):
                    continue  # without the excluded servers
                self._falsified |= {first for first, lacking in unfillable.items() if lacking}
                lost = set(unfillable) or await self._repair(plan, spoilt)
            self._falsified |= self._never_seen(lost)
            if lost and await self._strike(self._with_their_sums(lost, ledgers), ledgers):
                return None

    async def _apply_verdict(self, verdict: Verdict, ledgers: Ledgers, *, reason: str = _FALSE) -> bool:
        """Exclude servers and strike batches by a verdict; return whether the step takes new batches."""
        for peer, false_work in verdict.convicted.items():
            self.convict(peer, false_work)
        for peer, error in verdict.failed.items():
            self.step_servers.exclude(peer, error)
        avoided = verdict.avoided | verdict.convicted.keys() | (verdict.failed.keys() if verdict.tainted else set())
        if avoided:
            request = AvoidRequest(
                generation=self._generation,
                step=self.step.step,
                peers=sorted(avoided),
                lost=sorted(self.step_servers.gone),
                reason=reason,
            )
            await self._servers.ask_all(AVOID, self._run.trainers, request)  # trainers that are gone do not matter
        self._tainted |= verdict.tainted
        lost = verdict.tainted & self._places
        # Without this wait, trainers would resend the batches to a stage without servers.
        while lost and (empty := [index for index, roster in enumerate(self.step_servers.rosters) if not roster]):
            await self._pause(empty)
        return bool(lost) and await self._strike(self._with_their_sums(lost, ledgers), ledgers)

    async def _exclude_differing(self, ledgers: Ledgers, challenge: int) -> bool:
        """Exclude servers whose weights differ, by these ledgers; return whether the step takes new batches."""
        with_hashes = await self._freeze(next(self._rounds), challenge, each_tensor=True)
        ledgers = [
            {member: ledger.with_tensors(again.get(member)) for member, ledger in stage.items()}
            for stage, again in zip(ledgers, with_hashes, strict=True)
        ]
        run = self._run
        differing = choose_excluded(ledgers, guests=run.guests, trusted=run.trusted, tied=bool(run.ties))
        check_lead_kept(run.manifest, differing)
        if (own_error := differing.get(self._servers.own)) is not None:
            await self._hand_over(own_error)
        self.step.without_server |= differing.keys() if any(run.on_trainers) else set()
        tainted = set[int]()
        if self._may_strike():  # then the batches in these servers' sums run again
            for stage in ledgers:
                tainted.update(*(ledger.batches for member, ledger in stage.items() if member.peer_id in differing))
        verdict = Verdict(failed=dict(differing), avoided=set(differing), tainted=tainted)
        return await self._apply_verdict(verdict, ledgers, reason="its weights differ from its stage's")

    async def _hand_over(self, error: WeightsDiffer) -> None:
        """Hand over to another coordinator, which excludes this server; raise the error if no server takes over."""
        _log.warning("Another server is to coordinate in place of this one: %s", error)
        for _ in range(_MAX_HANDOVERS):
            await asyncio.wait({self._step_aside()})  # success ends this task
            await asyncio.sleep(_FIRST_PAUSE_S)
        raise error

    def _may_strike(self) -> bool:
        """Return whether trainers still have the step's batches, and can run them again."""
        # A late step's batches were computed with older weights. A lone trainer keeps only its newest batch.
        run = self._run
        keeps = run.is_shared or run.manifest.settings.delay_optimizer_step or len(self.step.batches) < 2
        return self.oversight.examines or (keeps and not self._late)

    def convict(self, peer: PeerId, reason: str) -> None:
        """Exclude a server for false work, and have the step's record expel it from the run."""
        self._events.note("convicted", peer=peer, step=self.step.step, reason=reason)
        self.convicted[peer] = reason
        self.step_servers.exclude(peer, ProtocolError(reason))
        self.oversight.watch_fellows(peer)

    # ------------------------------------------------------------------ freezing

    async def _freeze(self, round_: int, challenge: int, *, each_tensor: bool = False) -> Ledgers:
        """Freeze the sums and return their ledgers. A server that does not answer is excluded."""
        # Given the expected closing, servers begin to average before they get the final one. But a late step averages
        # only on idle links, and sums that are examined are averaged only afterwards.
        expected = None if self._late or each_tensor or self.oversight.examines else self._closing(round_)
        request = self._request(round=round_, expected=expected, each_tensor=each_tensor, challenge=challenge)
        servers = self.step_servers
        replies = await self._ask(dict.fromkeys(servers.peers, request))
        self._snapshots = {peer: reply.snapshots or () for peer, reply in replies.items()}
        ledgers: Ledgers = [{} for _ in self._run.rosters]
        for index, roster in enumerate(servers.rosters):
            for member in roster:
                try:
                    ledger = read_ledger(replies[member.peer_id], member, index)
                    from_bitmap(ledger.report.touched, len(self._run.ties.trainable(index, self._trained)))
                    self.oversight.check_ledger(member.peer_id, index, ledger)
                    ledgers[index][member] = ledger
                except SwarmError as error:
                    servers.exclude(member.peer_id, error)
        gone = servers.gone
        return [{member: ledger for member, ledger in stage.items() if member.peer_id not in gone} for stage in ledgers]

    async def _ask(self, requests: Mapping[PeerId, FreezeRequest]) -> dict[PeerId, FreezeReply]:
        """Send freeze requests, and return the answers; a server that does not answer is excluded."""
        replies, failed = await self._servers.freeze(requests)
        for peer, error in failed.items():
            self.step_servers.exclude(peer, error)
        self._machine_kinds.update((peer, reply.arithmetic) for peer, reply in replies.items())
        self._events.learn({peer: reply.noted for peer, reply in replies.items()})
        return replies

    def _closing(self, round_: int) -> Closing:
        step = self.step
        return Closing(
            generation=self._generation,
            step=step.step,
            round=round_,
            batches=to_runs([first for first, _, _ in step.batches]),
            num_samples=step.num_granted,
            total_weight=step.total_weight,
            absent=sorted(self.step_servers.gone),
            gradient_scale=step.gradient_scale or 1.0,  # None: no batch, so the sums are empty
        )

    # ------------------------------------------------------------------ what is missing

    # A batch's origin is its weight and its trainer. Trainers send the weight with their gradients, and servers report
    # both to the coordinator. If either differs from the lease, the sum begins anew, and its server is sent the granted
    # origins. If it then reports others, it is excluded. If replays still have another weight, the batch is struck, and
    # its trainer blamed. Gradients from another trainer than the batch's strike no batch.
    def _find_spoilt(self, ledgers: Ledgers) -> list[set[PeerId]]:
        """Find each stage's servers with wrong origins in their sums; exclude servers that knew the granted origins."""
        granted = self.step.origins
        spoilt = [{member.peer_id for member, ledger in stage.items() if ledger.spoilt(granted)} for stage in ledgers]
        self._misweighed.update(*(ledger.misweighed(granted) for stage in ledgers for ledger in stage.values()))
        for peer in sorted(self._informed & set[PeerId]().union(*spoilt)):
            reason = f"{peer} was sent the origins of all batches that it may add, but reports other origins"
            self.step_servers.exclude(peer, ProtocolError(reason))
        return spoilt

    def _never_corrected(self, plan: ReplayPlan) -> set[int]:
        """Return the batches with a wrong weight that replays did not correct."""
        return {
            receipt[0]
            for receipt in plan.holes
            if receipt[0] in self._misweighed and self._replays.num_replays(receipt) >= _MAX_CORRECTIONS
        }

    def _trust_lead(self, unfillable: Mapping[int, Collection[PeerId]]) -> bool:
        """Exclude servers that lack the lead's microbatches after its replays; return whether there are any."""
        lead = self._run.manifest.lead
        lacking = {peer for first, peers in unfillable.items() if self.step.trainer_of(first) == lead for peer in peers}
        for peer in sorted(lacking):
            reason = f"the lead sent microbatches to {peer} again, and its sum still lacks them"
            self.step_servers.exclude(peer, ProtocolError(reason))
        return bool(lacking)

    def _never_seen(self, lost: Collection[int]) -> set[int]:
        """Return the lost batches with a reported microbatch that no sum ever held."""
        if self.step_servers.gone:  # their sums may have held it
            return set()
        return {receipt[0] for receipt in self.step.counted if receipt[0] in lost and receipt not in self._seen}

    def _plan(self, ledgers: Ledgers, spoilt: Sequence[Collection[PeerId]]) -> ReplayPlan:
        step, stages, present = self.step, self._run.manifest.stages, self.step_servers.rosters
        return plan_replays(
            [step.batches if stage.on_trainers else step.counted for stage in stages],
            [{member.peer_id: ledger.held for member, ledger in stage.items()} for stage in ledgers],
            first_trained=self._first_trained,
            replayable=[not stage.on_trainers for stage in stages],
            barred={first: self._replays.barred_holders(first, present) for first, _, _ in step.batches},
            spoilt=spoilt,
        )

    def _check_excused(self, first: int, ledgers: Ledgers) -> None:
        """Raise StepError if a present trainer did not add its own batch to its sum, which is a bug."""
        # In a stage on trainers, a batch may be lost only if its trainer is gone, or its trainer's sum begins anew.
        trainer = self.step.trainer_of(first)
        for index, member, ledger in self._on_trainers(ledgers):
            added = ledger.batches
            if member.peer_id == trainer and not added - self._places and first not in added:
                raise StepError(
                    f"step {self.step.step}: trainer {trainer} answers, but its sum of stage {index} lacks its own "
                    f"batch at {first}"
                )

    async def _repair(self, plan: ReplayPlan, spoilt: Sequence[Collection[PeerId]]) -> set[int]:
        """Have unusable sums discarded and holes filled; return the batches that cannot be computed again."""
        for index, peers in enumerate(plan.discards):
            for peer in peers:
                self._discards[peer] += peer not in spoilt[index]
                if self._discards[peer] > _MAX_DISCARDS:
                    self.step_servers.exclude(peer, StepError(f"the sums of {peer} began anew too often"))
                    return set()
                reason = _SPOILT if peer in spoilt[index] else ""
                self._events.note("discard", peer=peer, stage=index, step=self.step.step, reason=reason)
        repaired = {peer for peers in plan.discards for peer in peers}
        repaired |= {holder for holders in plan.holes.values() for holder in holders.values()}
        round_, granted = next(self._rounds), self.step.origins
        requests = {
            peer: self._request(
                round=round_,
                named=[
                    NamedReceipts(
                        stage_index=index,
                        receipts=pack(stage[peer]),
                        origins=pack_origins({first: granted[first] for first, _, _ in stage[peer]}),
                    )
                    for index, stage in enumerate(plan.named)
                    if peer in stage
                ],
            )
            for peer in sorted(repaired)
        }
        self.oversight.expect(plan, repaired)
        if len(await self._ask(requests)) < len(requests):
            return set()  # a server is gone, so another plan is made
        self._informed |= repaired
        return await self._replays.fill(plan.holes, self.step_servers.gone)

    def _with_their_sums(self, lost: set[int], ledgers: Ledgers) -> set[int]:
        """Add all other batches of a trainer's own sum with a lost batch: it begins anew, and cannot be replayed."""
        sums = [ledger.batches & self._places for _, _, ledger in self._on_trainers(ledgers)]
        return lost.union(*(batches for batches in sums if batches & lost))

    def _on_trainers(self, ledgers: Ledgers) -> Iterator[tuple[int, Member, ServerLedger]]:
        """Yield the ledgers of stages on trainers, with stage and member."""
        for index, (manifest, stage) in enumerate(zip(self._run.manifest.stages, ledgers, strict=True)):
            if manifest.on_trainers:
                yield from ((index, member, ledger) for member, ledger in stage.items())

    @property
    def _places(self) -> set[int]:
        """Places of the batches that the step counts."""
        return {first for first, _, _ in self.step.batches}

    async def _strike(self, firsts: set[int], ledgers: Ledgers) -> bool:
        """Strike batches; return whether the step takes new ones."""
        for first in sorted(firsts):
            trainer, reason = self.step.trainer_of(first), f"the batch at {first} cannot be computed again"
            if first in self._misweighed:
                self._false_batches[trainer] += 1
                reason += ": its gradients have another weight than its lease"
            elif first in self._tainted:
                reason = f"the batch at {first} went through a server whose results or weights are in doubt"
            elif first in self._falsified and trainer != self._run.manifest.lead:
                self._false_batches[trainer] += 1
                reason += ": its trainer reported receipts, but no sum holds it"
            self._events.note("strike", peer=trainer, step=self.step.step, reason=reason)
        reopens = not self.step.closes_without(firsts, self._run.manifest.lead)
        if reopens:
            # Reopen the sums before places are free, because a granted batch needs open sums.
            added = set[int]().union(*(ledger.batches for stage in ledgers for ledger in stage.values()))
            request = self._request(round=next(self._rounds), struck=sorted(firsts | (added - self._places)))
            await self._ask(dict.fromkeys(self.step_servers.peers, request))
            self.oversight.reopen()
            self.step.reopen()
            self._informed.clear()
        self.step.strike(firsts)
        self.step.restart_places()
        self._fence(self.step, sorted(firsts))
        return reopens

    # ------------------------------------------------------------------ a stage without servers

    async def _pause(self, empty: Sequence[int]) -> None:
        """Wait a little for servers of empty stages; raise StageLost if none can come back, or after too long."""
        at_s = now_s()
        address = await self._servers.address()
        for index in empty:
            errors = {member.peer_id: self.step_servers.gone[member.peer_id] for member in self._run.rosters[index]}
            reason = "; ".join(str(error) for error in errors.values())
            # A server that answers NotMember has lost its state, and does not come back as a member.
            silent = [
                peer
                for peer, error in errors.items()
                if isinstance(error, PeerError) and not isinstance(error, NotMember)
            ]
            if not silent:
                raise StageLost(f"stage {index} has no server left: {reason}")
            self._outage.keep(index, errors, step=self.step.step, address=address, now_s=at_s)
            for peer in silent:
                self.step_servers.gone.pop(peer, None)  # it may have come back
            self.oversight.reopen()  # silent servers may have carried out a request
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
