"""The command `lightning-swarm`, and `SwarmCLI` for a command of your own."""

from lightning_swarm.cli.commands import main
from lightning_swarm.cli.swarm_cli import SwarmCLI

__all__ = ["SwarmCLI", "main"]
