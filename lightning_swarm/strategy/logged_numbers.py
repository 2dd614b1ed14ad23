"""Offers the newest numbers that the lead logs to surveys of its run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, Final

import torch
from lightning.pytorch import Trainer

from lightning_swarm.core.override import Override
from lightning_swarm.peer.peer import Peer
from lightning_swarm.protocol.messages.reports import MAX_LOGGED, LoggedNumber
from lightning_swarm.protocol.messages.wire import MAX_TEXT

_INTERVAL_S: Final = 1.0  # between two reads of a batch's numbers, because reading waits for an accelerator
_MAX_AGE_S: Final = 1e6


class LoggedNumbers:
    """Reads the numbers of batches once a second, and all numbers that loggers receive, if there are any."""

    def __init__(self, trainer: Trainer, peer: Peer, clock: Callable[[], float] = time.monotonic) -> None:
        self._trainer, self._peer, self._clock = trainer, peer, clock
        self._newest: Mapping[str, tuple[float, int, float]] = {}  # name -> value, step and time; replaced as a whole
        self._next_s = -math.inf
        connector = trainer._logger_connector
        self._on_batch = Override(connector, "update_train_step_metrics", self._read_batch)
        self._on_log = Override(connector, "log_metrics", self._read_log)
        peer.logged = self.report

    def release(self) -> None:
        """Restore Lightning's methods, and offer no more numbers."""
        self._on_log.remove()
        self._on_batch.remove()
        self._peer.logged = list

    def report(self) -> list[LoggedNumber]:
        """Return the newest number of each name. Any thread may call it."""
        now_s = self._clock()
        return [
            LoggedNumber(name=name, value=value, step=step, age_s=min(max(now_s - at_s, 0.0), _MAX_AGE_S))
            for name, (value, step, at_s) in self._newest.items()
        ]

    def _read_batch(self) -> None:
        self._on_batch.replaced()
        if self._clock() >= self._next_s:
            self._next_s = self._clock() + _INTERVAL_S
            self._keep(self._trainer._logger_connector.metrics["log"])

    def _read_log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self._on_log.replaced(metrics, step=step)
        self._keep(metrics)

    def _keep(self, metrics: Mapping[str, Any]) -> None:
        found, step, now_s = dict(self._newest), self._trainer.global_step, self._clock()
        for name, value in metrics.items():
            if isinstance(value, float | int) or (isinstance(value, torch.Tensor) and value.numel() == 1):
                number = float(value)
                if math.isfinite(number) and 0 < len(name) <= MAX_TEXT:
                    found[name] = number, step, now_s
        self._newest = dict(islice(found.items(), MAX_LOGGED))
