"""Tests of further features, repeated on machines of three kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lightning_swarm.peer.peer import Peer
from lightning_swarm.testing import InMemoryStrategy, UnlikeMachine
from tests.adversaries.adversary import Adversary
from tests.faults.test_audited import SINCE, audited, events_of
from tests.faults.test_audited import train as unaudited
from tests.parity.float16 import HALF, train
from tests.parity.harness import run_swarm
from tests.parity.test_delayed import test_gradients_are_one_step_late, test_stages_that_hold_the_same_parameter  # noqa: F401
from tests.parity.test_joining import test_a_server_leaves_with_the_next_step_and_nothing_is_computed_twice  # noqa: F401
from tests.parity.test_moving import (  # noqa: F401
    test_from_the_worst_assignment_the_swarm_comes_near_the_best_and_stays_there,
    test_who_begins_alone_gives_stages_up_to_those_who_come,
    test_who_coordinates_hands_that_over_and_moves,
)
from tests.parity.test_offload import _offloaded, test_training_is_the_same  # noqa: F401
from tests.parity.test_resume import test_one_curve_through_swarm_plain_swarm  # noqa: F401
from tests.parity.test_rollback import (  # noqa: F401
    test_a_frozen_server_is_waited_for_and_then_done_without,
    test_it_goes_back_again_and_again,
)
from tests.parity.test_sharded import test_it_goes_on_with_other_stages  # noqa: F401
from tests.parity.test_tied import plain, test_a_tied_weight_trains_as_on_one_machine, test_servers_that_join  # noqa: F401
from tests.parity.test_trainers_die import test_the_others_go_on_without_a_trainer_that_is_killed  # noqa: F401
from tests.parity.test_whole import (  # noqa: F401
    test_a_trainer_dies_or_freezes,
    test_a_trainer_joins_a_run_under_way,
    test_several_trainers,
)
from tests.parity.test_whole_churn import test_each_sample_counts_once  # noqa: F401
from tests.parity.test_written_weights import test_what_a_hook_writes_after_a_step_is_what_the_next_one_computes_with  # noqa: F401
from tests.parity.trainers import ThreadStrategy

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


@pytest.fixture(autouse=True)
def _machines_of_three_kinds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every second and third peer is of another kind than the first."""
    machines = [UnlikeMachine(seed=seed) for seed in (1, 2)]
    num_peers = 0

    def watched(make: Callable[..., Peer]) -> Callable[..., Peer]:
        def watched_peer(*args: Any) -> Peer:
            nonlocal num_peers
            peer = make(*args)
            if kind := num_peers % 3:
                machines[kind - 1].watch(peer)
            num_peers += 1
            return peer

        return watched_peer

    for strategy in (InMemoryStrategy, ThreadStrategy):
        monkeypatch.setattr(strategy, "_peer", watched(strategy._peer))
    yield
    assert any(machine.num_moved for machine in machines) or num_peers == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_audits_convict_liars_and_no_unlike_machine(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"num_stages": 2, "dtype": dtype, "deterministic": False}
    liar = Adversary("peer-4", "sign_flip", since=SINCE)
    found, strategy = audited(8, liar, **settings)
    assert events_of(strategy, "convicted") == {"peer-4"}
    honest, strategy = audited(8, **settings)
    assert not events_of(strategy, "convicted") | events_of(strategy, "gone")
    monkeypatch.undo()  # machines of one kind from here on
    expected, _ = unaudited(8, **settings)
    for weights in (found, honest):
        torch.testing.assert_close(weights, expected, rtol=0.0, atol=1e-12 if dtype == torch.float64 else 1e-5)


def test_scales_of_16_bit_gradients_are_the_same_everywhere() -> None:
    found = train(run_swarm, max_steps=30, microbatch_size=HALF, num_stages=1, num_servers=3)
    outcomes = [record.outcome for record in found.run.records]
    assert outcomes.count("skip") == found.num_skipped > 2
    assert all(record.portable for record in found.run.records)
    assert not [one for peer in found.run.strategy.peers for one in peer.events.newest if one.kind == "gone"]
