"""Collective operations of a strategy that user code calls, such as `broadcast` and `barrier`."""

from __future__ import annotations

import json
import sys
from typing import Any, Final, NoReturn

from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.core.module_names import is_in_packages
from lightning_swarm.strategy.framework import OWN_PACKAGES

MAX_CHARS: Final = 32_768
"""Most characters, as JSON, of a value that `broadcast` sends: the value must fit into one directory entry."""


def is_called_by_user() -> bool:
    """Return whether user code, and not Lightning, called the strategy's method that calls this function."""
    # Frame 0 is this function, frame 1 the strategy's method, frame 2 its caller.
    return not is_in_packages(OWN_PACKAGES, sys._getframe(2).f_globals.get("__name__"))


def refuse_collective(name: str) -> NoReturn:
    """Refuse an operation that needs all trainers at the same point."""
    raise ConfigError(
        f"`{name}` must not be called, because it needs all trainers at one point, but trainers of a swarm do not "
        "wait for each other. To combine values of all batches, use `self.log(..., sync_dist=True)`. For a value that "
        "all trainers need, compute it from the script's arguments; or, if one program starts the trainers "
        "(`devices`), call `broadcast` in `setup` or `on_fit_start`."
    )


def encode_shared(value: object, name: str) -> bytes:
    """Encode a value of the lead for the other trainers. Refuses values that JSON would change."""
    try:
        text = json.dumps(value, allow_nan=False)
        is_same = json.loads(text) == value
    except (TypeError, ValueError):
        is_same = False
    if not is_same or len(text) > MAX_CHARS:
        raise ConfigError(
            f"`{name}` can send only text, numbers, booleans and None, in lists and in dicts with text keys, at most "
            f"{MAX_CHARS} characters as JSON; got a {type(value).__name__}. Send text, and convert it at the receiver."
        )
    return text.encode()


def decode_shared(text: bytes, name: str) -> Any:
    """Decode a value that the lead published. Raises ProtocolError if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ProtocolError(
            f"the lead's value for `{name}` must be JSON, but the received value is not: {error}"
        ) from error
