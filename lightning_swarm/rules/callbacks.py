"""Callbacks that a swarm refuses, or has to know of."""

from __future__ import annotations

from lightning.pytorch import Trainer

from lightning_swarm.errors import ConfigError
from lightning_swarm.framework import callbacks_named

# They read or write the weights of the trainer's own module, which during a run live on the servers.
_WEIGHT_CALLBACKS = ("ModelPruning",)

# It looks for the largest batch that fits into memory, in batches that fail: on the servers, where it cannot see it.
_MEMORY_CALLBACKS = ("BatchSizeFinder",)

# They train for a while, then restore the weights and the step that they found. `Tuner` works through them.
_TRIAL_CALLBACKS = ("LearningRateFinder",)


def check_callbacks(trainer: Trainer) -> None:
    """Refuse callbacks that cannot do here what they are for.

    Raises:
        ConfigError: With the remedy.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # Lightning sets it in its connector
        if isinstance(callback, callbacks_named(*_WEIGHT_CALLBACKS)):
            raise ConfigError(
                "callbacks must not read or change weights during fit, they live on the servers: "
                f"got {type(callback).__name__}. Remove it for now."
            )
        if isinstance(callback, callbacks_named(*_MEMORY_CALLBACKS)):
            raise ConfigError(
                "callbacks must not look for the batch that fits into memory, it is cut into microbatches for the "
                f"servers': got {type(callback).__name__}. Choose `microbatch_size` for the smallest server, and the "
                "batch size for the training."
            )


def makes_trials(trainer: Trainer) -> bool:
    """Whether a callback may train for a while and then go back."""
    return any(isinstance(one, callbacks_named(*_TRIAL_CALLBACKS)) for one in trainer.callbacks)  # type: ignore[attr-defined]


def of_tuner(callback: object) -> str:
    """What the user may have written instead of the callback."""
    return ", through which `Tuner.lr_find` works" if isinstance(callback, callbacks_named(*_TRIAL_CALLBACKS)) else ""
