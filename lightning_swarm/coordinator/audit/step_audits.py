"""Audits the sums of a step before they are averaged: screens all, has some computed again, and convicts who lies."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from lightning_swarm.coordinator.audit.audit_run import (
    Assignment,
    AuditResult,
    AuditResults,
    AuditRun,
    TrainerResults,
    compare,
    is_false_accusation,
)
from lightning_swarm.coordinator.audit.policy import (
    MAX_SILENCES,
    Screening,
    Silences,
    StageHistory,
    StageProjection,
    Standing,
    Tolerance,
    Unit,
    WorkClaim,
    WorkComparison,
    deviation_of,
    disagreeing,
    read_claims,
    rounding_of,
    screen,
    share_of_step,
    tolerance_between_machines,
)
from lightning_swarm.coordinator.context import CoordinatorContext
from lightning_swarm.coordinator.server_calls import ServerCalls
from lightning_swarm.coordinator.step.open_step import OpenStep
from lightning_swarm.coordinator.step.replay_plan import Ledgers, ServerLedger
from lightning_swarm.core.errors import ProtocolError, SwarmError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.compression import Codecs
from lightning_swarm.protocol.mean_projections import sum_dtype
from lightning_swarm.protocol.messages.calls import Direction, Receipt
from lightning_swarm.protocol.messages.wire import draw_challenge

# Of the audits in stages that the coordinator does not hold: it fetches the weights for its own, and so finds out also
# where all others of a stage lie together.
_OWN_SHARE: Final = 1 / 16

_MAX_CONTESTED: Final = 2  # closings in which a server may give trainers what is not claimed, before it is left out

_FALSE_SUM: Final = WorkComparison(wrong=frozenset({"sum"}))

lots = random.SystemRandom()


@dataclass
class Verdict:
    """What the audits of a step came to."""

    convicted: dict[PeerId, str] = field(default_factory=dict)  # with the reasons
    tainted: set[int] = field(default_factory=set)  # batches that went through false outputs, by their places
    failed: dict[PeerId, SwarmError] = field(default_factory=dict)  # servers that do not answer
    avoided: set[PeerId] = field(default_factory=set)  # say different things of one transfer

    @property
    def is_clean(self) -> bool:
        """Tell whether all sums may be averaged."""
        return not (self.convicted or self.tainted or self.failed)


@dataclass(frozen=True)
class _Examined:
    """The step's sums as they are looked into at once."""

    ledgers: Mapping[Unit, ServerLedger]
    claims: Mapping[Unit, Mapping[Receipt, WorkClaim]]
    arithmetic: Mapping[PeerId, str]
    round: int

    def auditors_of(self, unit: Unit, without: Collection[PeerId]) -> list[PeerId]:
        """The other servers of a unit's stage."""
        return [
            one.peer
            for one in self.ledgers
            if one.stage_index == unit.stage_index and one.peer != unit.peer and one.peer not in without
        ]

    def batches_of(self, peer: PeerId) -> set[int]:
        """Places of the batches of which a server has computed something."""
        return {first for unit, claims in self.claims.items() if unit.peer == peer for first, _, _ in claims}

    def sharing_with(self, units: Collection[Unit]) -> set[Unit]:
        """The units of other stages that computed microbatches of these."""
        stages = {unit.stage_index for unit in units}
        receipts = {receipt for unit in units for receipt in self.claims[unit]}
        return {
            unit
            for unit, claims in self.claims.items()
            if stages - {unit.stage_index} and not receipts.isdisjoint(claims)
        }

    def differ(self, one: PeerId, other: PeerId) -> bool:
        """Tell whether two servers' machines are of different kinds."""
        return self.arithmetic.get(one) != self.arithmetic.get(other)


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
        self._audits = AuditRun(servers, step, context.generation, exact=context.run.manifest.settings.deterministic)
        self._standing: Standing = context.audit_memory.standing
        self._histories: dict[int, StageHistory] = context.audit_memory.histories
        self._disputes: Counter[frozenset[Unit]] = context.audit_memory.disputes
        self._contested: Counter[PeerId] = context.audit_memory.contested
        self._silences: Silences = context.audit_memory.silences
        self._passed: dict[Unit, tuple[object, ...]] = {}  # with what was claimed then
        self._auditors: dict[Unit, PeerId] = {}
        self._due: set[Unit] = set()  # those that are audited in this step, until they have passed
        self._silent: set[PeerId] = set()
        self._is_noted = False  # the histories have this step
        self._is_disturbed = False  # it closed before, and was not clean: all that is new is audited
        self._shares: dict[int, dict[PeerId, float]] = {}  # by stage, of the newest screening
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
        screenings = self._screen(step, sums)
        suspects = {Unit(stage, peer) for stage, found in screenings.items() for peer in found.suspects} & fresh
        disagreements = disagreeing(step.claims)
        results = await self._audits.results()
        contested = self._compare_given(step, results, disagreements, verdict)
        # Lots of this closing: who had the step run again has seen whom the ones before hit.
        share = share_of_step(self._run.manifest.settings.audit_share or 0.0, lots.random)
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
            self._note(screenings)
        return self._distrust_failed(verdict)

    def _distrust_failed(self, verdict: Verdict) -> Verdict:
        """Audit servers as new ones that did not answer while they were audited: they may have had a reason."""
        for peer in verdict.failed:
            self._standing.passed.pop(peer, None)
        return verdict

    def _convict_idle(self, step: _Examined, sums: Mapping[Unit, StageProjection], verdict: Verdict) -> None:
        """Convict servers whose sums hold something, and that claim to have computed nothing."""
        for unit, told in sums.items():
            if not step.claims[unit] and not told.is_nothing and unit.peer != self._own:
                self._convict(unit, _FALSE_SUM, verdict, step)

    def _compare_given(
        self,
        step: _Examined,
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

    def _contest(self, unit: Unit, firsts: set[int], step: _Examined, verdict: Verdict) -> None:
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

    def rescreen(self, stage_index: int, sums: Mapping[PeerId, Sequence[float]]) -> set[PeerId]:
        """Find the servers whose sums, as they were averaged, are not like those that were screened."""
        shares = self._shares.get(stage_index, {})
        known = {peer: values for peer, values in sums.items() if peer in shares}
        history = self._histories.setdefault(stage_index, StageHistory())
        idle = {peer for peer, values in known.items() if not shares[peer] and any(values)}
        return idle | screen(known, {peer: shares[peer] for peer in known}, history).suspects

    def _examined(self, ledgers: Ledgers, arithmetic: Mapping[PeerId, str], round_: int, verdict: Verdict) -> _Examined:
        held, claims = dict[Unit, ServerLedger](), dict[Unit, Mapping[Receipt, WorkClaim]]()
        for index, (stage, manifest) in enumerate(zip(ledgers, self._run.manifest.stages, strict=True)):
            for member, ledger in stage.items() if not manifest.on_trainers else ():
                unit = Unit(index, member.peer_id)
                try:
                    claims[unit] = read_claims(ledger.report.claims or b"", ledger.held)
                    held[unit] = ledger
                except SwarmError as error:
                    verdict.failed[unit.peer] = error
        return _Examined(held, claims, arithmetic, round_)

    # ------------------------------------------------------------------ whose work is audited

    def _is_drawn(self, unit: Unit, share: float) -> bool:
        return self._standing.is_drawn(unit.peer, self._step.step, share, lots.random)

    def _screen(self, step: _Examined, sums: Mapping[Unit, StageProjection]) -> dict[int, Screening]:
        num_microbatches = Counter(first for first, _, _ in self._step.counted)
        origins = self._step.origins
        weights = {first: origins[first].weight / number for first, number in num_microbatches.items()}
        found = {}
        for stage in sorted({unit.stage_index for unit in step.ledgers}):
            units = [unit for unit in step.ledgers if unit.stage_index == stage and unit in sums]
            shares = {unit.peer: sum(weights.get(first, 0.0) for first, _, _ in step.claims[unit]) for unit in units}
            self._shares[stage] = shares
            found[stage] = screen(
                {unit.peer: sums[unit].values for unit in units},
                shares,
                self._histories.setdefault(stage, StageHistory()),
            )
        return found

    def _note(self, screenings: Mapping[int, Screening]) -> None:
        if not self._is_noted:
            self._is_noted = True
            for stage, found in screenings.items():
                self._histories[stage].note(found.norm, found.spread)

    def watch_fellows(self, convicted: PeerId) -> None:
        """Audit all work for a while of those that came by the same invitation as a liar, or that it audited."""
        self._standing.doubt(convicted)
        used = [one.peers for one in self._run.invitations or () if convicted in one.peers]
        self._standing.watch({peer for peers in used for peer in peers} - {convicted}, self._step.step)

    # ------------------------------------------------------------------ audits

    async def _audit(self, step: _Examined, units: Collection[Unit], verdict: Verdict) -> set[Unit]:
        """Have servers' work computed again, and convict who lies; returns those that did what they claim."""
        # The coordinator is a keeper: there is nobody to doubt it.
        audited = sorted(unit for unit in units if unit.peer != self._own and step.claims[unit])
        assignments = self._assigned(step, audited, verdict)
        results = await self._audits.audit(assignments, step.round)
        self._take(results, verdict)
        passed = set()
        for one in assignments:
            if one.unit.peer in verdict.failed:  # it has gone, and others compute its work again
                if one.unit.peer in results.failed:  # or it was left out before, and answers still
                    self._note_silence(one.unit.peer, verdict)
                continue
            if not results.lost.isdisjoint(one.receipts):
                self._dispute(one.unit, "some of its work could not be computed again, for its trainer has no copy")
                continue
            comparison = self._compare(step, one, results)
            if comparison.is_equal or await self._decide(step, one, results, comparison, verdict):
                passed.add(one.unit)
                self._auditors[one.unit] = one.auditor if comparison.is_equal else self._own
        return passed

    def _assigned(self, step: _Examined, units: Sequence[Unit], verdict: Verdict) -> list[Assignment]:
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
            loads[auditor] += len(step.claims[unit])
            found.append(self._assignment(step, unit, auditor))
        return found

    def _assignment(self, step: _Examined, unit: Unit, auditor: PeerId) -> Assignment:
        return Assignment(unit, auditor, sorted(step.claims[unit]), compare=step.differ(unit.peer, auditor))

    def _compare(self, step: _Examined, one: Assignment, results: AuditResults) -> WorkComparison:
        """Compare what a server claims with what an auditor found."""
        unit = one.unit
        its, told = results.found.get((unit, one.auditor)), results.sums.get(unit)
        if its is None or told is None:
            return WorkComparison(is_whole=False)
        claims = step.claims[unit]
        if one.compare:  # digests are then of what the audited server gave, and its distance says the rest
            allowed = tolerance_between_machines(its.precision)
            far = tolerance_between_machines(its.precision, self._codec_bits)
            is_far, tolerance = (its.distance or 0.0) > far, deviation_of(its.magnitude, allowed, self._dtype(unit))
        else:
            is_far, tolerance = False, self._rounding(unit, its, len(claims))
        return compare(
            claims,
            its,
            told,
            tolerance=tolerance,
            is_far=is_far,
            touches_alike=its.touched == step.ledgers[unit].report.touched,
        )

    def _rounding(self, unit: Unit, found: AuditResult, num_added: int) -> Tolerance:
        """How far a sum may be from what was found, on machines of one kind."""
        exact = found.projection.exact is not None
        return Tolerance(0.0) if exact else rounding_of(found.magnitude, num_added, self._dtype(unit))

    def _dtype(self, unit: Unit) -> str:
        return sum_dtype(self._run.manifest.stages[unit.stage_index], self._trained)

    def _take(self, results: AuditResults, verdict: Verdict) -> None:
        """Take in who does not answer, and what the others said of their sums, to which they are held later."""
        verdict.failed |= results.failed
        for unit, trainers in sorted(results.silent.items()):
            if unit.peer != self._own:
                self._note_silent_auditor(unit, trainers, verdict)
        for unit, told in results.sums.items():
            self.told[unit].append((results.seed, told))
        self.audited |= results.sums.keys()

    # ------------------------------------------------------------------ disputes

    async def _decide(
        self, step: _Examined, one: Assignment, results: AuditResults, comparison: WorkComparison, verdict: Verdict
    ) -> bool:
        """Have the coordinator's own server do the whole audit, and convict who lies; True: the audited did not."""
        # Also where an auditor does nothing, or says that it was refused: it would let an accomplice pass.
        unit = one.unit
        if one.auditor == self._own:
            return self._hear(step, unit, comparison, verdict)
        own = self._assignment(step, unit, self._own)
        again = await self._audits.audit([own], step.round)
        self._take(again, verdict)
        if unit.peer in verdict.failed or not self._hear(step, unit, self._compare(step, own, again), verdict):
            return False
        # By the same seed as before, so that nobody is asked, and can answer otherwise, once more.
        about = (unit, self._own)
        found = (await self._audits.ask(again.order, [about], results.seed))[0].get(about)
        its, told = results.found.get((unit, one.auditor)), results.sums.get(unit)
        if found is None or its is None or told is None or one.compare or own.compare:
            return True
        tolerance = self._rounding(unit, found, len(one.receipts))
        if not told.agrees(found.projection, tolerance=tolerance):
            self._convict(unit, _FALSE_SUM, verdict, step)
            return False
        if is_false_accusation(step.claims[unit], its, found, tolerance=tolerance):
            verdict.convicted[one.auditor] = (
                f"said as auditor that {unit.peer} had computed stage {unit.stage_index} falsely, which it had not"
            )
        elif comparison.wrong:
            self._dispute(
                unit, f"{one.auditor} found other results, or was given something else, and {self._own} did not"
            )
        return True

    def _hear(self, step: _Examined, unit: Unit, comparison: WorkComparison, verdict: Verdict) -> bool:
        """Take what the coordinator's own server found of a server's work; True: that did what it claims."""
        if comparison.wrong:
            self._convict(unit, comparison, verdict, step)
        elif not comparison.is_whole:
            self._leave_out([unit.peer], unit, "the coordinator cannot compute its work again", verdict)
            verdict.tainted |= step.batches_of(unit.peer)
            if comparison.is_silent:
                self._note_silence(unit.peer, verdict)
        return comparison.is_equal

    def _note_silence(self, peer: PeerId, verdict: Verdict) -> None:
        """Convict who falls silent under audit again and again: by that a liar would escape each of them."""
        if peer in self._silent:  # in this step, already
            return
        self._silent.add(peer)
        # Machines and links fail now and then. A liar that is audited in each step has few lies left.
        self._standing.watch([peer], self._step.step)
        number = self._silences.note(peer, self._step.step)
        if number > MAX_SILENCES:
            verdict.convicted[peer] = f"gave no answer {number} times while it was audited"

    def _note_silent_auditor(self, unit: Unit, trainers: Collection[PeerId], verdict: Verdict) -> None:
        """Give a server no audits for a while that was silent as an auditor; the lead's report counts as a silence."""
        self._dispute(unit, f"it audited nothing in time, as {' and '.join(sorted(trainers))} found")
        self._silences.note_auditor(unit.peer, self._step.step)
        if self._run.manifest.lead in trainers:  # other trainers may be strangers, and convict nobody
            self._note_silence(unit.peer, verdict)

    def _convict(self, unit: Unit, comparison: WorkComparison, verdict: Verdict, step: _Examined) -> None:
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
        step: _Examined,
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


def _commitment(ledger: ServerLedger) -> tuple[object, ...]:
    return ledger.report.sum_digest, ledger.report.claims, ledger.report.touched
