"""`status`: looks at a live swarm from outside, once or again and again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Sequence
from typing import Final

from lightning_swarm.core.errors import ConfigError, PeerError, Unreachable
from lightning_swarm.core.readable import shorten
from lightning_swarm.monitor import survey
from lightning_swarm.monitor.checks import Obstacle
from lightning_swarm.monitor.doctor import knock
from lightning_swarm.monitor.survey import Sighting, SwarmReport, picture
from lightning_swarm.network.addresses import Address

_START_TIMEOUT_S: Final = 30.0


def watch(address: Address, *, every_s: float | None, timeout: float) -> Generator[SwarmReport]:
    """Reports of the swarm that a peer belongs to; see `looks`."""
    before: Sequence[Sighting] = ()
    with contextlib.closing(looks(address, every_s=every_s, timeout=timeout)) as sightings:
        for now in sightings:
            yield picture(now, before)
            before = now


def looks(address: Address, *, every_s: float | None, timeout: float) -> Generator[Sequence[Sighting]]:
    """The answers of a peer and of all that it knows, every `every_s` seconds or, if that is None, once.

    Raises a ConfigError for impossible seconds, and `Unreachable` if the peer does not answer within `timeout`.
    """
    for name, seconds in (("--watch", every_s), ("--timeout", timeout)):
        if seconds is not None and not 0 < seconds <= threading.TIMEOUT_MAX:
            raise ConfigError(
                f"`{name}` must be a number of seconds above 0, got {seconds}. Leave it out, or raise it."
            )
    from lightning_swarm.core.event_loop import ThreadRuntime
    from lightning_swarm.network import hivemind  # takes a second, and only this needs it

    with contextlib.closing(ThreadRuntime("status")) as runtime:
        transport, directory = runtime.run(hivemind.start(startup_timeout=_START_TIMEOUT_S))
        try:
            while True:
                try:
                    runtime.run(transport.connect([address.maddr]))
                except PeerError as error:
                    raise Unreachable(_explain(address, timeout)) from error
                try:
                    now = runtime.run(survey.look(transport, address.peer_id, address.maddr, timeout=timeout))
                except PeerError as error:
                    raise Unreachable(
                        f"{address} does not answer: {shorten(str(error))} Ask another peer of the run, or find out "
                        f"what is in the way: lightning-swarm doctor --peer {address}"
                    ) from error
                yield now
                if every_s is None:
                    return
                threading.Event().wait(every_s)
        finally:
            runtime.run(directory.close())
            runtime.run(transport.close())


def _explain(address: Address, timeout: float) -> str:
    """Why libp2p does not reach a peer, found out without libp2p and in plainer words."""
    dialed = knock(address, timeout=timeout)
    obstacle = dialed.obstacle or Obstacle.IDENTITY  # libp2p answers there
    detail = f" ({dialed.detail})" if dialed.detail else ""
    return f"{address} cannot be reached: {obstacle.what}{detail}. {obstacle.remedy} Or ask another peer of the run."
