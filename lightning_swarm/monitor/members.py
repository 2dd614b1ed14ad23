"""Asks a run's peers who its members are, sends prompts to its lead, and sends the owner's bans to all peers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from msgspec import UnsetType

from lightning_swarm.core.errors import AccessDenied, ConfigError, PeerError, SwarmError, Unreachable
from lightning_swarm.core.event_loop import Runtime
from lightning_swarm.core.readable import printable, shorten, table_lines
from lightning_swarm.core.tasks import gather
from lightning_swarm.monitor import survey
from lightning_swarm.monitor.doctor import Visitor, visit
from lightning_swarm.monitor.swarm_report import Sighting
from lightning_swarm.network import PeerId
from lightning_swarm.network.addresses import Address
from lightning_swarm.network.transport import BaseTransport
from lightning_swarm.protocol.bans import active_bans
from lightning_swarm.protocol.keepers import is_certified_keeper
from lightning_swarm.protocol.messages.inference import RunText, RunTextRequest
from lightning_swarm.protocol.messages.run import RunView
from lightning_swarm.protocol.queries import ask_view
from lightning_swarm.protocol.rpc import BAN, RUN_TEXT

_START_TIMEOUT_S: Final = 30.0
_HEADS: Final = ("peer", "role", "invitation", "uses", "in the run")


@dataclass(frozen=True)
class RunMember:
    """A peer that ever joined a run, or that was banned from it."""

    peer_id: str
    role: str | None  # None: it does not answer
    invitation: str | None  # its number in hex; None: the peer never joined, or the run has no invitations
    uses: tuple[int, int]  # number of the invitation's uses so far, and of all permitted uses
    parts: tuple[str, ...]  # the peer's present parts in the run, such as "stage 0" or "lead"; empty: it is gone
    banned: str | None  # the reason; None: not banned
    convicted: str | None = None  # the reason; None: not convicted


class Members:
    """Asks the peers of a run about its members, and sends bans to them."""

    def __init__(
        self, runtime: Runtime, transport: BaseTransport, address: Address, visitor: Visitor, timeout: float
    ) -> None:
        self._runtime, self._transport, self._first, self._timeout = runtime, transport, address.peer_id, timeout
        try:
            runtime.run(transport.connect([address.maddr]))
            runtime.run(visitor.introduce(transport, address.peer_id))
            answers = survey.ask_all(transport, address.peer_id, address.maddr, timeout=timeout)
            self._sightings: Sequence[Sighting] = runtime.run(answers)
        except AccessDenied:
            raise
        except PeerError as error:
            raise Unreachable(
                f"{address} does not answer: {shorten(str(error))} Ask another peer of the run."
            ) from error
        self._roles = {sighting.peer_id: sighting.role for sighting in self._sightings}

    def ask_view(self) -> RunView | None:
        """Ask a server of the run for its view; return None if no answering peer is in a run."""
        # Keepers come first, because their reports need no confirmation.
        for asked in sorted(self._sightings, key=lambda each: not is_certified_keeper(self._transport, each.peer_id)):
            if asked.report is not None and asked.report.server is not None:
                view = self._runtime.run(ask_view(self._transport, asked.peer_id, timeout=self._timeout))
                if view is not None:
                    return view
        return None

    def ask_lead(self, request: RunTextRequest, *, timeout: float) -> RunText:
        """Send a prompt to the run's lead, and return its continuation."""
        reports = [sighting.report for sighting in self._sightings if sighting.report is not None]
        leads = [report.server.lead for report in reports if report.server]
        if not leads:
            raise ConfigError("a text needs a run, and no answering peer is in one. Ask again once the run has begun.")
        lead = PeerId(Counter(leads).most_common(1)[0][0])
        return self._runtime.run(RUN_TEXT.ask(self._transport, lead, request, timeout=timeout))

    def members(self) -> list[RunMember]:
        """Return the run's members; see `members_of`."""
        view = self.ask_view()
        if view is None:
            raise ConfigError(
                f"a run lists its members once it has begun, and no peer that {self._first} knows is in a run. "
                "Call this again once it trains."
            )
        return members_of(view, self._roles)

    def has_seen(self, peer: PeerId) -> bool:
        """Return whether a peer ever joined the run, was banned from it, or announces itself now."""
        view = self.ask_view()
        members = [] if view is None else members_of(view, {})
        return peer in {*self._roles, *(member.peer_id for member in members)}

    def invitations_of(self, peer: PeerId) -> list[str]:
        """Return the numbers of the invitations with which a peer joined, in hex."""
        members = [member for member in self.members() if member.peer_id == peer]
        return [member.invitation for member in members if member.invitation is not None]

    def banned_invitations_of(self, peer: PeerId) -> list[str]:
        """Return a peer's invitations that the newest record lists as banned, in hex; none if no run has begun."""
        view = self.ask_view()
        if view is None or isinstance(view.seats.invitations, UnsetType):
            return []
        subjects = {ban.subject for ban in active_bans(view.seats.bans)}
        numbers = [invitation.number.hex() for invitation in view.seats.invitations if peer in invitation.peers]
        return [number for number in numbers if number in subjects]

    def send_ban(self, signed: bytes) -> dict[PeerId, str | None]:
        """Send a ban that the owner signed to all peers, and return each peer's reason to refuse it, or None."""
        return self._runtime.run(self._send_ban(signed))

    async def _send_ban(self, signed: bytes) -> dict[PeerId, str | None]:
        async def send(peer: PeerId) -> str | None:
            try:
                await BAN.ask(self._transport, peer, signed, timeout=self._timeout)
            except SwarmError as error:
                return shorten(str(error))
            return None

        peers = [sighting.peer_id for sighting in self._sightings]
        return dict(zip(peers, await gather(map(send, peers)), strict=True))


