"""Invitations and certificates: their holders, rights and expiry; any altered one is refused.

`SWARM_TIMES=34` tries 100,000 alterations of each kind, in some two minutes.
"""

from __future__ import annotations

import base64
import hashlib
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict, replace

from lightning_swarm.core.errors import AccessDenied, ConfigError
from lightning_swarm.network import PeerId
from lightning_swarm.network.access import Credentials, Permit, Role
from lightning_swarm.network.identity import Identity
from lightning_swarm.trust.certificates import (
    DEFAULT_STAY_S,
    MAX_USES,
    Certificate,
    Invitation,
    SecretInvitation,
    SignedBan,
    decode,
    encode,
)
from lightning_swarm.trust.credentials import RunCredentials
from lightning_swarm.trust.invitation_text import AnyInvitation, check_is_file_name, from_text, to_text
from lightning_swarm.trust.owner import Owner, owner_file

NUM_MUTANTS = 3000 * max(1, int(os.environ.get("SWARM_TIMES", "0")))
NOW_S = 1_800_000_000.5
WEEK_S = 7 * 86400.0

OWNER, OTHER_OWNER = Owner("run", Identity.generate()), Owner("run", Identity.generate())
PEERS = [Identity.generate().peer_id for _ in range(3)]


def invitation(
    role: Role = Role.SERVER, *, owner: Owner = OWNER, run_id: str = "run", lasts_s: float = WEEK_S, uses: int = 3
) -> SecretInvitation:
    return Owner(run_id, owner.key).invite(role, uses=uses, expires_at_s=NOW_S + lasts_s)


def credentials(run_id: str = "run", owner: Owner = OWNER) -> Credentials:
    own = encode(invitation(Role.TRAINER).certify(PEERS[0], now_s=NOW_S))
    return RunCredentials(run_id, owner.key.peer_id, own)


def refused(peer: PeerId, certificate: bytes, *, now_s: float = NOW_S, by: Credentials | None = None) -> str:
    with pytest.raises(AccessDenied) as caught:
        (by or credentials()).verify(peer, certificate, now_s=now_s)
    return str(caught.value)


# ---------------------------------------------------------------------- what holds


@pytest.mark.parametrize("role", list(Role))
def test_whoever_has_an_invitation_gets_what_it_says(role: Role) -> None:
    secret = invitation(role)
    received = from_text(f"  {to_text(secret)}\r\n", "a file")
    assert received == secret
    assert isinstance(received, SecretInvitation)
    certificate = encode(received.certify(PEERS[1], now_s=NOW_S))
    permit = credentials().verify(PEERS[1], certificate, now_s=NOW_S)
    ends_s, come_by_s = float(int(NOW_S) + int(DEFAULT_STAY_S)), float(int(NOW_S + WEEK_S))
    assert permit == Permit(role, ends_s, secret.invitation.number, 3, come_by_s)
    assert len(certificate) < 600


def test_the_largest_certificate_fits() -> None:
    name = "\N{DROMEDARY CAMEL}" * 100
    secret = invitation(run_id=name, uses=MAX_USES)
    certificate = encode(secret.certify(PEERS[1], now_s=NOW_S))
    assert len(certificate) <= 1024
    assert credentials(name).verify(PEERS[1], certificate, now_s=NOW_S).uses == MAX_USES
    assert from_text(to_text(secret), "a file") == secret


def test_an_invitation_of_one_peer_has_no_secret_and_lets_nobody_else_in() -> None:
    made = OWNER.certify(PEERS[1], Role.OBSERVER, now_s=NOW_S, expires_at_s=NOW_S + WEEK_S)
    received = from_text(to_text(made), "a file")
    assert received == made
    permit = credentials().verify(PEERS[1], encode(made), now_s=NOW_S)
    assert (permit.role, permit.uses) == (Role.OBSERVER, 1)
    assert "it was made for another peer" in refused(PEERS[2], encode(made))
    forged = SecretInvitation(invitation=made.invitation, seed=Identity.generate().seed)
    assert "forged" in refused(PEERS[2], encode(forged.certify(PEERS[2], now_s=NOW_S)))


def test_the_owner_s_own_peer_is_a_keeper_for_longer_than_any_run() -> None:
    certificate = encode(OWNER.certify_own(PEERS[0], now_s=NOW_S))
    assert credentials().verify(PEERS[0], certificate, now_s=NOW_S + 9 * 365 * 86400).role is Role.KEEPER


def test_each_invitation_has_a_number_of_its_own() -> None:
    numbers = {invitation().invitation.number for _ in range(20)}
    assert {len(number) for number in numbers} == {16}
    assert len(numbers) == 20


