"""Ways into a run of invited peers: as its owner, by an invitation, or by the certificate of an earlier start."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.private_file import can_see_file, replace_file
from lightning_swarm.network import PeerId
from lightning_swarm.network.access import Role
from lightning_swarm.network.identity import load_identity
from lightning_swarm.peer.config import SwarmConfig
from lightning_swarm.trust.certificates import Certificate, Invitation, SecretInvitation, encode
from lightning_swarm.trust.credentials import RunCredentials, mismatch, untimely
from lightning_swarm.trust.invitation_text import MAX_TEXT_BYTES, AnyInvitation, from_text, refuse, to_text
from lightning_swarm.trust.owner import OWN_STAY_S, Owner, owner_file

_log = logging.getLogger(__name__)

_NOTICE_S: Final = 86400.0  # time between the warning and the end of this peer's certificate
_ASK_FOR_ANOTHER: Final = "Ask the run's owner for another invitation"
_NAME_THE_FILE: Final = "Name the file that `lightning-swarm invite` wrote"


@dataclass(frozen=True)
class Entry:
    """This peer's way into a run. It is chosen, and checked, before the peer's network starts."""

    run_id: str
    owner: PeerId  # the root of the run's certificates
    role: Role
    proof: Owner | AnyInvitation  # the owner's key, an invitation, or a certificate (also an `AnyInvitation`)
    certificate_file: Path | None = None  # where the certificate is kept for the next start
    is_kept: bool = False  # `proof` is the certificate of an earlier start

    @property
    def may_lead(self) -> bool:
        """Return whether this peer may lead the run after the death of its lead."""
        return self.role.includes(Role.TRAINER)

    @property
    def is_owner(self) -> bool:
        """Return whether this machine has the owner's key, which signs invitations."""
        return isinstance(self.proof, Owner)

    def credentials(self, peer: PeerId, *, now_s: float) -> RunCredentials:
        """Certify this peer, whose id is known once its network has started."""
        if isinstance(self.proof, Owner):
            certificate = self.proof.certify_own(peer, now_s=now_s)
        elif isinstance(self.proof, SecretInvitation):
            certificate = self.proof.certify(peer, now_s=now_s)
        else:
            certificate = self.proof
        if self.certificate_file is not None and not self.is_kept:
            _keep(self.certificate_file, certificate)
        return RunCredentials(self.run_id, self.owner, encode(certificate))

    def check_children(self, num_children: int) -> None:
        """Refuse to start further peers on this machine if they have neither certificates nor an invitation."""
        if self.is_kept and all(map(can_see_file, self._certificates_of_children(num_children))):
            return
        if isinstance(self.proof, Certificate):
            raise ConfigError(
                f"`devices` above 1 starts {num_children} more peers, which must be invited, too, got an invitation or "
                "a kept certificate that admits only this peer. Name an invitation for several peers "
                "(`lightning-swarm invite --uses N`) by `invite`, or use `devices=1`."
            )
        if isinstance(self.proof, SecretInvitation) and self.proof.invitation.uses <= num_children:
            uses = self.proof.invitation.uses
            raise ConfigError(
                f"each of the {num_children + 1} peers that `devices` starts takes a use of the invitation, which "
                f"has {uses}. Ask the run's owner for an invitation made with `--uses {num_children + 1}`, or use "
                f"`devices={uses}`."
            )

    def _certificates_of_children(self, num_children: int) -> list[Path]:
        assert self.certificate_file is not None
        key = str(self.certificate_file.with_suffix(""))
        return [_certificate_file(further_identity(key, rank)) for rank in range(1, num_children + 1)]

    def invitation_for_children(self, num_children: int, *, train: bool, now_s: float) -> str | None:
        """Return an invitation for the other peers of this machine; None: they kept certificates of earlier starts."""
        if self.is_kept:
            return None
        if isinstance(self.proof, Owner):
            role = Role.TRAINER if train else Role.SERVER
            return to_text(
                self.proof.invite(role, uses=num_children, expires_at_s=now_s + OWN_STAY_S, stay_s=OWN_STAY_S)
            )
        return to_text(self.proof)


