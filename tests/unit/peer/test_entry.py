"""A peer's entry into a run of invited peers, and errors before its start."""

from __future__ import annotations

import errno
import logging
import pwd
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_swarm import SwarmStrategy
from lightning_swarm.core.errors import AccessDenied, ConfigError
from lightning_swarm.monitor import doctor
from lightning_swarm.network import Directory, hivemind
from lightning_swarm.network.access import Certify, Credentials, Permit, Role
from lightning_swarm.network.identity import Identity, load_identity
from lightning_swarm.network.memory import MemoryNetwork, MemoryTransport
from lightning_swarm.peer.config import SwarmConfig
from lightning_swarm.peer.entry import Entry, entry_of, visitor_entry
from lightning_swarm.peer.peer import hivemind_peer
from lightning_swarm.peer.process import apply_environment, owners_folder
from lightning_swarm.trust.certificates import DEFAULT_STAY_S, SecretInvitation, encode
from lightning_swarm.trust.invitation_text import AnyInvitation, from_text, to_text
from lightning_swarm.trust.owner import Owner, owner_file

SOMEBODY = "203.0.113.7:31337/12D3KooWBTrNL8qKG3SxDRQNAcaUb5nNNixuFBXcKeMfexuaGUUR"
NOW_S = 1_800_000_000.0
WEEK_S = 7 * 86400.0
OWNER = Owner("swarm", Identity.generate())
PEER = Identity.generate().peer_id


def config(**changes: Any) -> SwarmConfig:
    return SwarmStrategy(**{"trust": "invited", **changes}).config


def joiner(**changes: Any) -> SwarmConfig:
    return config(**{"initial_peers": SOMEBODY, **changes})


def written(folder: Path, made: AnyInvitation) -> str:
    path = folder / "swarm.invite"
    path.write_text(f"{to_text(made)}\n")
    return str(path)


def invitation(role: Role = Role.SERVER, *, run_id: str = "swarm", lasts_s: float = WEEK_S) -> SecretInvitation:
    return Owner(run_id, OWNER.key).invite(role, uses=3, expires_at_s=NOW_S + lasts_s)


def entered(config: SwarmConfig, folder: Path, *, now_s: float = NOW_S) -> Entry:
    entry = entry_of(config, lambda: folder, now_s=now_s)
    assert entry is not None
    return entry


def permit(entry: Entry, by: Entry) -> Permit:
    """Return the permit that one peer's credentials derive from another peer's certificate."""
    shown = entry.credentials(PEER, now_s=NOW_S).certificate
    return by.credentials(Identity.generate().peer_id, now_s=NOW_S).verify(PEER, shown, now_s=NOW_S)


def handed(entry: Entry, number: int, *, train: bool = False) -> str:
    """Return the invitation for a machine's other peers."""
    line = entry.invitation_for_children(number, train=train, now_s=NOW_S)
    assert line is not None
    return line


def refusal(config: SwarmConfig, folder: Path, *, now_s: float = NOW_S) -> str:
    with pytest.raises(ConfigError) as caught:
        entry_of(config, lambda: folder, now_s=now_s)
    return str(caught.value)


# ---------------------------------------------------------------------- by what


def test_where_anyone_may_come_there_is_no_entry(tmp_path: Path) -> None:
    for anyone in (config(trust=None), config(trust="open", listen="0.0.0.0:31337")):
        assert entry_of(anyone, lambda: tmp_path, now_s=NOW_S) is None
    assert not [*tmp_path.iterdir()]


def test_only_an_owner_needs_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_: int) -> None:
        raise KeyError

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert entry_of(config(trust=None), owners_folder, now_s=NOW_S) is None
    by_file = joiner(invite=written(tmp_path, invitation()))
    assert entry_of(by_file, owners_folder, now_s=NOW_S) is not None
    with pytest.raises(ConfigError, match=r"this user has no home directory\. Set XDG_CONFIG_HOME"):
        entry_of(config(), owners_folder, now_s=NOW_S)


def test_a_folder_that_is_closed_to_this_user_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.stat

    def stat(path: Path, **options: Any) -> Any:  # acts like a system where this user is not root
        if path.parent.name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    assert "this peer has no invitation" in refusal(joiner(), tmp_path / "closed")
    assert "Permission denied" in refusal(config(), tmp_path / "closed")


def test_the_starter_owns_the_run(tmp_path: Path) -> None:
    first = entered(config(run_id="my run"), tmp_path / "keys")
    path = owner_file(tmp_path / "keys", "my run")
    assert first.owner == load_identity(path).peer_id
    assert first.is_owner
    assert permit(first, by=first).role is Role.KEEPER
    assert entered(config(run_id="my run"), tmp_path / "keys").owner == first.owner
    assert entered(config(run_id="another"), tmp_path / "keys").owner != first.owner
    # With the key it may also join servers that wait on other machines.
    assert entered(joiner(run_id="my run", role="both"), tmp_path / "keys").is_owner


