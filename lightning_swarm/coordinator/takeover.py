"""Rebuilds a new coordinator's step state from trainers' reports, and appoints a standby if the lead is gone."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from lightning_swarm.coordinator.context import StepOutcome, StepState
from lightning_swarm.coordinator.step.data_order import DataOrder
from lightning_swarm.coordinator.step.leases import first_lease
from lightning_swarm.coordinator.step.open_step import OpenStep, logs_of_others
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import SwarmError
from lightning_swarm.core.tasks import gather
from lightning_swarm.network import Message, PeerId, Transport
from lightning_swarm.network.liveness import alive_among
from lightning_swarm.protocol.messages.batches import Lease, LeaseMetricsRequest, ReportReply, ReportRequest
from lightning_swarm.protocol.messages.run import InheritRequest, StepChange
from lightning_swarm.protocol.messages.wire import encode
from lightning_swarm.protocol.queries import Held, ask_each, ask_held, by_preference, holders_of
from lightning_swarm.protocol.rpc import INHERIT, REPORT, REPORT_METRICS
from lightning_swarm.protocol.run_state import RunState

_log = logging.getLogger(__name__)


async def gather_step_state(
    transport: Transport, run: RunState, change: StepChange, *, timeout: float, max_metric_bytes: int
) -> StepState:
    """Rebuild the step state from the trainers' reports. A silent trainer's batches are missing in it."""
    # `run` is the state of the new coordinator's server, with no accepted record left to finish. `change` is the change
    # with which the open step began.
    request = ReportRequest(term=run.term, generation=run.manifest.generation)
    trainers = list(run.trainers)  # a silent trainer may register its batches later, until the step is frozen
    reports = await ask_each(transport, trainers, REPORT, request, timeout=timeout)
    if silent := [trainer for trainer in trainers if trainer not in reports]:
        _log.warning("These trainers did not report their batches: %s", ", ".join(silent))
    metrics = await fetch_metrics(transport, reports, timeout=timeout, max_bytes=max_metric_bytes)
    state = rebuild(run, reports, metrics, complete=len(reports) == len(trainers))
    state.change = change
    return state


async def fetch_metrics(
    transport: Transport, reports: Mapping[PeerId, ReportReply], *, timeout: float, max_bytes: int
) -> dict[tuple[int, int], Message]:
    """Fetch the batches' metrics, by step and lease; at most `max_bytes` and `timeout` seconds for each trainer."""
    metrics: dict[tuple[int, int], Message] = {}

    async def fetch(trainer: PeerId, leases: Sequence[Lease]) -> None:
        until_s, num_left = now_s() + timeout, max_bytes
        for lease in leases:
            step, number = lease.grant.step, lease.grant.lease
            request = LeaseMetricsRequest(step=step, lease=number)
            try:
                head, tensors = await REPORT_METRICS.ask(
                    transport, trainer, request, timeout=max(0.0, until_s - now_s()), max_bytes=num_left
                )
                head.check_tensors(len(tensors))
            except SwarmError as error:
                _log.warning("The metrics of lease %d of trainer %s are lost: %s", number, trainer, error)
                continue
            num_left -= sum(tensor.nbytes for tensor in tensors)
            metrics[step, number] = Message(encode(head), tensors)

    await gather(
        fetch(trainer, [lease for lease in report.leases if lease.has_metrics]) for trainer, report in reports.items()
    )
    return metrics


def rebuild(
    run: RunState, reports: Mapping[PeerId, ReportReply], metrics: Mapping[tuple[int, int], Message], *, complete: bool
) -> StepState:
    """Make the step state from the trainers' reports, which are `complete` if all trainers have sent one. Pure."""
    own_first = first_lease(run.term)
    former = [
        (trainer, lease)
        for trainer, report in reports.items()
        for lease in report.leases
        if 1 <= lease.grant.lease < own_first  # granted by a former coordinator
    ]
    former.sort(key=lambda item: item[1].grant.first)
    lead = reports.get(run.manifest.lead)
    closed = dict(lead.closed) if lead is not None else {}
    target, scale = run.manifest.settings.target_batch_size, run.loss_scale
    steps = [OpenStep(step, target, gradient_scale=scale) for step in run.open_steps]
    order = DataOrder()
    for plan in lead.plans if lead is not None else ():
        order.add(plan)
    position = run.position or (None if lead is None else lead.position)
    if position is not None:
        steps[0].plan(order, position)
    for step in steps:
        step.first_lease = own_first
        for trainer, lease in former:
            if lease.grant.step == step.step:
                step.restore(trainer, lease, metrics.get((lease.grant.step, lease.grant.lease)))
        step.strike_others()
        if not complete:  # unreported places may be in use; new places begin far beyond them
            step.skip_to(run.term[0] << 32)
        if step.step in closed:
            step.ask_to_close(closed[step.step])
    late_step, open_ = (steps[0], steps[-1]) if steps[-1].begun and len(steps) > 1 else (None, steps[0])
    if late_step is not None:  # all its batches are complete, because the next step has opened
        late_step.sealed = True
        late_step.settle()
    return StepState(
        open=open_,
        late_step=late_step,
        begun=run.version > run.manifest.first_step or (lead is not None and lead.begun),
        outcome=_outcome(run, former, metrics),
        order=order,
    )


