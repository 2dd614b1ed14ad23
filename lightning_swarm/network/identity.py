"""A peer's key pair: the file of the key, the peer id that contains the public key, and signatures."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_private_key

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.private_file import temporary_file, write_new
from lightning_swarm.network import PeerId

_BASE58: Final = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_DIGITS: Final = {letter: digit for digit, letter in enumerate(_BASE58)}
# libp2p's encodings (github.com/libp2p/specs, peer-ids): protobuf, with the kind of a key and its bytes.
_ED25519_PRIVATE: Final = bytes.fromhex("08011240")  # followed by the seed and the public key
_ED25519_ID: Final = bytes.fromhex("002408011220")  # followed by the public key: the id is not a hash
_RSA_KEY: Final = bytes.fromhex("080012")  # followed by a length, and the key in DER
_SHA256_ID: Final = bytes.fromhex("1220")  # followed by the digest of an RSA key
_KEY_BYTES: Final = 32
_NUM_ID_BYTES: Final = len(_ED25519_ID) + _KEY_BYTES
_ED25519_NAME: Final = re.compile(rf"12D3KooW[{_BASE58}]{{44}}")
_RSA_NAME: Final = re.compile(rf"Qm[{_BASE58}]{{44}}")
_MAX_FILE_BYTES: Final = 16 << 10


@dataclass(frozen=True)
class Identity:
    """A peer's key pair. An RSA key, which earlier versions wrote, identifies its peer but cannot sign."""

    # The id of an RSA key is a hash, so a signature could not be verified by the id alone.
    peer_id: PeerId
    encoded: bytes = field(repr=False)  # the format of libp2p's daemon
    _key: Ed25519PrivateKey | None = field(repr=False, compare=False)

    @classmethod
    def generate(cls) -> Identity:
        """Generate a new Ed25519 key pair."""
        return cls._of(Ed25519PrivateKey.generate())

    @classmethod
    def decode(cls, encoded: bytes) -> Identity:
        """Decode the content of a key file; `ValueError` if it is not a private key."""
        if encoded.startswith(_RSA_KEY):
            return cls(_rsa_id(encoded), encoded, None)
        seed = encoded[len(_ED25519_PRIVATE) :][:_KEY_BYTES]
        if len(seed) == _KEY_BYTES:
            identity = cls._of(Ed25519PrivateKey.from_private_bytes(seed))
            if identity.encoded == encoded:
                return identity
        raise ValueError("neither an Ed25519 nor an RSA key in libp2p's encoding")

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """Return the key pair of a seed of 32 bytes."""
        return cls._of(Ed25519PrivateKey.from_private_bytes(seed))

    @property
    def seed(self) -> bytes:
        """The secret of the key, 32 bytes, for `from_seed`."""
        assert self._key is not None
        return self._key.private_bytes_raw()

    @classmethod
    def _of(cls, key: Ed25519PrivateKey) -> Identity:
        public = key.public_key().public_bytes_raw()
        peer_id = PeerId(_to_base58(_ED25519_ID + public))
        return cls(peer_id, _ED25519_PRIVATE + key.private_bytes_raw() + public, key)

    @property
    def can_sign(self) -> bool:
        """Return whether other peers can verify this peer's signatures."""
        return self._key is not None

    def sign(self, domain: bytes, message: bytes) -> bytes:
        """Return the signature of a message, 64 bytes. It is valid in its `domain` only."""
        assert self._key is not None
        return self._key.sign(_in_domain(domain, message))

    def temporary_file(self) -> AbstractContextManager[Path]:
        """Write the key to a file that only this user may read, and delete it when the context ends."""
        return temporary_file(self.encoded, Path(tempfile.gettempdir()))


def public_key(peer: str) -> bytes | None:
    """Return the Ed25519 key (32 bytes) in a peer id; None for the id of an RSA key, and for any other text."""
    if _ED25519_NAME.fullmatch(peer) is None:
        return None
    number = 0
    for letter in peer:
        number = 58 * number + _DIGITS[letter]
    decoded = number.to_bytes(_NUM_ID_BYTES, "big")
    return decoded[len(_ED25519_ID) :] if decoded.startswith(_ED25519_ID) else None


