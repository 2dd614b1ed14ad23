"""What servers say of their frozen sums, as who closes a step reads it. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

from lightning_swarm.errors import StepError
from lightning_swarm.network import PeerId
from lightning_swarm.rebalancing.said import Load
from lightning_swarm.types.calls import Receipt
from lightning_swarm.types.many import unpack
from lightning_swarm.types.runs import Member
from lightning_swarm.types.steps import FreezeReply, Named, StageLedger
from lightning_swarm.types.wire import union


@dataclass(frozen=True)
class Ledger:
    """Of one stage on one server.

    Args:
        said: By it.
        held: Which microbatches that names.
    """

    said: StageLedger
    held: set[Receipt]

    @property
    def batches(self) -> set[int]:
        """The places of the batches of which the sum holds something."""
        return {first for first, _, _ in self.held}


Ledgers: TypeAlias = list[dict[Member, Ledger]]
"""For each stage, those of its roster that are there, in its order."""


def read(reply: FreezeReply, member: Member, stage_index: int) -> Ledger:
    """What a member of a stage says of it.

    Raises:
        StepError: Its sums are gone, or it is silent about this one.
        ProtocolError: It says too much.
    """
    if reply.boot_id != member.boot_id:
        raise StepError(f"peer {member.peer_id} was restarted: its sums are gone")
    for ledger in reply.ledgers:
        if ledger.stage_index == stage_index:
            return Ledger(ledger, unpack(ledger.held))
    raise StepError(f"peer {member.peer_id} holds no ledger of stage {stage_index}")


def version_hash(stage_index: int, ledgers: Collection[Ledger], *, step: int) -> int | None:
    """Of the weights that a stage's replicas agree on. None: there is one, and nobody to compare them with.

    Raises:
        StepError: They do not, or not all say theirs.
    """
    hashes = {ledger.said.version_hash for ledger in ledgers}
    if None in hashes and len(ledgers) > 1:
        raise StepError(
            f"step {step}: stage {stage_index} has {len(ledgers)} replicas, and not all give a hash of their weights"
        )
    if len(hashes) != 1:
        raise StepError(f"step {step}: the replicas of stage {stage_index} have different weights: {hashes}")
    return hashes.pop()


def check_tied(ledgers: Ledgers, *, step: int) -> None:
    """What several stages hold must be the same in all of them.

    Raises:
        StepError: It is not.
    """
    hashes: dict[str, set[int]] = {}
    for stage in ledgers:
        for ledger in stage.values():
            for name, value in (ledger.said.tied or {}).items():
                hashes.setdefault(name, set()).add(value)
    differing = sorted(name for name, values in hashes.items() if len(values) > 1)
    if differing:
        raise StepError(
            f"step {step}: stages hold different weights of what they share: {differing[:5]}. Servers of these stages "
            "must round alike: have them on machines of one kind, with one build of torch."
        )


def named(ledgers: Ledgers) -> dict[PeerId, list[Named]]:
    """What each server holds, for each of its stages."""
    found: dict[PeerId, list[Named]] = {}
    for index, stage in enumerate(ledgers):
        for member, ledger in stage.items():
            found.setdefault(member.peer_id, []).append(Named(stage_index=index, receipts=ledger.said.held))
    return found


def loads(ledgers: Ledgers) -> dict[PeerId, dict[int, Load]]:
    """How busy each server was, by stage."""
    found: dict[PeerId, dict[int, Load]] = {}
    for index, stage in enumerate(ledgers):
        for member, ledger in stage.items():
            said = ledger.said
            found.setdefault(member.peer_id, {})[index] = Load.said(said.samples_per_s, said.queued, said.busy_share)
    return found


def touched(ledgers: Collection[Ledger]) -> bytes:
    """A bitmap over a stage's parameters: which got a gradient.

    Raises:
        StepError: Its replicas do not have the same parameters.
    """
    bitmaps = [ledger.said.touched for ledger in ledgers]
    if len(set(map(len, bitmaps))) != 1:
        raise StepError("the replicas of a stage disagree on its number of parameters")
    return union(bitmaps)
