"""Swarms for tests: all peers in one process and one thread, over the in-memory network, on a virtual clock.

`local_swarm` makes one for a test of your own model. A `FaultPlan` schedules faults, at moments that `Phase` names. An
`Adversary` is a peer whose server lies, by one of the `attacks`. ``pytest_plugins =
["lightning_swarm.testing.plugin"]`` adds the pytest fixture `local_swarm`. `SharedGPU` runs several peers on one card,
`SmallMemory` limits a server's memory, and `UnlikeMachine` rounds like a machine of another kind.
"""

from lightning_swarm.testing import attacks
from lightning_swarm.testing.adversary import Adversary
from lightning_swarm.testing.faults import DidNotHappen, Fault, FaultPlan, Moment, Phase
from lightning_swarm.testing.local import InMemoryStrategy, LocalSwarm, MakeLocalSwarm, local_swarm
from lightning_swarm.testing.sabotage import FaultySwarmStrategy
from lightning_swarm.testing.shared_gpu import SharedGPU
from lightning_swarm.testing.small_memory import SmallMemory
from lightning_swarm.testing.unlike import UnlikeMachine

__all__ = [
    "Adversary",
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
    "SmallMemory",
    "UnlikeMachine",
    "attacks",
    "local_swarm",
]
