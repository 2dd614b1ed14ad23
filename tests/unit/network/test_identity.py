"""Keys, their files, and signatures. `tests/contract` starts real daemons with such files."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.network.identity import Identity, is_rsa, is_signed, load_identity, public_key

DOMAIN = b"test/1"
# libp2p's own example of an Ed25519 key (specs/peer-ids), the kind whose id is no hash.
SPEC_KEY = bytes.fromhex(
    "080112407e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
    "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
)
SPEC_PUBLIC = bytes.fromhex("1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")


def rsa_file(bits: int = 2048) -> bytes:
    """Return a key file in the form of earlier versions, which hivemind wrote."""
    der = rsa.generate_private_key(65537, bits).private_bytes(
        Encoding.DER, PrivateFormat.TraditionalOpenSSL, NoEncryption()
    )
    return b"\x08\x00\x12" + bytes((len(der) & 0x7F | 0x80, len(der) >> 7)) + der


RSA = rsa_file()


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.fixture(autouse=True)
def any_mask() -> Any:
    former = os.umask(0)
    yield
    os.umask(former)


def test_the_specification_s_key() -> None:
    identity = Identity.decode(SPEC_KEY)
    assert identity.encoded == SPEC_KEY
    assert public_key(identity.peer_id) == SPEC_PUBLIC
    assert "7e0830" not in repr(identity)


def test_a_peer_id_contains_the_key_and_has_one_spelling() -> None:
    for _ in range(50):
        peer = Identity.generate().peer_id
        assert len(public_key(peer) or b"") == 32
        assert not is_rsa(peer)
        for other in (
            "1" + peer,
            peer[1:],
            peer + "1",
            peer + "\n",
            peer.lower(),
            f"{peer[:-1]}0",
            f"{peer[:-1]}é",
            "",
        ):
            assert public_key(other) is None
    for text in ("12D3KooW" + "z" * 44, "12D3KooW" + "1" * 44):  # resemble ids but are none
        assert len(public_key(text) or bytes(32)) == 32
    assert public_key(Identity.decode(RSA).peer_id) is None


def test_what_a_peer_signed_holds_in_one_domain_for_one_message_and_of_one_peer() -> None:
    one, other = Identity.generate(), Identity.generate()
    signature = one.sign(DOMAIN, b"message")
    assert len(signature) == 64
    assert is_signed(one.peer_id, DOMAIN, b"message", signature)
    for peer, domain, message, claimed in (
        (other.peer_id, DOMAIN, b"message", signature),
        (one.peer_id, b"test/2", b"message", signature),
        (one.peer_id, b"test", b"/1\0message", signature),
        (one.peer_id, DOMAIN, b"messagf", signature),
        (one.peer_id, DOMAIN, b"message", signature[:-1]),
        (one.peer_id, DOMAIN, b"message", b""),
        (one.peer_id, DOMAIN, b"message", bytes(64)),
        (Identity.decode(RSA).peer_id, DOMAIN, b"message", signature),
        ("somebody", DOMAIN, b"message", signature),
    ):
        assert not is_signed(peer, domain, message, claimed)


def test_an_rsa_key_names_its_peer_and_signs_nothing() -> None:
    identity = Identity.decode(RSA)
    assert is_rsa(identity.peer_id)
    assert not identity.can_sign
    with pytest.raises(AssertionError):
        identity.sign(DOMAIN, b"message")


def test_a_file_is_made_once_and_read_from_then_on(tmp_path: Path) -> None:
    path = tmp_path / "key"
    identity = load_identity(path)
    assert (path.stat().st_mode & 0o777, path.stat().st_nlink, names(tmp_path)) == (0o600, 1, ["key"])
    assert path.read_bytes() == identity.encoded
    assert load_identity(path) == identity
    assert load_identity(tmp_path / "other") != identity


def test_a_file_has_its_name_only_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "key", []

    def full(descriptor: int) -> None:
        seen.append((os.fstat(descriptor).st_mode & 0o777, path.exists()))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        load_identity(path)
    assert (seen, names(tmp_path)) == ([(0o600, False)], [])


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_that_another_process_made_meanwhile_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    path, other, link = tmp_path / "key", Identity.generate(), os.link

    def made_meanwhile(*names: Any, **options: Any) -> None:
        path.write_bytes(other.encoded)
        path.chmod(0o600)
        if not has_links:
            raise PermissionError(1, "Operation not permitted")
        link(*names, **options)

    monkeypatch.setattr(os, "link", made_meanwhile)
    assert load_identity(path) == other
    assert names(tmp_path) == ["key"]


def test_a_file_system_without_hard_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(*names: Any, **options: Any) -> None:
        asked.append(names)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "key"
    identity = load_identity(path)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (identity.encoded, 0o600)
    assert (len(asked), names(tmp_path)) == (1, ["key"])


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o601])
@pytest.mark.parametrize("data", [SPEC_KEY, RSA], ids=["Ed25519", "RSA"])
def test_a_key_that_others_may_use_is_refused(tmp_path: Path, mode: int, data: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(data)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"`identity_path` .* other users may use it \(mode {mode:o}\).*chmod 600"):
        load_identity(path)
    path.chmod(0o400)
    assert load_identity(path).encoded == data


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"noise", b"\0" * 68, SPEC_KEY[:-1], SPEC_KEY + b"\0", SPEC_KEY[:-1] + b"\0", SPEC_KEY[4:]),
        *(RSA[:-1], RSA + b"\0", RSA[:3], RSA[:5], RSA[:5] + bytes(len(RSA) - 5), RSA[5:]),
        *(b"\x08\x02\x12\x20" + bytes(32), b"-----BEGIN OPENSSH PRIVATE KEY-----\n"),
    ],
    ids=itertools.count(),  # keys are drawn anew in each process
)
def test_what_is_no_key_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(data)
    path.chmod(0o600)
    with pytest.raises(
        ConfigError, match=r"`identity_path` must be .* holds no private key.*Name another file"
    ) as refusal:
        load_identity(path)
    assert repr(str(path)) in str(refusal.value)
    assert path.read_bytes() == data


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("folder", "it is a folder"),
        ("pipe", "it is no regular file"),
        ("nowhere/key", "No such file or directory"),
        ("good/key", "Not a directory"),
        ("dangling", "No such file or directory"),
    ],
)
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str, why: str) -> None:
    path = tmp_path / kind
    load_identity(tmp_path / "good")
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind == "dangling":
        path.symlink_to(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=rf"`identity_path` must be .* got '{path}': {why}"):
        load_identity(path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    load_identity(path)

    def refuse(*_: Any) -> None:  # no file mode keeps root from reading
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigError, match=rf"`identity_path` must be .* got '{path}': Permission denied"):
        load_identity(path)


@pytest.mark.parametrize(("data", "number"), [(SPEC_KEY, 200), (RSA, 8)], ids=["Ed25519", "RSA"])
def test_a_damaged_file_is_refused_whatever_the_damage(tmp_path: Path, data: bytes, number: int) -> None:
    path, rng = tmp_path / "key", random.Random(0)
    for _ in range(number):
        damaged = bytearray(data)
        damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        path.chmod(0o600)
        with pytest.raises(ConfigError, match="holds no private key"):
            load_identity(path)


def test_a_temporary_file_is_its_owner_s_and_removed() -> None:
    identity = Identity.generate()
    with identity.temporary_file() as path:
        assert (path.read_bytes(), path.stat().st_mode & 0o777) == (identity.encoded, 0o600)
    assert not path.exists()
