"""Steps of several texts in one computation have the same numbers, or run separately."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.errors import SessionLost
from lightning_swarm.model.inference import attention_cache
from lightning_swarm.network import PeerId
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.inference import CacheLayer, CacheRecipe, SessionStep
from lightning_swarm.server.executor import InlineExecutor
from lightning_swarm.server.inference import batching as joint_steps
from lightning_swarm.server.inference.batching import JointSteps, WaitingStep
from lightning_swarm.server.inference.host import SessionStage
from lightning_swarm.server.inference.session_compute import SessionPart
from tests.parity.test_adapted_texts import save_adapter
from tests.served import FAMILIES, ServedSwarm, make_model

ALONE = {"bloom", "deepseek", "mamba", "qwen3 next"}
"""Their blocks keep states, or their arguments depend on the length."""

WINDOWS = {"gemma3", "mistral"}
"""Only texts beyond the window of four tokens have a mask, and these are computed together."""

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [3]]


class Recorded:
    """The recorded steps of some texts at a stage, each with its cache from before the step."""

    def __init__(self, stage: SessionStage, texts: list[list[tuple[SessionStep, SessionPart, Any]]]) -> None:
        self.stage, self.texts = stage, texts

    def waiting(self, number: int) -> list[WaitingStep[Any]]:
        """Make each text's step of this number wait, with a copy of its cache."""
        works = []
        for text in self.texts:
            step, part, cache = text[number]
            own = copy.deepcopy(cache)
            works.append(
                WaitingStep(
                    self.stage,
                    step,
                    SessionPart(part.hidden, part.extras, own, part.adapter),
                    lambda own=own: own,
                    lambda output: serialization.flatten(output)[1],
                )
            )
        return works


def recorded(
    folder: Path, family: str, monkeypatch: pytest.MonkeyPatch, prompts: list[Any], adapters: Sequence[Path | None] = ()
) -> Recorded:
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
            for number, (prompt, adapter) in enumerate(zip_longest(prompts, adapters)):
                found.clear()
                if adapter is not None:
                    swarm.connect(weights=folder, name=f"user-{number}", adapts=True)
                    assert swarm.client is not None
                    remote = swarm.client.load_adapter(adapter)
                remote.generate(**prompt, max_new_tokens=6, do_sample=False)
                texts.append([*found])
        assert host.server is not None
        return Recorded(host.server.stage_of(texts[0][0][0]), texts)
    finally:
        swarm.close()


def plain_prompts() -> list[dict[str, Tensor]]:
    return [{"input_ids": torch.tensor([one]), "attention_mask": torch.ones(1, len(one))} for one in PROMPTS]


def padded(*first: int) -> dict[str, Tensor]:
    """Return two rows, one of which is padded, so that their steps have masks."""
    rows = [[0, 0, *first], [7, 8, *first]]
    return {"input_ids": torch.tensor(rows), "attention_mask": (torch.tensor(rows) != 0).long()}


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


@pytest.mark.first_cells(4)
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
        for (result, _), expected, work, other in zip(found, apart, works, reference, strict=True):
            torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-12)
            own, others = (attention_cache.tensors(one.part.cache) for one in (work, other))
            torch.testing.assert_close(own, others, rtol=1e-9, atol=1e-12)
    assert (steps.num_joint > 0) == (family not in ALONE)
    if family != "bloom":  # only BLOOM's kinds include the length
        waits_for_nobody = [work.kind is None or steps._verdicts.refuses(work) for work in texts.waiting(4)]
        assert waits_for_nobody == 3 * [family in ALONE]


