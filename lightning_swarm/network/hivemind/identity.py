"""The file with a peer's private key: made so that nobody else ever reads it, and checked before the daemon does."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import NoReturn

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.network.hivemind._engine import PeerID, RSAPrivateKey, crypto_pb2

_log = logging.getLogger(__name__)


def prepare_identity(path: Path) -> None:
    """Make the file of a new key if there is none; a `ConfigError` says what is wrong with one that cannot be used."""
    try:
        if path.exists():
            _check(path)
        else:
            _make(path)
    except OSError as error:
        _refuse(path, str(error.strerror or error))


def _make(path: Path) -> None:
    key = crypto_pb2.PrivateKey(key_type=crypto_pb2.RSA, data=RSAPrivateKey().to_bytes()).SerializeToString()
    # With its mode from the beginning, and only if nobody has put another file there meanwhile.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(key)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _check(path: Path) -> None:
    try:
        key = crypto_pb2.PrivateKey.FromString(path.read_bytes())
        if key.key_type == crypto_pb2.RSA:
            PeerID.from_identity(key.SerializeToString())
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - what the parsers of protobuf and of keys raise
        _refuse(path, f"it holds no private key ({type(error).__name__}: {error})")
    if path.stat().st_mode & 0o077:
        _log.warning("Other users may read the private key in %s. Keep it to yourself: chmod 600 %s", path, path)


def _refuse(path: Path, why: str) -> NoReturn:
    raise ConfigError(
        f"`identity_path` must be a file with this peer's private key, or a new name in a folder that can be written "
        f"to, got {str(path)!r}: {why}. Name another file, or remove this one: then a new key is made, with another id."
    )