def _outcome(
    run: RunState, leases: Sequence[tuple[PeerId, Lease]], metrics: Mapping[tuple[int, int], Message]
) -> StepOutcome:
    """Make the outcome of the newest record, with the other trainers' logs and metrics of the counted batches."""
    record = run.newest
    if record is None:
        return StepOutcome()
    lead = run.manifest.lead
    counted = [
        (trainer, lease)
        for trainer, lease in leases
        if lease.grant.step == record.step and record.closing.counts(lease.grant.first)
    ]
    others = [lease for trainer, lease in counted if trainer != lead]
    keys = {lease.grant.first: (record.step, lease.grant.lease) for lease in others}
    logs = logs_of_others([(trainer, lease.logs) for trainer, lease in counted], lead)
    return StepOutcome(record, logs, {first: metrics[key] for first, key in keys.items() if key in metrics})


# Failover. A standby with the state of the lead's loop rolls the run back to the newest snapshot of all stages and of
# the loop. The coordinator names the standby to all servers (`INHERIT`), which then follow it as the lead, and vote for
# no more records of the old generation. The next generation begins only if a majority of the voters has got the name.
# Messages may be lost, and the coordinator may die between two of them, so naming the same standby again is harmless.
def choose_standby_lead(
    held: Held, candidates: Sequence[PeerId], num_stages: int, sound: int | None = None
) -> tuple[PeerId, int] | None:
    """Choose the most preferred complete version, and the first candidate with its loop as the new lead. Pure."""
    loops = {peer: set(held[peer].loops or ()) for peer in candidates if peer in held}
    for version in by_preference(set().union(*loops.values()), sound):
        if all(holders_of(held, version, index) for index in range(num_stages)):
            return next(peer for peer, versions in loops.items() if version in versions), version
    return None


def seniority(run: RunState) -> list[PeerId]:
    """List the servers that may lead a run, the oldest first. Newcomers are last in their rosters. Pure."""
    longest = max(map(len, run.rosters))
    oldest_first = (roster[index] for index in range(longest) for roster in run.rosters if index < len(roster))
    return list(dict.fromkeys(member.peer_id for member in oldest_first if run.decides(member.peer_id)))


def has_majority(run: RunState, peers: Sequence[PeerId]) -> bool:
    """Return whether these peers include a majority of a run's voters. Pure."""
    return 2 * sum(voter.peer_id in peers for voter in run.voters) > len(run.voters)


async def appoint(transport: Transport, run: RunState, *, timeout: float, is_last: bool = False) -> str:
    """Appoint a standby as the lead; return why that failed, or "" if the standby was notified."""
    generation = run.manifest.generation  # the run may be rolled back meanwhile
    held = await ask_held(transport, run.servers, timeout=timeout)
    # Servers may already follow a standby that was named before. So that standby is chosen again while it is alive,
    # except in the last attempt.
    named = [run.manifest.lead] if run.is_rolling_back else []
    if not named:
        held.pop(run.manifest.lead, None)
    for former in run.manifest.former_leads or ():
        held.pop(former, None)  # a former lead must not lead again: it would not learn that it was replaced
    num_stages = len(run.rosters)
    chosen = choose_standby_lead(held, named, num_stages, run.sound_version)
    if chosen is None and named and not is_last and await alive_among(transport, named, timeout=timeout):
        # Its report, or the report of a snapshot's holder, may have been lost.
        return f"the next lead {named[0]} is alive, but not all snapshots that it needs are reported"
    chosen = chosen or choose_standby_lead(held, seniority(run), num_stages, run.sound_version)
    if chosen is None:
        reason = "no live peer has the state of the lead's loop at a version of which all stages have a snapshot"
        return f"{reason}{run.electorate.remedy}"
    standby, version = chosen
    if not has_majority(run, list(held)):  # checked before any server follows it
        return _no_majority(run, standby)
    request = InheritRequest(generation=generation, new_lead=standby, first_step=version)
    others = [peer for peer in held if peer != standby]
    informed = await ask_each(transport, others, INHERIT, request, timeout=timeout)
    if not has_majority(run, [*informed, standby]):
        return _no_majority(run, standby)
    if await ask_each(transport, [standby], INHERIT, request, timeout=timeout):
        return ""
    return f"{standby}, which was to lead, does not answer"


def _no_majority(run: RunState, standby: PeerId) -> str:
    return f"{standby} cannot lead, because no majority of the {len(run.voters)} voters answers{run.electorate.remedy}"
