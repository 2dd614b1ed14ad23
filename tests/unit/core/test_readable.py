"""Messages that were recorded in real runs, as people see them."""

from __future__ import annotations

import pytest

from lightning_swarm.core.readable import short_name, shorten

PEER = "12D3KooWM7CaTpaYCfDNfo8mBoJC6tJUtsUAnUqmRnzhZ6errLTo"
DIAL = f"failed to dial: failed to dial {PEER}: all dials failed\n  * [/ip4/127.0.0.1/tcp/42661] "
REFUSED = f"{DIAL}dial tcp4 127.0.0.1:42661: connect: connection refused."

SLOW = "[/ip4/192.0.2.1/tcp/1] dial tcp4 192.0.2.1:1: i/o timeout."
OTHER = f"failed to negotiate security protocol: peer id mismatch: expected {PEER}, but remote key matches b."


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"Cannot open a stream to {PEER}: {REFUSED}", "connection refused."),
        (f"Cannot connect to {PEER}: {DIAL}dial backoff.", "it could not be reached a moment ago."),
        (f"Cannot connect to {PEER}: {DIAL}dial backoff\n  * {SLOW}", "i/o timeout."),
        (f"Cannot connect to {PEER}: failed to dial: context deadline exceeded.", "context deadline exceeded."),
        (
            f"peer {PEER}, which holds stage 0, is gone (Cannot open a stream to {PEER}: {REFUSED})",
            "peer errLTo, which holds stage 0, is gone (connection refused.)",
        ),
        (
            f"peer {PEER}, which holds stage 0, is gone (Cannot open a stream to {PEER}: {REFUSED}); peer b is gone",
            "peer errLTo, which holds stage 0, is gone (connection refused.); peer b is gone",
        ),
        (
            f"The connection to {PEER} broke: [Errno 104] Connection reset by peer.",
            "The connection to errLTo broke: Connection reset by peer.",
        ),
        (f"Cannot connect to {PEER}: {DIAL}{OTHER}", "peer id mismatch: expected errLTo, but remote key matches b."),
        (f"Cannot open a stream to {PEER} within 10 s.", "Cannot open a stream to errLTo within 10 s."),
        ("as it asked to", "as it asked to"),
        ("", ""),
    ],
)
def test_a_message_becomes_one_short_line(text: str, line: str) -> None:
    assert shorten(text) == line
    assert shorten(line) == line


def test_a_peer_is_named_by_the_end_of_its_id() -> None:
    assert short_name(PEER) == "errLTo"
    assert short_name("peer-12") == "peer-12"
