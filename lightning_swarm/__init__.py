"""Train one large PyTorch Lightning model on a swarm of slow, unequal, unreliable machines.

Importing the package registers ``strategy="swarm"`` with Lightning, under both of its names: `lightning.pytorch` and
`pytorch_lightning`. The class for the latter is `lightning_swarm.pytorch_lightning.SwarmStrategy`.
"""

from typing import TYPE_CHECKING

from lightning_swarm.core import program  # noqa: F401 - it records the working folder before user code can change it
from lightning_swarm.core.import_hook import alias_modules, import_after, lazy_attributes

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lightning_swarm.client import status as status
    from lightning_swarm.core import errors as errors
    from lightning_swarm.core.limits import Limits as Limits
    from lightning_swarm.model import boundary_layers, random
    from lightning_swarm.model import nn as nn
    from lightning_swarm.model.boundary_layers import Bottleneck as Bottleneck
    from lightning_swarm.model.boundary_layers import Maxout as Maxout
    from lightning_swarm.model.boundary_layers import insert_boundary as insert_boundary
    from lightning_swarm.model.boundary_layers import restore_boundary as restore_boundary
    from lightning_swarm.monitor import view as view
    from lightning_swarm.monitor.view import SwarmView as SwarmView
    from lightning_swarm.peer import config as config
    from lightning_swarm.peer import preemption as preemption
    from lightning_swarm.peer.config import Rebalancing as Rebalancing
    from lightning_swarm.peer.config import Trust as Trust
    from lightning_swarm.protocol import events as events
    from lightning_swarm.protocol.settings import Compression as Compression
    from lightning_swarm.serving.remote_model import remote_model as remote_model
    from lightning_swarm.strategy.attach import AttachStrategy as AttachStrategy
    from lightning_swarm.strategy.dashboard import Dashboard as Dashboard
    from lightning_swarm.strategy.sample_text import SampleText as SampleText
    from lightning_swarm.strategy.skip_divergence import SkipDivergence as SkipDivergence
    from lightning_swarm.strategy.strategy import SwarmStrategy as SwarmStrategy
    from lightning_swarm.strategy.swarm_monitor import SwarmMonitor as SwarmMonitor

    boundary, randomness = boundary_layers, random
else:
    # Each name is imported at its first use, because torch and Lightning take seconds. Modules keep their public names,
    # such as `lightning_swarm.nn`, wherever their files are.
    _PATHS = {
        "AttachStrategy": "lightning_swarm.strategy.attach:AttachStrategy",
        "Bottleneck": "lightning_swarm.model.boundary_layers:Bottleneck",
        "Compression": "lightning_swarm.protocol.settings:Compression",
        "Dashboard": "lightning_swarm.strategy.dashboard:Dashboard",
        "Limits": "lightning_swarm.core.limits:Limits",
        "Maxout": "lightning_swarm.model.boundary_layers:Maxout",
        "Rebalancing": "lightning_swarm.peer.config:Rebalancing",
        "SampleText": "lightning_swarm.strategy.sample_text:SampleText",
        "SkipDivergence": "lightning_swarm.strategy.skip_divergence:SkipDivergence",
        "SwarmMonitor": "lightning_swarm.strategy.swarm_monitor:SwarmMonitor",
        "SwarmStrategy": "lightning_swarm.strategy.strategy:SwarmStrategy",
        "SwarmView": "lightning_swarm.monitor.view:SwarmView",
        "Trust": "lightning_swarm.peer.config:Trust",
        "insert_boundary": "lightning_swarm.model.boundary_layers:insert_boundary",
        "remote_model": "lightning_swarm.serving.remote_model:remote_model",
        "restore_boundary": "lightning_swarm.model.boundary_layers:restore_boundary",
        "boundary": "lightning_swarm.model.boundary_layers",
        "config": "lightning_swarm.peer.config",
        "errors": "lightning_swarm.core.errors",
        "events": "lightning_swarm.protocol.events",
        "nn": "lightning_swarm.model.nn",
        "preemption": "lightning_swarm.peer.preemption",
        "randomness": "lightning_swarm.model.random",
        "status": "lightning_swarm.client.status",
        "view": "lightning_swarm.monitor.view",
    }
    __all__ = [name for name, path in _PATHS.items() if ":" in path] + ["__version__"]
    __getattr__ = lazy_attributes(__name__, _PATHS)
    alias_modules(__name__, _PATHS)  # so that `import lightning_swarm.nn` works, too

    def __dir__() -> list[str]:
        return sorted([*_PATHS, "__version__"])

    import_after("lightning.pytorch", "lightning_swarm.strategy.registration")
    # LightningCLI finds a class by its bare name only if the class's module is imported.
    import_after("lightning.pytorch.cli", *_PATHS.values())
    # Imported only if the script imports `pytorch_lightning`, before or after this package.
    import_after("pytorch_lightning", "lightning_swarm.pytorch_lightning")
