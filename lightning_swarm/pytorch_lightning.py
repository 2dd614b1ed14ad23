"""`SwarmStrategy`, `SwarmView` and `SwarmCLI` for ``import pytorch_lightning``, which has classes of its own.

``strategy="swarm"`` needs ``import lightning_swarm`` only.
"""

from importlib import import_module
from typing import Any

from pytorch_lightning.accelerators import Accelerator
from pytorch_lightning.callbacks import ProgressBar
from pytorch_lightning.plugins.io import CheckpointIO
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.strategies import Strategy

from lightning_swarm.monitor.view import ViewHooks
from lightning_swarm.strategy.framework import PYTORCH_LIGHTNING
from lightning_swarm.strategy.strategy import SwarmHooks

__all__ = ["SwarmCLI", "SwarmStrategy", "SwarmView"]  # noqa: F822 - `__getattr__` imports the first


class SwarmStrategy(SwarmHooks, Strategy):  # type: ignore[misc]  # noqa: D101 - checked and documented in its first base
    framework = PYTORCH_LIGHTNING
    __doc__ = SwarmHooks.__doc__

    def __init__(
        self,
        *args: Any,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        **kwargs: Any,
    ) -> None:
        # Only these three have other types, which YAML is checked against.
        super().__init__(  # type: ignore[misc]
            *args,
            accelerator=accelerator,  # type: ignore[arg-type]
            checkpoint_io=checkpoint_io,  # type: ignore[arg-type]
            precision_plugin=precision_plugin,  # type: ignore[arg-type]
            **kwargs,
        )


class SwarmView(ViewHooks, ProgressBar):  # type: ignore[misc]  # noqa: D101 - documented in its first base
    __doc__ = ViewHooks.__doc__


def __getattr__(name: str) -> Any:
    # The command line stands above the strategy, and takes a while to import.
    if name == "SwarmCLI":
        return import_module("lightning_swarm.cli.pytorch_lightning").SwarmCLI
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
