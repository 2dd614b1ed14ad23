"""Hooks that only observe are recognized by their code."""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_swarm.model.fidelity.hooks import observes

_log = logging.getLogger(__name__)
SEEN: set[Any] = set()


class Watching:
    def __init__(self) -> None:
        self.seen: set[Any] = set()

    def note(self, _module: Any, _inputs: Any, output: Any) -> Any:
        return self.seen.add(output)  # type: ignore[func-returns-value]

    def shift(self, _module: Any, _inputs: Any, output: Any) -> Any:
        return output.add(1)


def observing() -> dict[str, Callable[..., Any]]:
    own: set[Any] = set()
    newest: deque[Any] = deque()
    watching = Watching()
    return {
        "a set around it": lambda _module, _inputs, output: own.add(output),
        "a set of the file": lambda _module, _inputs, output: SEEN.add(output),
        "a deque": lambda _module, _inputs, output: newest.appendleft(output),
        "a set of an object": lambda _module, _inputs, output: watching.seen.add(output),
        "a method": watching.note,
        "print": lambda _module, _inputs, output: print(output),
        "a logger": lambda _module, _inputs, output: _log.info("%s", output),
        "partly called": functools.partial(lambda own, _module, _inputs, output: own.append(output), []),
    }


def changing() -> dict[str, Callable[..., Any]]:
    added = {"delta": 1.0}
    return {
        "a tensor's own add": lambda _module, _inputs, output: output.add(1),
        "of a part": lambda _module, _inputs, output: output[0].add(1),
        "torch.add": lambda _module, _inputs, output: torch.add(output, 1),
        "torch.log": lambda _module, _inputs, output: torch.log(output),
        "read from a dict": lambda _module, _inputs, output: output + added.get("delta"),
        "a method": Watching().shift,
    }


@pytest.mark.parametrize("hook", observing().values(), ids=observing())
def test_they_take_note(hook: Callable[..., Any]) -> None:
    assert observes(hook)


@pytest.mark.parametrize("hook", changing().values(), ids=changing())
def test_they_change_values(hook: Callable[..., Any]) -> None:
    assert not observes(hook)