@pytest.mark.first_cells(1)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set")
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_texts_of_several_adapters_share_a_forward(
    family: str, tmp_path: Path, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each text's rows have their own adapter's result; texts without an adapter are computed separately."""
    adapters = [save_adapter(family, tmp_path / f"adapter-{seed}", seed=seed, r=2 + seed) for seed in range(2)]
    chosen = [None, None, *adapters, adapters[0]]
    prompts = [*plain_prompts(), *plain_prompts()][: len(chosen)]
    texts = recorded(tmp_path, family, monkeypatch, prompts, chosen)
    steps = JointSteps[Any](InlineExecutor())
    for turn, number in enumerate((1, 2, 3)):
        works = texts.waiting(number)
        assert [work.part.adapter is None for work in works] == [one is None for one in chosen]
        assert len({work.kind for work in works}) == 2
        apart = alone(loop, reference := texts.waiting(number))
        found = [result for result, _ in results(loop, steps, works)]
        assert steps.num_joint == turn * len(works)
        torch.testing.assert_close(found, apart, rtol=1e-9, atol=1e-12)
        for work, other in zip(works, reference, strict=True):
            own, others = (attention_cache.tensors(one.part.cache) for one in (work, other))
            torch.testing.assert_close(own, others, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
def test_an_adapter_of_layers_that_see_no_rows_is_computed_alone(
    tmp_path: Path, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some models, such as OPT in transformers before version 5, flatten a layer's input; here a block does so."""
    adapters = [save_adapter("llama", tmp_path / f"adapter-{seed}", seed=seed) for seed in range(2)]
    texts = recorded(tmp_path, "llama", monkeypatch, plain_prompts()[:2], adapters)
    for block in texts.stage.module.blocks:
        forward = block.mlp.forward
        block.mlp.forward = lambda hidden, forward=forward: forward(hidden.flatten(0, 1)).view(hidden.shape)
    steps = JointSteps[Any](InlineExecutor())
    for number in (1, 2):
        found = [result for result, _ in results(loop, steps, texts.waiting(number))]
        torch.testing.assert_close(found, alone(loop, texts.waiting(number)), rtol=1e-9, atol=1e-12)
    assert steps.num_joint == 0


def test_an_exact_text_is_computed_alone(tmp_path: Path, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the same bits as without the other texts, which are computed together."""
    texts = recorded(tmp_path, "llama", monkeypatch, [*plain_prompts(), *plain_prompts()])
    texts.texts[0] = [(replace(step, exact=True), part, cache) for step, part, cache in texts.texts[0]]
    steps = JointSteps[Any](InlineExecutor())
    for number in (1, 2, 3):
        apart = alone(loop, texts.waiting(number)[:1])
        found = results(loop, steps, texts.waiting(number))
        torch.testing.assert_close(found[0][0], apart[0], rtol=0, atol=0)
    assert steps.num_joint == 2 * 5


def test_rows_with_masks_go_with_their_like(tmp_path: Path, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A padded batch of two rows waits beside single texts, and steps of one kind are computed together."""
    prompts = [padded(4, 5), *plain_prompts(), padded(9, 10, 11)]
    texts = recorded(tmp_path, "llama", monkeypatch, prompts)
    steps = JointSteps[Any](InlineExecutor())
    for number in (1, 2, 3):
        works = texts.waiting(number)
        apart = alone(loop, texts.waiting(number))
        found = [result for result, _ in results(loop, steps, works)]
        torch.testing.assert_close(found, apart, rtol=1e-9, atol=1e-12)
    assert steps.num_joint == 2 * len(prompts)
    assert steps._verdicts._joint
    assert not steps._verdicts._refused


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
    assert not steps._verdicts._joint


def test_texts_whose_numbers_would_differ_are_never_joined(
    tmp_path: Path, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, a block mixes rows."""
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
    assert not steps._verdicts._joint
    assert len(steps._verdicts._refused) == 1


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

        works[2].prepare = refuse
        first, second, third = results(loop, steps, works)
        assert isinstance(third, ValueError)
        torch.testing.assert_close([first[0], second[0]], apart[:2], rtol=1e-9, atol=1e-12)
    assert steps.num_joint == 2


@pytest.mark.parametrize("error", [RuntimeError("a mask of another width"), torch.OutOfMemoryError("no memory")])
def test_a_shared_forward_that_fails_costs_no_text_a_token(
    tmp_path: Path, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It may have updated some caches already. Short memory does not count against later attempts."""
    texts = recorded(tmp_path, "llama", monkeypatch, plain_prompts())
    steps = JointSteps[Any](InlineExecutor())
    results(loop, steps, texts.waiting(1))
    apart = alone(loop, texts.waiting(2))
    compute = SessionStage.compute

    def fails(stage: SessionStage, step: SessionStep, parts: list[SessionPart]) -> Any:
        found = compute(stage, step, parts)
        if len(parts) > 1:
            raise error
        return found

    for number in (1, 2):
        with monkeypatch.context() as patch:
            if number == 1:
                patch.setattr(SessionStage, "compute", fails)
            found = results(loop, steps, texts.waiting(2))
        torch.testing.assert_close([result for result, _ in found], apart, rtol=1e-9, atol=1e-12)
    assert steps.num_joint == (3 if isinstance(error, torch.OutOfMemoryError) else 0)


def test_equal_texts_prove_nothing(tmp_path: Path, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal rows stay equal in a block that mixes them."""
    equal = recorded(tmp_path, "llama", monkeypatch, 2 * plain_prompts()[:1])
    steps = JointSteps[Any](InlineExecutor())
    for number in (1, 2):
        results(loop, steps, equal.waiting(number))
    assert not steps._verdicts._joint
    assert steps.num_joint == 0


def test_numbers_that_are_not_finite_prove_nothing(
    tmp_path: Path, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client's NaN must not end the joint steps of others."""
    texts = recorded(tmp_path, "llama", monkeypatch, plain_prompts())
    steps = JointSteps[Any](InlineExecutor())
    works = texts.waiting(1)
    (leaf,) = serialization.leaves(works[2].part.hidden)
    assert isinstance(leaf, Tensor)
    broken = torch.full_like(leaf, float("nan"))
    works[2].part.hidden = serialization.transform(works[2].part.hidden, lambda _: broken)
    results(loop, steps, works)
    assert not steps._verdicts._refused
    results(loop, steps, texts.waiting(2))
    assert steps.num_joint == 3


def test_a_client_whose_numbers_differ_ends_no_joint_steps_of_others(
    tmp_path: Path, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own steps are computed alone for a while, and those of all clients only if several have differed."""
    clock = [0.0]
    monkeypatch.setattr(joint_steps.time, "monotonic", lambda: clock[0])
    texts = recorded(tmp_path, "llama", monkeypatch, plain_prompts())
    unlike, alike = {"one"}, joint_steps._are_alike
    owners: list[str] = []  # of the compared steps, in turn

    def compare(together: Any, apart: Any) -> bool:
        return alike(together, apart) and owners.pop(0) not in unlike

    monkeypatch.setattr(joint_steps, "_are_alike", compare)
    steps = JointSteps[Any](InlineExecutor())

    def joint(number: int, *clients: str) -> int:
        """Compute a step of each client; return how many shared a forward."""
        before, works = steps.num_joint, texts.waiting(number)[: len(clients)]
        for work, client in zip(works, clients, strict=True):
            work.step = replace(work.step, client=PeerId(client))
        refused = {one for ends in steps._verdicts._refused.values() for one, end_s in ends.items() if clock[0] < end_s}
        owners[:] = [one for one in clients if one not in refused]
        apart = alone(loop, texts.waiting(number)[: len(clients)])
        found = [result for result, _ in results(loop, steps, works)]
        torch.testing.assert_close(found, apart, rtol=1e-9, atol=1e-12)
        return steps.num_joint - before

    assert joint(1, "one", "two", "three") == 0
    assert len(steps._verdicts._refused) == 1
    assert joint(1, "one", "two", "three") == 0  # the trial of the two others
    assert joint(2, "one", "two", "three") == 2
    unlike.clear()
    clock[0] = 601.0
    assert joint(2, "one", "two", "three") == 3  # the refusal has ended
    unlike.update({"four", "five"})
    steps = JointSteps[Any](InlineExecutor())
    assert [joint(1, "four", "five", "six"), joint(2, "six", "seven"), joint(2, "six", "seven")] == [0, 0, 0]
    clock[0] = 1202.0
    assert [joint(1, "six", "seven"), joint(2, "six", "seven")] == [0, 2]


def test_states_in_a_cache_count_against_no_other_text(
    tmp_path: Path, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client's recipe may ask for states where the model keeps keys."""
    texts = recorded(tmp_path, "llama", monkeypatch, plain_prompts())
    steps = JointSteps[Any](InlineExecutor())
    recipe = CacheRecipe(layers=[CacheLayer(kind="linear")] * 4, records_past=False)
    step, part, _ = texts.texts[2][1]
    texts.texts[2][1] = step, part, attention_cache.build(recipe)
    (of_states,) = [work for work in texts.waiting(1) if work.kind is None]
    assert of_states.step is step
    results(loop, steps, texts.waiting(1))
    assert not steps._verdicts._refused
    for _ in range(2):
        results(loop, steps, texts.waiting(2))
    assert steps.num_joint == 6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_numbers_are_alike_but_for_roundings(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    one, other = torch.randn(2, 4096, dtype=torch.float64)
    one[7] = other[7] = 300.0  # a number so large that it would hide the other differences in a relative comparison
    step = torch.finfo(dtype).eps / 2
    assert joint_steps._are_close(one.to(dtype), (one * (1 + step)).to(dtype))
    assert not joint_steps._are_close(one.to(dtype), other.to(dtype))
    assert not joint_steps._are_close(one.to(dtype), torch.full_like(one, torch.nan).to(dtype))


def test_a_job_that_fails_leaves_nobody_waiting(
    tmp_path: Path, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = recorded(tmp_path, "llama", monkeypatch, plain_prompts())
    steps = JointSteps[Any](InlineExecutor())

    def breaks(*_: Any) -> Any:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(JointSteps, "_outputs", breaks)
        assert [type(one) for one in results(loop, steps, texts.waiting(1))] == 3 * [SessionLost]
    assert not any(isinstance(one, Exception) for one in results(loop, steps, texts.waiting(1)))


def test_steps_of_others_come_between_the_blocks_of_a_long_one(
    tmp_path: Path, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = recorded(tmp_path, "llama", monkeypatch, plain_prompts()[:2])
    monkeypatch.setattr(joint_steps, "_MAX_TOKENS", 1)
    monkeypatch.setattr(joint_steps, "_LONG_TOKENS", len(PROMPTS[1]) - 1)
    ended: list[str] = []
    for block in found.stage.module.blocks:
        block.register_forward_hook(lambda module, args, output: ended.append(f"block of {args[0].shape[1]} tokens"))
    long, short = found.waiting(0)[1], found.waiting(1)[0]
    assert (long.is_long, short.is_long) == (True, False)
    wanted = alone(loop, [found.waiting(0)[1], found.waiting(1)[0]])
    ended.clear()
    together = results(loop, JointSteps[Any](InlineExecutor()), [long, short])
    assert ended[0] == f"block of {len(PROMPTS[1])} tokens"
    num_blocks = len(found.stage.module.blocks)
    assert ended[1 : 1 + num_blocks] == ["block of 1 tokens"] * num_blocks, "the short step waited for all blocks"
    for (own, _), other in zip(together, wanted, strict=True):
        assert all(map(torch.equal, own, other))


def test_a_long_step_ends_with_its_session(tmp_path: Path, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    found = recorded(tmp_path, "llama", monkeypatch, plain_prompts()[:1])
    monkeypatch.setattr(joint_steps, "_MAX_TOKENS", 1)
    monkeypatch.setattr(joint_steps, "_LONG_TOKENS", 1)
    computed: list[int] = []
    for block in found.stage.module.blocks:
        block.register_forward_hook(lambda module, args, output: computed.append(args[0].shape[1]))
    executor = InlineExecutor()
    (work,) = found.waiting(0)
    work.is_wanted = lambda: not computed
    monkeypatch.setattr(executor, "has_waiting", lambda priority: True)  # makes each block a separate job
    (ended,) = results(loop, JointSteps[Any](executor), [work])
    assert isinstance(ended, SessionLost)
    assert len(computed) == 1


def test_long_steps_are_computed_one_after_the_other(
    tmp_path: Path, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step under way holds memory, and if they took turns all of them would end late."""
    found = recorded(tmp_path, "llama", monkeypatch, plain_prompts()[:2])
    monkeypatch.setattr(joint_steps, "_MAX_TOKENS", 1)
    monkeypatch.setattr(joint_steps, "_LONG_TOKENS", 1)
    computed: list[int] = []
    for block in found.stage.module.blocks:
        block.register_forward_hook(lambda module, args, output: computed.append(args[0].shape[1]))
    works = found.waiting(0)
    wanted = alone(loop, found.waiting(0))
    computed.clear()
    together = results(loop, JointSteps[Any](InlineExecutor()), works)
    num_blocks = len(found.stage.module.blocks)
    assert computed == [len(PROMPTS[0])] * num_blocks + [len(PROMPTS[1])] * num_blocks
    for (own, _), other in zip(together, wanted, strict=True):
        assert all(map(torch.equal, own, other))
