"""`status`: look at a live swarm from outside, once or again and again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Sequence
from typing import Final

from lightning_swarm.core.errors import ConfigError, PeerError, Unreachable
from lightning_swarm.monitor import survey
from lightning_swarm.monitor.checks import Obstacle
from lightning_swarm.monitor.doctor import knock
from lightning_swarm.monitor.survey import Sighting, SwarmReport, picture
from lightning_swarm.network.addresses import Address

_START_TIMEOUT_S: Final = 30.0


def watch(address: Address, *, every_s: float | None, timeout: float) -> Generator[SwarmReport]:
    """Look at the swarm of a peer. See `looks`."""
    before: Sequence[Sighting] = ()
    with contextlib.closing(looks(address, every_s=every_s, timeout=timeout)) as found:
        for now in found:
            yield picture(now, before)
            before = now


def looks(address: Address, *, every_s: float | None, timeout: float) -> Generator[Sequence[Sighting]]:
    """What the peers of a swarm say, whom one of them knows.

    Args:
        address: The peer's.
        every_s: Seconds between two looks; None looks once.
        timeout: Seconds for each peer to answer.

    Raises:
        ConfigError: A number of seconds is none.
        Unreachable: The peer does not answer.
    """
    for name, seconds in (("--watch", every_s), ("--timeout", timeout)):
        if seconds is not None and not 0 < seconds <= threading.TIMEOUT_MAX:
            raise ConfigError(
                f"`{name}` must be a number of seconds above 0, got {seconds}. Leave it out, or raise it."
            )
    from lightning_swarm.core.event_loop import ThreadRuntime
    from lightning_swarm.network import hivemind  # a second, and only needed here

    with contextlib.closing(ThreadRuntime("status")) as runtime:
        transport, directory = runtime.run(hivemind.start(startup_timeout=_START_TIMEOUT_S))
        try:
            while True:
                try:
                    runtime.run(transport.connect([address.maddr]))
                except PeerError as error:
                    raise Unreachable(_why(address, timeout)) from error
                try:
                    now = runtime.run(survey.look(transport, address.peer_id, address.maddr, timeout=timeout))
                except PeerError as error:
                    raise Unreachable(
                        f"{address} does not answer: {error} Ask another peer of the run, or find out what is in the "
                        f"way: lightning-swarm doctor --peer {address}"
                    ) from error
                yield now
                if every_s is None:
                    return
                threading.Event().wait(every_s)
        finally:
            runtime.run(directory.close())
            runtime.run(transport.close())


def _why(address: Address, timeout: float) -> str:
    """What stands between here and a peer that libp2p does not reach, without what libp2p says of it."""
    found = knock(address, timeout=timeout)
    obstacle = found.obstacle or Obstacle.IDENTITY  # something of libp2p answers there
    said = f" ({found.detail})" if found.detail else ""
    return f"{address} cannot be reached: {obstacle.what}{said}. {obstacle.remedy} Or ask another peer of the run."