def test_a_joiner_comes_by_its_invitation(tmp_path: Path) -> None:
    entry = entered(joiner(invite=written(tmp_path, invitation())), tmp_path / "keys")
    assert (entry.owner, entry.role, entry.is_owner, entry.may_lead) == (
        OWNER.key.peer_id,
        Role.SERVER,
        False,
        False,
    )
    assert permit(entry, by=entry).role is Role.SERVER
    assert not (tmp_path / "keys").exists(), "a joiner makes no key of an owner"
    leads = entered(joiner(role="both", invite=written(tmp_path, invitation(Role.TRAINER))), tmp_path)
    assert leads.may_lead
    begins = entered(config(invite=written(tmp_path, invitation(Role.KEEPER))), tmp_path)
    assert (begins.role, begins.is_owner) == (Role.KEEPER, False)


def test_a_peer_that_came_before_needs_no_invitation(tmp_path: Path) -> None:
    key = str(tmp_path / "peer.key")
    came = entered(joiner(invite=written(tmp_path, invitation()), identity_path=key), tmp_path / "keys")
    own = load_identity(Path(key)).peer_id
    issued = came.credentials(own, now_s=NOW_S).certificate
    kept = tmp_path / "peer.key.certificate"
    assert encode(from_text(kept.read_text(), "the file")) == issued
    again = entered(joiner(identity_path=key), tmp_path / "keys", now_s=NOW_S + 3600.0)
    assert again.credentials(own, now_s=NOW_S + 3600.0).certificate == issued
    assert "it expired 1 day ago" in refusal(
        joiner(identity_path=key), tmp_path, now_s=NOW_S + DEFAULT_STAY_S + 86400.0
    )
    Path(key).unlink()
    assert "it was made for another peer" in refusal(joiner(identity_path=key), tmp_path)
    # In the user's own run it has no effect.
    assert entered(config(identity_path=key), tmp_path / "keys").is_owner


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_peer_that_came_before_is_started_again_by_the_same_command(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_gone: bool
) -> None:
    key, path = str(tmp_path / "peer.key"), written(tmp_path, invitation())
    same = joiner(invite=path, identity_path=key)
    own = load_identity(Path(key)).peer_id
    issued = entered(same, tmp_path).credentials(own, now_s=NOW_S).certificate
    later_s = NOW_S + WEEK_S + 86400.0
    if is_gone:
        Path(path).unlink()
    with caplog.at_level(logging.WARNING):
        again = entered(same, tmp_path, now_s=later_s)
    assert again.credentials(own, now_s=later_s).certificate == issued
    (message,) = caplog.messages
    assert message.startswith(f"This peer uses its certificate in {key}.certificate, because the invitation in {path} ")
    assert message.endswith("No such file or directory." if is_gone else "it expired 1 day ago.")


def test_a_kept_certificate_that_will_not_do_is_not_taken(tmp_path: Path) -> None:
    key, others = str(tmp_path / "peer.key"), str(tmp_path / "others.key")
    own = load_identity(Path(key)).peer_id
    kept = tmp_path / "peer.key.certificate"
    expired = written(tmp_path, invitation(lasts_s=-86400.0))

    def said(made: AnyInvitation | None, source: str = expired, **changes: Any) -> str:
        kept.unlink(missing_ok=True)
        if made is not None:
            kept.write_text(to_text(made))
        return refusal(joiner(invite=source, **{"identity_path": key, **changes}), tmp_path)

    holds = invitation(lasts_s=86400.0).certify(own, now_s=NOW_S)
    for made in (
        None,
        invitation(lasts_s=86400.0).certify(load_identity(Path(others)).peer_id, now_s=NOW_S),
        invitation(run_id="another").certify(own, now_s=NOW_S),
        invitation().certify(own, now_s=NOW_S - DEFAULT_STAY_S - 1.0),
        Owner("swarm", Identity.generate())
        .invite(Role.SERVER, uses=1, expires_at_s=NOW_S + 9.0)
        .certify(own, now_s=NOW_S),
    ):
        assert "it expired 1 day ago" in said(made)
    assert "it expired 1 day ago" in said(holds, role="both"), "it is for a server"
    # An invitation for another purpose, or a damaged one, is a mistake by its user.
    wrong = written(tmp_path, invitation(run_id="another"))
    assert "this invitation is for run 'another', not 'swarm'" in said(holds, wrong)
    Path(wrong).write_text(to_text(invitation())[:-3])
    assert "it was cut or changed on its way" in said(holds, wrong)
    assert "No such file" in said(None, str(tmp_path / "none"))