async def warn_before_end(expires_at_s: float) -> None:
    """Warn a day before this peer's certificate expires, at `expires_at_s` in seconds since the epoch."""
    await asyncio.sleep(max(0.0, expires_at_s - _NOTICE_S - time.time()))
    _log.warning(
        "This peer's certificate expires at %s UTC, and from then on no peer of the run answers it. Before that, ask "
        "the run's owner for a new invitation (`lightning-swarm invite --for TIME`), and restart this peer with it.",
        f"{datetime.fromtimestamp(expires_at_s, UTC):%Y-%m-%d %H:%M}",
    )


def entry_of(config: SwarmConfig, folder: Callable[[], Path], *, now_s: float) -> Entry | None:
    """Choose this peer's entry to its run, or raise `ConfigError` before anything starts; None: any peer may join."""
    # `folder` returns the folder of owners' keys. It is called only if needed, because it fails without a home folder.
    if not config.is_invited:
        return None
    kept_at = None if config.identity_path is None else _certificate_file(config.identity_path)
    if config.invite is not None:
        return _entry_by_file(config, config.invite, kept_at, now_s=now_s)
    if config.initial_peers and kept_at is not None and can_see_file(kept_at):
        return _entry_by_kept(config, kept_at, now_s=now_s)
    path = owner_file(folder(), config.run_id)
    if config.initial_peers and not can_see_file(path):
        raise ConfigError(_missing(config))
    owner = Owner.load(config.run_id, path)
    return owner_entry(owner)


def further_identity(identity_path: str, rank: int) -> str:
    """Return the path of a further peer's key file, which is beside the key file of this machine's first peer."""
    return f"{identity_path}.{rank}"


def _certificate_file(identity_path: str) -> Path:
    return Path(f"{identity_path}.certificate")


def _entry_by_file(config: SwarmConfig, source: str, kept_at: Path | None, *, now_s: float) -> Entry:
    """Return the entry by the file `source`, or by a kept certificate if the file cannot be used any more."""
    text, problem = _text_of(Path(source))
    invitation: AnyInvitation | None = None
    remedy = _NAME_THE_FILE
    if problem is None:
        invitation = from_text(text, source)
        _check_run(invitation, config, source)
        problem, remedy = _untimely(invitation, now_s=now_s), _another_or_clock(now_s)
        if problem is None:
            _check_use(invitation, config, source)
            return _entry(invitation, kept_at)
    # A certificate may outlast its invitation, and a service restarts the peer by the same command.
    kept = _kept_for(invitation, config, kept_at, now_s=now_s)
    if kept is None:
        refuse(source, problem, remedy)
    _log.warning(
        "This peer uses its certificate in %s, because the invitation in %s is unusable: %s.", kept_at, source, problem
    )
    return kept


def _kept_for(
    invitation: AnyInvitation | None, config: SwarmConfig, kept_at: Path | None, *, now_s: float
) -> Entry | None:
    """Return the entry by the certificate of an earlier start; None if it is not valid, or of another owner's run."""
    if kept_at is None or not can_see_file(kept_at):
        return None
    try:
        kept = _entry_by_kept(config, kept_at, now_s=now_s)
    except ConfigError as error:
        _log.info("The certificate of an earlier start cannot be used either: %s", error)
        return None
    is_same_owner = invitation is None or invitation.invitation.owner == kept.owner
    return kept if is_same_owner else None


def _entry_by_kept(config: SwarmConfig, kept_at: Path, *, now_s: float) -> Entry:
    """Return the entry by the certificate of an earlier start, or raise ConfigError."""
    source = str(kept_at)
    kept = from_text(_read(kept_at, source), source)
    _check_run(kept, config, source)
    _check_time(kept, source, now_s=now_s)
    _check_use(kept, config, source)
    # A user may have put an invitation there. It is not used yet, and the certificate that it grants replaces it.
    return replace(_entry(kept, kept_at), is_kept=isinstance(kept, Certificate))


def owner_entry(owner: Owner) -> Entry:
    """Return the entry of the run's owner."""
    return Entry(owner.run_id, owner.key.peer_id, Role.KEEPER, owner)


def invitation_in(source: str, *, run_id: str) -> Invitation:
    """Return the invitation in a file, which may have expired; raise `ConfigError` if it is to another run."""
    invitation = from_text(_read(Path(source), source), source).invitation
    if (problem := mismatch(invitation, run_id=run_id)) is not None:
        refuse(source, problem, "Name `--run-id`, or another file")
    return invitation


