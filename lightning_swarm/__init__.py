"""Train one large PyTorch Lightning model on a swarm of slow, unequal, unreliable machines.

Importing the package registers ``strategy="swarm"`` with Lightning, under both of its names: `lightning.pytorch` and
`pytorch_lightning`. The class for the latter is `lightning_swarm.pytorch_lightning.SwarmStrategy`.
"""

import sys as _sys

from lightning_swarm.client import status
from lightning_swarm.core import errors
from lightning_swarm.core.import_hook import import_along as _import_along
from lightning_swarm.core.limits import Limits
from lightning_swarm.model import boundary_layers as boundary
from lightning_swarm.model import nn
from lightning_swarm.model import random as randomness
from lightning_swarm.model.boundary_layers import Bottleneck, Maxout, insert_boundary, restore_boundary
from lightning_swarm.monitor import view
from lightning_swarm.monitor.view import SwarmView
from lightning_swarm.peer import config, preemption
from lightning_swarm.peer.remote_model import remote_model
from lightning_swarm.protocol import events
from lightning_swarm.protocol.settings import Compression
from lightning_swarm.strategy.attach import AttachStrategy
from lightning_swarm.strategy.framework import LIGHTNING as _LIGHTNING
from lightning_swarm.strategy.sample_text import SampleText
from lightning_swarm.strategy.strategy import SwarmStrategy
from lightning_swarm.strategy.swarm_monitor import SwarmMonitor

__version__ = "0.1.0"
__all__ = [
    "AttachStrategy",
    "Bottleneck",
    "Compression",
    "Limits",
    "Maxout",
    "SampleText",
    "SwarmMonitor",
    "SwarmStrategy",
    "SwarmView",
    "__version__",
    "insert_boundary",
    "remote_model",
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

_LIGHTNING.register(SwarmStrategy)
# Only where a script imports `pytorch_lightning`, whichever of the two it imports first.
_import_along("pytorch_lightning", f"{__name__}.pytorch_lightning")
