from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_swarm.serving import http_server
from lightning_swarm.serving.texts import ServedText
from tests.unit.serving.endpoint import Model, Tokenizer, Writer


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedText]:
    Writer.made = []
    monkeypatch.setattr(http_server, "TextWriter", Writer)
    tokenizer = Tokenizer()
    yield ServedText("m", Model(), tokenizer)
    tokenizer.may_go.set()
