"""What exchanges with other peers tell of the way to them: how long it is, and how much it carries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_EMPTY_BYTES: Final = 4 << 10
"""What is no longer than this takes as long as nothing would."""

_LONG_BYTES: Final = 64 << 10
"""What is as long as this tells what the way carries."""

_MAX_LINKS: Final = 1024


@dataclass(frozen=True)
class TransferSample:
    """A long message: how long it was, and how long its exchange took, the way back or there included."""

    num_bytes: int
    took_s: float


@dataclass
class LinkEstimate:
    """The way to a peer and back, at its best: what waited, or shared it with others, does not count against it.

    Args:
        round_trip_s: Of a small call and its answer; None: there was none.
        sent: The request with tensors that went fastest; None: there was none long enough to tell.
        received: The answer with tensors, likewise.
    """

    round_trip_s: float | None = None
    sent: TransferSample | None = None
    received: TransferSample | None = None


class LinkEstimates(dict[str, LinkEstimate]):
    """By peer id, the first thousand."""

    def add_sample(self, peer: str, *, sent_bytes: int, received_bytes: int, took_s: float) -> None:
        """An exchange is over.

        Args:
            peer: Who was asked, and answered.
            sent_bytes: Of the request.
            received_bytes: Of the answer.
            took_s: From the one to the other.
        """
        if peer not in self and len(self) >= _MAX_LINKS:
            return
        link = self.setdefault(peer, LinkEstimate())
        num_bytes = max(sent_bytes, received_bytes)
        if num_bytes <= _EMPTY_BYTES:
            link.round_trip_s = took_s if link.round_trip_s is None else min(took_s, link.round_trip_s)
        elif num_bytes >= _LONG_BYTES and sent_bytes > received_bytes:
            link.sent = _faster(link.sent, TransferSample(num_bytes, took_s))
        elif num_bytes >= _LONG_BYTES:
            link.received = _faster(link.received, TransferSample(num_bytes, took_s))


def _faster(one: TransferSample | None, other: TransferSample) -> TransferSample:
    return other if one is None or other.num_bytes * one.took_s > one.num_bytes * other.took_s else one
