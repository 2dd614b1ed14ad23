"""Swarms for tests: all peers in one process and one thread, over the in-memory network, on a virtual clock.

`local_swarm` makes one for a test of your own model. A `FaultPlan` schedules faults, at moments that `Phase` names.
``pytest_plugins = ["lightning_swarm.testing.plugin"]`` adds the pytest fixture `local_swarm`. `SharedGPU` runs several
peers on one card, and `UnlikeMachine` rounds like a machine of another kind.
"""

from lightning_swarm.testing.faults import DidNotHappen, Fault, FaultPlan, Moment, Phase
from lightning_swarm.testing.local import InMemoryStrategy, LocalSwarm, MakeLocalSwarm, local_swarm
from lightning_swarm.testing.sabotage import FaultySwarmStrategy
from lightning_swarm.testing.shared_gpu import SharedGPU
from lightning_swarm.testing.unlike import UnlikeMachine

__all__ = [
    "DidNotHappen",
    "Fault",
    "FaultPlan",
    "FaultySwarmStrategy",
    "InMemoryStrategy",
    "LocalSwarm",
    "MakeLocalSwarm",
    "Moment",
    "Phase",
    "SharedGPU",
    "UnlikeMachine",
    "local_swarm",
]
