"""Audits a step's sums before they are averaged: screens all, has some computed again, and convicts on false work."""

from __future__ import annotations

import logging
import random
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from typing_extensions import override

from lightning_swarm.coordinator.audit.audit_orders import Assignment, AuditOrders, AuditResults, TrainerResults
from lightning_swarm.coordinator.audit.disputes import (
    MAX_REFUTED,
    MAX_UNPROVEN,
    Accusation,
    AuditResult,
    Kinds,
    WorkTolerance,
    compare,
    resolve_accusation,
)
from lightning_swarm.coordinator.audit.examined_step import ExaminedStep
from lightning_swarm.coordinator.audit.frozen_sums import FrozenSums
from lightning_swarm.coordinator.audit.mean_audit import MeanAudit
from lightning_swarm.coordinator.audit.policy import (
    MAX_SILENCES,
    AuditMemory,
    StageProjection,
    Unit,
    WorkClaim,
    WorkComparison,
    disagreeing,
    is_irreversible,
    read_claims,
    share_of_step,
)
from lightning_swarm.coordinator.audit.step_screen import StepScreen
from lightning_swarm.coordinator.context import CoordinatorContext
from lightning_swarm.coordinator.server_calls import ServerCalls, ServerSilent
from lightning_swarm.coordinator.step.open_step import OpenStep
from lightning_swarm.coordinator.step.oversight import CheckedMeans, StepOversight, Verdict
from lightning_swarm.coordinator.step.replay_plan import Ledgers, ReplayPlan, ServerLedger
from lightning_swarm.core.errors import ProtocolError, SwarmError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.compression import Codecs
from lightning_swarm.protocol.mean_projections import sum_dtype
from lightning_swarm.protocol.messages.calls import Direction, Receipt
from lightning_swarm.protocol.messages.run import Selection
from lightning_swarm.protocol.messages.step import AverageReply, Closing, unpack_order
from lightning_swarm.protocol.messages.wire import draw_challenge

_log = logging.getLogger(__name__)

# Share of the audits that the coordinator's own server does in stages that it does not hold, with fetched weights. So a
# stage whose servers all collude is found out, too.
_OWN_SHARE: Final = 1 / 16

_MAX_CONTESTED: Final = 2  # closings in which a server's results may contradict claims, before it is excluded

_FALSE_SUM: Final = WorkComparison(wrong=frozenset({"sum"}))

lots = random.SystemRandom()  # unpredictable for servers; tests replace it