# ---------------------------------------------------------------------- what does not


def test_why_a_certificate_is_refused_is_said_in_words() -> None:
    secret = invitation()
    good = encode(secret.certify(PEERS[1], now_s=NOW_S))
    assert "this invitation is for run 'run', not 'b'" in refused(PEERS[1], good, by=credentials("b"))
    assert "it was made for another peer" in refused(PEERS[2], good)
    other = encode(invitation(owner=OTHER_OWNER).certify(PEERS[1], now_s=NOW_S))
    assert f"is signed by {OTHER_OWNER.key.peer_id}, but the run's owner is {OWNER.key.peer_id}" in refused(
        PEERS[1], other
    )
    assert "it is malformed" in refused(PEERS[1], b"")
    assert "it is malformed: it has 1025 bytes" in refused(PEERS[1], bytes(1025))
    assert "it is malformed" in refused(PEERS[1], encode(secret.invitation))
    assert "makes one with `lightning-swarm invite`" in refused(PEERS[2], good)


@pytest.mark.parametrize(
    ("late_s", "words"),
    [
        (0.0, "less than a minute ago"),
        (60.0, "1 minute ago"),
        (3 * 3600.0 + 5, "3 hours ago"),
        (86400.0, "1 day ago"),
        (30 * 86400.0, "30 days ago"),
    ],
)
def test_a_certificate_ends_some_time_after_its_peer_came(late_s: float, words: str) -> None:
    came_s = NOW_S + WEEK_S - 60.0
    secret = OWNER.invite(Role.SERVER, uses=3, expires_at_s=NOW_S + WEEK_S, stay_s=3 * WEEK_S)
    certificate = encode(secret.certify(PEERS[1], now_s=came_s))
    end_s = float(int(came_s) + 3 * int(WEEK_S))
    credentials().verify(PEERS[1], certificate, now_s=end_s - 0.001)
    assert f"it expired {words}" in refused(PEERS[1], certificate, now_s=end_s + late_s)
    late = encode(secret.certify(PEERS[1], now_s=NOW_S + WEEK_S + late_s))
    assert "its peer joined after the invitation had expired" in refused(PEERS[1], late, now_s=NOW_S + WEEK_S + late_s)


def test_clocks_may_differ_by_a_minute() -> None:
    certificate = encode(invitation().certify(PEERS[1], now_s=NOW_S))
    credentials().verify(PEERS[1], certificate, now_s=NOW_S - 59.0)
    assert "issued 2 hours in the future. Set the clocks" in refused(PEERS[1], certificate, now_s=NOW_S - 7300.0)


def test_only_whoever_has_the_secret_certifies() -> None:
    mine, theirs = invitation(uses=1), invitation(Role.KEEPER)
    stolen = SecretInvitation(invitation=theirs.invitation, seed=mine.seed)
    assert not stolen.is_genuine
    assert "forged" in refused(PEERS[1], encode(stolen.certify(PEERS[1], now_s=NOW_S)))
    # The user's own invitation, with the owner's name on it.
    own = invitation(Role.KEEPER, owner=OTHER_OWNER)
    named = replace(own.invitation, owner=OWNER.key.peer_id)
    forged = SecretInvitation(invitation=named, seed=own.seed)
    assert "forged" in refused(PEERS[1], encode(forged.certify(PEERS[1], now_s=NOW_S)))


# ---------------------------------------------------------------------- altered ones

Mutation = Callable[[random.Random, bytes, bytes], bytes]


def flip(rng: random.Random, data: bytes, other: bytes) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]


def cut(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: rng.randrange(len(data))] if rng.random() < 0.5 else data[rng.randrange(1, len(data)) :]


def drop(rng: random.Random, data: bytes, other: bytes) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + data[place + rng.randint(1, 9) :]


def insert(rng: random.Random, data: bytes, other: bytes) -> bytes:
    place = rng.randrange(len(data) + 1)
    return data[:place] + rng.randbytes(rng.randint(1, 9)) + data[place:]


def splice(rng: random.Random, data: bytes, other: bytes) -> bytes:
    place = rng.randrange(1, len(data))
    return data[:place] + other[place:]


