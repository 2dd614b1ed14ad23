"""Messages recorded in real runs, in the form shown to users."""

from __future__ import annotations

import pytest

from lightning_swarm.core.errors import PeerError, from_wire
from lightning_swarm.core.readable import printable, short_name, shorten

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


HOSTILE = "\x1b[2J\x1b]0;title\x07 \x9b31m \u202eforged\x00\r\nWARNING: all is lost\u2028\x7f\ud800"


def test_nothing_that_a_terminal_obeys_is_shown() -> None:
    line = "?[2J?]0;title? ?31m ?forged? WARNING: all is lost ??"
    assert shorten(HOSTILE) == line
    assert " ".join(printable(HOSTILE).split()) == line
    assert short_name(f"{PEER}\x1b[2J") == "To?[2J"
    assert shorten("Größe, 模型 and ½") == "Größe, 模型 and ½"


def test_an_error_from_the_network_has_no_control_characters() -> None:
    assert str(from_wire("PeerError", f"a{HOSTILE}b")).isprintable()
    assert isinstance(from_wire("PeerError", HOSTILE), PeerError)
    assert str(from_wire("no such error", "a\nb")) == "a b"
    for kind in ("StageError", "StepError"):
        error = from_wire(kind, "it raised\x1b[2J\n  File x, line 1\n")
        assert type(error).__name__ == kind
        assert str(error) == "it raised?[2J\n  File x, line 1\n", "a traceback's lines are kept"


@pytest.mark.parametrize(
    "part",
    ["x", " ", "* [", "Cannot connect to ", "failed to dial", "Cannot x to y: ", "dial a b: ", "12D3KooW", "[Errno 1"],
)
@pytest.mark.parametrize("start", ["", f"Cannot connect to {PEER}: {DIAL}"])
def test_the_work_for_a_long_text_is_bounded(part: str, start: str) -> None:
    line = shorten(start + part * 1_000_000)
    assert len(line) <= 2000
    assert shorten(line) == line
