"""What else a run can have, on machines of three kinds: tests of other files, once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_swarm.peer.peer import Peer
from lightning_swarm.testing import InMemoryStrategy, UnlikeMachine
from tests.parity.test_delayed import test_gradients_are_one_step_late, test_stages_that_hold_the_same_parameter  # noqa: F401
from tests.parity.test_moving import (  # noqa: F401
    test_from_the_worst_assignment_the_swarm_comes_near_the_best_and_stays_there,
    test_who_begins_alone_gives_stages_up_to_those_who_come,
    test_who_coordinates_hands_that_over_and_moves,
)
from tests.parity.test_offload import _offloaded, test_training_is_the_same  # noqa: F401
from tests.parity.test_resume import test_one_curve_through_swarm_plain_swarm  # noqa: F401
from tests.parity.test_rollback import test_it_goes_back_again_and_again  # noqa: F401
from tests.parity.test_sharded import test_it_goes_on_with_other_stages  # noqa: F401
from tests.parity.test_tied import plain, test_a_tied_weight_trains_as_on_one_machine, test_servers_that_join  # noqa: F401
from tests.parity.test_trainers_die import test_the_others_go_on_without_a_trainer_that_is_killed  # noqa: F401
from tests.parity.test_whole import (  # noqa: F401
    test_a_trainer_dies_or_freezes,
    test_a_trainer_joins_a_run_under_way,
    test_several_trainers,
)
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
