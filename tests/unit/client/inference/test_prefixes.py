"""A client's kept texts: the longest common beginning is found, within a bound of memory."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_swarm.client.inference.prefixes import KeptTexts, num_common
from lightning_swarm.client.inference.session import SessionInput
from lightning_swarm.model.inference.prefix_digest import StageInput
from lightning_swarm.protocol.messages.inference import CacheLayer, CacheOperation, CacheRecipe

BYTES = 8 * 4  # of a token's hidden state


def step(num_tokens: int, **changes: Any) -> SessionInput:
    hidden = torch.zeros(changes.pop("rows", 1), num_tokens, 8)
    return SessionInput(**{"hidden": hidden, "extras": {}, "operations": [], "modes": [], **changes})


def session(name: str, *steps: SessionInput, kind: Any = "full", exact: bool = False) -> Any:
    recipe = CacheRecipe(layers=[CacheLayer(kind=kind, window=4)], records_past=False)
    return SimpleNamespace(id=name, log=[*steps], recipe=recipe, adapters=(), is_kept=False, exact=exact)


def tokens(*values: int) -> Tensor:
    return torch.tensor(values)


def found(texts: KeptTexts, prompt: Tensor, **scope: Any) -> tuple[str, int] | None:
    best = texts.find(prompt, [], **scope)
    return None if best is None else (best[0].session.id, best[1])


def test_the_longest_beginning_ends_at_a_step_and_leaves_a_token() -> None:
    texts = KeptTexts(min_tokens=2)
    texts.keep(session("a", step(2), step(1), step(1)), tokens(1, 2, 3, 4, 5))
    texts.keep(session("b", step(3), step(1)), tokens(1, 2, 3, 9, 9))
    for prompt, wanted in [
        (tokens(1, 2, 3, 4, 5, 6), ("a", 3)),
        (tokens(1, 2, 3, 4), ("a", 2)),  # of two equally long beginnings, the one that was used last
        (tokens(1, 2, 3, 9, 1), ("b", 2)),
        (tokens(1, 2, 7), ("a", 1)),
        (tokens(1, 2), None),
        (tokens(2, 2, 3, 4), None),
    ]:
        assert found(texts, prompt) == wanted, prompt
    assert found(texts, tokens(1, 2, 3, 4, 5, 6), scope="other") is None


def test_an_exact_text_continues_exact_texts_alone() -> None:
    texts = KeptTexts(min_tokens=1)
    texts.keep(session("a", step(3)), tokens(1, 2, 3))
    texts.keep(session("b", step(2), exact=True), tokens(1, 2))
    assert found(texts, tokens(1, 2, 3, 4), exact=True) == ("b", 1)
    assert found(texts, tokens(1, 2, 3, 4)) == ("a", 1)
    one = StageInput(stage_index=0, modes=[], adapters=[], recipe=None, exact=False, tree=(torch.zeros(1, 1, 8), {}))
    assert one.digest(b"") != replace(one, exact=True).digest(b"")


@pytest.mark.parametrize(
    "odd", [step(1, rows=2), step(1, operations=[CacheOperation(kind="crop", values=[1])]), step(1, drops=[True])]
)
def test_other_texts_than_plain_ones_are_not_kept(odd: SessionInput) -> None:
    texts = KeptTexts(min_tokens=1)
    one = session("a", step(2), odd)
    texts.keep(one, tokens(1, 2, 3))
    assert not one.is_kept
    assert found(texts, tokens(1, 2, 3, 4)) is None


@pytest.mark.parametrize(("kind", "wanted"), [("full", ["b"]), ("sliding", ["a", "b"])])
def test_a_longer_text_replaces_its_beginning_where_it_can_be_cut(kind: str, wanted: list[str]) -> None:
    texts = KeptTexts(min_tokens=1)
    first = session("a", step(2), kind=kind)
    texts.keep(first, tokens(1, 2))
    texts.keep(session("b", *first.log, step(1), kind=kind), tokens(1, 2, 3))
    assert [*texts._texts] == wanted


def test_memory_is_bounded_and_the_least_recently_used_text_goes_first() -> None:
    texts = KeptTexts(max_bytes=3 * 10 * BYTES, min_tokens=1)
    for number, name in enumerate("abc"):
        texts.keep(session(name, step(10)), torch.full((10,), number))
    assert found(texts, torch.zeros(11, dtype=torch.long)) == ("a", 1)
    texts.keep(session("d", step(10)), torch.full((10,), 3))
    assert [*texts._texts] == ["c", "a", "d"]
    assert texts._num_bytes == 3 * 10 * BYTES
    texts.keep(session("e", step(100)), torch.full((100,), 4))
    assert not texts._texts
    assert texts._num_bytes == 0


def test_common_tokens_are_counted() -> None:
    assert num_common(tokens(1, 2, 3), tokens(1, 2)) == 2
    assert num_common(tokens(1, 2, 3), tokens(1, 5, 3)) == 1
    assert num_common(tokens(), tokens(1)) == 0
