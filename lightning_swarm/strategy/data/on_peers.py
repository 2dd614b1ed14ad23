"""Reads the data module's data on a peer that serves, if the model cannot be built without data."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from lightning.pytorch import Trainer

from lightning_swarm.core.errors import ConfigError, SwarmError
from lightning_swarm.strategy.base import StrategyBase
from lightning_swarm.strategy.framework import tree_of

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


# Try without data first: most models can be built without it, and a peer's machine may have none.
def call_with_data_if_needed(strategy: StrategyBase, trainer: Trainer, task: str, work: Callable[[], _T]) -> _T:
    """Call user code. If it fails on a peer that only serves, prepare the data as the trainer does, and call it again.

    Returns the result. Raises ConfigError if the code still fails; `task` describes the code for the message.
    """
    try:
        return work()
    except SwarmError:
        raise
    except Exception as error:
        if not strategy.config.only_serves:
            raise
        if strategy.has_read_data or not _has_data(trainer):
            raise _failed(task, error) from error
        _log.info("This peer reads the data, because it cannot %s without data: %r", task, error)
    try:
        _read(strategy, trainer)
        return work()
    except SwarmError:
        raise
    except Exception as error:
        raise _failed(task, error) from error


def _read(strategy: StrategyBase, trainer: Trainer) -> None:
    """Prepare the data, once on each machine, and set the data module up."""
    strategy.has_read_data = True
    # The machine's first process prepares the data. A peer has both interfaces, `lead` and `follower`, in any role.
    if strategy.local_rank:
        strategy.own_peer.follower.await_event(strategy.launch_id, "prepare_data")
    else:
        trainer._data_connector.prepare_data()
        strategy.own_peer.lead.announce_event(strategy.launch_id, "prepare_data")
    if trainer.datamodule is not None:  # type: ignore[attr-defined]  # Lightning sets it in its connector
        tree_of(trainer).call._call_lightning_datamodule_hook(trainer, "setup", stage=trainer.state.fn)


def _has_data(trainer: Trainer) -> bool:
    is_overridden = tree_of(trainer).is_overridden
    return trainer.datamodule is not None or is_overridden("prepare_data", trainer.lightning_module)  # type: ignore[attr-defined]


def _failed(task: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"a peer that serves must be able to {task} as the trainer does, using only data that the data module's "
        f"`prepare_data` and `setup` find on its machine; it failed with {type(error).__name__}: {error}. Copy the "
        "files to that machine, or build the model and its optimizer from values that the script has before `fit`."
    )
