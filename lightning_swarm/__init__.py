"""Train one large PyTorch Lightning model on a swarm of slow, unequal, unreliable machines.

Importing the package registers ``strategy="swarm"`` with Lightning.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_swarm.config import Limits
from lightning_swarm.strategy import SwarmStrategy

__version__ = "0.1.0"
__all__ = ["Limits", "SwarmStrategy", "__version__"]

# A bare class path on a command line reaches Lightning as a name in lower case.
for _name in (SwarmStrategy.strategy_name, f"{__name__}.{SwarmStrategy.__name__}".lower()):
    StrategyRegistry.register(
        _name,
        SwarmStrategy,
        description="SWARM parallelism: pipeline stages on unequal, unreliable peers",
        override=True,
    )
