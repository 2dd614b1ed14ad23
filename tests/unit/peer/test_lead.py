"""If a run breaks off at its start, all notified peers learn of its end, and the next run can begin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from lightning_swarm.core.errors import PeerError
from lightning_swarm.core.event_loop import InlineRuntime
from lightning_swarm.network import Message, PeerId
from lightning_swarm.peer.config import SwarmConfig
from lightning_swarm.peer.discovery import RunDirectory
from lightning_swarm.peer.lead import Lead
from lightning_swarm.peer.manifest import RunSpec
from lightning_swarm.protocol.events import EventLog
from lightning_swarm.protocol.messages.run import Member
from lightning_swarm.protocol.rpc import LOAD
from lightning_swarm.protocol.run_state import RunState
from tests.unit.conftest import MakeSwarm
from tests.unit.peer.test_config import config
from tests.unit.swarm import Swarm

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


class Starter:
    """The lead of a swarm whose servers have announced themselves and wait for a run."""

    def __init__(self, swarm: Swarm, own: SwarmConfig | None = None) -> None:
        self.swarm = swarm
        own = own or config()
        self.runtime = InlineRuntime(swarm.loop)
        directory = RunDirectory(swarm.network.directory(swarm.trainer), swarm.trainer, config().run_id)
        self.lead = Lead(self.runtime, directory, own, EventLog(), lambda: False)
        for name, server in swarm.servers.items():
            transport = server._transport
            place = swarm.network.directory(transport)
            announcing = RunDirectory(place, transport, config().run_id)
            swarm.run(announcing.announce(swarm.members[name].boot_id, timeout=5.0))

    def begin(self, **changes: Any) -> None:
        spec = RunSpec(
            ranges=self.swarm.ranges,
            num_servers=len(self.swarm.ranges),
            num_trainers=0,
            seed=0,
            gradient_clip_norm=None,
            gradient_clip_value=None,
            first_step=0,
            selection=self.swarm.manifest.selection,
            max_steps=None,
            total_steps=None,
        )
        spec = replace(spec, **changes)
        model = self.swarm._model
        servers = self.lead.find_servers(spec, lambda: None)
        me = Member(peer_id=self.swarm.trainer.peer_id, boot_id=1)
        self.lead.begin_run(spec, model, me, model.build_stages(self.swarm.ranges), servers)


@pytest.fixture
def starter(make_swarm: MakeSwarm) -> Starter:
    """One of three servers dies when its weights arrive, after all have entered the run."""
    swarm = make_swarm("a b", "c", admit=False)
    handlers = swarm.servers[C]._transport._stream_handlers  # type: ignore[attr-defined]
    handler, *limits = handlers[LOAD.name]

    async def die(caller: PeerId, message: Message) -> Message:
        swarm.network.kill(C)
        return await handler(caller, message)

    handlers[LOAD.name] = (die, *limits)
    return Starter(swarm)


def test_servers_of_a_run_that_broke_off_as_it_began_are_dismissed(starter: Starter) -> None:
    with pytest.raises(PeerError):
        starter.begin()
    assert not starter.swarm.network.is_live(C)
    starter.lead.dismiss_others()
    assert all(starter.swarm.servers[name].admission.left.is_set() for name in (A, B))


def test_the_next_run_begins_with_those_that_are_left(starter: Starter) -> None:
    """They stay in the old run until they are released; the next run has a later generation."""
    with pytest.raises(PeerError):
        starter.begin()
    starter.lead.end_generation(0, serves=False)
    starter.begin()
    assert starter.lead.run is not None
    assert starter.lead.run.manifest.generation == 1
    assert sorted(starter.lead.run.servers) == [A, B]


def test_a_peer_that_takes_over_keeps_what_the_starter_decided(
    make_swarm: MakeSwarm, caplog: pytest.LogCaptureFixture
) -> None:
    """If its own program has other settings, it logs a warning."""
    swarm = make_swarm("a b", "c")
    settings = msgspec.structs.replace(config().settings, microbatch_size=2)
    manifest = msgspec.structs.replace(
        swarm.manifest, trainers=[swarm.trainer.peer_id], seed=5, gradient_clip_norm=0.5, max_steps=7, settings=settings
    )
    starter = Starter(swarm)
    starter.lead.take_over(RunState(manifest))
    assert "`microbatch_size` is 2, not None." in caplog.text
    assert "rebalancing" not in caplog.text
    starter.lead.end_generation(0, serves=False)
    caplog.clear()
    starter.begin(seed=7, gradient_clip_norm=3.0, max_steps=9)
    assert caplog.messages[:2] == [
        "The run keeps its `gradient_clip_norm` of 0.5; this Trainer's is 3.0.",
        "The run ends with this Trainer's `max_steps` of 9, not 7.",
    ]
    assert starter.lead.run is not None
    began = starter.lead.run.manifest
    assert (began.settings, began.seed, began.gradient_clip_norm) == (settings, 5, 0.5)
    assert began.generation == manifest.generation + 1
