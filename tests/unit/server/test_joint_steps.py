"""Steps of several texts that are computed together: the same numbers, or one by one."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.errors import SessionLost
from lightning_swarm.model import attention_cache
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.inference import SessionStep
from lightning_swarm.server import joint_steps
from lightning_swarm.server.compute import SessionPart
from lightning_swarm.server.executor import InlineExecutor
from lightning_swarm.server.joint_steps import JointSteps, WaitingStep
from lightning_swarm.server.session_host import SessionStage
from tests.served import FAMILIES, ServedSwarm, make_model

ALONE = {"falcon", "bloom", "deepseek", "mamba", "qwen3 next"}
"""Their blocks keep states of another kind, or attend by code of their own."""

WINDOWS = {"gemma3", "mistral"}
"""Only texts beyond the window of four tokens have a mask, and those go together."""

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [3]]


class Recorded:
    """The steps of some texts at a stage, each with its cache as it was before."""

    def __init__(self, stage: SessionStage, texts: list[list[tuple[SessionStep, SessionPart, Any]]]) -> None:
        self.stage, self.texts = stage, texts

    def waiting(self, number: int) -> list[WaitingStep[Any]]:
        """Make the step of this number of each text wait, on a copy of its cache."""
        works = []
        for text in self.texts:
            step, part, cache = text[number]
            own = copy.deepcopy(cache)
            works.append(
                WaitingStep(
                    self.stage,
                    step,
                    SessionPart(part.hidden, part.extras),
                    lambda own=own: own,
                    lambda output: serialization.flatten(output)[1],
                )
            )
        return works


def recorded(folder: Path, family: str, monkeypatch: pytest.MonkeyPatch, prompts: list[Any]) -> Recorded:
    model = make_model(family)
    model.save_pretrained(folder)
    swarm = ServedSwarm(folder, num_stages=1)
    found: list[tuple[SessionStep, SessionPart, Any]] = []
    compute = SessionStage.compute

    def record(stage: SessionStage, step: SessionStep, parts: list[SessionPart]) -> Any:
        found.extend((step, part, copy.deepcopy(part.cache)) for part in parts)
        return compute(stage, step, parts)

    texts = []
    try:
        host = swarm.serve("a")
        remote = swarm.connect(weights=folder)
        with monkeypatch.context() as patch:
            patch.setattr(SessionStage, "compute", record)
            for prompt in prompts:
                found.clear()
                remote.generate(**prompt, max_new_tokens=6, do_sample=False)
                texts.append([*found])
        assert host.server is not None
        return Recorded(host.server.stage_of(texts[0][0][0]), texts)
    finally:
        swarm.close()


def plain_prompts() -> list[dict[str, Tensor]]:
    return [{"input_ids": torch.tensor([one]), "attention_mask": torch.ones(1, len(one))} for one in PROMPTS]


def padded() -> dict[str, Tensor]:
    """Two rows, one of them with padding before it, so that their steps have masks."""
    return {
        "input_ids": torch.tensor([[0, 0, 4, 5], [6, 7, 8, 9]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]),
    }


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


def results(loop: VirtualLoop, steps: JointSteps[Any], works: list[WaitingStep[Any]]) -> list[Any]:
    async def go() -> list[Any]:
        return await asyncio.gather(*map(steps.compute, works), return_exceptions=True)

    return loop.run_until_complete(go())


def alone(loop: VirtualLoop, works: list[WaitingStep[Any]]) -> list[list[Tensor]]:
    steps = JointSteps[Any](InlineExecutor())
    return [result[0] for work in works for result in results(loop, steps, [work])]


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_share_a_forward_where_that_is_the_same(
    family: str, tmp_path: Path, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = recorded(tmp_path, family, monkeypatch, plain_prompts())
    steps = JointSteps[Any](InlineExecutor())
    for turn, number in enumerate((1, 2, 3, 4)):
        works = texts.waiting(number)
        apart = alone(loop, reference := texts.waiting(number))
        found = results(loop, steps, works)
        if family not in WINDOWS:
            assert steps.num_joint == (0 if family in ALONE else turn * len(works))
        for (result, busy_s), expected, work, other in zip(found, apart, works, reference, strict=True):
            assert busy_s > 0
            torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-12)
            own, others = (attention_cache.tensors(one.part.cache) for one in (work, other))
            torch.testing.assert_close(own, others, rtol=1e-9, atol=1e-12)
    assert (steps.num_joint > 0) == (family not in ALONE)


def test_rows_with_masks_go_with_their_like(tmp_path: Path, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A padded batch of two rows waits beside single texts: those of one kind are computed together."""
    prompts = [padded(), *plain_prompts(), padded()]
    texts = recorded(tmp_path, "llama", monkeypatch, prompts)
    steps = JointSteps[Any](InlineExecutor())
    for number in (1, 2, 3):
        works = texts.waiting(number)
        apart = alone(loop, texts.waiting(number))
        found = [result for result, _ in results(loop, steps, works)]
        torch.testing.assert_close(found, apart, rtol=1e-9, atol=1e-12)
    assert steps.num_joint == 2 * len(prompts)
    assert sorted(steps._verdicts.values()) == [True, True]