def test_further_peers_of_a_machine_come_again_by_their_own_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, path = str(tmp_path / "peer.key"), written(tmp_path, invitation())
    same = joiner(invite=path, identity_path=key)
    monkeypatch.setenv("SWARM_JOIN", SOMEBODY)

    def peers(now_s: float) -> list[Entry]:
        return [entered(apply_environment(same, rank), tmp_path, now_s=now_s) for rank in range(3)]

    ids = [load_identity(tmp_path / name).peer_id for name in ("peer.key", "peer.key.1", "peer.key.2")]
    issued = [entry.credentials(peer, now_s=NOW_S).certificate for peer, entry in zip(ids, peers(NOW_S), strict=True)]
    later_s = NOW_S + 2 * WEEK_S
    first, *further = peers(later_s)
    first.check_children(2)
    assert first.invitation_for_children(2, train=False, now_s=later_s) is None
    again = [
        entry.credentials(peer, now_s=later_s).certificate for peer, entry in zip(ids, [first, *further], strict=True)
    ]
    assert again == issued
    with pytest.raises(ConfigError, match="`devices` above 1 starts 3 more peers"):
        first.check_children(3)


def test_a_certificate_that_cannot_be_kept_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "peer.key.certificate").mkdir()
    entry = entered(
        joiner(invite=written(tmp_path, invitation()), identity_path=str(tmp_path / "peer.key")), tmp_path / "keys"
    )
    with caplog.at_level(logging.WARNING):
        entry.credentials(PEER, now_s=NOW_S)
    assert "could not be kept" in caplog.text
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".swarm-key")] == []


def test_an_invitation_of_one_peer_is_for_its_key(tmp_path: Path) -> None:
    key = str(tmp_path / "peer.key")
    own = load_identity(Path(key)).peer_id
    made = OWNER.certify(own, Role.SERVER, now_s=NOW_S, expires_at_s=NOW_S + WEEK_S)
    path = written(tmp_path, made)
    entry = entered(joiner(invite=path, identity_path=key), tmp_path)
    assert entry.credentials(own, now_s=NOW_S).certificate == encode(made)
    assert "Set `identity_path` to the file of that peer's key" in refusal(joiner(invite=path), tmp_path)
    other = joiner(invite=path, identity_path=str(tmp_path / "other.key"))
    assert f"it was made for another peer ({own};" in refusal(other, tmp_path)


def test_who_only_looks_takes_the_run_from_its_invitation(tmp_path: Path) -> None:
    entry = visitor_entry(written(tmp_path, invitation(Role.OBSERVER, run_id="theirs")), now_s=NOW_S)
    assert (entry.run_id, entry.role) == ("theirs", Role.OBSERVER)
    with pytest.raises(ConfigError, match="it expired 1 minute ago"):
        visitor_entry(written(tmp_path, invitation(lasts_s=-60.0)), now_s=NOW_S)
    one = OWNER.certify(PEER, Role.OBSERVER, now_s=NOW_S, expires_at_s=NOW_S + WEEK_S)
    with pytest.raises(ConfigError, match="it was made for one peer, and a visitor has a new id"):
        visitor_entry(written(tmp_path, one), now_s=NOW_S)


# ---------------------------------------------------------------------- what is refused


def test_without_an_invitation_one_is_told_what_to_ask_for(tmp_path: Path) -> None:
    said = refusal(joiner(), tmp_path)
    assert "run 'swarm' is for invited peers (`trust` is 'invited'), and this peer has no invitation" in said
    assert "Ask the user who started the run to make one" in said
    assert "`lightning-swarm invite --role server --out anna.invite`" in said
    assert "SWARM_INVITE_FILE" in said
    said = refusal(joiner(trust=None, listen="0.0.0.0:31337"), tmp_path)
    assert "(other machines reach this peer: 0.0.0.0:31337)" in said
    assert not [*tmp_path.iterdir()]


