"""Checks the means of a step's averaging round, in audited runs, before the step's record is decided."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_swarm.coordinator.audit.policy import Unit
from lightning_swarm.coordinator.context import CoordinatorContext
from lightning_swarm.coordinator.server_calls import ServerCalls
from lightning_swarm.coordinator.step.oversight import CheckedMeans
from lightning_swarm.core.errors import DeadlineExceeded, ProtocolError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.mean_projections import (
    StageScale,
    agreed_norm,
    check_shape,
    choose_accused,
    is_sound,
    sum_dtype,
)
from lightning_swarm.protocol.messages.parts import (
    ExamineReply,
    ExamineRequest,
    ProjectReply,
    ProjectRequest,
    ReportedSketch,
)
from lightning_swarm.protocol.messages.parts import PartProjections as Answer
from lightning_swarm.protocol.messages.run import Selection, trained_names
from lightning_swarm.protocol.messages.step import Closing
from lightning_swarm.protocol.messages.wire import draw_challenge
from lightning_swarm.protocol.rpc import EXAMINE, PROJECT

if TYPE_CHECKING:  # `StepAudits` has a `MeanAudit`
    from lightning_swarm.coordinator.audit.step_audits import StepAudits

_DRAWS: Final = secrets.SystemRandom()


@dataclass(frozen=True)
class _StageAnswers:
    """The answers of one stage's members, in the roster's order."""

    index: int
    answers: Mapping[PeerId, Answer]
    scale: StageScale  # how the stage's mean follows from the sums


class MeanAudit:
    """Asks servers for projections of their sums and means, and has a stage examined if its projections disagree."""

    def __init__(self, context: CoordinatorContext, servers: ServerCalls, audits: StepAudits) -> None:
        self._run, self._events, self._servers = context.run, context.events, servers
        self._audits = audits  # the audits of this step's sums

    async def check(self, closing: Closing, selection: Selection | None) -> CheckedMeans:
        """Check a round whose means all servers hold, and whose sums were audited."""
        rosters = [[member.peer_id for member in roster] for roster in self._run.present(closing.absent)]
        request = ProjectRequest(closing=closing, seed=draw_challenge())
        answers: list[dict[PeerId, Answer]] = [{} for _ in rosters]
        replies, failed = await self._servers.ask_all(PROJECT, sorted(set[PeerId]().union(*rosters)), request)
        for peer, reply in replies.items():
            try:
                self._record_answers(peer, reply, rosters, answers)
            except ProtocolError as error:
                failed[peer] = error
        checked = CheckedMeans(failed)
        if failed:
            return checked
        scales = self._scales(closing.total_weight * closing.gradient_scale, selection)
        for index, members in enumerate(rosters):
            ordered = {peer: answers[index][peer] for peer in members}
            await self._check_stage(_StageAnswers(index, ordered, scales[index]), request, checked)
        return checked

    def _record_answers(
        self,
        peer: PeerId,
        reply: ProjectReply,
        rosters: Sequence[Sequence[PeerId]],
        answers: Sequence[dict[PeerId, Answer]],
    ) -> None:
        """Record a server's answers by stage; raise ProtocolError if they are about other stages, or malformed."""
        stages = [index for index, members in enumerate(rosters) if peer in members]
        if [answer.stage_index for answer in reply.stages] != stages:
            raise ProtocolError(f"{peer} holds the stages {stages}, and answered about others")
        for answer in reply.stages:
            check_shape(answer, len(rosters[answer.stage_index]))
            answers[answer.stage_index][peer] = answer

    def _scales(self, divisor: float, selection: Selection | None) -> list[StageScale]:
        """Return for each stage how its mean follows from the sums."""
        trained = trained_names(selection) if selection is not None else set[str]()
        scales = []
        for stage in self._run.manifest.stages:
            length = sum(math.prod(shape) for name, shape, _ in stage.parameters if name in trained)
            scales.append(StageScale(length, sum_dtype(stage, trained), divisor))
        return scales

    async def _check_stage(self, stage: _StageAnswers, request: ProjectRequest, checked: CheckedMeans) -> None:
        """Have a stage examined if its projections disagree or it is drawn, else only the sums of doubtful members."""
        index, answers, manifest = stage.index, stage.answers, self._run.manifest
        # Trainers send no commitments, and are trusted with their stages.
        on_trainers = manifest.stages[index].on_trainers
        agree = on_trainers or is_sound([*answers.values()], stage.scale)
        # A projection adds up all elements, so a small false element may hide in the rounding of larger elements.
        is_drawn = not on_trainers and _DRAWS.random() < (manifest.settings.audit_share or 0.0)
        # Members whose sums are examined; None: the sums of all members, and their mean.
        doubtful = self._doubtful(stage) if agree and not is_drawn else None
        norm, parts = agreed_norm([*answers.values()]), next(iter(answers.values())).parts
        if doubtful is None or doubtful:
            examined = await self._examine(stage, request, doubtful)
            checked.failed.update((peer, DeadlineExceeded(reason)) for peer, reason in examined.unreached.items())
            checked.convicted.update(examined.lies)
            step = request.closing.step
            for contradiction in examined.contradictions:
                for peer in (contradiction.reducer, contradiction.other):
                    self._events.note("disputed", peer=peer, stage=index, step=step, reason=contradiction.reason)
            checked.accused.update(choose_accused(examined.contradictions, len(answers)))
            norm = norm if examined.squared_norm is None else examined.squared_norm
            parts = [] if examined.contradictions else parts
        checked.squared_norms.append(norm)
        checked.parts.append(parts)

    def _doubtful(self, stage: _StageAnswers) -> list[PeerId]:
        """Choose the members whose sums are fetched, because the sum that was audited may not be the averaged one."""
        index, answers = stage.index, stage.answers
        if self._run.manifest.stages[index].on_trainers:
            return []
        doubtful = {peer for peer in answers if Unit(index, peer) in self._audits.audited}
        doubtful |= self._audits.screen.screen_again(index, {peer: answer.sums for peer, answer in answers.items()})
        return sorted(doubtful - {self._servers.own})

    async def _examine(
        self, stage: _StageAnswers, projected: ProjectRequest, members: list[PeerId] | None
    ) -> ExamineReply:
        """Have the sums of these members examined; None: the sums of all, and their mean."""
        answers, audits = stage.answers, self._audits
        units = {peer: Unit(stage.index, peer) for peer in answers}
        request = ExamineRequest(
            closing=projected.closing,
            seed=projected.seed,
            stage_index=stage.index,
            length=stage.scale.length,
            dtype=stage.scale.dtype,
            answers=dict(answers),
            commitments={peer: audits.commitments[unit] for peer, unit in units.items()},
            told={
                peer: [
                    ReportedSketch(seed=seed, values=list(sketch.values))
                    for seed, sketch in audits.sum_sketches.get(unit, ())
                ]
                for peer, unit in units.items()
            },
            drawn=members,
        )
        # The coordinator's server asks one member after the other, for its sum and then for its mean.
        return await self._servers.ask(self._servers.own, EXAMINE, request, num_timeouts=2 * (len(answers) + 1))