def visitor_entry(source: str, *, now_s: float) -> Entry:
    """Return the entry of a peer that does not join the run, but looks at it or uses its model."""
    invitation = from_text(_read(Path(source), source), source)
    if isinstance(invitation, Certificate):
        refuse(source, "it was made for one peer, and a visitor has a new id each time", _ASK_FOR_ANOTHER)
    _check_time(invitation, source, now_s=now_s)
    return _entry(invitation, None)


def _entry(proof: AnyInvitation, certificate_file: Path | None) -> Entry:
    invitation = proof.invitation
    return Entry(invitation.run_id, PeerId(invitation.owner), invitation.role, proof, certificate_file)


def _check_run(proof: AnyInvitation, config: SwarmConfig, source: str) -> None:
    if (problem := mismatch(proof.invitation, run_id=config.run_id)) is not None:
        refuse(source, problem, "Name the invitation to this run, or set `run_id` to the name of that run")


def _check_use(proof: AnyInvitation, config: SwarmConfig, source: str) -> None:
    """Refuse another peer's certificate, and a role that does not suffice for this peer's tasks."""
    if isinstance(proof, Certificate):
        _check_own(proof.peer, config, source)
    needed = Role.SERVER if config.only_serves else Role.TRAINER
    if not proof.invitation.role.includes(needed):
        own_run = "" if config.initial_peers else ". For a run of your own, leave out `invite` and SWARM_INVITE_FILE"
        refuse(
            source,
            f"it is for the role {proof.invitation.role}, and this peer needs the role {needed}",
            f"{_ASK_FOR_ANOTHER}, made with `--role {needed}`{own_run}",
        )


def _check_time(proof: AnyInvitation, source: str, *, now_s: float) -> None:
    if (problem := _untimely(proof, now_s=now_s)) is not None:
        refuse(source, problem, _another_or_clock(now_s))


def _another_or_clock(now_s: float) -> str:
    """Return the remedy for an invitation that is used at the wrong time."""
    now = f"{datetime.fromtimestamp(now_s, UTC):%Y-%m-%d %H:%M}"
    return f"{_ASK_FOR_ANOTHER}; or set this machine's clock, if it is not {now} UTC"


def _untimely(proof: AnyInvitation, *, now_s: float) -> str | None:
    """Return why an invitation or a certificate is not valid now; None if it is."""
    return untimely(proof.invitation if isinstance(proof, SecretInvitation) else proof, now_s=now_s)


def _check_own(peer: str, config: SwarmConfig, source: str) -> None:
    """Refuse a certificate that was made for another peer than this one."""
    if config.identity_path is None:
        refuse(source, f"it was made for the peer {peer}", "Set `identity_path` to the file of that peer's key")
    me = load_identity(Path(config.identity_path)).peer_id
    if me != peer:
        refuse(
            source,
            f"it was made for another peer ({peer}; this one is {me})",
            "Set `identity_path` to the file of that peer's key, or ask the run's owner for another invitation",
        )


def _read(path: Path, source: str) -> str:
    text, problem = _text_of(path)
    if problem is not None:
        refuse(source, problem, _NAME_THE_FILE)
    return text


def _text_of(path: Path) -> tuple[str, str | None]:
    """Return the text in a file, and why it cannot be read, or None."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_TEXT_BYTES).decode(), None
    except (OSError, UnicodeError, ValueError) as error:
        return "", error.strerror if isinstance(error, OSError) and error.strerror else "it is not text"


def _keep(path: Path, certificate: Certificate) -> None:
    """Write a certificate for the next start; warn if that fails, because this start does not need the file."""
    try:
        replace_file(path, f"{to_text(certificate)}\n".encode())
    except OSError as error:
        _log.warning(
            "This peer's certificate could not be kept in %s: %s. Its next start uses the invitation again.",
            path,
            error.strerror,
        )


def _missing(config: SwarmConfig) -> str:
    """Return the error text for a peer that has no way into the run."""
    where = "`trust` is 'invited'" if config.trust == "invited" else f"other machines reach this peer: {config.listen}"
    return (
        f"run {config.run_id!r} is for invited peers ({where}), and this peer has no invitation. Ask the user who "
        "started the run to make one by `lightning-swarm invite --role server --out anna.invite`. Name its file by "
        "`lightning-swarm join --invite anna.invite ...`, `SwarmStrategy(invite=...)` or SWARM_INVITE_FILE. If the run "
        "is open to anyone, write `trust='open'`."
    )