def test_prompts_are_computed_alone(tmp_path: Path, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = recorded(tmp_path, "llama", monkeypatch, plain_prompts())
    steps = JointSteps[Any](InlineExecutor())
    for _ in range(2):
        works = texts.waiting(0)
        for work, text in zip(works, texts.texts, strict=True):
            cache = attention_cache.build(text[0][0].recipe)  # type: ignore[arg-type]
            work.prepare = lambda cache=cache: cache
        assert not any(isinstance(found, BaseException) for found in results(loop, steps, works))
    assert steps.num_joint == 0
    assert not steps._verdicts


def test_texts_whose_numbers_would_differ_are_never_joined(
    tmp_path: Path, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that mixes rows, say."""
    texts = recorded(tmp_path, "llama", monkeypatch, plain_prompts())
    stage = texts.stage
    (norm, *_) = [module for module in stage.module.modules() if type(module).__name__ == "LlamaRMSNorm"]
    norm.register_forward_hook(lambda module, args, output: output + 1e-3 * args[0].mean())
    apart = [alone(loop, texts.waiting(number)) for number in (1, 2)]
    steps = JointSteps[Any](InlineExecutor())
    for number, expected in zip((1, 2), apart, strict=True):
        found = [result for result, _ in results(loop, steps, texts.waiting(number))]
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert steps.num_joint == 0
    assert list(steps._verdicts.values()) == [False]


def test_what_fails_for_one_text_fails_for_no_other(
    tmp_path: Path, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = recorded(tmp_path, "llama", monkeypatch, plain_prompts())
    steps = JointSteps[Any](InlineExecutor())
    apart = alone(loop, texts.waiting(1))
    for _ in range(2):
        works = texts.waiting(1)

        def refuse() -> Any:
            raise ValueError("no room")

        works[1].prepare = refuse
        first, second, third = results(loop, steps, works)
        assert isinstance(second, ValueError)
        torch.testing.assert_close([first[0], third[0]], [apart[0], apart[2]], rtol=1e-9, atol=1e-12)
    assert steps.num_joint == 2


def test_a_failure_of_a_shared_forward_loses_its_sessions_and_is_the_last(
    tmp_path: Path, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their caches may have the step already. Clients then have it computed anew from the steps before."""
    texts = recorded(tmp_path, "llama", monkeypatch, plain_prompts())
    steps = JointSteps[Any](InlineExecutor())
    results(loop, steps, texts.waiting(1))
    compute = joint_steps._computed

    def fails(parts: Any, work: Any) -> Any:
        if len(parts) > 1:
            raise RuntimeError("out of memory")
        return compute(parts, work)

    monkeypatch.setattr(joint_steps, "_computed", fails)
    found = results(loop, steps, texts.waiting(2))
    assert [type(one) for one in found] == [SessionLost] * 3
    found = results(loop, steps, texts.waiting(2))
    apart = alone(loop, texts.waiting(2))
    torch.testing.assert_close([result for result, _ in found], apart, rtol=0, atol=0)
    assert steps.num_joint == 0
