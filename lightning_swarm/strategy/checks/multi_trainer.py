"""Refuses what several trainers of one run cannot do together."""

from __future__ import annotations

from typing import NoReturn

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_swarm.client.session import Session
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.peer.config import SwarmConfig
from lightning_swarm.strategy.checks.trainer import (
    WHOLE_MODULE_CALLBACKS,
    check_callback_imports,
    check_callbacks,
    of_tuner,
)
from lightning_swarm.strategy.framework import callbacks_of


def check_trainers(trainer: Trainer, config: SwarmConfig) -> None:
    """Refuse what several trainers cannot do together."""
    if config.target_batch_size is None:
        raise ConfigError(
            "`role='both'` on several devices needs `target_batch_size`: Lightning's own arithmetic counts the batches "
            "of one trainer; got None. Set the number of samples of a step, those of all trainers together."
        )
    if config.delay_optimizer_step:
        raise ConfigError(
            "with `delay_optimizer_step` one trainer must bring all batches, for what several log of a step is put "
            "together when its record comes, and others have begun the next one by then; got `role='both'`. Use "
            "`role='auto'`, or leave out `delay_optimizer_step`."
        )
    if trainer.precision == "16-mixed":
        raise ConfigError(
            "the trainers of a step must scale their losses alike, and with `precision='16-mixed'` each finds a scale "
            "of its own. Use 'bf16-mixed' with `role='both'`, or 16-mixed with `role='auto'`."
        )
    for callback in callbacks_of(trainer, *WHOLE_MODULE_CALLBACKS):
        raise ConfigError(
            "callbacks must not change weights or what trains while other trainers are in the middle of a batch: "
            f"got {type(callback).__name__}{of_tuner(callback)}. Use it with `role='auto'`."
        )


def check_brought_callbacks(trainer: Trainer, config: SwarmConfig, *, beside_others: bool) -> None:
    """Refuse callbacks that the module brings (`configure_callbacks`), once they are the Trainer's."""
    check_callback_imports(trainer)
    if trainer.state.fn == TrainerFn.FITTING:
        check_callbacks(trainer)
        if beside_others:
            check_trainers(trainer, config)


def check_servers(config: SwarmConfig, num_devices: int) -> None:
    """Refuse a run without servers."""
    if config.role == "trainer" and num_devices < 2 and not config.initial_peers:
        raise ConfigError(
            f"`role='trainer'` needs servers: `devices` must be at least 2, got {num_devices}. "
            "Raise `devices`, name servers that wait in `initial_peers`, or leave `role` out."
        )


def may_be_shared(trainer: Trainer, config: SwarmConfig) -> bool:
    """True if others may join as trainers of a run that this program begins: nothing keeps several from it."""
    if config.role not in ("both", "trainer") or trainer.state.fn != TrainerFn.FITTING or config.deterministic:
        return False
    try:
        check_trainers(trainer, config)
    except ConfigError:
        return False
    return True


def check_alone(session: Session, name: str) -> None:
    """Refuse a collective operation in a batch: the others are in batches of their own."""
    if session.is_shared and session.pipeline.batch is not None:
        refuse_collective(name)


def refuse_collective(name: str) -> NoReturn:
    """Refuse what needs all trainers at the same point."""
    raise ConfigError(
        f"trainers of a swarm do not wait for each other within a step, so there is nothing that `{name}` could "
        "collect. Use `self.log(..., sync_dist=True)`, which counts over the batches of all of them."
    )
