"""Servers of a served model join, leave and move while texts grow: each token equals that of one machine."""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from lightning_swarm.core.errors import StageLost
from lightning_swarm.network import PeerId
from lightning_swarm.serving.host import ModelHost
from lightning_swarm.serving.placement import MovePolicy
from tests.served import LIMITS, ServedSwarm, make_model

NUM_STAGES, NUM_TEXTS, NUM_EVENTS = 4, 8, 20
SEEDS = range(max(1, int(os.environ.get("SWARM_TIMES", "1"))))
POLICY = MovePolicy(look_s=5.0)
DRAIN_S = 2.0  # seconds for which open texts hold up a server that moves
AWAY_S = POLICY.times_away * DRAIN_S
QUICK = {"moves": POLICY, "limits": replace(LIMITS, drain_timeout=DRAIN_S)}


class Text:
    """A text that grows token by token, and keeps its cache in between."""

    def __init__(self, model: Any, prompt: Tensor) -> None:
        self._model, self._cache = model, DynamicCache()
        self._new, self.tokens = prompt, prompt

    def grow(self) -> None:
        with torch.no_grad():
            logits = self._model(self._new, past_key_values=self._cache, use_cache=True).logits
        self._new = logits[:, -1:].argmax(-1)
        self.tokens = torch.cat([self.tokens, self._new], dim=1)


def texts_of(model: Any) -> list[Text]:
    prompts = torch.Generator().manual_seed(0)
    return [Text(model, torch.randint(1, 29, (1, 5), generator=prompts)) for _ in range(NUM_TEXTS)]


class Churn:
    """Servers of one stage each, of which some join and leave at random.

    The last server of a stage never leaves, so only a server's own move could leave a stage empty.
    """

    def __init__(self, swarm: ServedSwarm, rng: random.Random) -> None:
        self.swarm, self.rng = swarm, rng
        self.begun = 0
        self.moves: list[tuple[float, str, range, range]] = []

    def holders(self) -> Counter[int]:
        """Count the servers of each stage that accept its texts."""
        hosts = [host for host in self.swarm.hosts.values() if not host.is_leaving]
        return Counter(stage for host in hosts for stage in host.span)

    def comes(self) -> None:
        name = f"s{self.begun}"
        self.begun += 1
        known = next(iter(self.swarm.hosts))
        self._watch(name, self.swarm.serve(name, join=known, share=1 / NUM_STAGES, **QUICK))

    def _watch(self, name: str, host: ModelHost) -> None:
        assert host.server is not None
        move, withdraw = host.move, host.server.withdraw

        async def noted(span: range) -> None:
            before = host.span
            await move(span)
            self.moves.append((self.swarm.loop.time(), name, before, host.span))

        async def checked() -> None:
            before = host.span
            await withdraw()
            host.span = range(0)
            holders = self.holders()
            assert all(holders[stage] for stage in before), f"{name} was the last one of {before}"

        host.move, host.server.withdraw = noted, checked  # type: ignore[method-assign]

    def leaves(self) -> None:
        """Remove a server that is not alone in its stage, gracefully or by a kill."""
        holders = self.holders()
        spare = [name for name, host in self.swarm.hosts.items() if all(holders[stage] > 2 for stage in host.span)]
        if not spare:
            self.comes()
            return
        name = self.rng.choice(spare)
        if self.rng.random() < 0.5:
            self.swarm.leave(name)
        else:
            self.swarm.network.kill(PeerId(name))
            self.swarm.loop.run_until_complete(self.swarm.hosts.pop(name).close())


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[ServedSwarm]:
    make_model("llama").save_pretrained(tmp_path)
    with closing(ServedSwarm(tmp_path, num_stages=NUM_STAGES)) as made:
        yield made


def test_a_server_moves_to_a_stage_that_nobody_serves(swarm: ServedSwarm) -> None:
    model = make_model("llama")
    swarm.serve("all")
    churn = Churn(swarm, random.Random(0))
    for _ in range(NUM_STAGES + 1):
        churn.comes()
    swarm.leave("all")
    alone = next(name for name, host in swarm.hosts.items() if churn.holders()[host.span[0]] == 1)
    twice = next(host.span for host in swarm.hosts.values() if churn.holders()[host.span[0]] == 2)
    missing = swarm.hosts[alone].span
    remote = swarm.connect(host=next(name for name in swarm.hosts if name != alone), weights=swarm.folder)
    texts, plain = texts_of(remote), texts_of(model)
    for _ in range(3):
        for text in (*texts, *plain):
            text.grow()
    swarm.leave(alone)
    for text in (*texts, *plain):
        text.grow()
    assert [(before, after) for *_, before, after in churn.moves] == [(twice, missing)]
    assert [text.tokens.tolist() for text in texts] == [text.tokens.tolist() for text in plain]


@pytest.mark.parametrize("seed", SEEDS)
def test_no_move_changes_a_token(swarm: ServedSwarm, seed: int) -> None:
    """Eight texts grow while servers join, leave, die and move. No move empties a stage or is soon reversed."""
    model = make_model("llama")
    swarm.serve("all")
    churn = Churn(swarm, random.Random(seed))
    for _ in range(2 * NUM_STAGES):
        churn.comes()
    swarm.leave("all")
    remote = swarm.connect(host=next(iter(swarm.hosts)), weights=swarm.folder)
    texts, plain = texts_of(remote), texts_of(model)
    for _ in range(NUM_EVENTS):
        for text in (*texts, *plain):
            text.grow()
        (churn.comes if churn.rng.random() < 0.4 else churn.leaves)()
        swarm.sleep(churn.rng.uniform(0.0, 15.0))
    assert churn.moves
    assert [text.tokens.tolist() for text in texts] == [text.tokens.tolist() for text in plain]
    left_s: dict[tuple[str, range], float] = {}
    for at_s, name, before, after in churn.moves:
        assert at_s >= left_s.get((name, after), -math.inf) + AWAY_S, f"{name} has moved back at once"
        left_s[name, before] = at_s


@pytest.mark.parametrize("also_old", [False, True])
def test_stages_that_cannot_be_loaded_are_tried_again(
    swarm: ServedSwarm, monkeypatch: pytest.MonkeyPatch, also_old: bool
) -> None:
    """The server returns to its old stages. If these cannot be loaded either, it serves none until a load succeeds."""
    swarm.serve("all")
    churn = Churn(swarm, random.Random(0))
    for _ in range(2):
        churn.comes()
    host = swarm.hosts["s1"]
    before, wanted, load = host.span, range(3, 4), ModelHost._load
    failures: list[range] = []

    async def fails(self: ModelHost, model: Any, span: range) -> Any:
        if self is host and (also_old or span == wanted) and len(failures) < 2:
            failures.append(span)
            raise StageLost("nobody has it")
        return await load(self, model, span)

    monkeypatch.setattr(ModelHost, "_load", fails)
    move = host.move(wanted)
    if also_old:
        with pytest.raises(StageLost):
            swarm.loop.run_until_complete(move)
        assert (host.span, failures) == (range(0), [wanted, before])
        swarm.sleep(30.0)
        assert len(host.span) == 1
    else:
        swarm.loop.run_until_complete(move)
        assert (host.span, failures) == (before, [wanted])
    text, plain = texts_of(swarm.connect(host="all"))[0], texts_of(make_model("llama"))[0]
    for _ in range(3):
        text.grow()
        plain.grow()
    assert text.tokens.tolist() == plain.tokens.tolist()
