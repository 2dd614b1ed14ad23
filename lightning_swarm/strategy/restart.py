"""A Trainer's function, called again as often as its run goes on from elsewhere."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from lightning.pytorch import Trainer

from lightning_swarm.core.errors import PeerError, StepError, SwarmError


class RestartableStrategy(Protocol):
    """What is needed of a strategy."""

    def check(self, trainer: Trainer, handed: Mapping[str, Any]) -> None:
        """Refuse what cannot work."""

    def go_back(self, trainer: Trainer, error: SwarmError) -> str | None:
        """Be ready to go on from a checkpoint after an error; from none, if it is empty. None: nothing goes on."""

    @property
    def is_global_zero(self) -> bool:
        """Whether this process leads."""


def run_through(
    strategy: RestartableStrategy,
    trainer: Trainer,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call a Trainer's function; and again, with a checkpoint, as often as its run goes back."""
    while True:
        result, path = _run(strategy, trainer, function, args, kwargs)
        if path is None:
            return result
        args, kwargs = on_from(path, function, args, kwargs)


def run_beside(
    strategy: RestartableStrategy,
    trainer: Trainer,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> str | None:
    """Likewise beside the lead. Returns the checkpoint from which this peer is to lead, if it comes to that."""
    while True:
        _, path = _run(strategy, trainer, function, args, kwargs)
        if path is None or strategy.is_global_zero:
            return path
        args, kwargs = on_from(path, function, args, kwargs)


def _run(
    strategy: RestartableStrategy,
    trainer: Trainer,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[Any, str | None]:
    """What it returned, or where its run goes on."""
    try:
        return function(*args, **kwargs), None
    except (PeerError, StepError) as error:
        path = strategy.go_back(trainer, error)
        if path is None:
            raise
    return None, path  # after the handler: what the loop was at is free by now


def lead_on(
    strategy: RestartableStrategy,
    trainer: Trainer,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    path: str,
) -> Any:
    """Where a peer served: call a Trainer's function in the place of the lead, from a checkpoint."""
    args, kwargs = on_from(path, function, args, kwargs)
    strategy.check(trainer, arguments_of(function, args, kwargs))
    return run_through(strategy, trainer, function, args, kwargs)


def on_from(
    path: str | None, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What to call a Trainer's function with, so that it goes on from a checkpoint; None: from none."""
    call = inspect.signature(function).bind(*args, **kwargs)
    call.arguments["ckpt_path"] = path or None
    return call.args, call.kwargs


def arguments_of(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a function is to be called with, by the names of its arguments."""
    return inspect.signature(function).bind(*args, **kwargs).arguments