@contextmanager
def asking(address: Address, *, timeout: float, visitor: Visitor) -> Iterator[Members]:
    """Join the network until the context ends, to ask the peers of the run that has a peer at `address`."""
    with visit("members", visitor, startup_timeout=_START_TIMEOUT_S) as (runtime, transport):
        yield Members(runtime, transport, address, visitor, timeout)


def members_of(view: RunView, roles: Mapping[PeerId, str | None]) -> list[RunMember]:
    """Return all peers that ever joined a run, present members first, and all banned peers and invitations. Pure."""
    # In a run without invitations, only present members and convicted peers are known.
    seats = view.seats
    banned = {ban.subject: printable(ban.reason) for ban in active_bans(seats.bans)}
    convicted = {str(conviction.peer): printable(conviction.reason) for conviction in seats.convicted or ()}
    members, named = list[RunMember](), set[str]()
    for invitation in seats.invitations or ():
        number = invitation.number.hex()
        for peer in invitation.peers:
            named.add(peer)
            reason = banned.get(peer, banned.get(number))
            uses = (len(invitation.peers), invitation.uses)
            members.append(
                RunMember(peer, roles.get(peer), number, uses, _parts(view, peer), reason, convicted.get(peer))
            )
    if isinstance(seats.invitations, UnsetType):
        peers = {str(member.peer_id) for roster in seats.rosters for member in roster} | {*seats.trainers, *convicted}
        members += [
            RunMember(peer, None, None, (0, 0), _parts(view, PeerId(peer)), None, convicted.get(peer))
            for peer in sorted(peers)
        ]
    numbers = {member.invitation for member in members}
    members += [
        RunMember(subject, None, None, (0, 0), (), reason)
        for subject, reason in banned.items()
        if subject not in named | numbers
    ]
    return sorted(members, key=lambda each: (not each.parts, each.banned is not None, each.parts, each.peer_id))


def _parts(view: RunView, peer: PeerId) -> tuple[str, ...]:
    """Name a peer's present parts in the run: its stages, training, leading and coordinating."""
    rosters = enumerate(view.seats.rosters)
    stages = [index for index, roster in rosters if any(member.peer_id == peer for member in roster)]
    parts = [] if view.manifest.is_whole else [f"stage {index}" for index in stages]
    if peer in view.seats.trainers:
        parts.append("lead" if peer == view.manifest.lead else "trains")
    elif stages and view.manifest.is_whole:
        parts.append("serves")
    return (*parts, *(["coordinates"] if peer == view.term[1] else []))


def table(run_id: str, members: Collection[RunMember]) -> str:
    """Format the members as a table."""
    rows = [
        (
            member.peer_id,
            member.role or "?",
            "-" if member.invitation is None else member.invitation[:8],
            "-" if member.invitation is None else f"{member.uses[0]}/{member.uses[1]}",
            _state(member),
        )
        for member in members
    ]
    return "\n".join([f"run {run_id!r}", "", *table_lines([_HEADS, *rows])])


def _state(member: RunMember) -> str:
    if member.banned is not None:
        return f"banned: {member.banned or 'no reason was given'}"
    if member.convicted is not None:
        return f"convicted: {member.convicted or 'no reason was given'}"
    return ", ".join(member.parts) or "gone"
