"""Audits the sums of a step before they are averaged: screens all, has some computed again, and convicts who lies."""

from __future__ import annotations

import logging
import random
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from lightning_swarm.coordinator.audit.audit_run import (
    Assignment,
    AuditResults,
    AuditRun,
    TrainerResults,
)
from lightning_swarm.coordinator.audit.disputes import (
    MAX_REFUTED,
    MAX_UNPROVEN,
    Accusation,
    AuditResult,
    Kinds,
    Verdict,
    WorkTolerance,
    compare,
    judge_accusation,
)
from lightning_swarm.coordinator.audit.examined_step import ExaminedStep
from lightning_swarm.coordinator.audit.policy import (
    MAX_SILENCES,
    Silences,
    StageProjection,
    Standing,
    Unit,
    WorkClaim,
    WorkComparison,
    disagreeing,
    is_worth_a_lie,
    read_claims,
    share_of_step,
)
from lightning_swarm.coordinator.audit.step_screen import StepScreen
from lightning_swarm.coordinator.context import CoordinatorContext
from lightning_swarm.coordinator.server_calls import ServerCalls, ServerSilent
from lightning_swarm.coordinator.step.open_step import OpenStep
from lightning_swarm.coordinator.step.replay_plan import Ledgers, ServerLedger
from lightning_swarm.core.errors import ProtocolError, SwarmError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.compression import Codecs
from lightning_swarm.protocol.mean_projections import sum_dtype
from lightning_swarm.protocol.messages.audits import unpack_order
from lightning_swarm.protocol.messages.calls import Direction, Receipt
from lightning_swarm.protocol.messages.wire import draw_challenge

_log = logging.getLogger(__name__)

# Of the audits in stages that the coordinator does not hold: it fetches the weights for its own, and so finds out also
# where all others of a stage lie together.
_OWN_SHARE: Final = 1 / 16

_MAX_CONTESTED: Final = 2  # closings in which a server may give trainers what is not claimed, before it is left out

_FALSE_SUM: Final = WorkComparison(wrong=frozenset({"sum"}))

lots = random.SystemRandom()


