"""`lightning_swarm.cli` for projects that ``import pytorch_lightning``."""

from pytorch_lightning.cli import LightningCLI, SaveConfigCallback

from lightning_swarm.cli import swarm_cli
from lightning_swarm.core.rebase import rebased
from lightning_swarm.pytorch_lightning import SwarmStrategy

__all__ = ["SaveConfig", "SwarmCLI"]

SaveConfig = rebased(swarm_cli.SaveConfig, SaveConfigCallback, __name__)
SwarmCLI = rebased(swarm_cli.SwarmCLI, LightningCLI, __name__, strategy_class=SwarmStrategy)
