"""Checks a record for a voter, which refuses any record that contradicts its own state of the run."""

from __future__ import annotations

import math
from typing import NoReturn

from lightning_swarm.coordinator.membership.rosters import members_that_may_vote, number_of_voters
from lightning_swarm.coordinator.step.open_step import clip_factor
from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.protocol.messages.run import MAX_TRAINERS, check_change
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.run_state import RunState


def check_record(run: RunState, record: Record) -> None:
    """Refuse a record of the open step that cannot follow from the run's state on this server."""
    run.check_generation(record.closing.generation)
    if record.step != run.version:
        raise ProtocolError(f"the next record here is of step {run.version}, got a record of step {record.step}")
    check_change(record.change, run.manifest.stages)
    _check_arithmetic(run, record)
    _check_servers(run, record)
    _check_voters(run, record)
    _check_trainers(run, record)
    _check_snapshots(run, record)
    if unknown := [index for index in record.portable or () if index >= len(run.rosters)]:
        _refuse(record, f"portable arithmetic is set for some of {len(run.rosters)} stages", unknown)


def _refuse(record: Record, rule: str, value: object) -> NoReturn:
    raise ProtocolError(f"{rule}; record {record.step} has {value}")


def _check_arithmetic(run: RunState, record: Record) -> None:
    """Refuse an outcome or a clip factor that does not follow from the gradient's norm and the manifest."""
    outcome = "apply" if math.isfinite(record.squared_norm) else "skip"
    if record.outcome != outcome or record.squared_norm < 0.0:
        _refuse(record, "a step is skipped if its gradient is not finite, and otherwise applied", record.outcome)
    factor = clip_factor(record.squared_norm, run.manifest.gradient_clip_norm)
    if record.clip_factor != factor and not math.isnan(factor):
        _refuse(record, f"the clip factor follows from the norm: {factor}", record.clip_factor)
    selection = record.change.selection or run.selection
    groups = len(record.hyperparameters)
    if outcome == "apply" and selection is not None and groups != selection.num_groups:
        _refuse(record, f"there are {selection.num_groups} parameter groups", f"{groups} sets of hyperparameters")


def _check_servers(run: RunState, record: Record) -> None:
    """Refuse departures of non-members and, without `delay_optimizer_step`, absent servers that stay."""
    run.check(record)
    for vacancy in record.left:
        if vacancy.member not in run.rosters[vacancy.stage_index]:
            _refuse(record, "only servers of a stage can leave it", vacancy)
    gone = {vacancy.member.peer_id for vacancy in record.left}
    if moving := [departure for departure in record.departures if departure.member.peer_id not in gone]:
        _refuse(record, "a server that moves must leave its stage", moving[:1])
    staying = {member.peer_id for roster in run.members_after(record).rosters for member in roster}
    absent = {*record.closing.absent} & staying - {newcomer.member.peer_id for newcomer in record.newcomers}
    if absent and not run.manifest.settings.delay_optimizer_step:
        _refuse(record, "a server that was absent from a step must leave with its record", sorted(absent)[:1])


def _check_voters(run: RunState, record: Record) -> None:
    """Refuse voters that are too many or too few, that may not vote, or that do not begin with the present voters."""
    after = run.members_after(record)
    members = set(members_that_may_vote(after.rosters, run.on_trainers, after.keepers))
    if not members:
        _refuse(record, "a keeper must stay in the rosters, because only keepers vote", after.keepers)
    if record.next_voters is None:
        return
    number = number_of_voters(len(members))
    kept = [voter for voter in run.voters if voter in members][:number]
    voters = record.next_voters
    if (
        len(voters) != number
        or len(set(voters)) != number
        or not members.issuperset(voters)
        or voters[: len(kept)] != kept
    ):
        _refuse(record, f"{number} members vote, of which the first are {[voter.peer_id for voter in kept]}", voters)


def _check_trainers(run: RunState, record: Record) -> None:
    """Refuse changes to a fixed set of trainers, false enlistments, and a record that retires the lead."""
    manifest, trainers = run.manifest, set(run.trainers)
    enlisted, retired = set(record.enlisted), set(record.retired)
    if (enlisted or retired) and not manifest.open_to_trainers:
        _refuse(record, "the run keeps the trainers with which it began", sorted(enlisted | retired)[:1])
    if enlisted & trainers or not retired <= trainers - {manifest.lead}:
        _refuse(
            record,
            "only trainers other than the lead retire, and only peers that do not train enlist",
            (enlisted, retired),
        )
    if len(trainers | enlisted) - len(retired) > MAX_TRAINERS:
        _refuse(record, f"a run has at most {MAX_TRAINERS} trainers", len(trainers | enlisted))


def _check_snapshots(run: RunState, record: Record) -> None:
    """Refuse the digest of a snapshot that is in an earlier record, or whose version does not exist yet."""
    listed = [(snapshot.stage_index, snapshot.version) for snapshot in record.snapshots or ()]
    for index, version in listed:
        if index >= len(run.rosters) or not run.manifest.first_step < version <= record.step:
            _refuse(record, f"snapshots are of {len(run.rosters)} stages and of earlier versions", (index, version))
    known = [(snapshot.stage_index, snapshot.version) for snapshot in run.snapshots]
    if len(set(listed)) < len(listed) or not set(listed).isdisjoint(known):
        _refuse(record, "each snapshot is recorded once", listed[:2])
