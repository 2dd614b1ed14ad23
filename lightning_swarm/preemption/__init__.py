"""Word from the cloud that it is about to take this machine away, as far as it says so beforehand.

A `Cloud` asks the metadata service of one provider, which answers on every machine of that provider and nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from lightning_swarm.config import Preemption
from lightning_swarm.preemption.aws import AWS
from lightning_swarm.preemption.azure import Azure
from lightning_swarm.preemption.cloud import Cloud
from lightning_swarm.preemption.gcp import GCP
from lightning_swarm.preemption.http import Endpoint, NoAnswer
from lightning_swarm.tasks import gather

_log = logging.getLogger(__name__)

POLL_S: Final = 5.0
"""How often a cloud is asked. AWS recommends it, and the shortest notices come 30 s before the end."""


def clouds(endpoint: Endpoint | None = None) -> Mapping[str, Cloud]:
    """All there are, by the name that users write."""
    return {kind.name: kind(endpoint) for kind in (AWS, GCP, Azure)}


async def watch(
    name: Preemption,
    on_notice: Callable[[str], None],
    *,
    known: Mapping[str, Cloud] | None = None,
    every_s: float = POLL_S,
) -> None:
    """Ask again and again whether this machine will go, and say so once.

    Args:
        name: Whom to ask. With ``"auto"`` whoever answers at once is asked; nobody: this returns.
        on_notice: Called on the loop, once, with the reason.
        known: Providers by name; None: those that there are.
        every_s: Seconds between two looks.
    """
    known = clouds() if known is None else known
    cloud = await _here(list(known.values())) if name == "auto" else known[name]
    if cloud is None:
        _log.info("No cloud's metadata service answers here: nobody will say that this machine is to go.")
        return
    _log.info("Asking %s every %g s whether this machine is to go.", cloud.name, every_s)
    answered = True
    while True:
        try:
            reason = await cloud.notice()
        except NoAnswer as error:
            if answered:
                _log.warning("No word from %s whether this machine is to go; asking on. %s", cloud.name, error)
            answered = False
        else:
            answered = True
            if reason is not None:
                on_notice(reason)
                return
        await asyncio.sleep(every_s)


async def _here(among: Sequence[Cloud]) -> Cloud | None:
    async def is_here(cloud: Cloud) -> bool:
        try:
            return await cloud.is_here()
        except NoAnswer:
            return False

    found = await gather(is_here(cloud) for cloud in among)
    return next((cloud for cloud, here in zip(among, found, strict=True) if here), None)
