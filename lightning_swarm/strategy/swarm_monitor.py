"""`SwarmMonitor`: logs a run's speed, waiting time and traffic."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Final, Literal, TypeAlias, get_args

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError, SwarmError
from lightning_swarm.core.rebase import written_once, written_part
from lightning_swarm.strategy.framework import IMPORT_TREES, CallbackBase, tree_of

__all__ = ["SwarmMetric", "SwarmMonitor", "add_default_monitor"]

SwarmMetric: TypeAlias = Literal[
    "samples_per_s", "step_s", "wait_s", "sent_bytes_per_s", "received_bytes_per_s", "peers", "deaths"
]
_METRICS: Final[Sequence[SwarmMetric]] = get_args(SwarmMetric)


@written_once(Callback)
class SwarmMonitor(CallbackBase):
    """Logs a run's speed, waiting time and traffic to the Trainer's loggers, every `log_every_n_steps` steps.

    In a swarm, a Trainer with a logger has a `SwarmMonitor` by default, which does not log to a `CSVLogger`. Pass your
    own instance to log there, too, or to choose its metrics: ``SwarmMonitor(metrics=["samples_per_s"])``, or
    ``SwarmMonitor(metrics=[])`` for none. Only the lead logs. Each value is the mean since it was last logged, without
    validation. If no swarm trains, nothing is logged.

    - ``swarm/samples_per_s``: samples in the run's steps, from all trainers, per second.
    - ``swarm/step_s``: seconds per step.
    - ``swarm/wait_s``: the part of `step_s` in which the lead waited for places in steps and for the ends of steps,
      where servers average gradients and step. It does not include forward and backward passes.
    - ``swarm/sent_bytes_per_s``, ``swarm/received_bytes_per_s``: bytes that the lead's peer exchanged with other peers,
      framing included.
    - ``swarm/peers``: number of peers that hold a stage now.
    - ``swarm/deaths``: number of peers that died or were cut off since `fit` began.

    Args:
        metrics: Names of the values to log, without ``swarm/``.

    Raises:
        ConfigError: A name is unknown.

    Example:
        >>> trainer = Trainer(strategy=strategy, callbacks=[SwarmMonitor(metrics=["samples_per_s", "wait_s"])])
    """

    def __init__(self, metrics: Sequence[SwarmMetric] = _METRICS) -> None:
        super().__init__()
        names: list[Any] = [metrics] if isinstance(metrics, str) else list(metrics)
        unknown = [name for name in names if name not in _METRICS]
        if unknown:
            raise ConfigError(
                f"`metrics` of `SwarmMonitor` must be among {list(_METRICS)}, got {unknown}. Leave it out for all of "
                "them; `metrics=[]` logs none."
            )
        self.metrics: Sequence[SwarmMetric] = names
        self.skips: tuple[type[Any], ...] = ()  # classes of loggers that get no values
        self._interval = 0  # number of the current interval of `log_every_n_steps` steps
        self._before: Mapping[str, float] | None = None  # the last counts; None while training is paused
        self._gained: Counter[str] = Counter()  # increases of the counts in this interval

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning calls this again after a rollback, when the counts start at zero.
        self._gained.clear()
        self._before = self._counts(trainer)
        self._interval = _interval(trainer, trainer.fit_loop.epoch_loop._batches_that_stepped)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._before is not None:
            self._add_increases(trainer)
            self._before = None

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:  # the sanity check runs before training starts
            self._before = self._counts(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.fit_loop._should_accumulate():
            return
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        former, self._interval = self._interval, _interval(trainer, step + 1)
        if self._interval <= former or self._before is None:
            return
        state = self._add_increases(trainer)
        values = {
            f"swarm/{name}": value for name, value in _values(self._gained, state).items() if name in self.metrics
        }
        self._gained.clear()
        if values:
            for logger in self._loggers(trainer):
                logger.log_metrics(values, step=step)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._before = None

    def _loggers(self, trainer: Trainer) -> list[Any]:
        return [logger for logger in trainer.loggers if not isinstance(logger, self.skips)]

    def _add_increases(self, trainer: Trainer) -> Mapping[str, float]:
        """Add the counts' increases since the last call to the interval's. Returns the counts; empty if unknown."""
        now = self._counts(trainer)
        if now is None or self._before is None:
            return {}
        self._gained.update({name: count - self._before[name] for name, count in now.items()})
        self._before = now
        return now

    def _counts(self, trainer: Trainer) -> Mapping[str, float] | None:
        """Return the run's current counts; None if this process does not log, or no swarm trains."""
        strategy: Any = trainer.strategy
        if not (self.metrics and trainer.is_global_zero and self._loggers(trainer) and hasattr(strategy, "status")):
            return None
        try:
            status = strategy.status()
        except SwarmError:  # no run is under way
            return None
        return {
            "time_s": time.monotonic(),
            "steps": trainer.global_step,
            "samples": status.total_samples,
            "waited_s": status.waited_s,
            "sent_bytes": status.sent_bytes,
            "received_bytes": status.received_bytes,
            "peers": status.num_servers,
            "deaths": strategy.rollback.membership.num_deaths,
        }


def _interval(trainer: Trainer, num_steps: int) -> int:
    """Return the number of complete intervals of `log_every_n_steps` steps in `num_steps` steps."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # Lightning sets it in its connector
    return num_steps // every if every else 0


def _values(gained: Mapping[str, float], state: Mapping[str, float]) -> dict[str, float]:
    """Compute the values of an interval from the increases of its counts and their state; empty without a step."""
    seconds, steps = gained.get("time_s", 0.0), gained.get("steps", 0)
    if seconds <= 0 or steps <= 0:
        return {}
    return {
        "samples_per_s": gained["samples"] / seconds,
        "step_s": seconds / steps,
        "wait_s": gained["waited_s"] / steps,
        "sent_bytes_per_s": gained["sent_bytes"] / seconds,
        "received_bytes_per_s": gained["received_bytes"] / seconds,
        "peers": state["peers"],
        "deaths": state["deaths"],
    }


def add_default_monitor(trainer: Trainer) -> None:
    """Add a `SwarmMonitor`, as Lightning adds its own default callbacks, if there is a logger and no other monitor."""
    untyped: Any = trainer  # Lightning sets its attributes in its connectors
    if not trainer.loggers or any(isinstance(callback, written_part(SwarmMonitor)) for callback in untyped.callbacks):
        return
    monitor = import_module(tree_of(trainer).strategies).SwarmMonitor()
    # Scripts may rely on the rows and columns of a CSV file; other loggers show each value separately.
    monitor.skips = tuple(framework.csv_logger for framework in IMPORT_TREES)
    untyped.callbacks[:] = untyped._callback_connector._reorder_callbacks([*untyped.callbacks, monitor])
