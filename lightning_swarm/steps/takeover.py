"""What a new coordinator asks: the servers, how far they are and whom they follow; the trainers, for its books."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Final

from lightning_swarm.errors import SwarmError
from lightning_swarm.network import MAX_STREAM_BYTES, Message, PeerId, Transport
from lightning_swarm.run_state import RunState
from lightning_swarm.steps import REPORT, REPORT_METRICS, WATCH
from lightning_swarm.steps.books import Books, Outcome
from lightning_swarm.steps.policy import OpenStep, fold
from lightning_swarm.steps.windows import Order
from lightning_swarm.tasks import gather
from lightning_swarm.types.batches import Lease, LeaseMetricsRequest, ReportReply, ReportRequest
from lightning_swarm.types.runs import Selection, Term, WatchReply, WatchRequest
from lightning_swarm.types.wire import decode, encode

_log = logging.getLogger(__name__)

GRACE_S: Final = 2.0
"""How long peers that may be gone are waited for, where the others do without them."""


def first_lease(term: Term) -> int:
    """Where a coordinator's leases begin: none of another one's is taken for one of them."""
    return ((term[0] - 1) << 32) + 1


async def watch(transport: Transport, peer: PeerId, request: WatchRequest, *, timeout: float) -> WatchReply:
    """Ask a server how far it is and whom it follows."""
    return decode(await transport.call(peer, WATCH, encode(request), timeout=timeout), WatchReply)


async def look_around(transport: Transport, run: RunState, *, timeout: float) -> dict[PeerId, WatchReply]:
    """Ask all other servers, as far as they answer soon."""
    replies: dict[PeerId, WatchReply] = {}
    request = WatchRequest(term=run.term, version=run.version, hold_s=0.0)

    async def ask(peer: PeerId) -> None:
        try:
            replies[peer] = await watch(transport, peer, request, timeout=timeout)
        except SwarmError as error:
            _log.debug("%s does not say whom it follows: %s", peer, error)

    async with asyncio.TaskGroup() as group:
        asking = {group.create_task(ask(peer)) for peer in run.servers if peer != transport.peer_id}
        if asking:
            _, late = await asyncio.wait(asking, timeout=GRACE_S)
            for one in late:
                one.cancel()
    return replies


async def gather_books(transport: Transport, run: RunState, reselected: Selection | None, *, timeout: float) -> Books:
    """Rebuild the books from what the trainers report. What the silent had counts nowhere.

    Args:
        transport: The new coordinator's.
        run: As its server knows it; nothing that was accepted is left to be finished.
        reselected: What its server trains in the open step, if that is not what trained in the step before.
        timeout: Seconds for a trainer to answer.
    """
    request = encode(ReportRequest(term=run.term, generation=run.manifest.generation))

    async def ask(trainer: PeerId) -> ReportReply | None:
        try:
            return decode(await transport.call(trainer, REPORT, request, timeout=timeout), ReportReply)
        except SwarmError as error:
            _log.warning("Trainer %s does not say what it has under way: %s", trainer, error)
            return None

    trainers = list(run.trainers)  # who does not answer now may register yet
    replies = await gather(ask(trainer) for trainer in trainers)
    reports = {trainer: reply for trainer, reply in zip(trainers, replies, strict=True) if reply is not None}
    metrics = await fetch_metrics(transport, reports, timeout=timeout)
    books = rebuild(run, reports, metrics, complete=len(reports) == len(trainers))
    books.reselected = reselected
    return books


async def fetch_metrics(
    transport: Transport, reports: Mapping[PeerId, ReportReply], *, timeout: float
) -> dict[tuple[int, int], Message]:
    """What came with batches, by step and lease."""
    found: dict[tuple[int, int], Message] = {}

    async def fetch(trainer: PeerId, lease: Lease) -> None:
        step, number = lease.grant.step, lease.grant.lease
        request = Message(encode(LeaseMetricsRequest(step=step, lease=number)))
        try:
            found[step, number] = await transport.stream(
                trainer, REPORT_METRICS, request, timeout=timeout, max_bytes=MAX_STREAM_BYTES
            )
        except SwarmError as error:
            _log.warning("What lease %d of %s added to metrics is lost: %s", number, trainer, error)

    await gather(fetch(peer, one) for peer, report in reports.items() for one in report.leases if one.has_metrics)
    return found


def rebuild(
    run: RunState,
    reports: Mapping[PeerId, ReportReply],
    metrics: Mapping[tuple[int, int], Message],
    *,
    complete: bool,
) -> Books:
    """The books that these reports make. Pure.

    Args:
        run: Whose version is the open step.
        reports: By trainer.
        metrics: What came with batches, by step and lease.
        complete: All trainers reported. Else places may be in use that nobody here knows of, so new ones begin far
            beyond them.
    """
    everything = [(trainer, lease) for trainer, report in reports.items() for lease in report.leases]
    lead = reports.get(run.manifest.lead)
    closed = dict(lead.closed) if lead is not None else {}
    steps = [OpenStep(one, run.manifest.target_batch_size) for one in run.open_steps]
    order = Order()
    for plan in lead.plans if lead is not None else ():
        order.add(plan)
    position = run.position or (None if lead is None else lead.position)
    if position is not None:
        steps[0].plan(order, position)
    for step in steps:
        _restore(step, everything, metrics)
        step.take_over(first_lease(run.term))
        if not complete:
            step.skip_to(run.term[0] << 32)
        if step.step in closed:
            step.ask_to_close(closed[step.step])
    due, open_ = (steps[0], steps[-1]) if steps[-1].begun and len(steps) > 1 else (None, steps[0])
    if due is not None:  # all of its batches were through, for the next step had opened
        due.sealed = True
        due.settle()
    return Books(
        open=open_,
        due=due,
        begun=run.version > run.manifest.first_step or (lead is not None and lead.begun),
        outcome=_outcome(run, everything, metrics),
        order=order,
    )


def _restore(
    step: OpenStep, leases: Sequence[tuple[PeerId, Lease]], metrics: Mapping[tuple[int, int], Message]
) -> None:
    """Enter what was granted of a step, in its order, and strike what nobody reports."""
    for trainer, lease in sorted(leases, key=lambda item: item[1].grant.first):
        if lease.grant.step == step.step:
            step.restore(trainer, lease, metrics.get((lease.grant.step, lease.grant.lease)))
    step.strike_others()


def _outcome(
    run: RunState,
    leases: Sequence[tuple[PeerId, Lease]],
    metrics: Mapping[tuple[int, int], Message],
) -> Outcome:
    """The newest record, and what the other trainers logged of the batches that it counts."""
    record = run.newest
    if record is None:
        return Outcome()
    others = [
        lease
        for trainer, lease in sorted(leases, key=lambda item: item[1].grant.first)
        if trainer != run.manifest.lead and lease.grant.step == record.step and record.closing.counts(lease.grant.first)
    ]
    found = {lease.grant.first: metrics.get((record.step, lease.grant.lease)) for lease in others}
    logs = fold(log for lease in others for log in lease.logs)
    return Outcome(record, logs, {first: one for first, one in found.items() if one is not None})
