"""A run that cannot continue releases its servers, which return to their initial state for the next run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch
from msgspec import structs

from lightning_swarm.client.run_generation import TrainerGeneration
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import Busy, DeadlineExceeded, ProtocolError, SwarmError, Unreachable
from lightning_swarm.core.limits import Limits
from lightning_swarm.network import PeerId
from lightning_swarm.peer import discovery, failover
from lightning_swarm.protocol.messages.batches import GrantRequest
from lightning_swarm.protocol.messages.run import LoopRequest, Manifest, Member, ReleaseRequest
from lightning_swarm.protocol.messages.wire import encode
from lightning_swarm.protocol.rpc import GRANT, LOOP, RELEASE, VIEW
from lightning_swarm.protocol.run_state import RunState
from tests.unit.conftest import MakeSwarm
from tests.unit.coordinator.test_rollback import step
from tests.unit.swarm import Swarm, make_module, plain_steps, rows

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def release(swarm: Swarm) -> list[PeerId]:
    return swarm.run(failover.release(swarm.trainer, swarm.steps.run, 3, timeout=5.0))


def next_manifest(swarm: Swarm, *rosters: Sequence[PeerId]) -> Manifest:
    """Return the manifest of a run with the same stages on other servers, in the next generation."""
    members = [[swarm.members[name] for name in roster] for roster in rosters]
    first = members[0][0]
    return structs.replace(
        swarm.manifest,
        generation=swarm.manifest.generation + 1,
        coordinator=first.peer_id,
        voters=[first],
        stages=[
            structs.replace(stage, roster=roster) for stage, roster in zip(swarm.manifest.stages, members, strict=True)
        ],
    )


def begin_again(swarm: Swarm, *rosters: Sequence[PeerId]) -> None:
    swarm.manifest = manifest = next_manifest(swarm, *rosters)
    swarm.rosters = [list(roster) for roster in rosters]
    swarm.run(discovery.admit(swarm.trainer, manifest, swarm.stages, timeout=10.0))
    # Use a new client, as a new session has.
    asking = swarm.steps._coordinator
    swarm.steps.run = asking._run = RunState(manifest)
    swarm.steps.generation = TrainerGeneration(swarm.steps.run)
    asking._registered_term = asking._run.term


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("a", "b"), ([A], [A])),
        (("a", "b"), ([B], [A])),  # each has released the stage that it gets now
        (("a", "b", "c"), ([A], [A], [C])),
        (("a b", "b"), ([B], [A])),
    ],
)
def test_the_next_run_begins_with_any_stages_on_any_of_them(
    make_swarm: MakeSwarm, before: Sequence[str], after: Sequence[Sequence[PeerId]]
) -> None:
    swarm = make_swarm(*before)
    for seed in (7, 8):
        swarm.run(step(swarm, seed))
    assert release(swarm) == sorted({PeerId(name) for roster in before for name in roster.split()})
    begin_again(swarm, *after)
    for seed in (1, 2, 3):
        swarm.run(step(swarm, seed, seed + 10))
    expected = make_module(len(before))
    plain_steps(expected, [(rows(seed), rows(seed + 10)) for seed in (1, 2, 3)], divisors=[1.0] * 3)
    found = swarm.weights()
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=0.0, atol=1e-12)


def test_nothing_is_left_of_the_run(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    swarm.run(step(swarm, 1))
    swarm.run(asyncio.sleep(1.0))
    assert all(server.snapshots.store.held for server in swarm.servers.values())
    assert release(swarm) == [A, B]
    for server in swarm.servers.values():
        assert not server.membership.has_run
        assert not server.admission.left.is_set(), "it is not the run's end"
        assert server.snapshots.store.held == []
        assert server.steps.stages == ()
        assert server.calls.cache.used_bytes == 0
    with pytest.raises(Busy):
        swarm.run(swarm.trainer.call(A, VIEW.name, b"", timeout=1.0))
    asked = encode(GrantRequest(step=1, num_samples=2, generation=0, gradient_scale=1.0))
    with pytest.raises(SwarmError):
        swarm.run(swarm.trainer.call(A, GRANT.name, asked, timeout=1.0))
    assert release(swarm) == [A, B], "told twice"


def test_only_the_lead_releases_and_only_from_its_run(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    request = encode(ReleaseRequest(generation=0))
    with pytest.raises(ProtocolError, match="the lead trainer releases"):
        swarm.run(swarm.servers[A]._transport.call(B, RELEASE.name, request, timeout=1.0))
    with pytest.raises(ProtocolError, match="generation"):
        swarm.run(swarm.trainer.call(B, RELEASE.name, encode(ReleaseRequest(generation=1)), timeout=1.0))
    assert swarm.servers[B].membership.has_run


def test_who_is_gone_is_not_released(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b", "c")
    swarm.network.kill(B)
    swarm.network.freeze(C)
    assert release(swarm) == [A]
    swarm.network.thaw(C)


def test_a_run_shows_itself_when_all_are_in_it(make_swarm: MakeSwarm) -> None:
    """A peer that waits for the run would otherwise ask to join it, although it is about to be admitted."""
    swarm = make_swarm("a", "b", admit=False)
    swarm.run(swarm.trainer.call(A, "server.admit", encode(swarm.manifest), timeout=1.0))
    with pytest.raises(Busy):
        swarm.run(swarm.trainer.call(A, VIEW.name, b"", timeout=1.0))


# ---------------------------------------------------------------------- trainers beside the lead


def beside(swarm: Swarm, name: PeerId) -> failover.RollbackFollower:
    """Return the rollback follower of the trainer in a server's process, in the server's run."""
    server = swarm.servers[name]
    found = failover.RollbackFollower(server._transport, server.admission, limits=Limits(silence_timeout=2.0))
    found.enter_run(RunState(swarm.manifest))
    return found


def test_loops_go_on_where_all_that_answer_can(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b", "c")
    for name, known in ((A, {3, 5, 7}), (B, {3, 5})):
        beside(swarm, name).can_resume = lambda version, _, known=known: version in known  # type: ignore[misc]
    beside(swarm, C)
    swarm.network.kill(C)
    ask = failover.resumable_versions(swarm.trainer, [A, B, C], [3, 5, 6, 7], timeout=1.0)
    assert swarm.run(ask) == {3, 5}


def test_a_loop_knows_from_its_server_which_batches_count(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    swarm.run(step(swarm, 1))
    loop = beside(swarm, B)
    loop.can_resume = lambda version, counts: counts(version - 1, [0])
    assert swarm.run(failover.resumable_versions(swarm.trainer, [B], [1, 2], timeout=1.0)) == {1}
    loop.can_resume = lambda version, counts: counts(version - 1, [0, 1])
    assert swarm.run(failover.resumable_versions(swarm.trainer, [B], [1, 2], timeout=1.0)) == set()


def test_only_the_lead_asks_for_loops(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    beside(swarm, B)
    request = encode(LoopRequest(versions=[1]))
    with pytest.raises(ProtocolError, match="only the lead trainer may roll the run back"):
        swarm.run(swarm.servers[A]._transport.call(B, LOOP.name, request, timeout=1.0))


def test_the_next_run_waits_for_the_trainers(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    loops = {name: beside(swarm, name) for name in (A, B)}
    asked: list[float] = []

    async def wait(names: Sequence[PeerId]) -> None:
        await failover.await_loops(swarm.trainer, names, timeout=20.0, check=lambda: asked.append(now_s()))

    async def come_back() -> None:
        for name in (B, A):
            await asyncio.sleep(5.0)
            loops[name].waits = True

    async def both() -> float:
        begin_s = now_s()
        await asyncio.gather(wait([A, B]), come_back())
        return now_s() - begin_s

    assert 10.0 <= swarm.run(both()) < 11.0
    assert len(asked) > 2
    loops[A].waits = False
    with pytest.raises(DeadlineExceeded, match="trainer a was notified that the run rolls back"):
        swarm.run(wait([A, B]))
    swarm.network.kill(A)
    with pytest.raises(Unreachable):
        swarm.run(wait([A, B]))


def test_a_trainer_hears_where_its_run_goes_on(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    loop = beside(swarm, B)
    assert swarm.run(loop.rollback_step()) is None, "nothing is lost"
    swarm.network.kill(A)

    async def told() -> int | None:
        task = asyncio.ensure_future(loop.rollback_step())
        await asyncio.sleep(70.0)
        assert not task.done(), "the lead may say so yet"
        await failover.release(swarm.trainer, swarm.steps.run, 3, timeout=5.0)
        return await task

    assert swarm.run(told()) == 3


@pytest.mark.parametrize("how", ["over", "lead dies"])
def test_a_trainer_does_not_wait_for_a_lead_that_says_nothing_any_more(make_swarm: MakeSwarm, how: str) -> None:
    swarm = make_swarm("a", "b")
    loop = beside(swarm, B)
    swarm.network.kill(A)

    async def told() -> int | None:
        task = asyncio.ensure_future(loop.rollback_step())
        await asyncio.sleep(70.0)
        if how == "over":
            swarm.servers[B].admission.left.set()
        else:
            swarm.network.kill(swarm.trainer.peer_id)
        async with asyncio.timeout(10.0):
            return await task

    assert swarm.run(told()) is None


# ---------------------------------------------------------------------- what is lost


def state(rosters: Sequence[str], voters: str, swarm: Swarm) -> RunState:
    run = RunState(swarm.manifest)
    run.rosters = [[Member(peer_id=PeerId(name), boot_id=0) for name in roster.split()] for roster in rosters]
    run.voters = [Member(peer_id=PeerId(name), boot_id=0) for name in voters.split()]
    return run


@pytest.mark.parametrize(
    ("rosters", "voters", "alive", "lost"),
    [
        (("a", "b"), "a", "a b", ""),
        (("a", "b"), "a", "a", "no server of stage 1 answers"),
        (("a", "b c", "b"), "a", "a", "no server of stages 1, 2 answers"),
        (("a", "b c"), "a", "a c", ""),
        (("a b c", "a b c"), "a b c", "a", "only 1 of 3 voters answer"),
        (("a b c", "a b c"), "a b c", "a c", ""),
    ],
)
def test_what_a_run_cannot_go_on_without(
    make_swarm: MakeSwarm, rosters: Sequence[str], voters: str, alive: str, lost: str
) -> None:
    run = state(rosters, voters, make_swarm("a"))
    assert failover.why_lost(run, {PeerId(name) for name in alive.split()}) == lost


@pytest.mark.parametrize(("num_known_dead", "waited_s"), [(0, 20.0), (1, 0.0)])
def test_who_is_silent_is_waited_for_unless_it_is_known_to_be_dead(
    make_swarm: MakeSwarm, num_known_dead: int, waited_s: float
) -> None:
    swarm = make_swarm("a", "b")
    swarm.network.kill(B)
    begin_s = swarm.loop.time()
    lost = swarm.run(
        failover.why_cannot_continue(
            swarm.trainer, swarm.steps.run, lambda: num_known_dead, timeout=20.0, silence_s=1.0
        )
    )
    assert lost == "no server of stage 1 answers"
    assert waited_s <= swarm.loop.time() - begin_s < waited_s + 2.0


def test_one_that_comes_back_is_not_lost(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    swarm.network.freeze(B)
    swarm.loop.call_later(10.0, swarm.network.thaw, B)
    asked = failover.why_cannot_continue(swarm.trainer, swarm.steps.run, lambda: 0, timeout=60.0, silence_s=1.0)
    assert swarm.run(asked) == ""
    assert 10.0 <= swarm.loop.time() < 20.0


def test_one_that_was_started_again_is_lost(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    swarm.network.kill(B)
    swarm.servers[PeerId("b again")] = swarm._server(B, 999, swarm._optimizer)
    swarm.run(swarm.servers[PeerId("b again")].start())
    asked = failover.why_cannot_continue(swarm.trainer, swarm.steps.run, lambda: 0, timeout=5.0, silence_s=1.0)
    assert swarm.run(asked) == "no server of stage 1 answers"
