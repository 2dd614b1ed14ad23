"""Starts a peer's network: its event loop, transport and directory."""

from __future__ import annotations

import time
from functools import partial

from lightning_swarm.core.event_loop import Runtime, ThreadRuntime, UntilCutOff
from lightning_swarm.core.process import ProcessSettings
from lightning_swarm.network import Directory
from lightning_swarm.network.addresses import Address
from lightning_swarm.network.transport import BaseTransport
from lightning_swarm.peer.config import SwarmConfig
from lightning_swarm.peer.entry import Entry
from lightning_swarm.peer.process import talks_to_neighbours, tunes_malloc


def start_network(
    config: SwarmConfig, entry: Entry | None, *, keeps_memory: bool = True
) -> tuple[Runtime, BaseTransport, Directory]:
    """Start a real network, with its event loop in a thread of its own, for a peer that comes by `entry`.

    With `keeps_memory` the process holds on to freed memory, which saves time where each step needs as much again.
    """
    from lightning_swarm.network import hivemind  # takes a second, which tests can do without

    certify = None if entry is None else partial(entry.credentials, now_s=time.time())
    runtime: Runtime = ThreadRuntime(settings=ProcessSettings(keeps_memory=keeps_memory and not tunes_malloc()))
    try:
        transport, directory = runtime.run(
            hivemind.start(
                listen=config.listen,
                announce=[place.maddr for place in config.announce],
                identity_path=config.identity_path,
                initial_peers=[address.maddr for address in config.initial_peers],
                startup_timeout=config.limits.start_timeout,
                silence_timeout=config.limits.silence_timeout,
                receive_bytes=config.limits.receive_bytes,
                certify=certify,
                neighbours=talks_to_neighbours(),
            )
        )
    except BaseException:
        runtime.close()
        raise
    return UntilCutOff(runtime, transport.cut_off, lambda: transport.cut_off.reason), transport, directory


def visit_network(host: Address, entry: Entry | None) -> tuple[Runtime, BaseTransport, Directory]:
    """Start a network at which this peer only asks others, of which `host` is one."""
    from lightning_swarm.network import hivemind

    certify = None if entry is None else partial(entry.credentials, now_s=time.time())
    runtime = ThreadRuntime()
    try:
        transport, directory = runtime.run(
            hivemind.start(initial_peers=[host.maddr], certify=certify, neighbours=talks_to_neighbours())
        )
    except BaseException:
        runtime.close()
        raise
    return UntilCutOff(runtime, transport.cut_off, lambda: transport.cut_off.reason), transport, directory
