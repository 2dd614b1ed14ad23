"""The same as `lightning_swarm.cli`, for ``import pytorch_lightning``."""

from pytorch_lightning.cli import LightningCLI, SaveConfigCallback

from lightning_swarm.cli.swarm_cli import SaveConfigHooks, SwarmCLIHooks
from lightning_swarm.pytorch_lightning import SwarmStrategy

__all__ = ["SaveConfig", "SwarmCLI"]


class SaveConfig(SaveConfigHooks, SaveConfigCallback):  # type: ignore[misc]  # noqa: D101 - checked and documented in its first base
    __doc__ = SaveConfigHooks.__doc__


class SwarmCLI(SwarmCLIHooks, LightningCLI):  # type: ignore[misc]  # noqa: D101 - checked and documented in its first base
    strategy_class = SwarmStrategy
    __doc__ = SwarmCLIHooks.__doc__
