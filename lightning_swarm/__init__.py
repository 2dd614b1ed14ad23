"""Train one large PyTorch Lightning model on a swarm of slow, unequal, unreliable machines.

Importing the package registers ``strategy="swarm"`` with Lightning, under both of its names: `lightning.pytorch` and
`pytorch_lightning`. The class for the latter is `lightning_swarm.pytorch_lightning.SwarmStrategy`.
"""

import sys as _sys

from lightning.pytorch.strategies import Strategy as _Strategy
from lightning.pytorch.strategies import StrategyRegistry as _Registry
from pytorch_lightning.strategies import Strategy as _OtherStrategy
from pytorch_lightning.strategies import StrategyRegistry as _OtherRegistry

from lightning_swarm import pytorch_lightning
from lightning_swarm.client import status
from lightning_swarm.core import errors
from lightning_swarm.core.limits import Limits
from lightning_swarm.model import boundary_layers as boundary
from lightning_swarm.model import nn
from lightning_swarm.model import random as randomness
from lightning_swarm.model.boundary_layers import Bottleneck, Maxout, insert_boundary, restore_boundary
from lightning_swarm.monitor import view
from lightning_swarm.monitor.view import SwarmView
from lightning_swarm.peer import config, preemption
from lightning_swarm.protocol import events
from lightning_swarm.protocol.settings import Compression
from lightning_swarm.strategy.framework import explain_mixed_imports
from lightning_swarm.strategy.strategy import SwarmStrategy

__version__ = "0.1.0"
__all__ = [
    "Bottleneck",
    "Compression",
    "Limits",
    "Maxout",
    "SwarmStrategy",
    "SwarmView",
    "__version__",
    "insert_boundary",
    "restore_boundary",
]

# Modules that users import by these names, wherever they stand: `import lightning_swarm.nn`.
_PUBLIC_MODULES = {
    "boundary": boundary,
    "config": config,
    "errors": errors,
    "events": events,
    "nn": nn,
    "preemption": preemption,
    "randomness": randomness,
    "status": status,
    "view": view,
}
_sys.modules.update({f"{__name__}.{_name}": _module for _name, _module in _PUBLIC_MODULES.items()})

for _registry, _class in ((_Registry, SwarmStrategy), (_OtherRegistry, pytorch_lightning.SwarmStrategy)):
    # A bare class path on a command line reaches Lightning as a name in lower case.
    for _name in (SwarmStrategy.strategy_name, f"{_class.framework.strategies}.{_class.__name__}".lower()):
        _registry.register(
            _name, _class, description="SWARM parallelism: pipeline stages on unequal, unreliable peers", override=True
        )

# A Trainer calls whatever is not its Strategy "an invalid strategy name". It lets these two pass as far as to
# `_configure_launcher`, where they say which import to change.
_Strategy.register(pytorch_lightning.SwarmStrategy)
_OtherStrategy.register(SwarmStrategy)
explain_mixed_imports()
