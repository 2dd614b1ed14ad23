"""The owner's bans in a run: distributed by its records, applied by each peer's transport."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Final

from msgspec import UNSET, UnsetType

from lightning_swarm.core.errors import AccessDenied, ProtocolError, SwarmError
from lightning_swarm.core.tasks import gather
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.protocol.invitations import Used
from lightning_swarm.protocol.messages.run import Bans
from lightning_swarm.protocol.rpc import BAN
from lightning_swarm.trust.certificates import SignedBan, decode

MAX_BANS: Final = 128
"""Most bans in a run, lifted bans included, so that a `RunView`, which lists each ban twice, fits into a call."""

_FORWARD_TIMEOUT_S: Final = 10.0

_log = logging.getLogger(__name__)


def answer_bans(
    transport: Transport,
    members: Callable[[], Iterable[PeerId]] = tuple,  # the peers of this peer's run
    spawn: Callable[[Coroutine[Any, Any, None]], Awaitable[object]] | None = None,  # None: forward no bans
) -> None:
    """Apply bans that the owner signed, from any sender, and forward them, because a banned coordinator would not."""

    async def handle(caller: PeerId, signed: bytes) -> None:
        is_new = signed not in transport.bans
        known = bans_after(UNSET, transport.bans)
        if len(bans_after(known, [signed]) or ()) > MAX_BANS:
            raise AccessDenied(
                f"a run keeps at most {MAX_BANS} bans, and this run has reached that number. A lifted ban still counts."
            )
        transport.ban(signed)
        if signed not in transport.bans:
            raise AccessDenied(
                "a ban must be newer than all other bans of its peer or invitation, and a newer one is known here. Set "
                "the clock of the machine that holds the owner's key, and ban again."
            )
        if is_new and spawn is not None:
            await spawn(_forward(transport, {*members()} - {transport.peer_id, caller}, signed))

    BAN.serve(transport, handle)


async def _forward(transport: Transport, peers: Iterable[PeerId], signed: bytes) -> None:
    async def forward_to(peer: PeerId) -> None:
        try:
            await BAN.ask(transport, peer, signed, timeout=_FORWARD_TIMEOUT_S)
        except SwarmError as error:  # no retry, because the next record carries the ban
            _log.info("%s did not receive a ban: %s", peer, error)

    await gather(map(forward_to, sorted(peers)))


def apply_received_ban(transport: Transport, signed: bytes) -> None:
    """Apply a ban received from a member; if the owner has not signed it, only log a warning."""
    try:
        transport.ban(signed)
    except AccessDenied as error:
        _log.warning("Ignored a ban: %s", error)


def bans_after(known: Bans, new: Bans) -> Bans:
    """Merge bans, keeping the newest of each peer and invitation; raise `ProtocolError` for a malformed ban. Pure."""
    if isinstance(new, UnsetType):
        return known
    newest: dict[str, tuple[int, bytes]] = {}
    for signed in (*(known or ()), *new):
        ban = _read(signed)
        newest[ban.subject] = max(newest.get(ban.subject, (0, b"")), (ban.decided_at_ns, signed))
    return [signed for _, signed in newest.values()]


def active_bans(bans: Bans) -> list[SignedBan]:
    """Return all bans that are not lifted; raise `ProtocolError` for a malformed ban. Pure."""
    return [ban for ban in map(_read, bans or ()) if not ban.is_lifted]


def banned_among(peers: Iterable[PeerId], bans: Bans, used: Used) -> set[PeerId]:
    """Return the peers that are banned themselves, or used only banned invitations. Pure."""
    subjects = {ban.subject for ban in active_bans(bans)}
    invitations_of = defaultdict[PeerId, set[str]](set)
    for invitation in used or ():
        for peer in invitation.peers:
            invitations_of[peer].add(invitation.number.hex())
    return {peer for peer in peers if peer in subjects or (peer in invitations_of and invitations_of[peer] <= subjects)}


def unrecorded(known: Bans, received: Iterable[bytes] | UnsetType) -> list[bytes]:
    """Return the received bans that the run does not know yet. Pure."""
    recorded = frozenset(known or ())
    return [signed for signed in received or () if signed not in recorded]


def _read(signed: bytes) -> SignedBan:
    try:
        return decode(signed, SignedBan)
    except ValueError as error:
        raise ProtocolError(
            f"a ban must be a record that the run's owner signed, got {signed[:20].hex()}: {error}"
        ) from error
