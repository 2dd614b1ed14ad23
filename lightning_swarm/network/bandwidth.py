"""Estimates of the links to other peers, from ordinary exchanges: their round trips and their bandwidths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_SHORT_BYTES: Final = 4 << 10  # up to this length, a message takes as long as an empty one
_LONG_BYTES: Final = 64 << 10  # from this length on, a message tells the bandwidth
_MAX_LINKS: Final = 1024


@dataclass(frozen=True)
class TransferSample:
    """The length of a long message, and the seconds of its exchange, with the message the other way."""

    num_bytes: int
    took_s: float


@dataclass
class LinkEstimate:
    """The link to a peer at its best: an exchange that waited, or shared the link, does not count against it."""

    round_trip_s: float | None = None  # of a small call and its answer; None: there was none
    sent: TransferSample | None = None  # the fastest request with tensors; None: there was none long enough
    received: TransferSample | None = None  # the fastest answer with tensors, likewise


class LinkEstimates(dict[str, LinkEstimate]):
    """Link estimates by peer id, for the first thousand peers."""

    def add_sample(self, peer: str, *, sent_bytes: int, received_bytes: int, took_s: float) -> None:
        """Count one exchange: bytes of the request and of the answer, and seconds from one to the other."""
        if peer not in self and len(self) >= _MAX_LINKS:
            return
        link = self.setdefault(peer, LinkEstimate())
        num_bytes = max(sent_bytes, received_bytes)
        if num_bytes <= _SHORT_BYTES:
            link.round_trip_s = took_s if link.round_trip_s is None else min(took_s, link.round_trip_s)
        elif num_bytes >= _LONG_BYTES and sent_bytes > received_bytes:
            link.sent = _faster(link.sent, TransferSample(num_bytes, took_s))
        elif num_bytes >= _LONG_BYTES:
            link.received = _faster(link.received, TransferSample(num_bytes, took_s))


def _faster(one: TransferSample | None, other: TransferSample) -> TransferSample:
    return other if one is None or other.num_bytes * one.took_s > one.num_bytes * other.took_s else one
