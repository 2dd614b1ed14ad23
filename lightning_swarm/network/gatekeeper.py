"""The gate: the permits of peers with verified certificates, and checks of requests in both directions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, NoReturn

from lightning_swarm.core.errors import AccessDenied, Busy, Uncertified, Unreachable, Untrusted
from lightning_swarm.core.readable import printable, short_name, shorten
from lightning_swarm.network import PeerId
from lightning_swarm.network.access import OPEN_METHODS, Ban, Credentials, Permit, Role, Rpc

_log = logging.getLogger(__name__)

MAX_CERTIFICATE_BYTES: Final = 1 << 10

STRANGER_BYTES: Final = 4 << 10
"""Longest message of a peer that has shown no certificate yet; a longer one is refused unread."""

_MAX_PERMITS: Final = 4096
_MAX_FAILING: Final = 1024
_FIRST_PAUSE_S: Final = 1.0  # pause after a refused certificate of a peer; doubles with each further one
_LONGEST_PAUSE_S: Final = 64.0


class _CertifiedPeer(NamedTuple):
    """A peer with a verified certificate, and the methods of its role, so that a check costs at most two look-ups."""

    certificate: bytes
    permit: Permit
    expires_at_s: float  # seconds since the epoch
    calls: frozenset[str]  # methods that it may call at this peer
    answers: frozenset[str]  # methods that it may be asked for


class _Failing(NamedTuple):
    """A peer whose certificates were refused."""

    num_attempts: int  # refused attempts since the last valid certificate
    next_s: float  # earliest time to verify its next certificate, in seconds since the epoch
    reason: str


class Gatekeeper:
    """Keeps the permits of other peers, and refuses requests, in both directions, that no permit allows."""

    def __init__(
        self,
        own: PeerId,
        credentials: Credentials,
        rpcs: Iterable[Rpc],
        *,
        on_certified: Callable[[PeerId], None] = lambda _: None,
        on_cut_off: Callable[[PeerId], None] = lambda _: None,
        on_banned: Callable[[Ban], None] = lambda _: None,
        on_refused: Callable[[int], None] = lambda _: None,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self.own = own
        self.credentials = credentials
        self._rpcs = {rpc.name: rpc for rpc in rpcs}
        listed = self._rpcs.values()
        # role -> methods that it may call, and methods that it answers
        self._may_call = {
            role: OPEN_METHODS.union(rpc.name for rpc in listed if role.includes(rpc.by)) for role in Role
        }
        self._answers = {role: frozenset(rpc.name for rpc in listed if role.includes(rpc.of)) for role in Role}
        self._on_certified = on_certified  # called with each peer whose certificate was verified
        self._on_cut_off = on_cut_off  # called when the certificate of a known peer permits nothing any more
        self._on_banned = on_banned  # called when this peer itself is banned
        self._wall_s = wall_s  # seconds since the epoch: certificates expire by the calendar
        # Recently used peers come last. A peer dropped ("forgotten") for lack of room must show its certificate again.
        self._permits: OrderedDict[PeerId, _CertifiedPeer] = OrderedDict()
        self._failing: OrderedDict[PeerId, _Failing] = OrderedDict()
        self._bans: dict[str, Ban] = {}  # peer or invitation -> its newest ban
        # Peer without a permit -> the ban that took or denied it; None: its certificate has expired.
        self._cut_off: OrderedDict[PeerId, Ban | None] = OrderedDict()
        self.refusals = RefusalLog(on_refused)

    def permit_of(self, peer: PeerId) -> Permit | None:
        """Return the permit of a peer's certificate; None: it has shown none, or its certificate has expired."""
        if peer == self.own:
            return self.credentials.verify(peer, self.credentials.certificate, now_s=self._wall_s())
        certified = self._find(peer)
        return None if certified is None else certified.permit

    def _find(self, peer: PeerId) -> _CertifiedPeer | None:
        """Return a certified peer. If the peer's certificate has expired, cut the peer off, and return None."""
        certified = self._permits.get(peer)
        if certified is None:
            return None
        if certified.expires_at_s <= self._wall_s():
            self._cut(peer, None)
            _log.warning(
                "The certificate of %s has expired, so this peer neither answers nor asks that peer any more. To "
                "return, it needs a new invitation: `lightning-swarm invite`, with a longer `--for`.",
                short_name(peer),
            )
            return None
        if len(self._permits) > _MAX_PERMITS // 2:  # peers may soon be forgotten
            self._permits.move_to_end(peer)
        return certified

    def _cut(self, peer: PeerId, ban: Ban | None) -> None:
        """Revoke a peer's permit because of a ban, or (None) because its certificate has expired."""
        certified = self._permits.pop(peer, None)
        self._cut_off[peer] = ban
        _keep_newest(self._cut_off, peer, _MAX_PERMITS)
        if certified is not None:
            self._on_cut_off(peer)

    def check_not_cut_off(self, peer: PeerId) -> None:
        """Raise `Unreachable` for a peer whose certificate permits nothing any more; such a peer counts as gone."""
        if reason := self._why_cut_off(peer):
            raise Unreachable(f"{peer} is not asked any more: {reason}")

    def _why_cut_off(self, peer: PeerId) -> str:
        """Return why a peer's certificate permits nothing any more; empty if no reason is known."""
        if self._find(peer) is not None:
            return ""
        ban = self._standing_ban(peer) or self._cut_off.get(peer)  # the peer may have shown no certificate yet
        if ban is not None:
            return f"it {banned(ban)}"
        return "its certificate has expired" if peer in self._cut_off else ""

    def is_certified(self, peer: PeerId) -> bool:
        """Return whether another peer has shown a valid certificate."""
        return self._find(peer) is not None

    def certify(self, peer: PeerId, certificate: bytes) -> None:
        """Verify a peer's certificate and store its permit, or raise `AccessDenied` or `Busy`."""
        certified = self._find(peer)
        if certified is not None and certified.certificate == certificate:
            return
        if (ban := self._standing_ban(peer)) is not None:
            self._cut(peer, ban)
            raise AccessDenied(f"{peer} {banned(ban)}")
        at_s = self._wall_s()
        failing = self._failing.get(peer, _Failing(0, 0.0, ""))
        wait_s = failing.next_s - at_s
        if 0 < wait_s <= _LONGEST_PAUSE_S:  # a longer wait shows only that the clock was set back
            raise Busy(
                f"after {failing.num_attempts} refused certificates, the next certificate of {peer} is verified in "
                f"{wait_s:.0f} s. The last reason: {failing.reason}"
            )
        # The attempt counts before the certificate is verified, so that it counts even after an unexpected error.
        pause_s = min(_FIRST_PAUSE_S * 2 ** min(failing.num_attempts, 20), _LONGEST_PAUSE_S)
        failing = self._failing[peer] = _Failing(
            failing.num_attempts + 1, at_s + pause_s, "Its certificate was refused."
        )
        _keep_newest(self._failing, peer, _MAX_FAILING)
        try:
            permit = self._verified(peer, certificate, at_s)
        except AccessDenied as error:
            self._failing[peer] = failing._replace(reason=shorten(str(error)))
            raise
        self._cut_off.pop(peer, None)
        del self._failing[peer]
        calls, answers = self._may_call[permit.role], self._answers[permit.role]
        self._permits[peer] = _CertifiedPeer(certificate, permit, permit.expires_at_s, calls, answers)
        _keep_newest(self._permits, peer, _MAX_PERMITS)
        self.refusals.forget(peer)
        self._on_certified(peer)

    def _verified(self, peer: PeerId, certificate: bytes, at_s: float) -> Permit:
        """Return the permit of a valid certificate; `AccessDenied` if it is invalid, or a ban denies it."""
        if len(certificate) > MAX_CERTIFICATE_BYTES:
            raise AccessDenied(
                f"A certificate has at most {MAX_CERTIFICATE_BYTES} bytes, got {len(certificate)}. Join with "
                "an invitation: `lightning-swarm join --invite FILE`."
            )
        permit = self.credentials.verify(peer, certificate, now_s=at_s)
        if (ban := self._ban_of(peer, permit)) is not None:
            self._cut(peer, ban)
            raise AccessDenied(f"{peer} {banned(ban)}")
        return permit

    # ------------------------------------------------------------------ bans

    @property
    def bans(self) -> list[bytes]:
        """The newest signed ban of each peer or invitation that was ever banned, lifted bans included."""
        return [ban.signed for ban in self._bans.values()]

    def ban(self, signed: bytes) -> None:
        """Apply a ban, or lift it, unless a newer decision is known; `AccessDenied` if the owner did not sign it."""
        if any(known.signed == signed for known in self._bans.values()):
            return
        ban = self.credentials.verify_ban(signed)
        former = self._bans.get(ban.subject)
        if former is not None and (former.decided_at_ns, former.signed) > (ban.decided_at_ns, ban.signed):
            return
        self._bans[ban.subject] = ban
        if ban.is_lifted:
            self._failing.clear()  # the peers concerned may come back at once, and no longer count as gone
            for peer, cause in list(self._cut_off.items()):
                if cause is not None and cause.subject == ban.subject:
                    del self._cut_off[peer]
            return
        for peer in [peer for peer, certified in self._permits.items() if self._ban_of(peer, certified.permit) is ban]:
            self._cut(peer, ban)
            _log.warning("%s %s", short_name(peer), banned(ban))
        with suppress(AccessDenied):  # raised if this peer's certificate has expired, which other peers report
            permit = self.credentials.verify(self.own, self.credentials.certificate, now_s=self._wall_s())
            if self._ban_of(self.own, permit) is ban:
                self._on_banned(ban)

    def _ban_of(self, peer: PeerId, permit: Permit) -> Ban | None:
        return self._standing_ban(peer) or self._standing_ban(permit.invitation.hex())

    def _standing_ban(self, subject: str) -> Ban | None:
        ban = self._bans.get(subject)
        return None if ban is None or ban.is_lifted else ban

    # ------------------------------------------------------------------ the rules

    def may_call(self, caller: PeerId, method: str) -> bool:
        """Return whether a caller has shown a certificate that permits a request."""
        certified = self._find(caller)
        return certified is not None and method in certified.calls

    def may_be_asked(self, peer: PeerId, method: str) -> bool:
        """Return whether a peer has shown a certificate that permits it to answer a request."""
        certified = self._find(peer)
        return certified is not None and method in certified.answers

    # The checks of a request, in their order. At the caller: `check_before_asking`. At the answering peer: `check_size`
    # (of long messages), `check_on_arrival`, `check_before_handler`, `check_before_answer`.

    def check_before_asking(self, peer: PeerId, method: str) -> None:
        """Before this peer sends a request: refuse if the other peer's certificate does not permit it to answer."""
        certified = self._find(peer)
        if certified is None:
            raise Untrusted(f"{peer} has shown no certificate of this run, so `{method}` was not sent to it")
        rpc = self._rpcs.get(method)
        if rpc is not None and method not in certified.answers:  # the peer itself refuses a method that is not listed
            raise Untrusted(_needs_role(peer, certified.permit.role, f"be asked for `{method}`", rpc.of))

    def check_size(self, caller: PeerId, num_bytes: int) -> None:
        """Refuse a long message of a peer that has shown no certificate, before it is read."""
        if num_bytes > STRANGER_BYTES and not self.is_certified(caller):
            self.refuse(caller, Uncertified(_uncertified(self.own, caller)))

    def check_on_arrival(self, caller: PeerId, method: str) -> None:
        """As a request arrives: refuse it if the caller's certificate does not permit it, or was never shown."""
        if self.may_call(caller, method):
            return
        certified = self._find(caller)
        if method in OPEN_METHODS:
            return
        rpc = self._rpcs.get(method)
        if certified is None:
            self.refuse(caller, Uncertified(_uncertified(self.own, caller)))
        elif rpc is None:
            self.refuse(caller, AccessDenied(f"no role may call `{printable(method)}` at {self.own}"))
        else:
            self.refuse(caller, AccessDenied(_needs_role(caller, certified.permit.role, f"call `{method}`", rpc.by)))

    def check_before_handler(self, caller: PeerId, method: str) -> None:
        """Before a request goes to its handler: refuse it if the caller's certificate does not permit it any more."""
        if self.may_call(caller, method):
            return
        self.check_before_answer(caller, method)
        self.check_on_arrival(caller, method)  # refuses even a forgotten caller, which can send the request again

    def check_before_answer(self, caller: PeerId, method: str) -> None:
        """Before an answer is sent: refuse it if the caller has lost its permit since its request."""
        if self.may_call(caller, method):
            return
        certified = self._find(caller)
        if reason := self._why_cut_off(caller):
            self.refuse(caller, AccessDenied(f"{self.own} answers {caller} no more: {reason}"))
        if certified is not None:  # the caller has shown another certificate since its request
            self.check_on_arrival(caller, method)
        # A caller that was only forgotten for lack of room still gets the answer.

    def refuse(self, caller: PeerId, error: AccessDenied) -> NoReturn:
        """Record a refusal, and raise its error."""
        self.refusals.note(caller, str(error))
        raise error