class StepAudits(StepOversight):
    """Audits the sums and the means of one step."""

    examines = True

    def __init__(
        self,
        context: CoordinatorContext,
        servers: ServerCalls,
        step: OpenStep,
        trained: Collection[str],
        memory: AuditMemory,
    ) -> None:
        self._run, self._events = context.run, context.events
        self._own = servers.own
        codecs = Codecs.of(context.run.manifest.settings.compression)
        bits = [codec.bits for codec in (codecs.activations, codecs.gradients) if codec is not None]
        self._codec_bits = min(bits, default=None)  # bits of an element in transit; None: no codec
        self._step = step
        self._trained = trained  # names of the parameters that the step trains
        self._audits = AuditOrders(servers, step, context.generation)
        # Knowledge from earlier steps, which `AuditMemory` explains.
        self._standing, self._disputes, self._contested = memory.standing, memory.disputes, memory.contested
        self._silences, self._refuted, self._unrepeatable = memory.silences, memory.refuted, memory.unrepeatable
        self._passed: dict[Unit, tuple[object, ...]] = {}  # unit -> its commitment when it passed
        self._auditors: dict[Unit, PeerId] = {}  # unit that passed -> server that found its claims true
        self._due: set[Unit] = set()  # units to audit in this step, until they pass
        self._silent: set[PeerId] = set()  # servers that were silent under audit in this step
        self._accusers: set[PeerId] = set()  # auditors whose accusations were refuted in this step
        self._is_disturbed = False  # an earlier closing was not clean, so all new sums are audited
        self._frozen = FrozenSums()
        self._means = MeanAudit(context, servers, self)
        self.screen = StepScreen(step, memory.histories)
        # Unit -> (seed, reported sketch of its sum). `MeanAudit` compares the averaged sums with these sketches.
        self.sum_sketches: defaultdict[Unit, list[tuple[int, StageProjection]]] = defaultdict(list)
        self.audited: set[Unit] = set()  # units whose averaged sums `MeanAudit` fetches
        self.commitments: dict[Unit, bytes] = {}  # unit -> BLAKE3 of its sum, as its server committed at the freeze

    @override
    def check_ledger(self, peer: PeerId, stage_index: int, ledger: ServerLedger) -> None:
        if not ledger.report.sum_digest and not self._run.manifest.stages[stage_index].on_trainers:
            raise ProtocolError(f"{peer} does not commit to its sum of stage {stage_index}")
        self._frozen.take(peer, stage_index, ledger.held)

    @override
    def expect(self, plan: ReplayPlan, servers: Collection[PeerId]) -> None:
        self._frozen.order(plan, servers)

    @override
    def reopen(self) -> None:
        self._frozen = FrozenSums()

    @override
    async def check_means(
        self, closing: Closing, selection: Selection | None, replies: Mapping[PeerId, AverageReply]
    ) -> CheckedMeans:
        return await self._means.check(closing, selection)

    @override
    async def examine(self, ledgers: Ledgers, arithmetic: Mapping[PeerId, str], round_: int) -> Verdict:
        verdict = Verdict()
        step = self._examined(ledgers, arithmetic, round_, verdict)
        self.commitments = {unit: ledger.report.sum_digest or b"" for unit, ledger in step.ledgers.items()}
        fresh = {unit for unit, ledger in step.ledgers.items() if self._passed.get(unit) != _commitment(ledger)}
        if not fresh or verdict.failed:
            return verdict
        seed = draw_challenge()
        sums, verdict.failed = await self._audits.sketch(step.ledgers, round_, seed)
        if verdict.failed:
            return self._distrust_failed(verdict)
        self.sum_sketches = defaultdict(list, {unit: [(seed, sum_sketch)] for unit, sum_sketch in sums.items()})
        self._convict_idle(step, sums, verdict)
        screenings = self.screen.screen(step.claims, sums)
        suspects = {Unit(stage, peer) for stage, found in screenings.items() for peer in found.suspects} & fresh
        disagreements = disagreeing(step.claims)
        results = await self._audits.results()
        contested = self._compare_results(step, results, disagreements, verdict)
        self._due |= fresh & suspects.union(contested, self._drawn(fresh), *disagreements.values())
        passed = await self._audit_due(step, fresh, suspects, verdict)
        self._settle(step, disagreements, results.replaced, verdict)
        self._is_disturbed |= not verdict.is_clean
        if verdict.is_clean:
            self._record_passed(step, fresh, passed)
            self.screen.record(screenings)
        return self._distrust_failed(verdict)

    def _drawn(self, fresh: Collection[Unit]) -> set[Unit]:
        """Draw units with new sums by lot; after a verdict that was not clean, return all of them."""
        # Each closing draws anew, because a server that forced another closing has seen the earlier draws.
        number = self._step.step
        at_risk = is_irreversible(number, self._run.manifest.max_steps, is_kept=self.is_kept)
        share = share_of_step(self._run.manifest.settings.audit_share or 0.0, lots.random, irreversible=at_risk)
        return {
            unit
            for unit in sorted(fresh)
            if self._is_disturbed or self._standing.is_drawn(unit.peer, number, share, lots.random)
        }

    async def _audit_due(
        self, step: ExaminedStep, fresh: set[Unit], suspects: set[Unit], verdict: Verdict
    ) -> set[Unit]:
        """Audit due units, and others if a suspect is cleared or a server convicted; return the units that passed."""
        due = self._due & fresh
        passed = await self._audit(step, due, verdict)
        # A cleared suspect may have had false inputs, and a convicted server may have accomplices.
        cleared = {unit for unit in suspects if unit in passed or unit.peer == self._own}
        others = fresh if verdict.convicted else fresh & step.sharing_with(cleared)
        passed |= await self._audit(step, others - due, verdict)
        # Audits by a server that is convicted now prove nothing.
        while doubtful := {unit for unit in passed if self._auditors[unit] in verdict.convicted}:
            passed = passed - doubtful | await self._audit(step, doubtful, verdict)
        return passed

    def _record_passed(self, step: ExaminedStep, fresh: Collection[Unit], passed: Collection[Unit]) -> None:
        """Record that new sums count, and which of them auditors found true."""
        self._passed.update({unit: _commitment(step.ledgers[unit]) for unit in fresh})
        self._standing.passed.update({unit.peer for unit in passed})
        for unit in fresh:
            if step.claims[unit] and unit.peer != self._own:
                auditor = self._auditors.get(unit) if unit in passed else None
                self._standing.note_counted(unit.peer, self._step.step, auditor)

    def _distrust_failed(self, verdict: Verdict) -> Verdict:
        """Audit servers that did not answer as if they were new: their silence may have hidden false work."""
        for peer in verdict.failed:
            self._standing.passed.pop(peer, None)
        return verdict

    def _convict_idle(self, step: ExaminedStep, sums: Mapping[Unit, StageProjection], verdict: Verdict) -> None:
        """Convict servers that claim no microbatches, but whose sums are not zero."""
        for unit, sum_sketch in sums.items():
            if not step.claims[unit] and not sum_sketch.is_nothing and unit.peer != self._own:
                self._convict(unit, _FALSE_SUM, verdict, step)

    def _compare_results(
        self, step: ExaminedStep, results: TrainerResults, disagreements: Mapping[Receipt, set[Unit]], verdict: Verdict
    ) -> set[Unit]:
        """Have batches run again whose results at the pipeline's ends contradict claims; return the units of these."""
        # A contradiction convicts no server. The server that sent the result may be gone, and its work replayed on
        # another one. Or it computed a microbatch twice, because a neighbour first sent it a false input.
        contested, batches = set[Unit](), defaultdict[Unit, set[int]](set)
        last = max((unit.stage_index for unit in step.claims), default=0)
        for unit, claims in step.claims.items():
            for receipt, claim in claims.items() if unit.stage_index in (0, last) else ():
                ends: list[tuple[Direction, bytes]] = [("forward", claim.output)] if unit.stage_index == last else []
                ends += [("backward", claim.input_gradient)] if unit.stage_index == 0 else []
                for direction, claimed in ends:
                    server, digest = results.given.get((direction, receipt), (unit.peer, claimed))
                    if digest != claimed and receipt not in disagreements:
                        contested.add(unit)
                        # A server that failed may have sent a false input to the server of the result.
                        only_sender = {Unit(unit.stage_index, server)}
                        for sender in results.replaced.get(receipt, only_sender):
                            batches[sender].add(receipt[0])
        for sender, firsts in batches.items():
            if sender.peer != self._own:
                self._contest(sender, firsts, step, verdict)
        return contested

    def _contest(self, unit: Unit, firsts: set[int], step: ExaminedStep, verdict: Verdict) -> None:
        """Have batches run again without a server that sent trainers other results than are claimed."""
        verdict.tainted |= firsts
        verdict.avoided.add(unit.peer)
        self._standing.passed.pop(unit.peer, None)
        reason = f"its results of {len(firsts)} batches differ from the claims"
        self._contested[unit.peer] += 1  # even between two kinds of machines: claims are of the values that were sent
        # A stage's only server is not excluded, because the run needs it.
        if self._contested[unit.peer] > _MAX_CONTESTED and unit in step.claims and step.auditors_of(unit, ()):
            del self._contested[unit.peer]
            self._leave_out([unit.peer], unit, reason, verdict)
        else:
            self._dispute(unit, reason)

    def _examined(
        self, ledgers: Ledgers, arithmetic: Mapping[PeerId, str], round_: int, verdict: Verdict
    ) -> ExaminedStep:
        """Read the servers' claims; a server whose claims are malformed fails by the verdict."""
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

    @override
    def watch_fellows(self, convicted: PeerId) -> None:
        # Fellows share an invitation with the convicted server. Its own audits prove nothing.
        self._standing.reset_audited_by(convicted)
        used = [one.peers for one in self._run.invitations or () if convicted in one.peers]
        self._standing.watch({peer for peers in used for peer in peers} - {convicted}, self._step.step)

    # ------------------------------------------------------------------ audits

    async def _audit(self, step: ExaminedStep, units: Collection[Unit], verdict: Verdict) -> set[Unit]:
        """Have servers' work computed again, and convict on false claims; return the units whose claims are true."""
        # The coordinator is a keeper, and keepers are trusted.
        audited = sorted(unit for unit in units if unit.peer != self._own and step.claims[unit])
        assignments = self._assigned(step, audited, verdict)
        results = await self._audits.audit(assignments, step.round)
        self._take(results, verdict)
        passed = set()
        for one in assignments:
            if one.unit.peer in verdict.failed:  # it is gone, and other servers compute its work again
                error = results.failed.get(one.unit.peer)
                if error is not None:  # None: it was excluded before, and still answers
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
        """Assign each server's work to one auditor: another server of its stage, or the coordinator's own."""
        # There is one auditor, because an accomplice among several could report a value that corrects a false total.
        # The reported kind of machine has no influence, or malicious servers could choose their auditors by it.
        found, loads = [], Counter[PeerId]()
        for unit in units:
            others = step.auditors_of(unit, verdict.convicted)
            others = [peer for peer in others if not self._silences.is_spared_as_auditor(peer, self._step.step)]
            if not others or (self._own not in others and lots.random() < _OWN_SHARE):
                others = [self._own]
            auditor = min(lots.sample(others, len(others)), key=lambda peer: loads[peer])
            if self._disputes[_pair(unit, auditor)] >= MAX_UNPROVEN:
                auditor = self._own  # another draw would let the audited server replace all honest auditors
            loads[auditor] += len(step.claims[unit])
            found.append(self._assignment(step, unit, auditor))
        return found

    def _assignment(self, step: ExaminedStep, unit: Unit, auditor: PeerId) -> Assignment:
        return Assignment(unit, auditor, list(step.claims[unit]), within_tolerance=step.differ(unit.peer, auditor))

    def _compare(self, step: ExaminedStep, one: Assignment, results: AuditResults) -> WorkComparison:
        its, sum_sketch = results.found.get((one.unit, one.auditor)), results.sums.get(one.unit)
        if its is None or sum_sketch is None:
            return WorkComparison(is_whole=False)
        tolerance = self._tolerance(one.unit, its) if one.within_tolerance else None
        return compare(step.claimed_work(one.unit), its, sum_sketch, tolerance=tolerance)

    def _tolerance(self, unit: Unit, found: AuditResult) -> WorkTolerance:
        dtype = sum_dtype(self._run.manifest.stages[unit.stage_index], self._trained)
        return WorkTolerance.around(found, self._codec_bits, dtype)

    def _take(self, results: AuditResults, verdict: Verdict) -> None:
        """Record silent servers, and the reported sketches, which must match the servers' sums later."""
        verdict.failed |= results.failed
        for unit, trainers in sorted(results.silent.items()):
            if unit.peer != self._own:  # it is assigned no audits for a while, and is not convicted
                self._dispute(unit, f"it audited nothing in time, as {' and '.join(sorted(trainers))} found")
                self._silences.note_auditor(unit.peer, self._step.step)
        for unit, sum_sketch in results.sums.items():
            self.sum_sketches[unit].append((results.seed, sum_sketch))
        self.audited |= results.sums.keys()

    # ------------------------------------------------------------------ disputes

    async def _decide(
        self, step: ExaminedStep, one: Assignment, results: AuditResults, comparison: WorkComparison, verdict: Verdict
    ) -> bool:
        """Repeat the audit on the coordinator's own server, and convict on false claims; return whether they hold."""
        # Repeat it even if the auditor did nothing or reported a refusal, which could cover an accomplice.
        unit, is_accusation = one.unit, one.auditor != self._own
        own_assignment, own_results = one, results
        if is_accusation:
            own_assignment, own_results = await self._audit_itself(step, unit, verdict)
        own_comparison = self._compare(step, own_assignment, own_results)
        # No server is convicted for bits that the coordinator's own machine cannot repeat.
        is_by_bits = not own_assignment.within_tolerance and own_comparison.rests_on_bits
        if is_by_bits and not await self._repeats(step, own_assignment, own_results):
            is_accusation = False
            own_assignment, own_results = await self._audit_itself(step, unit, verdict)
            own_comparison = self._compare(step, own_assignment, own_results)
        if unit.peer in verdict.failed or not self._apply_own_finding(step, unit, own_comparison, verdict):
            return False
        # An accusation about bits is void once machines of this kind are known not to repeat them, even by another
        # audit of this step: `differ` then no longer returns the value with which the work was assigned.
        if is_accusation and one.within_tolerance == step.differ(unit.peer, one.auditor):
            await self._resolve_accusation(step, one, results, comparison, own_assignment, own_results, verdict)
        return unit.peer not in verdict.convicted

    async def _audit_itself(self, step: ExaminedStep, unit: Unit, verdict: Verdict) -> tuple[Assignment, AuditResults]:
        own_assignment = self._assignment(step, unit, self._own)
        own_results = await self._audits.audit([own_assignment], step.round)
        self._take(own_results, verdict)
        return own_assignment, own_results

    async def _repeats(self, step: ExaminedStep, own_assignment: Assignment, own_results: AuditResults) -> bool:
        """Return whether the coordinator's server repeats its bits; if not, record its kind as unrepeatable."""
        about, claimed = (own_assignment.unit, self._own), step.claimed_work(own_assignment.unit)
        second_results = await self._audits.audit([own_assignment], step.round)
        pair = [results.found.get(about) for results in (own_results, second_results)]
        found = [one for one in pair if one is not None and claimed.has_claimed_inputs(one)]
        if len(found) < 2 or len({(one.sum_digest, frozenset(one.claims.items())) for one in found}) == 1:
            return True
        kind = step.arithmetic.get(self._own, "")
        self._unrepeatable.add(kind)
        _log.warning("%s: not the same bits twice from the same input; compared within a tolerance from now on.", kind)
        return False

    async def _resolve_accusation(
        self,
        step: ExaminedStep,
        one: Assignment,
        results: AuditResults,
        comparison: WorkComparison,
        own_assignment: Assignment,
        own_results: AuditResults,
        verdict: Verdict,
    ) -> None:
        """Decide on an auditor's accusation of a server that the coordinator's own server has cleared."""
        # Use the seed of the first audit, so that the audited server is not asked again, and cannot answer differently.
        unit, about = one.unit, (one.unit, self._own)
        found = (await self._audits.ask_findings(own_results.order_id, [about], results.seed))[0].get(about)
        its, sum_sketch = results.found.get((unit, one.auditor)), results.sums.get(unit)
        if found is None or its is None or sum_sketch is None:
            return
        tolerance = self._tolerance(unit, found)
        kinds = Kinds(auditor=not one.within_tolerance, referee=not own_assignment.within_tolerance)
        if not sum_sketch.agrees(found.projection, tolerance=tolerance.sum):
            self._convict(unit, _FALSE_SUM, verdict, step)
        elif comparison.wrong:
            shown = resolve_accusation(
                step.claimed_work(unit), sum_sketch, its, found, tolerance=tolerance, kinds=kinds
            )
            # Bits count as proof only if the coordinator's own machine repeats them.
            is_proof_by_bits = all(kinds) and shown is not Accusation.UNPROVEN
            if not is_proof_by_bits or await self._repeats(step, own_assignment, own_results):
                self._follow_accusation(one, shown, verdict)

    def _follow_accusation(self, one: Assignment, shown: Accusation, verdict: Verdict) -> None:
        """Apply the decision on an accusation to the auditor that made it."""
        unit, accuser = one.unit, one.auditor
        said = f"said as auditor that {unit.peer} had computed stage {unit.stage_index} falsely, which it had not"
        if shown is Accusation.FALSE:
            verdict.convicted[accuser] = said
        elif shown is Accusation.REFUTED:
            self._dispute(Unit(unit.stage_index, accuser), f"{said}, as {self._own} found")
            if accuser in self._accusers:  # counts once a step: a diverging step has many differing results
                return
            self._accusers.add(accuser)
            number = self._refuted.note(accuser, self._step.step)
            if number > MAX_REFUTED:
                verdict.convicted[accuser] = f"{said}; the {number}th step in which it accused falsely"
        else:
            self._disputes[_pair(unit, accuser)] += 1
            self._dispute(unit, f"{accuser} got other results or other inputs, and {self._own} did not")

    def _apply_own_finding(self, step: ExaminedStep, unit: Unit, comparison: WorkComparison, verdict: Verdict) -> bool:
        """Apply the coordinator's own findings on a server's work; return whether its claims are true."""
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
        """Convict a server that is silent under audit again and again, or it could escape every audit."""
        if peer in self._silent:  # already counted in this step
            return
        self._silent.add(peer)
        # Machines and links fail now and then, so a silence does not convict at once. But all work is audited then,
        # which leaves a malicious server few chances.
        self._standing.watch([peer], self._step.step)
        if is_late:  # by seconds, which excludes it for a while
            return
        number = self._silences.note(peer, self._step.step)
        if number > MAX_SILENCES:
            verdict.convicted[peer] = f"gave no answer {number} times while it was audited"

    def _convict(self, unit: Unit, comparison: WorkComparison, verdict: Verdict, step: ExaminedStep) -> None:
        verdict.convicted[unit.peer] = f"{comparison.describe()} in stage {unit.stage_index}, as {self._own} found"
        if comparison.has_false_outputs:  # or may have: then none of its batches is certain
            verdict.tainted |= step.batches_of(unit.peer)

    def _leave_out(self, peers: Iterable[PeerId], unit: Unit, reason: str, verdict: Verdict) -> None:
        """Exclude servers without a conviction, because it is unknown which of them is right."""
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
        """Strike the batches on which two servers make different claims, if neither was convicted."""
        pairs = defaultdict[frozenset[Unit], list[Receipt]](list)
        between = defaultdict[Unit, set[int]](set)  # failed server between two honest servers -> batches
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
            # Exclude both servers the second time, or batches would run again forever. If a server is in several pairs,
            # excluding one pair suffices.
            is_there = verdict.failed.keys().isdisjoint(unit.peer for unit in pair)
            if self._disputes[pair] > 1 and is_there and all(sizes[unit.stage_index] > 1 for unit in pair):
                sizes.subtract(unit.stage_index for unit in pair if unit.peer != self._own)
                self._leave_out(others, min(pair), f"{names} contradict each other for the second time", verdict)


def _pair(unit: Unit, auditor: PeerId) -> frozenset[Unit]:
    return frozenset({unit, Unit(unit.stage_index, auditor)})


def _commitment(ledger: ServerLedger) -> tuple[object, ...]:
    return ledger.report.sum_digest, ledger.report.claims, ledger.report.touched, ledger.report.order
