"""Streamed text is passed on until a stop string."""

from __future__ import annotations

import random

import pytest

from lightning_swarm.serving.pieces import StopFinder


@pytest.mark.parametrize(
    ("stops", "pieces", "passed", "found"),
    [
        ([], ["ab", "c"], "abc", False),
        (["."], ["ab", "c.d", "e"], "abc", True),
        (["END"], ["a E", "N", "D b"], "a ", True),
        (["END"], ["a E", "N", "X b"], "a ENX b", False),
        (["END"], ["a E"], "a E", False),
        (["aab"], ["aa", "ab", "c"], "a", True),
        (["xyz", "yb"], ["axyb"], "ax", True),
    ],
)
def test_text_ends_before_what_ends_it(stops: list[str], pieces: list[str], passed: str, found: bool) -> None:
    finder, said = StopFinder(stops), ""
    for piece in pieces:
        said += finder.take(piece)
        if finder.has_stop:
            break
    else:
        said += finder.rest()
    assert (said, finder.has_stop) == (passed, found)


@pytest.mark.parametrize("seed", range(50))
def test_it_does_not_matter_in_which_pieces_text_comes(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices("ab", k=40))
    stops = ["".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(rng.randint(1, 3))]
    finder, said, place = StopFinder(stops), "", 0
    while place < len(text) and not finder.has_stop:
        end = min(len(text), place + rng.randint(1, 5))
        said, place = said + finder.take(text[place:end]), end
        assert not any(stop in said for stop in stops)
    said += "" if finder.has_stop else finder.rest()
    ends = [text.find(stop) for stop in stops if stop in text]
    assert finder.has_stop == bool(ends)
    assert text.startswith(said)
    # The first complete string ends the text, as a reader of the stream would see.
    assert not ends or len(said) in ends