def _keep_newest(table: OrderedDict[PeerId, Any], newest: PeerId, at_most: int) -> None:
    table.move_to_end(newest)
    if len(table) > at_most:
        table.popitem(last=False)


def _uncertified(own: PeerId, caller: PeerId) -> str:
    return (
        f"{own} answers only peers with a certificate of its run, and {caller} has shown none. Join with an "
        "invitation of the run's owner: `lightning-swarm join --invite FILE`."
    )


def banned(ban: Ban) -> str:
    """Return the second half of a sentence about a banned peer, with the reason: "was banned from ..."."""
    event = "came by an invitation that was banned" if ban.is_of_invitation else "was banned"
    return f"{event} from this run by its owner, who gives the reason: {printable(ban.reason) or 'none'}"


def _needs_role(peer: PeerId, role: Role, action: str, least: Role) -> str:
    """Return the text of an error: the `action` requires at least the role `least`, and the peer's `role` is lower."""
    return (
        f"the role {least} may {action}, and the certificate of {peer} has the role {role}. Ask the run's owner for "
        f"another invitation: `lightning-swarm invite --role {least}`."
    )


# ------------------------------------------------------------------ the log of refusals

_GRACE_S: Final = 5.0  # delay of the first warning: a forgotten member shows its certificate after a refusal
_INTERVAL_S: Final = 60.0
_MAX_NAMED: Final = 32  # most peers that warnings name at a time


