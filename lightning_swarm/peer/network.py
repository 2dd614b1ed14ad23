"""Starts a peer's network: event loop, transport and directory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from lightning_swarm.core.errors import InitialPeersSilent
from lightning_swarm.core.event_loop import Runtime, ThreadRuntime, UntilCutOff
from lightning_swarm.core.process import ProcessSettings
from lightning_swarm.monitor import doctor
from lightning_swarm.network import Directory
from lightning_swarm.network.addresses import Address
from lightning_swarm.network.transport import BaseTransport
from lightning_swarm.peer.config import SwarmConfig
from lightning_swarm.peer.entry import Entry
from lightning_swarm.peer.process import environment_tunes_malloc, talks_to_neighbours
from lightning_swarm.protocol.rpc import RPCS


def start_network(
    config: SwarmConfig, entry: Entry | None, *, keeps_memory: bool = True
) -> tuple[Runtime, BaseTransport, Directory]:
    """Start a real network, with its event loop in a thread of its own, for a peer that enters its run by `entry`."""
    # With `keeps_memory` the process does not return freed memory, which saves time if each step needs as much again.
    return _start(
        ThreadRuntime(settings=ProcessSettings(keeps_memory=keeps_memory and not environment_tunes_malloc())),
        config.initial_peers,
        entry,
        listen=config.listen,
        announce=[address.maddr for address in config.announce],
        identity_path=config.identity_path,
        startup_timeout=config.limits.start_timeout,
        silence_timeout=config.limits.silence_timeout,
        receive_bytes=config.limits.receive_bytes,
    )


def visit_network(host: Address, entry: Entry | None) -> tuple[Runtime, BaseTransport, Directory]:
    """Start a network for a peer that joins no run and only calls servers, such as `host`."""
    return _start(ThreadRuntime(), [host], entry)


def _start(
    runtime: Runtime, initial_peers: Sequence[Address], entry: Entry | None, **options: Any
) -> tuple[Runtime, BaseTransport, Directory]:
    from lightning_swarm.network import hivemind  # takes a second, which tests can do without

    certify = None if entry is None else partial(entry.credentials, now_s=time.time())
    neighbours, maddrs = talks_to_neighbours(), [address.maddr for address in initial_peers]
    try:
        doctor.check_answering(initial_peers)
        transport, directory = runtime.run(
            hivemind.start(initial_peers=maddrs, certify=certify, rpcs=RPCS, neighbours=neighbours, **options)
        )
    except BaseException as error:
        runtime.close()
        # Only hivemind's error has a cause, not the doctor's. The doctor got an answer before, so whatever listens at
        # the address is another peer, or no peer.
        if isinstance(error, InitialPeersSilent) and error.__cause__ is not None:
            raise InitialPeersSilent(doctor.explain(initial_peers)) from error
        raise
    # If this peer is cut off from all others, calls fail at once: the main thread must not wait for an answer.
    return UntilCutOff(runtime, transport.cut_off, lambda: transport.cut_off.reason), transport, directory