def swap(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Replace one field, at any depth, by that of another valid record."""
    kinds: Any = Invitation | Certificate | SecretInvitation
    record, donor = decode(data, kinds), decode(other, kinds)
    inner = getattr(record, "invitation", None)
    if inner is not None and rng.random() < 0.6:
        name = rng.choice([*asdict(inner)])
        return encode(replace(record, invitation=replace(inner, **{name: getattr(donor.invitation, name)})))
    name = rng.choice([name for name in asdict(record) if hasattr(donor, name)])
    return encode(replace(record, **{name: getattr(donor, name)}))


def alter(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Change the role, end, number of uses, run, owner or time."""
    kinds: Any = Invitation | Certificate | SecretInvitation
    record = decode(data, kinds)
    inner = record if isinstance(record, Invitation) else record.invitation
    name, value = rng.choice(
        [
            ("role", rng.choice([role for role in Role if role != inner.role])),
            ("expires_at_s", rng.choice([inner.expires_at_s + rng.randint(1, 1 << 30), int(NOW_S) - 1])),
            ("stay_s", inner.stay_s + rng.choice([-1, 1, 1 << 30])),
            ("uses", rng.choice([uses for uses in (1, 4, MAX_USES) if uses != inner.uses])),
            ("run_id", "rum"),
            ("owner", OTHER_OWNER.key.peer_id if inner.owner == OWNER.key.peer_id else OWNER.key.peer_id),
            ("number", rng.randbytes(16)),
            ("key", Identity.generate().peer_id),
            ("signature", rng.randbytes(rng.choice([0, 63, 64]))),
        ]
    )
    changed = replace(inner, **{name: value})
    return encode(changed if isinstance(record, Invitation) else replace(record, invitation=changed))


MUTATIONS: Sequence[Mutation] = (flip, cut, drop, insert, splice, swap, alter)


def secrets_of_all_kinds() -> list[SecretInvitation]:
    return [
        *(invitation(role) for role in Role),
        invitation(run_id="another"),
        invitation(owner=OTHER_OWNER),
        invitation(lasts_s=-60.0),
        invitation(Role.KEEPER, uses=1),
    ]


def mutants(valid: Sequence[bytes], seed: int) -> list[tuple[str, bytes]]:
    """Return altered records, each with the name of its mutation."""
    rng, known, found = random.Random(seed), set(valid), []
    while len(found) < NUM_MUTANTS:
        mutation = rng.choice(MUTATIONS)
        made = mutation(rng, *rng.sample(valid, 2))
        if made not in known:
            found.append((mutation.__name__, made))
    return found


def test_no_altered_certificate_is_accepted() -> None:
    certificates = [
        secret.certify(peer, now_s=NOW_S + age_s)
        for secret in secrets_of_all_kinds()
        for peer in PEERS
        for age_s in (0.0, -600.0)
    ]
    by, why, how = credentials(), Counter[str](), Counter[str]()
    for name, data in mutants([*map(encode, certificates)], seed=1):
        try:
            peer = PeerId(decode(data, Certificate).peer)
        except ValueError:
            peer = PEERS[0]
        found = re.search(r"malformed|forged|for run|expired|another peer|signed by", refused(peer, data, by=by))
        assert found is not None
        why[found[0]] += 1
        how[name] += 1
    assert set(how) == {mutation.__name__ for mutation in MUTATIONS}
    assert {"malformed", "forged", "for run", "signed by"} <= set(why)


@pytest.mark.parametrize("kind", [Invitation, SecretInvitation])
def test_no_altered_invitation_is_genuine(kind: type[Invitation | SecretInvitation]) -> None:
    secrets = secrets_of_all_kinds()
    valid = [encode(one if kind is SecretInvitation else one.invitation) for one in secrets]
    how = Counter[str]()
    for name, data in mutants(valid, seed=2):
        try:
            record: Any = decode(data, kind)
        except ValueError:
            how["malformed"] += 1
        else:
            assert not record.is_genuine
            how[name] += 1
    assert {"malformed", "flip", "splice", "swap", "alter"} <= set(how)


def test_no_altered_ban_is_heeded() -> None:
    def bans(owner: Owner, run_id: str = "run") -> list[bytes]:
        by = Owner(run_id, owner.key)
        subjects = (PEERS[1], bytes(16).hex())
        return [
            encode(by.ban(subject, "noise", is_lifted=is_lifted, now_ns=now_ns))
            for subject in subjects
            for is_lifted in (False, True)
            for now_ns in (1, 1 << 60)
        ]

    heeded, others = bans(OWNER), [*bans(OTHER_OWNER), *bans(OWNER, "another")]
    by, how, rng = credentials(), Counter[str](), random.Random(5)
    for signed in heeded:
        assert by.verify_ban(signed).signed == signed
    for _ in range(NUM_MUTANTS):
        mutation = rng.choice([flip, cut, drop, insert, splice, _swap_in_ban])
        made = mutation(rng, *rng.sample([*heeded, *others], 2))
        if made not in heeded:
            with pytest.raises(AccessDenied, match="ban"):
                by.verify_ban(made)
            how[mutation.__name__] += 1
    assert len(how) == 6


def _swap_in_ban(rng: random.Random, data: bytes, other: bytes) -> bytes:
    ban, donor = decode(data, SignedBan), decode(other, SignedBan)
    name = rng.choice([*asdict(ban)])
    return encode(replace(ban, **{name: getattr(donor, name)}))


# ---------------------------------------------------------------------- as text


def with_checksum(data: bytes) -> str:
    """Encode an invitation with a valid checksum, as an attacker who knows the format can."""
    prefix = "swarm-invite-1."
    checksum = hashlib.sha256(prefix.encode() + data).digest()[:6]
    return prefix + base64.urlsafe_b64encode(data + checksum).decode().rstrip("=")


def said(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        from_text(text, "the file")
    error = str(caught.value)
    assert "got 'the file'" in error
    assert len(text) < 20 or text[15:] not in error, "the secret stays out of errors"
    return error


def test_a_cut_line_and_a_forged_one_are_told_apart() -> None:
    secret = invitation()
    line = to_text(secret)
    assert with_checksum(encode(secret)) == line
    cut_off = "it was cut or changed on its way: its checksum is wrong. Copy the whole line again"
    for damaged in (line[:-1], line[:40], line[:15], line[:90] + "é" + line[91:], f"{line}=", f"{line}\n{line}"):
        assert cut_off in said(damaged)
    forged = replace(secret, invitation=replace(secret.invitation, role=Role.KEEPER))
    assert "it is whole, but forged" in said(with_checksum(encode(forged)))
    assert "it is whole, but malformed" in said(with_checksum(b"\xc0"))
    assert "its version is 2, and this program reads version 1" in said(line.replace("invite-1", "invite-2"))
    for text in ("", "secret", line[5:]):
        assert "it does not begin with 'swarm-invite-'. Name the file" in said(text)


def test_no_altered_text_is_accepted() -> None:
    valid: list[AnyInvitation] = [*secrets_of_all_kinds(), OWNER.certify_own(PEERS[0], now_s=NOW_S)]
    lines = [to_text(one) for one in valid]
    how = Counter[str]()
    rng = random.Random(3)
    while how.total() < NUM_MUTANTS:
        mutation = rng.choice(MUTATIONS[:5])
        one, other = rng.sample(lines, 2)
        damaged = mutation(rng, one.encode(), other.encode()).decode(errors="replace")
        if damaged.strip() not in lines:
            how[re.split(r"[:.(]", said(damaged).partition("'the file': ")[2])[0]] += 1
    assert set(how) >= {"it was cut or changed on its way", "it does not begin with 'swarm-invite-'"}
    for _, data in mutants([encode(one) for one in valid], seed=4)[: NUM_MUTANTS // 2]:
        assert re.search("whole, but (forged|malformed)", said(with_checksum(data)))


def test_what_is_no_file_name_is_refused_and_not_repeated() -> None:
    line = to_text(invitation())
    with pytest.raises(ConfigError, match=r"got an invitation itself.*secret.*Write it to a file") as caught:
        check_is_file_name(line)
    assert line[20:40] not in str(caught.value)
    check_is_file_name("swarm.invite")
    assert "seed" not in repr(invitation())


# ---------------------------------------------------------------------- the owner's key


def test_the_owner_s_key_is_made_once_and_only_this_user_reads_it(tmp_path: Path) -> None:
    path = owner_file(tmp_path / "config" / "lightning-swarm", "run")
    owner = Owner.load("run", path)
    assert path.name == "run.owner"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert Owner.load("run", path) == owner
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=r"the owner's key .* so they could invite .* chmod 600 .* void"):
        Owner.load("run", path)


def test_an_owner_s_key_that_cannot_be_made_or_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("none")
    (tmp_path / "file").chmod(0o600)
    with pytest.raises(ConfigError, match=r"needs a writable folder.*XDG_CONFIG_HOME"):
        Owner.load("run", tmp_path / "file" / "run.owner")
    with pytest.raises(ConfigError, match="it holds no private key"):
        Owner.load("run", tmp_path / "file")


@pytest.mark.parametrize("run_id", ["../../x", ".", "..", "a/b", "a\\b", "é" * 100, "a b", "-x", "~", "a\0b"])
def test_no_name_of_a_run_leads_out_of_the_folder(run_id: str, tmp_path: Path) -> None:
    path = owner_file(tmp_path, run_id)
    assert re.fullmatch(r"[0-9a-f]{64}\.owner", path.name)
    assert path.parent == tmp_path
    assert owner_file(tmp_path, "gpt-2.b_1").name == "gpt-2.b_1.owner"
