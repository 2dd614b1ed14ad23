"""A proof of a stage's state depends on every part of the state, and on the challenge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_swarm.model import state_proof
from lightning_swarm.model.fingerprint import fingerprint
from lightning_swarm.model.state_proof import StateDigests, parts_of_optimizer, parts_of_weights
from lightning_swarm.protocol.messages.state import STATE_KINDS, StateKind
from tests.unit.model.forged import forged

CHALLENGE = 7


def weights() -> dict[str, Tensor]:
    values = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(3, 5, generator=values) for name in ("a", "b", "c", "d")}
    return {**drawn, "count": torch.tensor(4), "empty": torch.empty(0, 4)}


def state() -> dict[str, Any]:
    values = torch.Generator().manual_seed(1)
    both = [{key: torch.randn(3, 5, generator=values) for key in ("exp_avg", "exp_avg_sq")} for _ in "ab"]
    return {name: {**one, "step": 3, "flags": (True, None)} for name, one in zip("ab", both, strict=True)}


def proof(
    held: Mapping[str, Tensor], optimizer: Mapping[str, Any], *kinds: StateKind, challenge: int = CHALLENGE
) -> bytes:
    digests = StateDigests([*parts_of_weights(held), *parts_of_optimizer(optimizer)])
    return digests.proof(challenge, kinds or STATE_KINDS)


def test_equal_states_have_equal_proofs_in_whatever_order_they_come() -> None:
    turned = {name: dict(reversed(one.items())) for name, one in reversed(state().items())}
    found = proof(dict(reversed(weights().items())), turned)
    assert found == proof(weights(), state())
    transposed = {**weights(), "a": weights()["a"].t().contiguous().t()}
    assert found == proof(transposed, state()), "the bytes count, and not how they lie in memory"


def changed() -> dict[str, tuple[dict[str, Tensor], dict[str, Any]]]:
    same, own = weights(), state()
    exchanged = {**own["a"], "exp_avg": own["a"]["exp_avg_sq"], "exp_avg_sq": own["a"]["exp_avg"]}
    flipped = same["b"].clone()
    flipped.view(torch.int32)[1, 2] ^= 1
    return {
        "a bit": ({**same, "b": flipped}, own),
        "two exchanged weights": ({**same, "a": same["b"], "b": same["a"]}, own),
        "a shape": ({**same, "a": same["a"].view(5, 3)}, own),
        "a dtype": ({**same, "a": same["a"].view(torch.int32)}, own),
        "a missing buffer": ({name: one for name, one in same.items() if name != "count"}, own),
        "exchanged moments": (same, {**own, "a": exchanged}),
        "a number": (same, {**own, "b": {**own["b"], "step": 4}}),
        "a number's type": (same, {**own, "b": {**own["b"], "step": 3.0}}),
        "a list for a tuple": (same, {**own, "b": {**own["b"], "flags": [True, None]}}),
        "a missing parameter": (same, {"a": own["a"]}),
    }


@pytest.mark.parametrize("what", changed())
def test_whatever_changes_changes_the_proof(what: str) -> None:
    held, optimizer = changed()[what]
    assert proof(held, optimizer) != proof(weights(), state())


def test_what_a_forger_solves_for_has_another_proof() -> None:
    held = {f"{number}": one for number, one in enumerate(torch.randn(64, 1000).unbind())}
    others = dict(zip(held, forged(list(held.values())), strict=True))
    assert not all(map(torch.equal, held.values(), others.values()))
    assert fingerprint(held.values()) == fingerprint(others.values())
    assert proof(held, {}) != proof(others, {})


def test_each_kind_is_proved_apart_and_each_challenge_anew() -> None:
    one = StateDigests([*parts_of_weights(weights()), *parts_of_optimizer(state())])
    assert one.proof(CHALLENGE, ["weights"]) == proof(weights(), {}, "weights")
    assert one.proof(CHALLENGE, ["optimizer"]) == proof({}, state(), "optimizer")
    assert one.proof(CHALLENGE + 1, STATE_KINDS) == proof(weights(), state(), challenge=CHALLENGE + 1)
    found: Sequence[bytes] = [
        one.proof(CHALLENGE, STATE_KINDS),
        one.proof(CHALLENGE + 1, STATE_KINDS),
        one.proof(CHALLENGE, STATE_KINDS, "more"),
        one.proof(CHALLENGE, ["weights"]),
        one.proof(CHALLENGE, ["optimizer"]),
    ]
    assert len(set(found)) == len(found)


def test_in_pieces_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = proof(weights(), state())
    monkeypatch.setattr(state_proof, "_PIECE_BYTES", 16)
    in_pieces = StateDigests([*parts_of_weights(weights()), *parts_of_optimizer(state())])
    number = 0
    while in_pieces.advance():
        number += 1
    assert number > 4 * 4, "of each weight four pieces"
    assert in_pieces.proof(CHALLENGE, STATE_KINDS) == expected
