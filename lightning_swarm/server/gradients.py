"""A server's gradient sums of the open steps, and the ledgers of the microbatches in them.

The coordinator closes a step in rounds, each of which begins with FREEZE. In the first round, the sums accept nothing
more, and their ledgers are reported. If a microbatch is missing or is in two sums, the next round names the receipts of
each sum. A sum with any other receipt is then cleared, and trainers send the missing microbatches again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from msgspec import UNSET
from torch import Tensor

from lightning_swarm.core.errors import LeaseRevoked, NotCoordinator, NotMember, ProtocolError
from lightning_swarm.model.fingerprint import fingerprint
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.calls import CallKey, Origin, Receipt, pack, pack_origins, unpack, unpack_origins
from lightning_swarm.protocol.messages.run import (
    NO_CHANGE,
    NO_TERM,
    Member,
    StepChange,
    Term,
    check_change,
    trained_names,
)
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
from lightning_swarm.server.arithmetic import arithmetic_of, shortened
from lightning_swarm.server.context import RunMembership
from lightning_swarm.server.gradient_buffer import ReceiptLedger
from lightning_swarm.server.oversight import KeepWork, keep_nothing
from lightning_swarm.server.stage import Stage

_MAX_MISSENT_STEPS: Final = 3  # steps with gradients of other trainers' batches, after which a trainer is refused


@dataclass
class _OpenSums:
    """The ledgers and the struck batches of an open step."""

    ledgers: dict[int, ReceiptLedger]  # stage -> ledger
    struck: tuple[Term, frozenset[int]] = (NO_TERM, frozenset())  # term of the coordinator that struck, and places


# The receipts that a sum must hold, and the origins of their batches by place.
_Contents = tuple[set[Receipt], dict[int, Origin]]

WrittenByStage = Mapping[int, Mapping[str, Tensor]]
"""Weights that the lead's user code wrote, by stage and name."""


@dataclass
class _NextStep:
    """Progress of the step whose record is next; reset by every record and every generation."""

    change: StepChange = NO_CHANGE  # the change with which it began
    written: WrittenByStage = field(default_factory=dict)  # the weights of the change
    round: int = 0  # the round of the newest freeze
    frozen_under: Term = NO_TERM  # term of the coordinator that froze the sums last