def test_an_invitation_that_will_not_do_is_refused_before_anything_starts(tmp_path: Path) -> None:
    def said(made: SecretInvitation, **changes: Any) -> str:
        return refusal(joiner(invite=written(tmp_path, made), **changes), tmp_path)

    assert "this invitation is for run 'a', not 'swarm'" in said(invitation(run_id="a"))
    assert "it expired 3 hours ago" in said(invitation(lasts_s=-3 * 3600.0))
    assert "it is for the role observer, and this peer needs the role server" in said(invitation(Role.OBSERVER))
    wrong_role = said(invitation(), role="both")
    assert (
        "needs the role trainer. Ask the run's owner for another invitation, made with `--role trainer`" in wrong_role
    )
    assert "No such file" in refusal(joiner(invite=str(tmp_path / "none")), tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff" * 5000)
    assert "it is not text" in refusal(joiner(invite=str(tmp_path / "bytes")), tmp_path)
    assert "Is a directory" in refusal(joiner(invite=str(tmp_path)), tmp_path)


def test_who_starts_a_run_by_a_left_over_invitation_is_told_to_drop_it(tmp_path: Path) -> None:
    left_over = written(tmp_path, invitation())
    drop = "For a run of your own, leave out `invite` and SWARM_INVITE_FILE."
    assert drop in refusal(config(invite=left_over), tmp_path)
    assert drop not in refusal(joiner(invite=left_over, role="both"), tmp_path)


def test_roles_include_those_before_them() -> None:
    order = [Role.OBSERVER, Role.SERVER, Role.TRAINER, Role.KEEPER]
    assert [[role.includes(needed) for needed in order] for role in order] == [
        [True, False, False, False],
        [True, True, False, False],
        [True, True, True, False],
        [True, True, True, True],
    ]


# ---------------------------------------------------------------------- the peers of the same machine


@pytest.mark.parametrize(("train", "role"), [(False, Role.SERVER), (True, Role.TRAINER)])
def test_an_owner_invites_the_peers_of_its_machine(tmp_path: Path, train: bool, role: Role) -> None:
    entry = entered(config(), tmp_path)
    entry.check_children(3)
    made = from_text(handed(entry, 3, train=train), "the launcher")
    assert (made.invitation.role, made.invitation.uses, made.invitation.owner) == (role, 3, entry.owner)
    assert made.invitation.expires_at_s > NOW_S + 365 * 86400, "a run may be long"
    child = entered(joiner(invite=written(tmp_path, made)), tmp_path)
    assert permit(child, by=entry).role is role
    assert permit(entry, by=child).role is Role.KEEPER


def test_who_was_invited_passes_its_invitation_on(tmp_path: Path) -> None:
    secret = invitation()
    entry = entered(joiner(invite=written(tmp_path, secret)), tmp_path)
    entry.check_children(2)
    assert from_text(handed(entry, 1), "the launcher") == secret


def test_an_invitation_with_too_few_uses_is_refused_before_anything_starts(tmp_path: Path) -> None:
    entry = entered(joiner(invite=written(tmp_path, invitation())), tmp_path)
    with pytest.raises(
        ConfigError, match=r"each of the 4 peers .* which has 3\. Ask .* `--uses 4`, or use `devices=3`"
    ):
        entry.check_children(3)


def test_an_invitation_of_one_peer_is_not_passed_on(tmp_path: Path) -> None:
    key = str(tmp_path / "peer.key")
    made = OWNER.certify(load_identity(Path(key)).peer_id, Role.SERVER, now_s=NOW_S, expires_at_s=NOW_S + WEEK_S)
    entry = entered(joiner(invite=written(tmp_path, made), identity_path=key), tmp_path)
    with pytest.raises(ConfigError, match=r"`devices` above 1 starts 3 more peers.*or use `devices=1`"):
        entry.check_children(3)


# ---------------------------------------------------------------------- the network is told


@pytest.mark.parametrize(("role", "may_lead"), [(Role.SERVER, False), (Role.TRAINER, True)])
def test_the_network_starts_with_the_certificate_and_a_role_may_lead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: Role, may_lead: bool
) -> None:
    settings = joiner(invite=written(tmp_path, invitation(role, lasts_s=1e9)))
    made: list[Credentials] = []
    network = MemoryNetwork()

    async def start(*, certify: Certify, **_: Any) -> tuple[MemoryTransport, Directory]:
        transport = network.transport("joiner")
        made.append(certify(transport.peer_id))
        return transport, network.directory(transport)

    monkeypatch.setattr(hivemind, "start", start)
    monkeypatch.setattr(doctor, "check_answering", lambda _: None)
    peer = hivemind_peer(settings, entered(settings, tmp_path))
    try:
        [credentials] = made
        permit = credentials.verify(peer.transport.peer_id, credentials.certificate, now_s=time.time())
        assert permit.role is role
        with pytest.raises(AccessDenied, match="another peer"):
            credentials.verify(PEER, credentials.certificate, now_s=time.time())
        announced: list[bool] = []

        async def serve(model: object, *, trains: bool, may_take_over: bool) -> None:
            announced.append(may_take_over)

        monkeypatch.setattr(peer._host, "announce", serve)
        no_model: Any = None
        peer.serve(no_model, may_take_over=True)
        assert announced == [may_lead]
    finally:
        peer.close()
