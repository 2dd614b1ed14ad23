"""The stage of layers that trainers hold: counted by batch, averaged among trainers, outside microbatches' routes."""

from __future__ import annotations

import copy

import msgspec
import pytest
import torch
from torch import Tensor

from lightning_swarm.core.errors import ConfigError, LeaseRevoked, ProtocolError
from lightning_swarm.network import PeerId
from lightning_swarm.peer import discovery
from lightning_swarm.protocol.messages.batches import Grant
from lightning_swarm.protocol.messages.calls import Origin
from lightning_swarm.protocol.messages.step import Record
from tests.held import batches_of
from tests.unit.conftest import MakeSwarm
from tests.unit.coordinator.replays import Replayer
from tests.unit.swarm import LEAD, WIDTH, Swarm, key, make_optimizer, rows

AROUND = 2
"""The stage's index, after the two stages of the pipeline."""

NAMES = ["head.0.0.weight", "head.0.0.bias"]


@pytest.fixture
def swarm(make_swarm: MakeSwarm) -> Swarm:
    """Two stages on two servers, and two trainers, of which one is also a server."""
    return make_swarm("a", "b", around="b t")


def gradients(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((WIDTH, WIDTH), (WIDTH,))
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in zip(NAMES, shapes, strict=True)
    }


def add(swarm: Swarm, trainer: str, grant: Grant, seed: int) -> None:
    steps = swarm.servers[PeerId(trainer)].steps
    stage, k = steps.stage(AROUND), key(grant.first, step=grant.step)
    found = [gradients(seed)[name] for name in stage.trainable_names]
    origin = Origin(grant.weight, LEAD)  # the lead is granted both trainers' batches here
    swarm.run(steps._compute(lambda: steps.sums.add(stage, k, found, origin)))


def granted(swarm: Swarm, *, microbatch: bool = True) -> Grant:
    """Grant a batch whose pass through the pipeline is over."""
    grant = swarm.run(swarm.steps.grant(2))
    if microbatch:
        swarm.run(swarm.through(key(grant.first, step=grant.step), rows(grant.first), weight=grant.weight))
    return grant


def close(swarm: Swarm, *grants: Grant, microbatch: bool = True) -> Record:
    for grant in grants:
        completed = [key(grant.first).receipt] if microbatch else []
        swarm.run(swarm.steps.done(grant.lease, completed))
    record = None
    while record is None:  # the lead lost a batch, and might run it again before it asks to close once more
        swarm.run(swarm.steps.close())
        record = swarm.run(swarm.steps.wait_for_record(swarm.steps.version))
    return record


def heads(swarm: Swarm) -> list[dict[str, Tensor]]:
    return [swarm.servers[name].steps.stage(AROUND).weights() for name in swarm.around]


@pytest.mark.parametrize("microbatch", [True, False])
def test_trainers_average_what_their_batches_gave(swarm: Swarm, microbatch: bool) -> None:
    reference = copy.deepcopy(swarm.module)
    optimizer = make_optimizer(reference)
    for _ in range(2):
        first, second = granted(swarm, microbatch=microbatch), granted(swarm, microbatch=microbatch)
        add(swarm, "t", first, 1)
        add(swarm, "b", second, 2)
        add(swarm, "b", second, 2)  # a repeated addition counts once
        record = close(swarm, first, second, microbatch=microbatch)
        assert batches_of(record) == [0, 2]
        assert len(swarm.counted(record)) == (2 if microbatch else 0)
        for name, parameter in reference.named_parameters():
            parameter.grad = (gradients(1)[name] + gradients(2)[name]) / 2 if name in NAMES else None
        optimizer.step()
    own, other = heads(swarm)
    for name, tensor in own.items():
        assert torch.equal(tensor, other[name])
        torch.testing.assert_close(tensor, dict(reference.named_parameters())[name].detach(), rtol=0.0, atol=1e-14)


@pytest.mark.parametrize(
    "adds",
    [[("t", 0), ("b", 0)], [("t", 0)]],
    ids=["one of them twice", "one of them never"],
)
def test_a_batch_that_no_trainer_added_is_struck_from_every_stage(swarm: Swarm, adds: list[tuple[str, int]]) -> None:
    """A user's code computed the layers around the pipeline, so only its trainer could run it again."""
    reference = copy.deepcopy(swarm.module)
    trainer = Replayer(swarm)
    grants = []
    for place in (0, 1):
        grants.append(swarm.run(swarm.steps.grant(2)))
        swarm.run(trainer.through(key(grants[place].first), rows(place)))
    for name, place in adds:
        add(swarm, name, grants[place], seed=1)
    record = close(swarm, *grants)
    assert (batches_of(record), swarm.counted(record)) == ([0], [(0, 0, 0)])
    assert (record.closing.num_samples, record.closing.total_weight) == (2, 1.0)
    assert {one.receipt for one in trainer.replayed} == {(0, 0, 0)}, "the sums held the other one, too"
    (reference["body"](rows(0)).square().sum() / 2).backward()  # type: ignore[operator]
    for name, parameter in reference.named_parameters():
        parameter.grad = gradients(1)[name] if name in NAMES else parameter.grad
    make_optimizer(reference).step()
    torch.testing.assert_close(swarm.weights(), dict(reference.state_dict()), rtol=1e-12, atol=1e-14)


def test_a_trainer_that_is_gone_takes_its_batch_along(swarm: Swarm) -> None:
    """The trainer also leaves the roster of the layers around the pipeline."""
    trainer = Replayer(swarm)
    grants = [swarm.run(swarm.steps.grant(2)) for _ in "bt"]
    for name, grant in zip("bt", grants, strict=True):
        swarm.run(trainer.through(key(grant.first), rows(grant.first)))
        add(swarm, name, grant, seed=1)
    swarm.network.kill(PeerId("t"))
    record = close(swarm, *grants)
    assert batches_of(record) == [0]
    assert [member.peer_id for member in swarm.rosters_now[AROUND]] == ["b"]


def test_a_gradient_of_another_step_is_refused(swarm: Swarm) -> None:
    grant = granted(swarm)
    add(swarm, "t", grant, 1)
    close(swarm, grant)
    before = swarm.state()
    with pytest.raises(LeaseRevoked, match="step 0 is decided"):
        add(swarm, "t", grant, 1)
    assert swarm.state() == before


def test_no_microbatch_goes_there(swarm: Swarm) -> None:
    with pytest.raises(ProtocolError, match="trainers compute stage 2 themselves"):
        swarm.run(
            swarm.send(PeerId("t"), "stage.forward", swarm.forward_request(key(), AROUND, ["", PeerId("b")], rows(1)))
        )


@pytest.mark.parametrize("flags", [(False, False, False), (True, False, True), (False, True, True)])
def test_a_manifest_that_says_otherwise_is_refused(make_swarm: MakeSwarm, flags: tuple[bool, ...]) -> None:
    swarm = make_swarm("a", "b", around="t", admit=False)
    stages = [
        msgspec.structs.replace(stage, on_trainers=flag)
        for stage, flag in zip(swarm.manifest.stages, flags, strict=True)
    ]
    manifest = msgspec.structs.replace(swarm.manifest, stages=stages)
    with pytest.raises(ConfigError):
        swarm.run(discovery.admit(swarm.trainer, manifest, swarm.stages, timeout=1.0))