# Sums change only on the compute thread, so a freeze never interrupts an addition. While a job is queued, the run may
# roll back, or continue without this server, so each job checks the generation again.
class GradientSums:
    """The gradient sums of one server's stages, and the receipts of their microbatches."""

    def __init__(self, membership: RunMembership) -> None:
        self._membership = membership
        self._me = membership.me
        self.stages: dict[int, Stage] = {}  # index -> stage
        self._open: dict[int, _OpenSums] = {}  # step -> its ledgers and struck batches
        self._was_challenged = False  # whether the newest freeze had a challenge: in audited runs, or for a joiner
        self.next = _NextStep()
        # trainer -> each (generation, step) in which it sent gradients of a batch that another trainer owns
        self._missent: defaultdict[PeerId, set[tuple[int, int]]] = defaultdict(set)

    def _reset(self) -> None:
        """Begin all open steps with empty ledgers; without a run, no step is open."""
        self._open = {step: self._empty_sums(step) for step in self.open_steps}
        self.next = _NextStep()

    def _empty_sums(self, step: int) -> _OpenSums:
        return _OpenSums({index: ReceiptLedger(step) for index in self.stages})

    # ------------------------------------------------------------------ the run

    def enter_run(self, stages: dict[int, Stage], *, now_s: float) -> None:
        """Begin to sum in a run, with stages at the run's version."""
        self.stages = stages
        for stage in stages.values():
            stage.load.start_step(now_s=now_s)
            stage.state_hash = self._membership.oversight.work.state_hash(stage)
        self._reset()

    def leave_run(self) -> None:
        """Release all stages."""
        self.stages = {}
        self._missent.clear()
        self._reset()

    def enter_generation(self) -> None:
        """Begin the run's next generation, with the stages that this server still holds."""
        run = self.run
        self._keep_assigned(run)
        for stage in self.stages.values():
            stage.enter_generation(run.manifest.first_step, run.manifest.selection)
        self._reset()

    @property
    def run(self) -> RunState:
        """The run that this server is in."""
        return self._membership.running

    @property
    def version(self) -> int:
        """The version of the weights of all stages here; the step whose record is next."""
        run = self._membership.run_or_none
        return run.version if run is not None else 0

    @property
    def open_steps(self) -> range:
        """The steps whose gradients are summed."""
        run = self._membership.run_or_none
        return run.open_steps if run is not None else range(0)

    @property
    def ledgers(self) -> dict[int, ReceiptLedger]:
        """The ledgers of the step whose record is next, by stage."""
        return self._open_step(self.version).ledgers

    def _open_step(self, step: int) -> _OpenSums:
        if step not in self._open:  # its record has just been applied
            raise ProtocolError(f"a call must be of one of the open steps {sorted(self._open)}, got step {step}")
        return self._open[step]

    def stage(self, index: int) -> Stage:
        """Return one of the stages that this server holds."""
        if index not in self.stages:
            raise NotMember(f"this peer serves the stages {sorted(self.stages)}, not stage {index}")
        return self.stages[index]

    def check(self, caller: PeerId, generation: int, step: int) -> None:
        """Refuse any caller but the coordinator, and any step but the one whose record is next."""
        self.check_open(caller, generation, step)
        if step != self.version:
            raise ProtocolError(f"step {self.version} is decided next here, got a call of step {step}")

    def check_open(self, caller: PeerId, generation: int, step: int) -> None:
        """Refuse any caller but the coordinator, and any step that is not open."""
        run = self.run
        run.check_coordinator(caller)
        expected = (run.manifest.generation, run.version)
        if step not in run.open_steps or generation != expected[0]:
            raise ProtocolError(f"this server is at generation, step {expected}, got a call of {(generation, step)}")

    # ------------------------------------------------------------------ counting

    def settle(self, change: StepChange, generation: int) -> None:
        """Begin the open step with a change; refuse it if gradients were added already."""
        run = self.run
        run.check_generation(generation)
        check_change(change, run.manifest.stages)
        if any(ledger.begun for opened in self._open.values() for ledger in opened.ledgers.values()):
            raise ProtocolError(f"a change must precede the step's gradients, and step {run.version} has some here")
        written = change.written
        if written is not None and run.manifest.settings.delay_optimizer_step:
            raise ProtocolError(
                "hooks must not write weights with `delay_optimizer_step`, because the next step computes with older "
                "weights. Remove the option, or the hook."
            )
        weights = {
            index: stage.evaluation_weights(written.number)
            for index, stage in self.stages.items()
            if written is not None and index in written.stages
        }
        for stage in self.stages.values():
            if change.selection is not None:
                stage.select(change.selection)
            if stage.index in weights:
                stage.load_weights(weights[stage.index])
        self.next.written, self.next.change = weights, change

    def follow_change(self, stage: Stage, change: StepChange, written: Mapping[str, Tensor]) -> None:
        """Begin the open step with its change at a joiner, which gets no SETTLE; `written` has the stage's weights."""
        if change.selection is not None:
            stage.select(change.selection)
        if change.written not in (None, self.next.change.written) and stage.index in change.written.stages:
            stage.load_weights(dict(written))
            self.next.written = {stage.index: written}
        self.next.change = change

    def strike(self, step: int, batches: Collection[int]) -> None:
        """Refuse gradients of these batches in a step, as long as the peer that struck them coordinates."""
        # Bound to the present term, because the next coordinator may count these batches.
        self._open_step(step).struck = (self.run.term, self._struck(step) | set(batches))

    def _struck(self, step: int) -> frozenset[int]:
        """Return the batches that the present coordinator has struck from a step."""
        run, opened = self._membership.run_or_none, self._open.get(step)
        if run is None or opened is None:
            return frozenset()
        term, batches = opened.struck
        return batches if run.term == term else frozenset()

    def may_count(self, key: CallKey) -> bool:
        """Return whether a later record may count the call."""
        run = self.run
        is_open = key.generation == run.manifest.generation and key.step in run.open_steps
        return is_open and key.first not in self._struck(key.step)

    def check_counts(self, stage: Stage, key: CallKey) -> None:
        """Refuse a call that no record will count, because its batch was struck, or its step is over."""
        if key.first in self._struck(key.step):
            raise LeaseRevoked(f"the batch at {key.first} was struck from step {key.step}")
        if key.step < stage.version:
            raise LeaseRevoked(f"step {key.step} is decided, and counts no more gradients")

    def check_own_batches(self, trainer: PeerId) -> None:
        """Refuse a trainer that sent gradients of other trainers' batches in several steps."""
        # A single step is no proof: a new coordinator may grant a place again because it does not know the first grant.
        if len(self._missent.get(trainer, ())) >= _MAX_MISSENT_STEPS:
            raise ProtocolError(
                f"a trainer must send gradients of its own batches only; {trainer} sent those of other trainers in "
                f"{_MAX_MISSENT_STEPS} steps, so this server computes nothing more for it"
            )

    # ------------------------------------------------------------------ adding

    def add(
        self,
        stage: Stage,
        key: CallKey,
        gradients: Sequence[Tensor | None],
        origin: Origin,
        batch_statistics: Tensor | None = None,
        keep: KeepWork = keep_nothing,
    ) -> bool:
        """Add a microbatch's gradients and batch norm statistics to its sum, and enter its receipt, exactly once.

        `keep` is called first. Always returns True, the receipt in the call's report: even if nothing is added, the sum
        holds the microbatch already, or its batch from another trainer.
        """
        self.run.check_generation(key.generation)
        self.check_counts(stage, key)
        index = self.stage(stage.index).index
        if key.step not in self._open:
            raise ProtocolError(f"a gradient must be of one of the open steps {sorted(self._open)}, got {key}")
        ledgers = self._open_step(key.step).ledgers
        ledger, total = ledgers[index], stage.sum_of(key.step)
        keep(ledger)  # before the receipt, which must not exist without its work
        converted = total.converted(gradients)  # before the receipt, because memory may run out
        if ledger.add(key.receipt, origin):
            try:
                total.add(converted, origin.weight)
                stage.statistics.add(key, batch_statistics)
            except BaseException:  # the sum may hold a part of the gradient, so clear it
                total.clear()
                ledgers[index] = ReceiptLedger(key.step)
                ledgers[index].freeze_like(ledger)
                raise
        return True

    @property
    def arithmetic(self) -> str:
        """Name the hardware and software that determine the bits of this server's results; see `arithmetic_of`."""
        machines = {arithmetic_of(stage.device, offloads=stage.optimizer.offloads) for stage in self.stages.values()}
        return shortened("; ".join(sorted(machines)))

    def holds(self, stage_index: int, key: CallKey) -> bool:
        """Return whether the sum holds the microbatch."""
        opened = self._open.get(key.step)
        ledger = opened.ledgers.get(stage_index) if opened is not None else None
        return ledger is not None and ledger.holds(key.receipt)

    def ledger(self, step: int, stage_index: int) -> ReceiptLedger:
        """Return the ledger of a stage in an open step."""
        ledgers = self._open_step(step).ledgers
        if stage_index not in ledgers:
            raise ProtocolError(f"this peer sums the stages {sorted(ledgers)} in step {step}, not stage {stage_index}")
        return ledgers[stage_index]

    # ------------------------------------------------------------------ closing

    def hash_while_idle(self) -> bool:
        """Hash a piece of a stage's state for the next freeze, called while idle; return whether more is left."""
        return any(self._is_compared(stage) and stage.state_hash.advance() for stage in tuple(self.stages.values()))

    def _is_compared(self, stage: Stage) -> bool:
        """Return whether the stage's weights are compared with another replica's or with a joiner's."""
        run = self._membership.run_or_none
        return run is not None and (self._was_challenged or run.rosters[stage.index] != [self._me])

    def freeze(self, request: FreezeRequest, term: Term, *, now_s: float) -> tuple[list[StageLedger], list[str]]:
        """Freeze the sums for the coordinator of a term; return the ledgers, and the tickets that are now stale."""
        run = self.run
        run.check_generation(request.generation)
        if term != run.term:  # another server has become the coordinator
            raise NotCoordinator(f"the run is now coordinated under the term {run.term}, not {term}")
        newest, requested = (self.version, self.next.round), (request.step, request.round)
        if requested[0] != newest[0] or requested[1] < newest[1]:
            raise ProtocolError(f"this server is at step, round {newest}, got a request to freeze {requested}")
        named = {} if request.named is None else self._contents_by_stage(request.named)
        self.next.round, self.next.frozen_under = request.round, term
        self._was_challenged = request.challenge != 0
        reports, stale = [], []
        for index, stage in sorted(self.stages.items()):
            stale += self._freeze_stage(stage, named.get(index), request)
            ledger = self._open_step(request.step).ledgers[index]
            report = StageLedger(
                stage_index=index,
                held=pack(ledger.held),
                origins=pack_origins(ledger.origins),
                touched=to_bitmap(stage.sum_of(request.step).touched),
                version_hash=stage.fingerprint(request.challenge) if self._is_compared(stage) else None,
                samples_per_s=stage.load.samples_per_s,
                queued=stage.load.queued,
                busy_share=stage.load.busy_share(now_s=now_s),
                lacks_memory=stage.load.lacks_memory,
                tied={name: fingerprint([stage.parameters[name]]) for name in run.ties.of(index)} or UNSET,
                tensors=stage.fingerprints() if request.each_tensor else UNSET,
            )
            reports.append(self._membership.oversight.work.commit(report, stage, ledger, request.step))
        return reports, stale

    def check_round(self, step: int, round_: int) -> None:
        """Refuse a round other than the newest, and sums that the present coordinator has not frozen."""
        newest = (self.version, self.next.round)
        if (step, round_) != newest or self.next.frozen_under != self.run.term:
            raise ProtocolError(f"this server froze its sums for step, round {newest}, got a call of {(step, round_)}")

    def _contents_by_stage(self, named: Sequence[NamedReceipts]) -> dict[int, _Contents]:
        """Return for each stage here the receipts that its sum must hold, and the origins of their batches."""
        indices = [part.stage_index for part in named]
        if sorted(indices) != sorted(self.stages):
            raise ProtocolError(f"receipts must be named for the stages {sorted(self.stages)}, got {indices[:100]}")
        contents = {}
        for part in named:
            receipts = unpack(part.receipts)
            contents[part.stage_index] = receipts, unpack_origins(part.origins, {first for first, _, _ in receipts})
        return contents

    def _freeze_stage(self, stage: Stage, named: _Contents | None, request: FreezeRequest) -> list[str]:
        """Set the receipts that a stage's sum accepts from now on; return the tickets of results to compute again."""
        step, ledgers = request.step, self._open_step(request.step).ledgers
        ledger = ledgers[stage.index]
        granted_to = {} if named is None else named[1]
        for first, origin in ledger.origins.items():
            # Only now does the coordinator name the trainer to which the batch was granted.
            if first in granted_to and granted_to[first].trainer != origin.trainer:
                self._missent[origin.trainer].add((request.generation, step))
        struck = request.struck is not None and ledger.holds_any(frozenset(request.struck))
        if struck or (named is not None and not ledger.agrees(*named)):
            stage.sum_of(step).clear()
            ledger = ledgers[stage.index] = ReceiptLedger(step)
        if request.struck is not None:  # the step takes other batches in place of the struck ones
            ledger.thaw()
            return []
        receipts, granted = named or (set[Receipt](), {})
        ledger.freeze(receipts, granted)
        # An earlier result of a lacking microbatch must be dropped, or a repeated call would not compute its gradient.
        lacking = sorted(receipts - ledger.held)
        return [
            CallKey.of(request.generation, request.step, receipt).result(stage.index, "backward") for receipt in lacking
        ]

    def reopen(self) -> None:
        """Reopen sums that a former coordinator froze, until the present coordinator freezes them."""
        if self.next.frozen_under == self.run.term:
            return  # the present coordinator has frozen them already
        for opened in self._open.values():
            for ledger in opened.ledgers.values():
                ledger.thaw()

    # ------------------------------------------------------------------ closed

    def bind(self, closing: Closing, rosters: Sequence[Sequence[Member]]) -> dict[int, int]:
        """Check that the sums are frozen for a round; return this server's index in each of its stages' rosters."""
        self.run.check_generation(closing.generation)
        self.check_frozen(closing)
        for index in self.stages:
            if self._me not in rosters[index]:
                raise ProtocolError(
                    f"peer {self._me.peer_id} with boot id {self._me.boot_id} is not in the round's roster"
                )
            if not self.ledgers[index].final:
                raise ProtocolError(f"only a frozen sum is averaged, and the ledger of stage {index} may still change")
        return {index: rosters[index].index(self._me) for index in self.stages}

    def check_named(self, request: AverageRequest) -> None:
        """Refuse a round unless the frozen sums hold exactly the named microbatches."""
        closing = request.closing
        self.run.check_generation(closing.generation)
        self.check_frozen(closing)
        named = self._contents_by_stage(request.named)
        for index in self.stages:
            ledger, (receipts, granted) = self.ledgers[index], named[index]
            if ledger.held != receipts or ledger.origins != granted:
                raise ProtocolError(
                    f"the sum of stage {index} on {self._me.peer_id} must hold the microbatches named for step "
                    f"{closing.step}: {len(ledger.held - receipts)} more are in it, {len(receipts - ledger.held)} are "
                    "missing, or a batch has another weight or trainer"
                )

    def check_frozen(self, closing: Closing) -> None:
        """Refuse a round other than that of the newest freeze."""
        newest, closed = (self.version, self.next.round), (closing.step, closing.round)
        if closed != newest:
            raise ProtocolError(f"this server is at step, round {newest}, got a closing of {closed}")

    def apply(self, record: Record, gradients: Mapping[int, Tensor]) -> None:
        """Apply a decided record to all stages or to none; a repeated record is applied once."""
        run = self.run
        opening = run.open_steps.stop  # the step that opens with the record
        run.check_generation(record.closing.generation)
        if all(stage.version == record.step + 1 for stage in self.stages.values()):
            return  # applied already; the caller missed the answer
        run.check(record)
        if len(record.touched) != len(run.rosters):
            raise ProtocolError(f"a record must be of the run's {len(run.rosters)} stages, got {len(record.touched)}")
        touched = {index: _touched(run, record, stage) for index, stage in self.stages.items()}
        for stage in self.stages.values():
            stage.check_applies(record)
        applied: list[Stage] = []
        for index, stage in self.stages.items():
            stage.apply(record, gradients[index], touched[index], applied=applied if run.ties else ())
            applied.append(stage)
        # On this thread, directly after the last stage, so that no gradient is added to the decided step.
        self._open.pop(record.step, None)
        self._open[opening] = self._empty_sums(opening)

    def open_next_step(self, record: Record, *, now_s: float) -> None:
        """Open the next step after a record, and free stages that this server does not hold any more."""
        self.run.apply(record)
        self._keep_assigned(self.run)
        for stage in self.stages.values():
            stage.load.note_step(now_s=now_s)
        self.next = _NextStep()

    def _keep_assigned(self, run: RunState) -> None:
        """Release the stages, and their ledgers, that the run's rosters no longer assign to this server."""
        assigned = {index for index, roster in enumerate(run.rosters) if self._me in roster}
        if assigned:  # a server without stages is still joining, or was excluded and will rejoin with them
            # New dicts, because the compute thread may be reading the old dicts.
            self.stages = {index: stage for index, stage in self.stages.items() if index in assigned}
            for opened in self._open.values():
                opened.ledgers = {index: ledger for index, ledger in opened.ledgers.items() if index in assigned}


def _touched(run: RunState, record: Record, stage: Stage) -> list[bool]:
    """Return for each parameter of a stage whether it had a gradient, in this stage or in a stage tied to it."""
    ties, bitmaps = run.ties, record.touched
    selection = record.change.selection or stage.selection
    trained = trained_names(selection) if selection is not None and ties else ()
    partners = ties.partners(stage.index, trained)
    touched = {stage.index: from_bitmap(bitmaps[stage.index], len(stage.trainable))}
    if not partners:
        return touched[stage.index]
    touched |= {index: from_bitmap(bitmaps[index], len(ties.trainable(index, trained))) for index in partners}
    return ties.touched(stage.index, trained, touched)
