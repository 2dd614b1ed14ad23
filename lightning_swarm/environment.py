"""What a peer's process is told by whoever starts it: the first peer of its machine, or the command line."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Final, cast

from lightning_swarm.config import Preemption, Role, SwarmConfig
from lightning_swarm.errors import ConfigError
from lightning_swarm.network.addresses import Address, Place

JOIN: Final = "SWARM_JOIN"
"""Whom to join, for a script that names nobody."""
LISTEN: Final = "SWARM_LISTEN"
"""Where to listen, whatever the script says."""
IDENTITY: Final = "SWARM_IDENTITY"
"""The file of the first peer's key, whatever the script says."""
ROLE: Final = "SWARM_ROLE"
"""What to be, whatever the script says."""
PREEMPTION: Final = "SWARM_PREEMPTION"
"""Whose notice to heed that this machine is to go, whatever the script says."""
NEIGHBOURS: Final = "SWARM_NEIGHBOURS"
"""0: peers of one machine talk to each other as if they were far apart. For networks that are emulated on one."""
_RUN: Final = "SWARM_RUN_ID"
_RANK: Final = "SWARM_LOCAL_RANK"
_TRAINS: Final = "SWARM_TRAINS"  # a child that reads data, too
_LAUNCH: Final = "SWARM_LAUNCH_ID"


def local_rank() -> int:
    """Which of this machine's peers this process is."""
    return int(os.environ.get(_RANK, "0"))


def talks_to_neighbours() -> bool:
    """Whether peers of this machine are talked to past their daemons.

    Raises:
        ConfigError: The variable says neither yes nor no.
    """
    told = os.environ.get(NEIGHBOURS, "1")
    if told not in ("0", "1"):
        raise ConfigError(f"the variable {NEIGHBOURS} must be 0 or 1, got {told!r}. Leave it out: that means 1.")
    return told == "1"


def tunes_malloc() -> bool:
    """Whether somebody has told glibc what to do with freed memory, by its own variables."""
    return any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)


def launch_id() -> str:
    """Of the peers that were started together; empty in the first of them."""
    return os.environ.get(_LAUNCH, "")


def for_child(rank: int, addresses: str, *, run_id: str, launch: str, trains: bool) -> dict[str, str]:
    """The environment of another peer of this machine.

    Args:
        rank: Which one it is.
        addresses: Of this process's peer, a space between them.
        run_id: Of the run that it is for.
        launch: Id of those that are started together.
        trains: Whether it reads data, too.
    """
    return {
        **os.environ,
        JOIN: addresses,
        _RUN: run_id,
        _RANK: str(rank),
        _LAUNCH: launch,
        "LOCAL_RANK": str(rank),  # keeps Lightning's own rank-zero messages to one process
        _TRAINS: "1" if trains else "",
    }


def settle(config: SwarmConfig, local_rank: int) -> SwarmConfig:
    """A script's settings, as changed by what this process was told."""
    peers = tuple(map(Address.parse, os.environ.get(JOIN, "").split()))
    listen = os.environ.get(LISTEN)
    config = replace(
        config,
        initial_peers=peers or config.initial_peers,
        run_id=os.environ.get(_RUN, config.run_id),
        role=cast(Role, os.environ.get(ROLE, config.role)),
        listen=Place.to_listen(listen) if listen else config.listen,
        identity_path=os.environ.get(IDENTITY, config.identity_path),
        preemption=cast(Preemption | None, os.environ.get(PREEMPTION, config.preemption)),
    )
    if local_rank == 0:
        return config
    # The first peer's place and key are taken.
    return replace(
        config,
        role="both" if os.environ.get(_TRAINS) else "server",
        listen=config.listen.further(local_rank),
        announce=tuple(place.further(local_rank) for place in config.announce),
        identity_path=None,
    )
