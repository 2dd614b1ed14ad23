"""Swarms whose servers lie or have little memory: in memory, and in real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_swarm import testing
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.network import PeerId
from lightning_swarm.peer.peer import Peer
from lightning_swarm.testing import LocalSwarm
from tests.adversaries.adversary import Adversary, check_struck
from tests.adversaries.lying_server import Collusion
from tests.small_memory import SmallMemory, check_ran_out, limit_memory


@contextmanager
def local_swarm(
    num_peers: int = 2, *, adversaries: Sequence[Adversary] = (), memories: Sequence[SmallMemory] = (), **settings: Any
) -> Iterator[LocalSwarm]:
    """Run `lightning_swarm.testing.local_swarm` with servers that lie or have little memory.

    At the end of the block, all adversaries must have lied, and all small memories must have been full.

    Args:
        num_peers: Number of peers, the trainer's own included.
        adversaries: Peers whose servers lie. They collude.
        memories: Peers whose servers have little memory.
        settings: Further arguments of `lightning_swarm.testing.local_swarm`.

    Raises:
        DidNotHappen: An adversary told no lie, a memory was never full, or a planned fault did not strike.
    """
    collusion, limit = Collusion(adversaries), limit_memory(memories)

    def modify(peer: Peer, name: PeerId) -> None:
        collusion.watch(peer, name)
        limit(peer, name)

    with testing.local_swarm(num_peers, modify_peer=modify, **settings) as swarm:
        yield swarm
    check_struck(adversaries)
    check_ran_out(memories)


def lie_in_process(adversaries: Sequence[Adversary], fired: Path) -> Callable[[Peer, PeerId], None]:
    """Make the argument `modify_peer` of a `FaultySwarmStrategy` whose process lies like the adversaries of its name.

    A line for each adversary is appended to the file `fired` before its first lie, because a killed process cannot
    report it.

    Raises:
        ConfigError: An attack reads the sums of other servers.
    """
    if seeing := [str(adversary) for adversary in adversaries if adversary.attack.sees_others]:
        raise ConfigError(
            f"an adversary sees no sums of other processes, and these look at them: {'; '.join(seeing)}. Use the "
            "in-memory network for such attacks."
        )

    def write(adversary: Adversary) -> None:
        if not adversary.struck:
            with fired.open("a") as file:
                print(adversary, file=file)

    def modify(peer: Peer, name: PeerId) -> None:
        own = [adversary for adversary in adversaries if adversary.peer == name]
        for adversary in own:
            adversary.on_lie = write
        Collusion(own).watch(peer, name)

    return modify