class StepAudits:
    """Audits the sums of one step."""

    def __init__(
        self, context: CoordinatorContext, servers: ServerCalls, step: OpenStep, trained: Collection[str]
    ) -> None:
        self._run, self._events = context.run, context.events
        self._own = servers.own
        codecs = Codecs.of(context.run.manifest.settings.compression)
        bits = [codec.bits for codec in (codecs.activations, codecs.gradients) if codec is not None]
        self._codec_bits = min(bits, default=None)  # of what servers give to others
        self._step = step
        self._trained = trained  # the parameters that the step trains, by name
        self._audits = AuditRun(servers, step, context.generation)
        self._standing: Standing = context.audit_memory.standing
        self._disputes: Counter[frozenset[Unit]] = context.audit_memory.disputes
        self._contested: Counter[PeerId] = context.audit_memory.contested
        self._silences: Silences = context.audit_memory.silences
        self._refuted: Silences = context.audit_memory.refuted
        self._unrepeatable: set[str] = context.audit_memory.unrepeatable
        self._passed: dict[Unit, tuple[object, ...]] = {}  # with what was claimed then
        self._auditors: dict[Unit, PeerId] = {}
        self._due: set[Unit] = set()  # those that are audited in this step, until they have passed
        self._silent: set[PeerId] = set()
        self._accusers: set[PeerId] = set()  # those whose accusations were refuted in this step
        self._is_disturbed = False  # it closed before, and was not clean: all that is new is audited
        self.screen = StepScreen(step, context.audit_memory.histories)
        self.is_kept = False  # a snapshot of what the step makes of the weights is due
        # What servers said of their sums, by which seed; and whose work was computed again: their sums are looked at.
        self.told: defaultdict[Unit, list[tuple[int, StageProjection]]] = defaultdict(list)
        self.audited: set[Unit] = set()

    async def examine(self, ledgers: Ledgers, arithmetic: Mapping[PeerId, str], round_: int) -> Verdict:
        """Audit the sums that nobody looked into so far."""
        verdict = Verdict()
        step = self._examined(ledgers, arithmetic, round_, verdict)
        fresh = {unit for unit, ledger in step.ledgers.items() if self._passed.get(unit) != _commitment(ledger)}
        if not fresh or verdict.failed:
            return verdict
        seed = draw_challenge()
        sums, verdict.failed = await self._audits.sketch(step.ledgers, round_, seed)
        if verdict.failed:
            return self._distrust_failed(verdict)
        self.told = defaultdict(list, {unit: [(seed, told)] for unit, told in sums.items()})
        self._convict_idle(step, sums, verdict)
        screenings = self.screen.screen(step.claims, sums)
        suspects = {Unit(stage, peer) for stage, found in screenings.items() for peer in found.suspects} & fresh
        disagreements = disagreeing(step.claims)
        results = await self._audits.results()
        contested = self._compare_given(step, results, disagreements, verdict)
        # Lots of this closing: who had the step run again has seen whom the ones before hit.
        is_worth = is_worth_a_lie(self._step.step, self._run.manifest.max_steps, is_kept=self.is_kept)
        share = share_of_step(self._run.manifest.settings.audit_share or 0.0, lots.random, worth_a_lie=is_worth)
        drawn = {unit for unit in sorted(fresh) if self._is_disturbed or self._is_drawn(unit, share)}
        chosen = (self._due | suspects | drawn | contested | set[Unit]().union(*disagreements.values())) & fresh
        self._due |= chosen
        passed = await self._audit(step, chosen, verdict)
        # A suspect that did what it should may have had false inputs; and who lies may not be alone.
        cleared = {unit for unit in suspects if unit in passed or unit.peer == self._own}
        others = fresh if verdict.convicted else fresh & step.sharing_with(cleared)
        passed |= await self._audit(step, others - chosen, verdict)
        while doubtful := {unit for unit in passed if self._auditors[unit] in verdict.convicted}:
            passed = passed - doubtful | await self._audit(step, doubtful, verdict)
        self._settle(step, disagreements, results.replaced, verdict)
        self._is_disturbed |= not verdict.is_clean
        if verdict.is_clean:
            self._passed.update({unit: _commitment(step.ledgers[unit]) for unit in fresh})
            for peer in {unit.peer for unit in passed}:
                self._standing.note_passed(peer)
            for unit in fresh:
                if step.claims[unit] and unit.peer != self._own:
                    auditor = self._auditors.get(unit) if unit in passed else None
                    self._standing.note_counted(unit.peer, self._step.step, auditor)
            self.screen.record(screenings)
        return self._distrust_failed(verdict)

    def _distrust_failed(self, verdict: Verdict) -> Verdict:
        """Audit servers as new ones that did not answer while they were audited: they may have had a reason."""
        for peer in verdict.failed:
            self._standing.passed.pop(peer, None)
        return verdict

    def _convict_idle(self, step: ExaminedStep, sums: Mapping[Unit, StageProjection], verdict: Verdict) -> None:
        """Convict servers whose sums hold something, and that claim to have computed nothing."""
        for unit, told in sums.items():
            if not step.claims[unit] and not told.is_nothing and unit.peer != self._own:
                self._convict(unit, _FALSE_SUM, verdict, step)

    def _compare_given(
        self,
        step: ExaminedStep,
        results: TrainerResults,
        disagreements: Mapping[Receipt, set[Unit]],
        verdict: Verdict,
    ) -> set[Unit]:
        """Compare what trainers were given at the ends of the pipeline with what is claimed of it.

        Batches of which something else is claimed run again. Returns the servers that claim it.
        """
        # Nobody is convicted by that. Who gave it may be gone, and its work done by another; or it computed something
        # twice, because a neighbour had given it something false at first.
        contested, batches = set[Unit](), defaultdict[Unit, set[int]](set)
        last = max((unit.stage_index for unit in step.claims), default=0)
        for unit, claims in step.claims.items():
            for receipt, claim in claims.items() if unit.stage_index in (0, last) else ():
                ends: list[tuple[Direction, bytes]] = [("forward", claim.output)] if unit.stage_index == last else []
                ends += [("backward", claim.input_gradient)] if unit.stage_index == 0 else []
                for direction, said in ends:
                    server, digest = results.given.get((direction, receipt), (unit.peer, said))
                    if digest != said and receipt not in disagreements:
                        contested.add(unit)
                        # Who failed may have given the server that gave it something false.
                        for giver in results.replaced.get(receipt, {Unit(unit.stage_index, server)}):
                            batches[giver].add(receipt[0])
        for giver, firsts in batches.items():
            if giver.peer != self._own:
                self._contest(giver, firsts, step, verdict)
        return contested

    def _contest(self, unit: Unit, firsts: set[int], step: ExaminedStep, verdict: Verdict) -> None:
        """Have batches run again without a server that gave something else of them than is claimed."""
        verdict.tainted |= firsts
        verdict.avoided.add(unit.peer)
        self._standing.passed.pop(unit.peer, None)
        reason = f"it gave something else of {len(firsts)} batches than is claimed"
        self._contested[unit.peer] += 1  # also of another kind of machine, for that is its own word
        # A stage's only server stays, as the run needs it.
        if self._contested[unit.peer] > _MAX_CONTESTED and unit in step.claims and step.auditors_of(unit, ()):
            del self._contested[unit.peer]
            self._leave_out([unit.peer], unit, reason, verdict)
        else:
            self._dispute(unit, reason)

    def _examined(
        self, ledgers: Ledgers, arithmetic: Mapping[PeerId, str], round_: int, verdict: Verdict
    ) -> ExaminedStep:
        held, claims = dict[Unit, ServerLedger](), dict[Unit, Mapping[Receipt, WorkClaim]]()
        for index, (stage, manifest) in enumerate(zip(ledgers, self._run.manifest.stages, strict=True)):
            for member, ledger in stage.items() if not manifest.on_trainers else ():
                unit = Unit(index, member.peer_id)
                try:
                    its = read_claims(ledger.report.claims or b"", ledger.held)
                    added = unpack_order(ledger.report.order or b"", ledger.held)
                    claims[unit], held[unit] = {receipt: its[receipt] for receipt in added}, ledger
                except SwarmError as error:
                    verdict.failed[unit.peer] = error
        return ExaminedStep(held, claims, arithmetic, round_, self._unrepeatable)

    # ------------------------------------------------------------------ whose work is audited

    def _is_drawn(self, unit: Unit, share: float) -> bool:
        return self._standing.is_drawn(unit.peer, self._step.step, share, lots.random)

    def watch_fellows(self, convicted: PeerId) -> None:
        """Audit all work for a while of those that came by the same invitation as a liar, or that it audited."""
        self._standing.doubt(convicted)
        used = [one.peers for one in self._run.invitations or () if convicted in one.peers]
        self._standing.watch({peer for peers in used for peer in peers} - {convicted}, self._step.step)

    # ------------------------------------------------------------------ audits

    async def _audit(self, step: ExaminedStep, units: Collection[Unit], verdict: Verdict) -> set[Unit]:
        """Have servers' work computed again, and convict who lies; returns those that did what they claim."""
        # The coordinator is a keeper: there is nobody to doubt it.
        audited = sorted(unit for unit in units if unit.peer != self._own and step.claims[unit])
        assignments = self._assigned(step, audited, verdict)
        results = await self._audits.audit(assignments, step.round)
        self._take(results, verdict)
        passed = set()
        for one in assignments:
            if one.unit.peer in verdict.failed:  # it has gone, and others compute its work again
                if (
                    error := results.failed.get(one.unit.peer)
                ) is not None:  # or it was left out before, and answers still
                    self._note_silence(one.unit.peer, verdict, is_late=isinstance(error, ServerSilent))
                continue
            if not results.lost.isdisjoint(one.receipts):
                self._dispute(one.unit, "some of its work could not be computed again, for its trainer has no copy")
                continue
            comparison = self._compare(step, one, results)
            if comparison.is_equal or await self._decide(step, one, results, comparison, verdict):
                passed.add(one.unit)
                self._auditors[one.unit] = one.auditor if comparison.is_equal else self._own
        return passed

    def _assigned(self, step: ExaminedStep, units: Sequence[Unit], verdict: Verdict) -> list[Assignment]:
        """Give each server's work to one other server of its stage, or to the coordinator's own."""
        # To one alone: of several, an accomplice could say what makes the others' sums come out right. And whoever they
        # say that they are: liars would choose their auditors by that.
        found, loads = [], Counter[PeerId]()
        for unit in units:
            others = step.auditors_of(unit, verdict.convicted)
            others = [peer for peer in others if not self._silences.is_excused(peer, self._step.step)]
            if not others or (self._own not in others and lots.random() < _OWN_SHARE):
                others = [self._own]
            auditor = min(lots.sample(others, len(others)), key=lambda peer: loads[peer])
            if self._disputes[_pair(unit, auditor)] >= MAX_UNPROVEN:
                auditor = self._own  # drawn again, the audited could have all honest auditors replaced
            loads[auditor] += len(step.claims[unit])
            found.append(self._assignment(step, unit, auditor))
        return found

    def _assignment(self, step: ExaminedStep, unit: Unit, auditor: PeerId) -> Assignment:
        return Assignment(unit, auditor, list(step.claims[unit]), compare=step.differ(unit.peer, auditor))

    def _compare(self, step: ExaminedStep, one: Assignment, results: AuditResults) -> WorkComparison:
        """Compare what a server claims with what an auditor found."""
        its, told = results.found.get((one.unit, one.auditor)), results.sums.get(one.unit)
        if its is None or told is None:
            return WorkComparison(is_whole=False)
        tolerance = self._tolerance(one.unit, its) if one.compare else None
        return compare(step.said(one.unit), its, told, tolerance=tolerance)

    def _tolerance(self, unit: Unit, found: AuditResult) -> WorkTolerance:
        """How far results of machines of different kinds may be apart."""
        dtype = sum_dtype(self._run.manifest.stages[unit.stage_index], self._trained)
        return WorkTolerance.around(found, self._codec_bits, dtype)

    def _take(self, results: AuditResults, verdict: Verdict) -> None:
        """Take in who does not answer, and what the others said of their sums, to which they are held later."""
        verdict.failed |= results.failed
        for unit, trainers in sorted(results.silent.items()):
            if unit.peer != self._own:
                self._note_silent_auditor(unit, trainers)
        for unit, told in results.sums.items():
            self.told[unit].append((results.seed, told))
        self.audited |= results.sums.keys()

    # ------------------------------------------------------------------ disputes

    async def _decide(
        self, step: ExaminedStep, one: Assignment, results: AuditResults, comparison: WorkComparison, verdict: Verdict
    ) -> bool:
        """Have the coordinator's own server do the whole audit, and convict who lies; True: the audited did not."""
        # Also where an auditor does nothing, or says that it was refused: it would let an accomplice pass.
        unit, by_other, own, again = one.unit, one.auditor != self._own, one, results
        if by_other:
            own, again = await self._audit_itself(step, unit, verdict)
        mine = self._compare(step, own, again)
        # Nobody is convicted for bits that the coordinator's own machine does not compute twice.
        if not own.compare and mine.rests_on_bits and not await self._repeats(step, own, again):
            by_other, (own, again) = False, await self._audit_itself(step, unit, verdict)
            mine = self._compare(step, own, again)
        if unit.peer in verdict.failed or not self._hear(step, unit, mine, verdict):
            return False
        # An accusation for bits is void once machines of the kind are known never to compute the same.
        if by_other and one.compare == step.differ(unit.peer, one.auditor):
            await self._judge_auditor(step, one, results, comparison, own, again, verdict)
        return unit.peer not in verdict.convicted

    async def _audit_itself(self, step: ExaminedStep, unit: Unit, verdict: Verdict) -> tuple[Assignment, AuditResults]:
        own = self._assignment(step, unit, self._own)
        again = await self._audits.audit([own], step.round)
        self._take(again, verdict)
        return own, again

    async def _repeats(self, step: ExaminedStep, own: Assignment, again: AuditResults) -> bool:
        """Return whether the coordinator's server finds the same once more; if not, remember its kind of machine."""
        about, said = (own.unit, self._own), step.said(own.unit)
        second = await self._audits.audit([own], step.round)
        pair = [results.found.get(about) for results in (again, second)]
        found = [one for one in pair if one is not None and said.was_given(one)]
        if len(found) < 2 or len({(one.sum_digest, frozenset(one.claims.items())) for one in found}) == 1:
            return True
        kind = step.arithmetic.get(self._own, "")
        self._unrepeatable.add(kind)
        _log.warning("%s: not the same bits twice from the same input; compared within a tolerance from now on.", kind)
        return False

    async def _judge_auditor(
        self,
        step: ExaminedStep,
        one: Assignment,
        results: AuditResults,
        comparison: WorkComparison,
        own: Assignment,
        again: AuditResults,
        verdict: Verdict,
    ) -> None:
        """Judge an auditor's accusation of a server that the coordinator's own server has cleared."""
        # By the same seed as before, so that nobody is asked, and can answer otherwise, once more.
        unit, about = one.unit, (one.unit, self._own)
        found = (await self._audits.ask(again.order, [about], results.seed))[0].get(about)
        its, told = results.found.get((unit, one.auditor)), results.sums.get(unit)
        if found is None or its is None or told is None:
            return
        tolerance, kinds = self._tolerance(unit, found), Kinds(auditor=not one.compare, judge=not own.compare)
        if not told.agrees(found.projection, tolerance=tolerance.sum):
            self._convict(unit, _FALSE_SUM, verdict, step)
        elif comparison.wrong:
            shown = judge_accusation(step.said(unit), told, its, found, tolerance=tolerance, kinds=kinds)
            if not all(kinds) or shown is Accusation.UNPROVEN or await self._repeats(step, own, again):
                self._follow_accusation(one, shown, verdict)

    def _follow_accusation(self, one: Assignment, shown: Accusation, verdict: Verdict) -> None:
        """Hold a false accusation against the auditor that made it."""
        unit, accuser = one.unit, one.auditor
        said = f"said as auditor that {unit.peer} had computed stage {unit.stage_index} falsely, which it had not"
        if shown is Accusation.FALSE:
            verdict.convicted[accuser] = said
        elif shown is Accusation.REFUTED:
            self._dispute(Unit(unit.stage_index, accuser), f"{said}, as {self._own} found")
            if accuser in self._accusers:  # once in each step, for one that diverges has many results that differ
                return
            self._accusers.add(accuser)
            number = self._refuted.note(accuser, self._step.step)
            if number > MAX_REFUTED:
                verdict.convicted[accuser] = f"{said}; the {number}th step in which it accused falsely"
        else:
            self._disputes[_pair(unit, accuser)] += 1
            self._dispute(unit, f"{accuser} found other results, or was given something else, and {self._own} did not")

    def _hear(self, step: ExaminedStep, unit: Unit, comparison: WorkComparison, verdict: Verdict) -> bool:
        """Take what the coordinator's own server found of a server's work; True: that did what it claims."""
        if comparison.wrong:
            self._convict(unit, comparison, verdict, step)
        elif not comparison.is_whole:
            reason = "the coordinator cannot compute its work again"
            reason += ": a trainer sent it with another weight than was granted" if comparison.is_misweighed else ""
            self._leave_out([unit.peer], unit, reason, verdict)
            verdict.tainted |= step.batches_of(unit.peer)
            if comparison.is_silent:
                self._note_silence(unit.peer, verdict)
        return comparison.is_equal

    def _note_silence(self, peer: PeerId, verdict: Verdict, *, is_late: bool = False) -> None:
        """Convict who falls silent under audit again and again: by that a liar would escape each of them.

        One that is `is_late` by seconds is only audited more: it is left out of the step, and for a while.
        """
        if peer in self._silent:  # in this step, already
            return
        self._silent.add(peer)
        # Machines and links fail now and then. A liar that is audited in each step has few lies left.
        self._standing.watch([peer], self._step.step)
        if is_late:
            return
        number = self._silences.note(peer, self._step.step)
        if number > MAX_SILENCES:
            verdict.convicted[peer] = f"gave no answer {number} times while it was audited"

    def _note_silent_auditor(self, unit: Unit, trainers: Collection[PeerId]) -> None:
        """Give a server no audits for a while that was silent as an auditor. That convicts nobody."""
        self._dispute(unit, f"it audited nothing in time, as {' and '.join(sorted(trainers))} found")
        self._silences.note_auditor(unit.peer, self._step.step)

    def _convict(self, unit: Unit, comparison: WorkComparison, verdict: Verdict, step: ExaminedStep) -> None:
        verdict.convicted[unit.peer] = f"{comparison.describe()} in stage {unit.stage_index}, as {self._own} found"
        if comparison.has_false_outputs:  # or it may have: of all that went through it nothing is sure
            verdict.tainted |= step.batches_of(unit.peer)

    def _leave_out(self, peers: Iterable[PeerId], unit: Unit, reason: str, verdict: Verdict) -> None:
        """Do without servers, none of which is convicted, for nobody can tell who is right."""
        self._dispute(unit, reason)
        error = ProtocolError(f"its work of stage {unit.stage_index} is in dispute: {reason}")
        verdict.failed |= {peer: error for peer in peers if peer != self._own}

    def _dispute(self, unit: Unit, reason: str) -> None:
        self._events.note("disputed", peer=unit.peer, stage=unit.stage_index, step=self._step.step, reason=reason)

    def _settle(
        self,
        step: ExaminedStep,
        disagreements: Mapping[Receipt, set[Unit]],
        replaced: Mapping[Receipt, Collection[Unit]],
        verdict: Verdict,
    ) -> None:
        """Do without what two servers say different things of, where neither was convicted."""
        pairs = defaultdict[frozenset[Unit], list[Receipt]](list)
        between = defaultdict[Unit, set[int]](set)  # who gave one of two something, and failed: both may be honest
        for receipt, units in disagreements.items():
            if any(unit.peer in verdict.convicted for unit in units):
                continue
            failed = [unit for unit in replaced.get(receipt, ()) if unit.peer != self._own]
            for unit in failed:
                between[unit].add(receipt[0])
            if not failed:
                pairs[frozenset(units)].append(receipt)
        for unit, firsts in sorted(between.items()):
            self._contest(unit, firsts, step, verdict)
        sizes = Counter(unit.stage_index for unit in step.ledgers if unit.peer not in verdict.failed)
        for pair, receipts in sorted(pairs.items(), key=lambda item: sorted(item[0])):
            self._disputes[pair] += 1
            names = " and ".join(unit.peer for unit in sorted(pair))
            self._events.note(
                "disputed",
                stage=min(pair).stage_index,
                step=self._step.step,
                reason=f"{names} say different things of {len(receipts)} microbatches that went from one to the other",
            )
            verdict.tainted |= {first for first, _, _ in receipts}
            others = [unit.peer for unit in pair if unit.peer != self._own]
            verdict.avoided |= {*others}
            # Else batches would run again and again. Of several pairs with one server, one suffices: it goes with that.
            is_there = verdict.failed.keys().isdisjoint(unit.peer for unit in pair)
            if self._disputes[pair] > 1 and is_there and all(sizes[unit.stage_index] > 1 for unit in pair):
                sizes.subtract(unit.stage_index for unit in pair if unit.peer != self._own)
                self._leave_out(others, min(pair), f"{names} contradict each other for the second time", verdict)


def _pair(unit: Unit, auditor: PeerId) -> frozenset[Unit]:
    return frozenset({unit, Unit(unit.stage_index, auditor)})


def _commitment(ledger: ServerLedger) -> tuple[object, ...]:
    return ledger.report.sum_digest, ledger.report.claims, ledger.report.touched, ledger.report.order
