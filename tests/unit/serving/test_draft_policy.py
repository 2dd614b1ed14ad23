"""How far a text's drafts are sent ahead of their verification."""

from __future__ import annotations

import pytest

from lightning_swarm.serving.draft_policy import MAX_CHUNKS, DraftPolicy

MOST = 10


def measured(
    *,
    accepted: float,
    round_trip_s: float = 0.1,
    token_s: float = 0.002,
    draft_s: float = 0.0,
    busy_s: float = 0.0,
    num_begun: int = 1,
) -> DraftPolicy:
    """Return a policy after many equal measurements; of the drafted tokens this share is accepted."""
    policy = DraftPolicy(MOST)
    for number in range(200):
        policy.verify(accepted=(number * accepted) % 1.0 < accepted)
        policy.measure_token(token_s)
        policy.measure_draft(draft_s, 1)
        policy.measure_chunk(round_trip_s + busy_s * (number > 0), 1.0)
    for _ in range(num_begun):
        policy.begin()
    return policy


def test_as_many_tokens_are_ahead_as_are_likely_to_be_needed() -> None:
    assert [measured(accepted=share).num_ahead for share in (1.0, 0.5)] == [50, 3]
    assert measured(accepted=1.0, round_trip_s=10.0).num_ahead == MAX_CHUNKS * MOST


def test_no_more_are_ahead_than_the_client_takes_in_a_round_trip() -> None:
    assert measured(accepted=1.0, round_trip_s=0.01).num_ahead == 5
    assert measured(accepted=1.0, round_trip_s=0.099, draft_s=0.018).num_ahead == 5


def test_useless_drafts_end_but_for_a_probe() -> None:
    ahead = [measured(accepted=0.0, num_begun=number).num_ahead for number in range(1, 17)]
    assert ahead == [0, 0, 0, 0, 0, 0, 0, 1] * 2


def test_drafts_begin_again_where_a_text_becomes_foreseeable() -> None:
    policy = measured(accepted=0.0)
    for _ in range(20):
        policy.verify(accepted=True)
    assert policy.num_ahead > MOST


def test_tokens_leave_at_once_where_drafts_take_long() -> None:
    policy = measured(accepted=1.0, draft_s=0.003)
    assert not policy.is_cheap
    assert policy.chunk == -(-policy.num_ahead // MAX_CHUNKS) < MOST


def test_tokens_leave_together_where_drafts_take_no_time() -> None:
    policy = measured(accepted=1.0, draft_s=1e-5)
    assert policy.is_cheap
    assert policy.chunk == MOST


def test_chunks_are_long_enough_for_servers_that_take_long() -> None:
    """Otherwise servers would be slower than the client."""
    policy = measured(accepted=1.0, draft_s=0.002, busy_s=0.03)
    assert policy.chunk == pytest.approx(8, abs=1)


def test_nothing_is_known_at_first() -> None:
    policy = DraftPolicy(MOST)
    assert (policy.num_ahead, policy.chunk, policy.is_cheap) == (10, 2, False)
