"""What a server has added up in the steps that are open: its stages' sums, and the ledgers that say what is in them.

What changes a sum runs on the compute thread, so that freezing falls between two additions and never into one. Since it
was asked for the run may have gone back, or on without this server: so the generation is looked at anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from msgspec import UNSET
from torch import Tensor

from lightning_swarm.core.errors import LeaseRevoked, NotCoordinator, NotMember, ProtocolError
from lightning_swarm.model.fingerprint import fingerprint
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.calls import CallKey, Receipt, pack, unpack
from lightning_swarm.protocol.messages.run import NO_TERM, Member, Selection, Term, check_selection, trained_names
from lightning_swarm.protocol.messages.step import (
    AverageRequest,
    Closing,
    FreezeRequest,
    NamedReceipts,
    Record,
    StageLedger,
)
from lightning_swarm.protocol.messages.wire import from_bitmap, to_bitmap
from lightning_swarm.protocol.run_state import RunState
from lightning_swarm.server.gradient_buffer import ReceiptLedger
from lightning_swarm.server.stage import Stage

_NO_FENCES: tuple[Term, frozenset[int]] = (NO_TERM, frozenset())


@dataclass
class _OpenSums:
    """What is known here of a step that is open."""

    ledgers: dict[int, ReceiptLedger]  # by stage
    fenced: tuple[Term, frozenset[int]] = _NO_FENCES  # batches that were struck from it, and by whom


class GradientSums:
    """Of the stages of one server.

    Args:
        me: That server.

    Attributes:
        stages: By index.
        reselected: What trains in the step that is decided next, if it is not what trained in the step before.
        attempt: Of the step.
        round: Of the newest freeze in it.
    """

    def __init__(self, me: Member) -> None:
        self._me = me
        self._run: RunState | None = None
        self.stages: dict[int, Stage] = {}
        self._open: dict[int, _OpenSums] = {}  # by step
        self._joining = False  # somebody was, when this server froze last
        self._begin_step()

    def _begin_step(self) -> None:
        self.reselected: Selection | None = None
        self.attempt = self.round = 0
        self._frozen_under = NO_TERM

    def _begin_anew(self) -> None:
        """With nothing in any sum."""
        self._open = {step: self._opened(step) for step in self.open_steps}
        self._begin_step()

    def _opened(self, step: int) -> _OpenSums:
        return _OpenSums({index: ReceiptLedger(step) for index in self.stages})

    # ------------------------------------------------------------------ the run

    def enter_run(self, run: RunState, stages: dict[int, Stage], *, now_s: float) -> None:
        """Enter the run with stages at its version."""
        self._run, self.stages = run, stages
        for stage in stages.values():
            stage.load.start_step(now_s=now_s)
        self._begin_anew()

    def step_out(self) -> None:
        """Be in no run."""
        self._run, self.stages = None, {}
        self._begin_anew()

    def go_back(self) -> None:
        """Begin anew with the run's next generation, and with what this server holds in it."""
        manifest = self.run.manifest
        self._keep_held()
        for stage in self.stages.values():
            stage.go_back(manifest.first_step, manifest.selection)
        self._begin_anew()

    @property
    def run(self) -> RunState:
        """That this server is in."""
        if self._run is None:
            raise ProtocolError("this peer is in no run (any more)")
        return self._run

    @property
    def in_run(self) -> bool:
        """Whether there is one."""
        return self._run is not None

    @property
    def version(self) -> int:
        """Of the weights of all stages here; the step whose record is next."""
        return self._run.version if self._run is not None else 0

    @property
    def open_steps(self) -> range:
        """That gradients are added up of."""
        return self._run.open_steps if self._run is not None else range(0)

    @property
    def ledgers(self) -> dict[int, ReceiptLedger]:
        """By stage; of the step whose record is next."""
        return self._opened_step(self.version).ledgers

    def ledger(self, stage_index: int, step: int) -> ReceiptLedger:
        """Of a stage in a step that is open."""
        return self._opened_step(step).ledgers[stage_index]

    def _opened_step(self, step: int) -> _OpenSums:
        if step not in self._open:  # its record has just been applied
            raise ProtocolError(f"the steps {sorted(self._open)} are open here, got a call of step {step}")
        return self._open[step]

    def stage(self, index: int) -> Stage:
        """One of the stages that this server holds."""
        if index not in self.stages:
            raise NotMember(f"this peer serves the stages {sorted(self.stages)}, not stage {index}")
        return self.stages[index]

    def check(self, caller: PeerId, generation: int, step: int, attempt: int) -> None:
        """Refuse who does not coordinate the run, and what is not of the step whose record is next."""
        self.check_open(caller, generation, step, attempt)
        if step != self.version:
            raise ProtocolError(f"step {self.version} is decided next here, got a call of step {step}")

    def check_open(self, caller: PeerId, generation: int, step: int, attempt: int) -> None:
        """Refuse who does not coordinate the run, and what is not of a step that is open."""
        if self._run is None:
            raise ProtocolError("this peer was not admitted to a run yet")
        self._run.check_coordinator(caller)
        here = (self._run.manifest.generation, self.version, self.attempt)
        if step not in self.open_steps or (generation, attempt) != (here[0], here[2]):
            raise ProtocolError(f"generation, step, attempt are {here} here, got {(generation, step, attempt)}")

    # ------------------------------------------------------------------ what counts

    def settle(self, selection: Selection, generation: int) -> None:
        """Train this in the open step, of which nothing was added yet."""
        self.run.check_generation(generation)
        check_selection(selection, self.run.manifest.stages)
        if any(ledger.begun for one in self._open.values() for ledger in one.ledgers.values()):
            raise ProtocolError(f"step {self.version} has begun here; what it trains changes no more")
        for stage in self.stages.values():
            stage.select(selection)
        self.reselected = selection

    def strike(self, step: int, batches: Collection[int]) -> None:
        """Add nothing of these batches of a step any more, as long as who said so coordinates."""
        # By whom: who takes over may count them.
        self._opened_step(step).fenced = (self.run.term, self._struck(step) | set(batches))

    def _struck(self, step: int) -> frozenset[int]:
        """Batches of a step that who coordinates has struck."""
        if self._run is None or step not in self._open:
            return frozenset()
        term, batches = self._open[step].fenced
        return batches if self._run.term == term else frozenset()

    def may_count(self, key: CallKey) -> bool:
        """Whether a record to come may count it."""
        is_open = key.generation == self.run.manifest.generation and key.step in self.open_steps
        return is_open and key.first not in self._struck(key.step)

    def check_counts(self, stage: Stage, key: CallKey) -> None:
        """Refuse what no record will count: of a batch that was struck, or of a step that is over.

        Raises:
            LeaseRevoked: Its trainer was not heard of for a while.
        """
        if key.first in self._struck(key.step):
            raise LeaseRevoked(f"the batch at {key.first} was struck from step {key.step}")
        if key.step < stage.version:
            raise LeaseRevoked(f"step {key.step} is decided, and does not count what comes now")

    # ------------------------------------------------------------------ adding

    def add(
        self,
        stage: Stage,
        key: CallKey,
        gradients: Sequence[Tensor | None],
        weight: float,
        seen: Tensor | None = None,
    ) -> bool:
        """Enter the receipt and add the gradients, once; and what the stage's norms have seen, if it has any.

        Returns:
            True: the sum holds the microbatch, from now on or from before.
        """
        self.run.check_generation(key.generation)
        self.check_counts(stage, key)
        index = self.stage(stage.index).index
        if key.step not in self._open or key.attempt != self.attempt:
            raise ProtocolError(f"step {self.version}, attempt {self.attempt} is open, got a gradient of {key}")
        if self.ledger(index, key.step).add(key.receipt):
            stage.sum_of(key.step).add(gradients, weight)
            stage.statistics.add(key, seen)
        return True

    def holds(self, stage_index: int, key: CallKey) -> bool:
        """Whether the sum holds the microbatch."""
        if key.step not in self._open or key.attempt != self.attempt:
            return False
        ledger = self._open[key.step].ledgers.get(stage_index)
        return ledger is not None and ledger.holds(key.receipt)

    # ------------------------------------------------------------------ closing

    def look_ahead(self) -> bool:
        """Where there is nothing else to do, work for what the next freeze asks; whether more is left."""
        return any(self._is_compared(stage) and stage.look_ahead() for stage in tuple(self.stages.values()))

    def _is_compared(self, stage: Stage) -> bool:
        """Whether the stage's weights are, with another replica's or with those of whoever joins."""
        return self._run is not None and (self._joining or self._run.rosters[stage.index] != [self._me])

    def freeze(self, request: FreezeRequest, term: Term, *, now_s: float) -> tuple[list[StageLedger], list[str]]:
        """The ledgers, and the tickets of earlier results that would keep what is named now from being computed.

        Args:
            request: What for.
            term: Of the coordinator that asked.
            now_s: On the loop's clock.

        Raises:
            NotCoordinator: Another one coordinates by now.
        """
        self.run.check_generation(request.generation)
        if term != self.run.term:
            raise NotCoordinator(f"the run is led under the term {self.run.term} by now, not {term}")
        self._check_round(request)
        named = {} if request.named is None else self._named(request.named)
        self.round = request.round
        self._frozen_under = term
        self._joining = request.joining
        reports, stale = [], []
        for index, stage in sorted(self.stages.items()):
            stale += self._bound(stage, named.get(index), request)
            reports.append(
                StageLedger(
                    stage_index=index,
                    held=pack(self.ledger(index, request.step).held),
                    touched=to_bitmap(stage.sum_of(request.step).touched),
                    version_hash=stage.fingerprint() if self._is_compared(stage) else None,
                    samples_per_s=stage.load.samples_per_s,
                    queued=stage.load.queued,
                    busy_share=stage.load.busy_share(now_s=now_s),
                    tied={name: fingerprint([stage.parameters[name]]) for name in self.run.ties.of(index)} or UNSET,
                )
            )
        return reports, stale

    def _check_round(self, request: FreezeRequest) -> None:
        here = (self.version, self.attempt, self.round)
        if (request.step, request.attempt) != here[:2] or request.round < self.round:
            asked = (request.step, request.attempt, request.round)
            raise ProtocolError(f"step, attempt, round are {here} here, got a request to freeze of {asked}")

    def _named(self, named: Sequence[NamedReceipts]) -> dict[int, set[Receipt]]:
        """By stage, what the sums here shall hold."""
        indices = [one.stage_index for one in named]
        if sorted(indices) != sorted(self.stages):
            raise ProtocolError(f"what is named must be of the stages {sorted(self.stages)}, got {indices[:100]}")
        return {one.stage_index: unpack(one.receipts) for one in named}

    def _bound(self, stage: Stage, named: set[Receipt] | None, request: FreezeRequest) -> list[str]:
        """Say what may be added to a stage's sum from now on; returns tickets of earlier results, now stale."""
        step = request.step
        ledger = self.ledger(stage.index, step)
        struck = request.struck is not None and ledger.holds_any(frozenset(request.struck))
        if struck or (named is not None and ledger.goes_beyond(named)):
            stage.sum_of(step).clear()
            ledger = self._opened_step(step).ledgers[stage.index] = ReceiptLedger(step, ledger.attempt)
        if request.struck is not None:
            ledger.thaw()
            return []
        ledger.freeze(named or ())
        lacking = [] if named is None else ledger.lacks(named)
        return [CallKey.of(request, receipt).name(stage.index, "backward") for receipt in lacking]

    def reopen(self) -> None:
        """Another peer coordinates: what the one before it froze takes gradients again, until it is frozen anew."""
        if self._frozen_under == self.run.term:
            return  # the new one's freeze was quicker than the end of this peer's own coordinating, say
        for one in self._open.values():
            for ledger in one.ledgers.values():
                ledger.thaw()

    # ------------------------------------------------------------------ closed

    def bind(self, request: AverageRequest, rosters: Sequence[Sequence[Member]]) -> dict[int, int]:
        """Check that the frozen sums are what is named here.

        Args:
            request: Which round.
            rosters: Of the round.

        Returns:
            This server's place in the roster of each of its stages.
        """
        closing = request.closing
        self.run.check_generation(closing.generation)
        self.check_frozen(closing)
        self.check_stages(closing)
        named = self._named(request.named)
        places = {index: _place(rosters[index], self._me) for index in self.stages}
        for index in places:
            from_bitmap(closing.touched[index], len(self.stages[index].trainable))
            ledger = self.ledgers[index]
            if not ledger.final:
                raise ProtocolError(f"the ledger of stage {index} is not frozen; a sum that may change has no mean")
            if ledger.held != named[index]:
                raise ProtocolError(
                    f"the sum of stage {index} on {self._me.peer_id} is not what is named for step {closing.step}: it "
                    f"holds {len(ledger.held - named[index])} others, and lacks {len(named[index] - ledger.held)}"
                )
        return places

    def check_frozen(self, closing: Closing) -> None:
        """Refuse a round that the sums are not frozen for (any more)."""
        if closing.round != self.round:
            raise ProtocolError(
                f"the sums of step {closing.step} are frozen for round {self.round}, not {closing.round}"
            )

    def check_stages(self, closing: Closing) -> None:
        """Refuse a closing of another number of stages than the run has."""
        if len(closing.touched) != len(self.run.rosters):
            raise ProtocolError(f"a closing of {len(closing.touched)} stages; there are {len(self.run.rosters)}")

    def apply(self, record: Record, gradients: Mapping[int, Tensor]) -> None:
        """Apply a decided record to the stages, all or none; told twice, once."""
        after = self.open_steps.stop
        self.run.check_generation(record.closing.generation)
        if all(stage.version == record.step + 1 for stage in self.stages.values()):
            return  # told before, by a caller that hung up before it had the answer
        self.run.check(record)
        self.check_stages(record.closing)
        for stage in self.stages.values():
            stage.check_applies(record)
        applied: list[Stage] = []
        for index, stage in self.stages.items():
            touched = self._touched(record, stage)
            stage.apply(record, gradients[index], touched, before=applied if self.run.ties else ())
            applied.append(stage)
        # With the last stage: what is added from now on, on this thread, is of later steps.
        self._open.pop(record.step, None)
        self._open[after] = self._opened(after)

    def _touched(self, record: Record, stage: Stage) -> list[bool]:
        """Which of a stage's parameters got a gradient, be it in another stage that holds them, too."""
        ties, bitmaps = self.run.ties, record.closing.touched
        selection = record.selection or stage.selection
        trained = trained_names(selection) if selection is not None and ties else ()
        partners = ties.partners(stage.index, trained)
        own = from_bitmap(bitmaps[stage.index], len(stage.trainable))
        if not partners:
            return own
        others = {index: from_bitmap(bitmaps[index], len(ties.trainable(index, trained))) for index in partners}
        return ties.touched(stage.index, trained, {stage.index: own, **others})

    def turn(self, record: Record, *, now_s: float) -> None:
        """The record is applied: the next step is open, and what this server holds no more is freed."""
        self.run.apply(record)
        self._keep_held()
        for stage in self.stages.values():
            stage.load.note_step(now_s=now_s)
        self._begin_step()

    def _keep_held(self) -> None:
        held = {index for index, roster in enumerate(self.run.rosters) if self._me in roster}
        if held:  # else this server joins still, or a record left it out: it joins again with what it has
            # New ones, for the compute thread may be looking at the old ones.
            self.stages = {index: stage for index, stage in self.stages.items() if index in held}
            for one in self._open.values():
                one.ledgers = {index: ledger for index, ledger in one.ledgers.items() if index in held}


def _place(roster: Sequence[Member], me: Member) -> int:
    if me not in roster:
        raise ProtocolError(f"peer {me.peer_id} with boot id {me.boot_id} is not in the round's roster")
    return roster.index(me)
