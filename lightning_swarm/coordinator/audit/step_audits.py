"""Audits a step's sums before they are averaged: screens all, has some computed again, and convicts on false work.

`examine` runs whenever the sums of a closing step hold exactly the counted microbatches. A unit is fresh if its
server's reports are new or have changed since they passed. Fresh units are audited if they are suspects, if their
claims differ from a neighbour's or from results that trainers received, or by lot. Another server computes the work
again. If it contradicts the claims, the coordinator's own server decides, and the accused server or the accuser may be
convicted. If two servers contradict each other and neither is convicted, their batches run again; the next time, both
are excluded.
"""

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
    SameKind,
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

# Share of the audits that the coordinator's own server does in stages that it does not hold, with fetched weights. So
# even a stage is found out whose servers all collude.
_OWN_SHARE: Final = 1 / 16

_MAX_CONTESTED: Final = 2  # closings at which a server's results may contradict claims, before it is excluded

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
        self._orders = AuditOrders(servers, step, context.generation)
        # Knowledge from earlier steps, which `AuditMemory` explains.
        self._standing, self._num_disputes, self._contested = memory.standing, memory.disputes, memory.contested
        self._silences, self._refuted, self._unrepeatable = memory.silences, memory.refuted, memory.unrepeatable
        self._passed: dict[Unit, tuple[object, ...]] = {}  # unit -> its server's reports when it passed
        self._auditors: dict[Unit, PeerId] = {}  # unit that passed -> server that found its claims true
        self._due: set[Unit] = set()  # units to audit in this step, until they pass
        self._silent: set[PeerId] = set()  # servers that were silent under audit in this step
        self._refuted_accusers: set[PeerId] = set()  # auditors whose accusations were refuted in this step
        self._is_disturbed = False  # an earlier closing was not clean, so all fresh units are audited
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
        self._frozen.record_ledger(peer, stage_index, ledger.held)

    @override
    def expect(self, plan: ReplayPlan, servers: Collection[PeerId]) -> None:
        self._frozen.record_orders(plan, servers)

    @override
    def reopen(self) -> None:
        self._frozen = FrozenSums()

    @override
    async def check_means(
        self, closing: Closing, selection: Selection | None, replies: Mapping[PeerId, AverageReply]
    ) -> CheckedMeans:
        return await self._means.check(closing, selection)

    @override
    async def examine(self, ledgers: Ledgers, machine_kinds: Mapping[PeerId, str], round_: int) -> Verdict:
        verdict = Verdict()
        examined = self._examined(ledgers, machine_kinds, round_, verdict)
        self.commitments = {unit: ledger.report.sum_digest or b"" for unit, ledger in examined.ledgers.items()}
        fresh = {unit for unit, ledger in examined.ledgers.items() if self._passed.get(unit) != _reports(ledger)}
        if not fresh or verdict.failed:
            return verdict
        seed = draw_challenge()
        sums, verdict.failed = await self._orders.sketch(examined.ledgers, round_, seed)
        if verdict.failed:
            return self._distrust_failed(verdict)
        self.sum_sketches = defaultdict(list, {unit: [(seed, sum_sketch)] for unit, sum_sketch in sums.items()})
        self._convict_idle(examined, sums, verdict)
        screenings = self.screen.screen(examined.claims, sums)
        suspects = {Unit(stage, peer) for stage, screening in screenings.items() for peer in screening.suspects} & fresh
        disagreements = disagreeing(examined.claims)
        results = await self._orders.results()
        contested = self._compare_results(examined, results, disagreements, verdict)
        self._due |= fresh & suspects.union(contested, self._drawn(fresh), *disagreements.values())
        passed = await self._audit_due(examined, fresh, suspects, verdict)
        self._strike_disagreements(examined, disagreements, results.replaced, verdict)
        self._is_disturbed |= not verdict.is_clean
        if verdict.is_clean:
            self._record_passed(examined, fresh, passed)
            self.screen.record(screenings)
        return self._distrust_failed(verdict)

    def _drawn(self, fresh: Collection[Unit]) -> set[Unit]:
        """Draw fresh units by lot; after a verdict that was not clean, return all of them."""
        # Each closing draws again, because a server that forced another closing has seen the earlier draws.
        number, manifest = self._step.step, self._run.manifest
        at_risk = is_irreversible(number, manifest.max_steps, is_snapshot_due=self.is_snapshot_due)
        share = share_of_step(manifest.settings.audit_share or 0.0, lots.random, irreversible=at_risk)
        return {
            unit
            for unit in sorted(fresh)
            if self._is_disturbed or self._standing.is_drawn(unit.peer, number, share, lots.random)
        }

    async def _audit_due(
        self, examined: ExaminedStep, fresh: set[Unit], suspects: set[Unit], verdict: Verdict
    ) -> set[Unit]:
        """Audit due units, and more if a suspect is cleared or a server convicted; return the units that passed."""
        due = self._due & fresh
        passed = await self._audit(examined, due, verdict)
        # A cleared suspect may have had false inputs, and a convicted server may have accomplices.
        cleared = {unit for unit in suspects if unit in passed or unit.peer == self._own}
        others = fresh if verdict.convicted else fresh & examined.sharing_with(cleared)
        passed |= await self._audit(examined, others - due, verdict)
        # Audits by a server that was convicted meanwhile prove nothing.
        while doubtful := {unit for unit in passed if self._auditors[unit] in verdict.convicted}:
            passed = passed - doubtful | await self._audit(examined, doubtful, verdict)
        return passed

    def _record_passed(self, examined: ExaminedStep, fresh: Collection[Unit], passed: Collection[Unit]) -> None:
        """Record that fresh units count, and which of them auditors found true."""
        self._passed.update({unit: _reports(examined.ledgers[unit]) for unit in fresh})
        self._standing.passed.update({unit.peer for unit in passed})
        for unit in fresh:
            if examined.claims[unit] and unit.peer != self._own:
                auditor = self._auditors.get(unit) if unit in passed else None
                self._standing.note_counted(unit.peer, self._step.step, auditor)

    def _distrust_failed(self, verdict: Verdict) -> Verdict:
        """Audit failed servers like new ones from now on, because their silence may have hidden false work."""
        for peer in verdict.failed:
            self._standing.passed.pop(peer, None)
        return verdict

    def _convict_idle(self, examined: ExaminedStep, sums: Mapping[Unit, StageProjection], verdict: Verdict) -> None:
        """Convict servers that claim no microbatches although their sums are not zero."""
        for unit, sum_sketch in sums.items():
            if not examined.claims[unit] and not sum_sketch.is_nothing and unit.peer != self._own:
                self._convict(unit, _FALSE_SUM, verdict, examined)

    def _compare_results(
        self,
        examined: ExaminedStep,
        results: TrainerResults,
        disagreements: Mapping[Receipt, set[Unit]],
        verdict: Verdict,
    ) -> set[Unit]:
        """Have batches run again whose results at the pipeline's ends contradict claims; return the claiming units."""
        # A contradiction convicts no server. The server that sent the result may be gone, and another one may have
        # replayed the work. Or it computed a microbatch twice, because a neighbour first sent it a false input.
        contested, batches = set[Unit](), defaultdict[Unit, set[int]](set)
        last = max((unit.stage_index for unit in examined.claims), default=0)
        for unit, claims in examined.claims.items():
            for receipt, claim in claims.items() if unit.stage_index in (0, last) else ():
                ends: list[tuple[Direction, bytes]] = [("forward", claim.output)] if unit.stage_index == last else []
                ends += [("backward", claim.input_gradient)] if unit.stage_index == 0 else []
                for direction, claimed in ends:
                    server, digest = results.sent.get((direction, receipt), (unit.peer, claimed))
                    if digest != claimed and receipt not in disagreements:
                        contested.add(unit)
                        # If servers of the microbatch failed, one of them may have sent this server a false input.
                        sender = {Unit(unit.stage_index, server)}
                        for suspect in results.replaced.get(receipt, sender):
                            batches[suspect].add(receipt[0])
        for suspect, firsts in batches.items():
            if suspect.peer != self._own:
                self._contest(suspect, firsts, examined, verdict)
        return contested

    def _contest(self, unit: Unit, firsts: set[int], examined: ExaminedStep, verdict: Verdict) -> None:
        """Have batches run again without a server that may have sent trainers other results than are claimed."""
        verdict.tainted |= firsts
        verdict.avoided.add(unit.peer)
        self._standing.passed.pop(unit.peer, None)
        reason = f"its results of {len(firsts)} batches differ from the claims"
        self._contested[unit.peer] += 1  # also between two kinds of machines, because claims are of the sent values
        # A stage's only server is not excluded, because the run needs it.
        if self._contested[unit.peer] > _MAX_CONTESTED and unit in examined.claims and examined.auditors_of(unit, ()):
            del self._contested[unit.peer]
            self._exclude([unit.peer], unit, reason, verdict)
        else:
            self._dispute(unit, reason)

    def _examined(
        self, ledgers: Ledgers, machine_kinds: Mapping[PeerId, str], round_: int, verdict: Verdict
    ) -> ExaminedStep:
        """Read the servers' claims; add servers with malformed claims to the verdict's failed servers."""
        read, claims = dict[Unit, ServerLedger](), dict[Unit, Mapping[Receipt, WorkClaim]]()
        for index, (stage, manifest) in enumerate(zip(ledgers, self._run.manifest.stages, strict=True)):
            for member, ledger in stage.items() if not manifest.on_trainers else ():
                unit = Unit(index, member.peer_id)
                try:
                    unordered = read_claims(ledger.report.claims or b"", ledger.held)
                    order = unpack_order(ledger.report.order or b"", ledger.held)
                    claims[unit], read[unit] = {receipt: unordered[receipt] for receipt in order}, ledger
                except SwarmError as error:
                    verdict.failed[unit.peer] = error
        return ExaminedStep(read, claims, machine_kinds, round_, self._unrepeatable)

    @override
    def watch_fellows(self, convicted: PeerId) -> None:
        # Fellows share an invitation with the convicted server. The audits that it did prove nothing.
        self._standing.reset_audited_by(convicted)
        groups = [invitation.peers for invitation in self._run.invitations or () if convicted in invitation.peers]
        self._standing.watch({peer for peers in groups for peer in peers} - {convicted}, self._step.step)

    # ------------------------------------------------------------------ audits

    async def _audit(self, examined: ExaminedStep, units: Collection[Unit], verdict: Verdict) -> set[Unit]:
        """Have servers' work computed again, and convict on false claims; return the units whose claims are true."""
        # The coordinator's own server is not audited, because it is a keeper's, and keepers are trusted.
        audited = sorted(unit for unit in units if unit.peer != self._own and examined.claims[unit])
        assignments = self._assign(examined, audited, verdict)
        results = await self._orders.audit(assignments, examined.round)
        self._record_results(results, verdict)
        passed = set()
        for assignment in assignments:
            unit = assignment.unit
            if unit.peer in verdict.failed:  # it is excluded, and its work is replayed on other servers
                error = results.failed.get(unit.peer)
                if error is not None:  # None: it was excluded for another reason, and answered
                    self._note_silence(unit.peer, verdict, is_late=isinstance(error, ServerSilent))
                continue
            if not results.lost.isdisjoint(assignment.receipts):
                self._dispute(unit, "some of its work could not be computed again, because its trainer has no copy")
                continue
            comparison = self._compare(examined, assignment, results)
            if comparison.is_equal or await self._decide(examined, assignment, results, comparison, verdict):
                passed.add(unit)
                self._auditors[unit] = assignment.auditor if comparison.is_equal else self._own
        return passed

    def _assign(self, examined: ExaminedStep, units: Sequence[Unit], verdict: Verdict) -> list[Assignment]:
        """Assign each server's work to one auditor: another server of its stage, or the coordinator's own."""
        # There is only one auditor, because an accomplice among several could report a value that corrects a false
        # total. The reported kinds of machines have no influence, or malicious servers could choose their auditors.
        assignments, loads = [], Counter[PeerId]()
        for unit in units:
            others = examined.auditors_of(unit, verdict.convicted)
            others = [peer for peer in others if not self._silences.is_spared_as_auditor(peer, self._step.step)]
            if not others or (self._own not in others and lots.random() < _OWN_SHARE):
                others = [self._own]
            auditor = min(lots.sample(others, len(others)), key=lambda peer: loads[peer])
            if self._num_disputes[_pair(unit, auditor)] >= MAX_UNPROVEN:
                auditor = self._own  # drawing again would let the audited server replace all honest auditors
            loads[auditor] += len(examined.claims[unit])
            assignments.append(self._assignment(examined, unit, auditor))
        return assignments

    def _assignment(self, examined: ExaminedStep, unit: Unit, auditor: PeerId) -> Assignment:
        within_tolerance = examined.needs_tolerance(unit.peer, auditor)
        return Assignment(unit, auditor, list(examined.claims[unit]), within_tolerance=within_tolerance)

    def _compare(self, examined: ExaminedStep, assignment: Assignment, results: AuditResults) -> WorkComparison:
        unit = assignment.unit
        finding, sum_sketch = results.findings.get((unit, assignment.auditor)), results.sums.get(unit)
        if finding is None or sum_sketch is None:
            return WorkComparison(is_whole=False)
        tolerance = self._tolerance(unit, finding) if assignment.within_tolerance else None
        return compare(examined.claimed_work(unit), finding, sum_sketch, tolerance=tolerance)

    def _tolerance(self, unit: Unit, finding: AuditResult) -> WorkTolerance:
        dtype = sum_dtype(self._run.manifest.stages[unit.stage_index], self._trained)
        return WorkTolerance.around(finding, self._codec_bits, dtype)

    def _record_results(self, results: AuditResults, verdict: Verdict) -> None:
        """Record silent servers, and the reported sketches, which the averaged sums must match later."""
        verdict.failed |= results.failed
        for unit, trainers in sorted(results.silent.items()):
            if unit.peer != self._own:  # a silent auditor is not convicted, but assigned no audits for a while
                self._dispute(unit, f"it did no audits in time, as {' and '.join(sorted(trainers))} found")
                self._silences.note_auditor(unit.peer, self._step.step)
        for unit, sum_sketch in results.sums.items():
            self.sum_sketches[unit].append((results.seed, sum_sketch))
        self.audited |= results.sums.keys()

    # ------------------------------------------------------------------ disputes

    async def _decide(
        self,
        examined: ExaminedStep,
        assignment: Assignment,
        results: AuditResults,
        comparison: WorkComparison,
        verdict: Verdict,
    ) -> bool:
        """Repeat an audit on the coordinator's own server, and convict on false claims; return whether all are true."""
        # This also follows if the auditor did nothing or reported a refusal, by which it could protect an accomplice.
        unit, is_accusation = assignment.unit, assignment.auditor != self._own
        own_assignment, own_results = assignment, results
        if is_accusation:
            own_assignment, own_results = await self._audit_itself(examined, unit, verdict)
        own_comparison = self._compare(examined, own_assignment, own_results)
        # No server is convicted for bits that the coordinator's own machine cannot repeat.
        is_by_bits = not own_assignment.within_tolerance and own_comparison.rests_on_bits
        if is_by_bits and not await self._repeats_bits(examined, own_assignment, own_results):
            is_accusation = False
            own_assignment, own_results = await self._audit_itself(examined, unit, verdict)
            own_comparison = self._compare(examined, own_assignment, own_results)
        if unit.peer in verdict.failed or not self._apply_own_finding(examined, unit, own_comparison, verdict):
            return False
        # An accusation about bits is void once machines of this kind are known not to repeat them. Another audit of
        # this step may have shown that, and then `needs_tolerance` has changed since the assignment.
        if is_accusation and assignment.within_tolerance == examined.needs_tolerance(unit.peer, assignment.auditor):
            await self._resolve_accusation(
                examined, assignment, results, comparison, own_assignment, own_results, verdict
            )
        return unit.peer not in verdict.convicted

    async def _audit_itself(
        self, examined: ExaminedStep, unit: Unit, verdict: Verdict
    ) -> tuple[Assignment, AuditResults]:
        """Have the coordinator's own server audit a unit."""
        own_assignment = self._assignment(examined, unit, self._own)
        own_results = await self._orders.audit([own_assignment], examined.round)
        self._record_results(own_results, verdict)
        return own_assignment, own_results

    async def _repeats_bits(
        self, examined: ExaminedStep, own_assignment: Assignment, own_results: AuditResults
    ) -> bool:
        """Return whether the coordinator's server repeats its bits; if not, record its kind as unrepeatable."""
        unit = own_assignment.unit
        claimed = examined.claimed_work(unit)
        second_results = await self._orders.audit([own_assignment], examined.round)
        pair = [results.findings.get((unit, self._own)) for results in (own_results, second_results)]
        findings = [finding for finding in pair if finding is not None and claimed.has_claimed_inputs(finding)]
        digests = {(finding.sum_digest, frozenset(finding.claims.items())) for finding in findings}
        if len(findings) < 2 or len(digests) == 1:
            return True
        kind = examined.machine_kinds.get(self._own, "")
        self._unrepeatable.add(kind)
        _log.warning("Machines of kind %s do not repeat their bits; compared within a tolerance from now on.", kind)
        return False

    async def _resolve_accusation(
        self,
        examined: ExaminedStep,
        assignment: Assignment,
        results: AuditResults,
        comparison: WorkComparison,
        own_assignment: Assignment,
        own_results: AuditResults,
        verdict: Verdict,
    ) -> None:
        """Decide on an auditor's accusation of a server that the coordinator's own server has cleared."""
        # The seed of the first audit is used again, so that the audited server need not send another sketch of its sum,
        # which might be of another sum.
        unit, own_pair = assignment.unit, (assignment.unit, self._own)
        own_findings, _ = await self._orders.ask_findings(own_results.order_id, [own_pair], results.seed)
        own_finding, sum_sketch = own_findings.get(own_pair), results.sums.get(unit)
        finding = results.findings.get((unit, assignment.auditor))
        if own_finding is None or finding is None or sum_sketch is None:
            return
        tolerance = self._tolerance(unit, own_finding)
        same_kind = SameKind(auditor=not assignment.within_tolerance, referee=not own_assignment.within_tolerance)
        if not sum_sketch.agrees(own_finding.projection, tolerance=tolerance.sum):
            self._convict(unit, _FALSE_SUM, verdict, examined)
        elif comparison.wrong:
            claimed = examined.claimed_work(unit)
            conclusion = resolve_accusation(
                claimed, sum_sketch, finding, own_finding, tolerance=tolerance, same_kind=same_kind
            )
            # Bits prove something only if the coordinator's own machine repeats them.
            is_proof_by_bits = all(same_kind) and conclusion is not Accusation.UNPROVEN
            if not is_proof_by_bits or await self._repeats_bits(examined, own_assignment, own_results):
                self._apply_conclusion(assignment, conclusion, verdict)

    def _apply_conclusion(self, assignment: Assignment, conclusion: Accusation, verdict: Verdict) -> None:
        """Apply the conclusion on an accusation to the auditor that made it."""
        unit, accuser = assignment.unit, assignment.auditor
        reason = f"accused {unit.peer}, as its auditor, of false work in stage {unit.stage_index}, but the work is true"
        if conclusion is Accusation.FALSE:
            verdict.convicted[accuser] = reason
        elif conclusion is Accusation.REFUTED:
            self._dispute(Unit(unit.stage_index, accuser), f"{reason}, as {self._own} found")
            if accuser in self._refuted_accusers:  # counted once a step, because a diverging step refutes many
                return
            self._refuted_accusers.add(accuser)
            number = self._refuted.note(accuser, self._step.step)
            if number > MAX_REFUTED:
                verdict.convicted[accuser] = f"{reason}; this is the {number}th step with a false accusation"
        else:
            self._num_disputes[_pair(unit, accuser)] += 1
            self._dispute(unit, f"{accuser} got other results or other inputs, but {self._own} did not")

    def _apply_own_finding(
        self, examined: ExaminedStep, unit: Unit, comparison: WorkComparison, verdict: Verdict
    ) -> bool:
        """Apply the coordinator's own findings on a server's work; return whether its claims are true."""
        if comparison.wrong:
            self._convict(unit, comparison, verdict, examined)
        elif not comparison.is_whole:
            reason = "the coordinator cannot compute its work again"
            reason += ": a trainer sent it with another weight than was granted" if comparison.is_misweighed else ""
            self._exclude([unit.peer], unit, reason, verdict)
            verdict.tainted |= examined.batches_of(unit.peer)
            if comparison.is_silent:
                self._note_silence(unit.peer, verdict)
        return comparison.is_equal

    def _note_silence(self, peer: PeerId, verdict: Verdict, *, is_late: bool = False) -> None:
        """Record a silence under audit, and convict after too many; otherwise, a server could evade every audit."""
        if peer in self._silent:  # counted once a step
            return
        self._silent.add(peer)
        # Machines and links sometimes fail, so a silence does not convict at once. But from now on all its work is
        # audited, which leaves a malicious server few chances.
        self._standing.watch([peer], self._step.step)
        if is_late:  # it was only slow, for which it may not join again for a while
            return
        number = self._silences.note(peer, self._step.step)
        if number > MAX_SILENCES:
            verdict.convicted[peer] = f"did not answer {number} times while it was audited"

    def _convict(self, unit: Unit, comparison: WorkComparison, verdict: Verdict, examined: ExaminedStep) -> None:
        verdict.convicted[unit.peer] = f"{comparison.describe()} in stage {unit.stage_index}, as {self._own} found"
        if comparison.has_false_outputs:
            verdict.tainted |= examined.batches_of(unit.peer)

    def _exclude(self, peers: Iterable[PeerId], unit: Unit, reason: str, verdict: Verdict) -> None:
        """Exclude servers from the step without a conviction, because no false work of theirs is proven."""
        self._dispute(unit, reason)
        error = ProtocolError(f"its work of stage {unit.stage_index} is in dispute: {reason}")
        verdict.failed |= {peer: error for peer in peers if peer != self._own}

    def _dispute(self, unit: Unit, reason: str) -> None:
        self._events.note("disputed", peer=unit.peer, stage=unit.stage_index, step=self._step.step, reason=reason)

    def _strike_disagreements(
        self,
        examined: ExaminedStep,
        disagreements: Mapping[Receipt, set[Unit]],
        replaced: Mapping[Receipt, Collection[Unit]],
        verdict: Verdict,
    ) -> None:
        """Strike the batches on which two servers make contradictory claims, if neither was convicted."""
        pairs = defaultdict[frozenset[Unit], list[Receipt]](list)
        # A server that failed and was replaced may have sent false tensors to both: such a server -> its batches.
        suspects = defaultdict[Unit, set[int]](set)
        for receipt, units in disagreements.items():
            if any(unit.peer in verdict.convicted for unit in units):
                continue
            failed = [unit for unit in replaced.get(receipt, ()) if unit.peer != self._own]
            for unit in failed:
                suspects[unit].add(receipt[0])
            if not failed:
                pairs[frozenset(units)].append(receipt)
        for unit, firsts in sorted(suspects.items()):
            self._contest(unit, firsts, examined, verdict)
        sizes = Counter(unit.stage_index for unit in examined.ledgers if unit.peer not in verdict.failed)
        for pair, receipts in sorted(pairs.items(), key=lambda item: sorted(item[0])):
            self._num_disputes[pair] += 1
            names = " and ".join(unit.peer for unit in sorted(pair))
            self._events.note(
                "disputed",
                stage=min(pair).stage_index,
                step=self._step.step,
                reason=f"{names} report differently on {len(receipts)} microbatches between them",
            )
            verdict.tainted |= {first for first, _, _ in receipts}
            others = [unit.peer for unit in pair if unit.peer != self._own]
            verdict.avoided |= {*others}
            # Exclude both servers the second time, or batches would run again forever. If one of them is excluded
            # already, with another server, that suffices.
            are_present = verdict.failed.keys().isdisjoint(unit.peer for unit in pair)
            if self._num_disputes[pair] > 1 and are_present and all(sizes[unit.stage_index] > 1 for unit in pair):
                sizes.subtract(unit.stage_index for unit in pair if unit.peer != self._own)
                self._exclude(others, min(pair), f"{names} contradict each other for the second time", verdict)


def _pair(unit: Unit, auditor: PeerId) -> frozenset[Unit]:
    return frozenset({unit, Unit(unit.stage_index, auditor)})


def _reports(ledger: ServerLedger) -> tuple[object, ...]:
    return ledger.report.sum_digest, ledger.report.claims, ledger.report.touched, ledger.report.order
