"""The bounds of an announcement. Every directory keeps to them, and leaves out what does not."""

from __future__ import annotations

from typing import Final

from lightning_swarm.errors import ProtocolError

MAX_RECORD_BYTES: Final = 64 << 10
"""Longest value of an announcement."""

MAX_RECORD_TTL_S: Final = 86_400.0
"""Longest life of an announcement: what claims to live longer is malformed."""


def check_record(key: str, value: bytes, ttl_s: float) -> None:
    """Refuse an announcement that others would leave out."""
    if len(value) > MAX_RECORD_BYTES:
        raise ProtocolError(f"An announcement has at most {MAX_RECORD_BYTES} bytes, got {len(value)} for {key!r}.")
    if not 0 < ttl_s <= MAX_RECORD_TTL_S:
        raise ProtocolError(f"An announcement lives up to {MAX_RECORD_TTL_S:g} s, got {ttl_s:g} for {key!r}.")