@dataclass(eq=False)
class _Refused:
    reason: str = ""
    count: int = 0


@dataclass(eq=False)
class RefusalLog:
    """Warns about refused peers: once a minute for each, with a count, and for a few peers at a time."""

    on_refused: Callable[[int], None] = lambda _: None  # called at each warning with its number of requests
    _refused: dict[PeerId, _Refused] = field(default_factory=dict)
    total: int = 0  # refusals of all peers, except peers that have shown their certificates since
    _num_unnamed: int = 0  # refusals of peers beyond `_MAX_NAMED`

    def note(self, peer: PeerId, reason: str) -> None:
        """Count a refusal, and warn about it later."""
        self.total += 1
        refused = self._refused.get(peer)
        if refused is None:
            if len(self._refused) >= _MAX_NAMED:
                self._num_unnamed += 1
                return
            refused = self._refused[peer] = _Refused()
            self._warn_later(_GRACE_S, peer, refused)
        refused.reason = reason
        refused.count += 1

    def forget(self, peer: PeerId) -> None:
        """Drop the refusals of a peer that has shown its certificate meanwhile."""
        refused = self._refused.pop(peer, None)
        self.total -= 0 if refused is None else refused.count

    def _warn_later(self, after_s: float, peer: PeerId, refused: _Refused) -> None:
        asyncio.get_running_loop().call_later(after_s, self._warn, peer, refused)

    def _warn(self, peer: PeerId, refused: _Refused) -> None:
        if self._refused.get(peer) is not refused:  # the peer has shown its certificate since
            return
        if not refused.count:  # no refusal since the previous warning
            del self._refused[peer]
            return
        num_unnamed, self._num_unnamed = self._num_unnamed, 0
        unnamed = f" {num_unnamed} requests of other peers were refused, too." if num_unnamed else ""
        _log.warning(
            "%d requests of %s were refused: %s%s", refused.count, short_name(peer), shorten(refused.reason), unnamed
        )
        self.on_refused(refused.count + num_unnamed)
        refused.count = 0
        self._warn_later(_INTERVAL_S, peer, refused)
