"""Servers die, fall silent or run out of memory while text is generated: no token changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from typing_extensions import override

from lightning_swarm.core.limits import Limits
from lightning_swarm.network import PeerId
from lightning_swarm.server.server import Server
from lightning_swarm.testing import InMemoryStrategy
from tests.parity.harness import assert_exact, run_plain, run_swarm
from tests.parity.test_generation import FAMILIES, MODES, Writing, made, write
from tests.parity.test_hugging_face import loader

NUM_STEPS = 5
FAMILY = "llama"


class Striking(LogitsProcessor):  # type: ignore[misc]
    """Injects a fault once, before a token is chosen."""

    def __init__(self, strike: Callable[[], None], at: int) -> None:
        self._strike, self._left = strike, at

    @override
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._left -= 1
        if self._left == 0:
            self._strike()
        return scores


class Struck(Writing):
    """Generates after each step; in the second step, servers of the session are struck."""

    stages: tuple[int, ...] = ()
    at = 5
    how = "kill"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.struck: list[str] = []

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        striking = Striking(self._strike, self.at if len(self.texts) == 1 else 0)
        self.texts.append(self._write(logits_processor=LogitsProcessorList([striking])))

    def _write(self, **options: Any) -> Tensor:
        return write(self.model, self.mode, **options)

    def _strike(self) -> None:
        strategy = self.trainer.strategy
        if not isinstance(strategy, InMemoryStrategy):
            return
        assert strategy.network is not None
        for stage in self.stages:
            (victim,) = [one for one in strategy.servers if serves(one, stage)]
            name = PeerId(victim.membership.me.peer_id)
            self.struck.append(name)
            if self.how == "forget":
                victim.sessions.discard()
            else:
                {"kill": strategy.network.kill, "freeze": strategy.network.freeze}[self.how](name)


class StruckInTrainMode(Struck):
    """Generates in train mode."""

    @override
    def _write(self, **options: Any) -> Tensor:
        return write(self.model, self.mode, training=True, **options)


def serves(server: Server, stage: int) -> bool:
    """Return whether a server has the newest session at this stage."""
    return any(key[1] == stage and held.computed > 1 for key, held in server.sessions._sessions.items())


def check(mode: str, *stages: int, how: str = "kill", at: int = 5, **options: Any) -> None:
    def make() -> Struck:
        module = made(FAMILY, mode, Struck)
        module.stages, module.how, module.at = stages, how, at
        return module

    plain = run_plain(make, loader(), max_steps=NUM_STEPS)
    swarm = run_swarm(
        make,
        loader(),
        max_steps=NUM_STEPS,
        num_stages=2,
        # Fewer servers would leave no majority of the voters, and the run would roll back.
        num_servers=4 if len(stages) == 1 else 8,
        num_gone=0 if how == "forget" else len(stages),
        pipeline=FAMILIES[FAMILY].layers,
        role="trainer",
        latency_s=0.001,
        **options,
    )
    assert isinstance(plain.module, Struck)
    assert isinstance(swarm.module, Struck)
    assert len(swarm.module.struck) == len(stages), "nobody was struck"
    for own, other in zip(swarm.module.texts, plain.module.texts, strict=True):
        assert torch.equal(own, other)
    assert_exact(swarm, plain)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("mode", ["greedy", "sampled", "beams", "prompt lookup"])
@pytest.mark.parametrize("stages", [(0,), (1,), (0, 1)], ids=str)
def test_servers_die_while_a_text_is_generated(mode: str, stages: tuple[int, ...]) -> None:
    assert mode in MODES
    check(mode, *stages)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("stages", [(0,), (1,)], ids=str)
def test_a_server_falls_silent_while_a_text_is_generated(stages: tuple[int, ...]) -> None:
    check("beams", *stages, how="freeze")


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("stages", [(0,), (1,), (0, 1)], ids=str)
def test_servers_lose_a_session(stages: tuple[int, ...]) -> None:
    """They run out of memory, or a pause is longer than the time for which they keep a session."""
    check("beams", *stages, how="forget")


@pytest.mark.thorough
@pytest.mark.parametrize("stages", [(0,), (1,)], ids=str)
def test_where_no_outputs_are_kept_the_steps_are_computed_again_from_further_back(stages: tuple[int, ...]) -> None:
    check("sampled", *stages, limits=Limits(session_bytes=8_000))


@pytest.mark.thorough
def test_a_server_dies_at_the_first_token() -> None:
    check("greedy", 1, at=2)


def test_dropout_in_train_mode_is_the_same_whoever_dies() -> None:
    """A replacement server draws the same dropout masks."""
    family = replace(FAMILIES["gpt2"], options={**FAMILIES["gpt2"].options, "resid_pdrop": 0.3})
    config = getattr(transformers, family.config)(**family.options)
    texts = []
    for stages in ((), (1,)):

        def make(stages: tuple[int, ...] = stages) -> StruckInTrainMode:
            module = StruckInTrainMode(getattr(transformers, family.kind), config, "greedy")
            module.stages = stages
            return module

        swarm = run_swarm(
            make,
            loader(),
            max_steps=NUM_STEPS,
            num_stages=2,
            num_servers=4,
            num_gone=len(stages),
            pipeline=family.layers,
            role="trainer",
            latency_s=0.001,
        )
        assert isinstance(swarm.module, StruckInTrainMode)
        assert len(swarm.module.struck) == len(stages), "nobody was struck"
        texts.append(swarm.module.texts)
    assert all(map(torch.equal, *texts))
