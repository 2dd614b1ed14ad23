"""The command `lightning-swarm`, and `SwarmCLI` for commands of one's own."""

from lightning_swarm.cli.commands import main
from lightning_swarm.cli.trainer import SwarmCLI

__all__ = ["SwarmCLI", "main"]