def is_rsa(peer: str) -> bool:
    """Return whether a peer id may be that of an RSA key."""
    return _RSA_NAME.fullmatch(peer) is not None


def is_signed(peer: str, domain: bytes, message: bytes, signature: bytes) -> bool:
    """Return whether a peer has signed a message in a domain."""
    if (key := public_key(peer)) is None:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, _in_domain(domain, message))
    except (InvalidSignature, ValueError):
        return False
    return True


@dataclass(frozen=True)
class KeyUse:
    """The purpose of a key, as parts of the errors about its file."""

    setting: str  # the setting that names the file
    holder: str  # the owner of the key
    misuse: str  # possible misuse by other users
    loss: str  # consequence of a new key


PEER_KEY: Final = KeyUse("`identity_path`", "this peer's", "pass for this peer", "with another id")


def load_identity(path: Path, use: KeyUse = PEER_KEY) -> Identity:
    """Read the identity from a file, which is created with a new key if missing; `ConfigError` if it is unusable."""
    try:
        if not path.exists():
            with suppress(FileExistsError):  # another process may have created the file meanwhile; then that file stays
                write_new(path, Identity.generate().encoded)
        encoded = _read(path, use)
    except OSError as error:
        _refuse(path, use, f"{error.strerror or error}")
    try:
        return Identity.decode(encoded)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        _refuse(path, use, f"it holds no private key ({error})")


def _read(path: Path, use: KeyUse) -> bytes:
    """Read a key's file; refuse anything but a regular file, and a file of this user that other users may use."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # reading a pipe could block for ever
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            _refuse(path, use, "it is a folder" if stat.S_ISDIR(status.st_mode) else "it is no regular file")
        if status.st_uid == os.getuid() and status.st_mode & 0o077:  # other owners' files are accepted, as by ssh
            _refuse(
                path,
                use,
                f"other users may use it (mode {stat.S_IMODE(status.st_mode):03o}), so they could {use.misuse}",
                f"Keep it to yourself: chmod 600 {path}. If the key is not yours alone any more",
            )
        return os.read(descriptor, _MAX_FILE_BYTES)
    finally:
        os.close(descriptor)


def _refuse(path: Path, use: KeyUse, why: str, remedy: str = "") -> NoReturn:
    """Raise the error about a key's file. A `remedy` comes before the advice to name another file."""
    raise ConfigError(
        f"{use.setting} must be a file with {use.holder} private key, or a new name in a folder that can be written "
        f"to, got {str(path)!r}: {why}. {f'{remedy}, name' if remedy else 'Name'} another file, or remove this one: "
        f"then a new key is made, {use.loss}."
    )


def _in_domain(domain: bytes, message: bytes) -> bytes:
    assert b"\0" not in domain
    return domain + b"\0" + message


def _rsa_id(encoded: bytes) -> PeerId:
    """Return the peer id of an encoded RSA key: the digest of the public key, as libp2p encodes it."""
    length, der = encoded[len(_RSA_KEY) :][:2], encoded[len(_RSA_KEY) + 2 :]
    if length != _varint(len(der)):
        raise ValueError("it is cut off, or has extra bytes at its end")
    key = load_der_private_key(der, None)
    if not isinstance(key, RSAPrivateKey):
        raise ValueError("it is marked as an RSA key, but is not one")
    public = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    digest = hashlib.sha256(_RSA_KEY + _varint(len(public)) + public).digest()
    return PeerId(_to_base58(_SHA256_ID + digest))


def _varint(number: int) -> bytes:
    """Encode a length between 128 and 16383, the range of RSA keys' lengths."""
    return bytes((number & 0x7F | 0x80, number >> 7 & 0x7F))


def _to_base58(data: bytes) -> str:
    number, text = int.from_bytes(data, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        text = _BASE58[digit] + text
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + text
