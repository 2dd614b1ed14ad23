"""Texts whose steps travel and are computed together have the tokens of one machine, whatever happens to servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from lightning_swarm.client.inference.forwards import Delayed
from lightning_swarm.network import Message, PeerId
from lightning_swarm.protocol.messages.inference import SessionSteps
from lightning_swarm.server.inference.handlers import SessionHandlers
from lightning_swarm.serving.blocks import ServedBlocks
from tests.served import FAMILIES, ServedSwarm, make_model

NUM_TOKENS = 6
PROMPTS = [torch.randint(1, 29, (1, 2 + n % 5), generator=torch.Generator().manual_seed(n)) for n in range(16)]

Call = tuple[Any, dict[str, Any], Any]


class Caught(Exception):
    """Holds the call of the blocks that a forward was about to make."""


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ServedSwarm]]:
    """Return a function that serves a model; forwards with a cache raise `Caught`, or go on with `output`."""
    made = []

    def call_with_cache(blocks: ServedBlocks, *call: Any) -> Any:
        output = vars(blocks).get("output")
        if output is None:
            raise Caught(*call)
        return output

    def start(model: Any, *, num_stages: int) -> ServedSwarm:
        model.save_pretrained(tmp_path)
        made.append(ServedSwarm(tmp_path, num_stages=num_stages))
        return made[-1]

    monkeypatch.setattr(ServedBlocks, "call_with_cache", call_with_cache)
    yield start
    for swarm in made:
        swarm.close()


@torch.no_grad()
def write_together(remote: Any, prompts: Sequence[Tensor], num_tokens: int = NUM_TOKENS) -> list[Tensor]:
    """Write texts greedily; each step of all texts is one call of `step_many`."""
    blocks, name = remote.swarm.served, "cache_params" if remote.config.model_type == "mamba" else "past_key_values"
    texts, caches = list(prompts), [DynamicCache(config=remote.config) for _ in prompts]
    new = texts
    for _ in range(num_tokens):
        calls: list[Call] = []
        for tokens, cache in zip(new, caches, strict=True):
            with pytest.raises(Caught) as caught:
                remote(tokens, use_cache=True, **{name: cache})
            calls.append(caught.value.args)  # type: ignore[arg-type]
        outputs, given, new = blocks.step_many(calls), new, []
        for tokens, cache, output in zip(given, caches, outputs, strict=True):
            if isinstance(output, Delayed):
                output = output.wait()  # noqa: PLW2901 - the same output, later
            if isinstance(output, Exception):
                raise output
            blocks.output = output
            new.append(remote(tokens, use_cache=True, **{name: cache}).logits[:, -1:].argmax(-1))
            del blocks.output
        texts = [torch.cat(text, 1) for text in zip(texts, new, strict=True)]
    return texts


def written(model: Any, prompts: Sequence[Tensor]) -> list[Tensor]:
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False}
    return [model.generate(prompt, attention_mask=torch.ones_like(prompt), **options) for prompt in prompts]


@pytest.mark.first_cells(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_text_has_the_tokens_of_one_machine(serve: Callable[..., ServedSwarm], family: str) -> None:
    model = make_model(family)
    swarm = serve(model, num_stages=2)
    swarm.serve("a")
    assert all(map(torch.equal, write_together(swarm.connect(), PROMPTS[:5]), written(model, PROMPTS[:5])))


@pytest.mark.parametrize("fault", ["kill", "freeze", "move"])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_server_that_fails_with_many_steps_under_way_costs_no_token(
    serve: Callable[..., ServedSwarm], monkeypatch: pytest.MonkeyPatch, fault: str, stage: int
) -> None:
    """Sixteen texts; the server of a stage fails as soon as it has accepted steps of several of them in one message."""
    model = make_model("llama")
    failed: list[list[int]] = []  # numbers of the steps that were under way
    handle = SessionHandlers._handle_steps

    async def fail(handlers: SessionHandlers, caller: PeerId, request: SessionSteps, message: Message) -> Any:
        reply = await handle(handlers, caller, request, message)
        steps, peer = request.steps, handlers._transport.peer_id
        if not failed and (steps[0].stage_index, steps[0].number) == (stage, 4):
            failed.append([step.number for step in steps])
            server = swarm.hosts[peer].server
            assert server is not None
            if fault == "move":
                await server.withdraw()
            else:
                getattr(swarm.network, fault)(peer)
        return reply

    monkeypatch.setattr(SessionHandlers, "_handle_steps", fail)
    swarm = serve(model, num_stages=2)
    swarm.serve("a")
    for name in "bcde":
        swarm.serve(name, join="a", share=0.5)
    swarm.network.kill(PeerId("a"))
    remote = swarm.connect(host="b")
    found = write_together(remote, PROMPTS)
    (numbers,) = failed
    assert len(numbers) > 1
    assert {*numbers} == {4}
    assert all(map(torch.equal, found, written(model, PROMPTS)))
