"""Calls a Trainer's function again as often as its run rolls back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from lightning.pytorch import Trainer

from lightning_swarm.core.errors import PeerError, StepError, SwarmError


class RestartableStrategy(Protocol):
    """The part of a strategy that a call needs."""

    def check(self, trainer: Trainer, handed: Mapping[str, Any]) -> None:
        """Refuse what cannot work; `handed` are the arguments of the Trainer's method, by name."""

    def prepare_rollback(self, trainer: Trainer, error: SwarmError) -> str | None:
        """Make ready to run the Trainer's function again after an error, with what is left of the swarm.

        Returns the checkpoint to go on from; empty: from none, as a trainer that joins the run. None: the run cannot
        roll back, or has lost nothing that it needs.
        """

    @property
    def is_global_zero(self) -> bool:
        """True if this process leads."""


@dataclass(frozen=True)
class TrainerCall:
    """A call of a Trainer's function, such as that of `fit`, which is repeated where its run rolls back."""

    strategy: RestartableStrategy
    trainer: Trainer
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments by name."""
        return inspect.signature(self.function).bind(*self.args, **self.kwargs).arguments

    def resumed(self, path: str | None) -> TrainerCall:
        """The same call, which goes on from a checkpoint; None or empty: from none."""
        bound = inspect.signature(self.function).bind(*self.args, **self.kwargs)
        bound.arguments["ckpt_path"] = path or None
        return replace(self, args=bound.args, kwargs=bound.kwargs)

    def run(self) -> Any:
        """Call the function, and again, with a checkpoint, as often as its run rolls back."""
        call = self
        while True:
            result, path = call._run_once()
            if path is None:
                return result
            call = call.resumed(path)

    def run_beside(self) -> str | None:
        """Do the same beside the lead. Returns the checkpoint from which this peer is to lead, if it comes to that."""
        call = self
        while True:
            _, path = call._run_once()
            if path is None or self.strategy.is_global_zero:
                return path
            call = call.resumed(path)

    def run_as_lead(self, path: str) -> Any:
        """Call the function, at a peer that served, in the place of the lead, from a checkpoint."""
        call = self.resumed(path)
        self.strategy.check(self.trainer, call.arguments)
        return call.run()

    def _run_once(self) -> tuple[Any, str | None]:
        """Call the function once; returns its result, and the checkpoint where its run goes on."""
        try:
            return self.function(*self.args, **self.kwargs), None
        except (PeerError, StepError) as error:
            path = self.strategy.prepare_rollback(self.trainer, error)
            if path is None:
                raise
        return None, path  # after the handler: the loop's old state is free by now
