"""The package's classes for ``import pytorch_lightning``, such as `SwarmStrategy` and `SwarmView`.

`pytorch_lightning` has base classes of its own. ``strategy="swarm"`` needs only ``import lightning_swarm``.
"""

from typing import TYPE_CHECKING

from pytorch_lightning.callbacks import Callback, ProgressBar
from pytorch_lightning.strategies import SingleDeviceStrategy, Strategy, StrategyRegistry

from lightning_swarm.core.import_hook import lazy_attributes
from lightning_swarm.core.rebase import rebased
from lightning_swarm.monitor import view
from lightning_swarm.strategy import attach, dashboard, sample_text, skip_divergence, strategy, swarm_monitor
from lightning_swarm.strategy.framework import LIGHTNING, PYTORCH_LIGHTNING
from lightning_swarm.strategy.registration import register

__all__ = [
    "AttachStrategy",
    "Dashboard",
    "SampleText",
    "SkipDivergence",
    "SwarmCLI",  # noqa: F822 - `__getattr__` imports it
    "SwarmMonitor",
    "SwarmStrategy",
    "SwarmView",
]

if TYPE_CHECKING:

    class _SwarmStrategy(strategy.SwarmStrategy, Strategy):  # type: ignore[misc]
        pass

    class _SwarmView(view.SwarmView, ProgressBar):  # type: ignore[misc]
        pass

    class _SwarmMonitor(swarm_monitor.SwarmMonitor, Callback):  # type: ignore[misc]
        pass

    class _Dashboard(dashboard.Dashboard, Callback):  # type: ignore[misc]
        pass

    class _SampleText(sample_text.SampleText, Callback):  # type: ignore[misc]
        pass

    class _SkipDivergence(skip_divergence.SkipDivergence, Callback):  # type: ignore[misc]
        pass

    class _AttachStrategy(attach.AttachStrategy, SingleDeviceStrategy):  # type: ignore[misc]
        pass

    AttachStrategy = _AttachStrategy
    Dashboard = _Dashboard
    SwarmStrategy = _SwarmStrategy
    SwarmMonitor = _SwarmMonitor
    SwarmView = _SwarmView
    SampleText = _SampleText
    SkipDivergence = _SkipDivergence
else:
    SwarmStrategy = rebased(strategy.SwarmStrategy, Strategy, __name__, framework=PYTORCH_LIGHTNING)
    AttachStrategy = rebased(attach.AttachStrategy, SingleDeviceStrategy, __name__)
    SwarmView = rebased(view.SwarmView, ProgressBar, __name__)
    SwarmMonitor = rebased(swarm_monitor.SwarmMonitor, Callback, __name__)
    Dashboard = rebased(dashboard.Dashboard, Callback, __name__)
    SampleText = rebased(sample_text.SampleText, Callback, __name__)
    SkipDivergence = rebased(skip_divergence.SkipDivergence, Callback, __name__)

register(StrategyRegistry, __name__)
# A Trainer rejects any other class than its own Strategy as "an invalid strategy name". So each tree's strategy is
# registered with the other, and `_configure_launcher` reports which import to change.
LIGHTNING.strategy.register(SwarmStrategy)
Strategy.register(strategy.SwarmStrategy)

if not TYPE_CHECKING:
    # Lazy, because the strategy's layer must not import the command line's, which also takes a while to import.
    __getattr__ = lazy_attributes(__name__, {"SwarmCLI": "lightning_swarm.cli.pytorch_lightning:SwarmCLI"})
