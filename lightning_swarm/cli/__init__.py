"""The command `lightning-swarm`, and `SwarmCLI` for a command of your own."""

from typing import TYPE_CHECKING

from lightning_swarm.cli.commands import main as main
from lightning_swarm.core.import_hook import lazy_attributes

if TYPE_CHECKING:
    from lightning_swarm.cli.swarm_cli import SwarmCLI as SwarmCLI
else:
    __all__ = ["SwarmCLI", "main"]
    __getattr__ = lazy_attributes(__name__, {"SwarmCLI": "lightning_swarm.cli.swarm_cli:SwarmCLI"})
