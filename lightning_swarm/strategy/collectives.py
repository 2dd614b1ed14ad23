"""Collective operations of a strategy that user code calls, such as `broadcast` and `barrier`."""

from __future__ import annotations

import json
import sys
from typing import Any, Final, NoReturn

from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.core.module_names import is_of
from lightning_swarm.strategy.framework import OWN_PACKAGES

MAX_SAID: Final = 32_768
"""Largest number of characters of a value that `broadcast` sends, because it must fit into one directory entry."""


def asks_as_user() -> bool:
    """Return whether user code called a strategy's method. Lightning's own calls need the process's own value."""
    # Frame 0 is this function, frame 1 the strategy's method, frame 2 its caller.
    return not is_of(OWN_PACKAGES, sys._getframe(2).f_globals.get("__name__"))


def refuse_collective(name: str) -> NoReturn:
    """Refuse an operation that needs all trainers at the same point."""
    raise ConfigError(
        f"trainers of a swarm do not wait for each other within a step, nor for those that join, so there is nothing "
        f"that `{name}` could collect. For a value of all batches use `self.log(..., sync_dist=True)`; have what all "
        "trainers need follow from the script's arguments, or `broadcast` it in `setup` or `on_fit_start` of trainers "
        "that one program starts (`devices`)."
    )


def said(value: object, name: str) -> bytes:
    """Encode a value of the lead for the other trainers. Refuses values that JSON would change."""
    try:
        text = json.dumps(value, allow_nan=False)
        is_same = json.loads(text) == value
    except (TypeError, ValueError):
        is_same = False
    if not is_same or len(text) > MAX_SAID:
        raise ConfigError(
            f"`{name}` brings other trainers text, numbers, truth values and None, in lists and dicts with text as "
            f"keys, up to {MAX_SAID} characters, got a {type(value).__name__}. Send text, and make of it what you need."
        )
    return text.encode()


def heard(text: bytes, name: str) -> Any:
    """Decode a value that the lead published."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ProtocolError(f"what came in place of the lead's `{name}` cannot be read: {error}") from error
