"""Text of served models, which nobody trains: each token is that of the model on one machine."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from lightning_swarm.core.errors import ConfigError, StageLost, Unreachable
from lightning_swarm.model.attention_cache import CacheHandle
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.inference import SessionFailed
from lightning_swarm.server.sessions import SessionHandlers
from tests.served import FAMILIES, ServedSwarm, calling, make_model

PROMPTS = torch.tensor([[0, 0, 5, 3, 7, 3], [4, 11, 2, 9, 2, 6]])
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 1.3},
    "beams": {"num_beams": 3},
    "beams, all": {"num_beams": 3, "num_return_sequences": 3},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
    "prefill in chunks": {"prefill_chunk_size": 3},
    "assisted": {},
}
ONE_PROMPT = ("prompt lookup", "assisted")
# Hugging Face refuses these itself: states of linear attention cannot be taken back.
REFUSED = {(family, mode) for family in ("mamba", "qwen3 next") for mode in ONE_PROMPT}
NUM_NEW = 9


def write(model: Any, mode: str, assistant: Any = None, **options: Any) -> Tensor:
    """Two prompts of different lengths, but where a mode takes one."""
    prompts = PROMPTS[1:] if mode in ONE_PROMPT else PROMPTS
    with torch.random.fork_rng():
        torch.manual_seed(3)
        found = model.generate(
            prompts,
            attention_mask=(prompts > 0).long(),
            max_new_tokens=NUM_NEW,
            **{"do_sample": False, **MODES[mode], **options},
            **({"assistant_model": assistant} if mode == "assisted" else {}),
        )
    assert isinstance(found, Tensor)
    return found


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., ServedSwarm]]:
    swarms: list[ServedSwarm] = []

    def make(model: Any, **options: Any) -> ServedSwarm:
        model.save_pretrained(tmp_path)
        swarms.append(ServedSwarm(tmp_path, **options))
        return swarms[-1]

    yield make
    for swarm in swarms:
        swarm.close()


CELLS = [(family, mode, stages) for family in FAMILIES for mode in MODES for stages in (1, 2, 4)]


@pytest.mark.each_value
@pytest.mark.parametrize(("family", "mode", "num_stages"), CELLS)
def test_served_text_is_that_of_one_machine(
    serve: Callable[..., ServedSwarm], family: str, mode: str, num_stages: int
) -> None:
    model = make_model(family)
    assistant = make_model(family, seed=1) if mode == "assisted" else None
    if (family, mode) in REFUSED:
        with pytest.raises((ValueError, RuntimeError)):
            write(model, mode, assistant)
        return
    swarm = serve(model, num_stages=num_stages)
    swarm.serve("a")
    for name in "bc" if num_stages > 1 else "":
        swarm.serve(name, join="a", share=0.5, has_files=name == "b")
    remote = swarm.connect()
    assert torch.equal(write(remote, mode, assistant), write(model, mode, assistant))
    assert sum(host.server.sessions.num_steps for host in swarm.hosts.values() if host.server is not None) > 3
    logits = remote(PROMPTS, attention_mask=(PROMPTS > 0).long(), use_cache=False).logits
    wanted = model(PROMPTS, attention_mask=(PROMPTS > 0).long(), use_cache=False).logits
    torch.testing.assert_close(logits, wanted, equal_nan=True)  # some models have no numbers for padding


@pytest.mark.each_value
@pytest.mark.parametrize("mode", ["greedy", "sampled", "beams", "prompt lookup", "assisted"])
@pytest.mark.parametrize("victims", ["b", "bc", "a"])
def test_no_death_of_a_server_changes_a_token(serve: Callable[..., ServedSwarm], mode: str, victims: str) -> None:
    """Two spans of stages at b and c, all of them at a, and d to e in their places."""
    model = make_model("llama")
    assistant = make_model("llama", seed=1) if mode == "assisted" else None
    swarm = serve(model, num_stages=4)
    swarm.serve("a")
    for name in "bcde":
        swarm.serve(name, join="a", share=0.5)
    remote = swarm.connect()
    killed: list[int] = []

    def kill() -> None:
        for name in victims:
            swarm.network.kill(PeerId(name))
            server = swarm.hosts[name].server
            assert server is not None
            killed.append(server.sessions.num_steps)

    found = write(remote, mode, assistant, stopping_criteria=[calling(kill, at=PROMPTS.shape[1] + 4)])
    assert len(killed) == len(victims), "the fault is due"
    assert torch.equal(found, write(model, mode, assistant))


def test_a_text_goes_on_where_its_only_server_comes_back_as_another_one(serve: Callable[..., ServedSwarm]) -> None:
    model = make_model("llama")
    swarm = serve(model, num_stages=2)
    swarm.serve("a")
    remote = swarm.connect()

    def exchange() -> None:
        swarm.serve("b", join="a")
        swarm.network.kill(PeerId("a"))

    found = write(remote, "greedy", stopping_criteria=[calling(exchange, at=PROMPTS.shape[1] + 4)])
    assert torch.equal(found, write(model, "greedy"))
    server = swarm.hosts["b"].server
    assert server is not None
    assert server.sessions.num_steps == 2 * NUM_NEW


def test_a_server_that_leaves_takes_no_new_text_and_ends_the_one_under_way(serve: Callable[..., ServedSwarm]) -> None:
    model = make_model("llama")
    swarm = serve(model, num_stages=2)
    for name in "ab":
        swarm.serve(name, join="" if name == "a" else "a")
    remote = swarm.connect()
    first = write(remote, "greedy")
    steps = {name: host.server.sessions.num_steps for name, host in swarm.hosts.items() if host.server is not None}
    busy = max(steps, key=lambda name: steps[name])
    swarm.hosts[busy].leave()
    swarm.sleep(15.0)
    for _ in range(4):
        assert torch.equal(write(remote, "greedy"), first)
    left = swarm.hosts[busy].server
    assert left is not None
    assert left.sessions.num_steps == steps[busy]


def test_a_stage_that_nobody_serves_is_named(serve: Callable[..., ServedSwarm]) -> None:
    swarm = serve(make_model("llama"), num_stages=4)
    swarm.serve("a")
    swarm.serve("b", join="a", share=0.5)
    swarm.network.kill(PeerId("a"))
    remote = swarm.connect(host="b", weights=swarm.folder)
    with pytest.raises(StageLost, match=r"\[2, 3\] of 4 have none"):
        write(remote, "greedy")


def test_a_server_checks_what_it_is_given(serve: Callable[..., ServedSwarm], tmp_path: Path) -> None:
    model = make_model("llama")
    swarm = serve(model, num_stages=2)
    a = swarm.serve("a")
    assert a.server is not None
    parts, read = a.server.parts, a.server.parts.tensor
    changed: list[str] = []

    def poisoned(name: str) -> Tensor:
        tensor = read(name).clone()
        if "mlp" in name:
            changed.append(name)
            tensor.view(-1)[0] += 1e-3
        return tensor

    a.server.parts = replace(parts, tensor=poisoned)
    with pytest.raises(StageLost, match="are not those of the model's card"):
        swarm.serve("b", join="a", has_files=False)
    assert changed
    other = tmp_path / "other"
    make_model("llama", seed=5).save_pretrained(other)
    swarm.folder = other
    with pytest.raises(ConfigError, match=r"stage 0 in .* has other weights"):
        swarm.serve("c", join="a")


def test_a_served_model_gives_no_gradients(serve: Callable[..., ServedSwarm]) -> None:
    swarm = serve(make_model("llama"), num_stages=2)
    swarm.serve("a")
    remote = swarm.connect()
    embedded = remote.get_input_embeddings()(PROMPTS).requires_grad_()
    for use_cache in (True, False):
        with pytest.raises(ConfigError, match="without gradients"):
            remote(inputs_embeds=embedded, use_cache=use_cache)


def stepping(remote: Any, cache: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = remote(tokens, past_key_values=cache, use_cache=True).logits
    return logits


def test_a_lost_message_costs_a_moment(serve: Callable[..., ServedSwarm], monkeypatch: pytest.MonkeyPatch) -> None:
    """The last server's output does not come, and all servers live."""
    model = make_model("llama")
    swarm = serve(model, num_stages=2)
    swarm.serve("a")
    remote = swarm.connect()
    lost: list[int] = []
    give = SessionHandlers._give

    async def lose(handlers: SessionHandlers, held: Any, kept: Any) -> None:
        if kept.step.number == 5 and len(lost) < 2:
            lost.append(kept.step.number)
            raise Unreachable("lost")
        await give(handlers, held, kept)

    monkeypatch.setattr(SessionHandlers, "_give", lose)
    begin_s = swarm.loop.time()
    assert torch.equal(write(remote, "greedy"), write(model, "greedy"))
    assert lost == [5, 5]
    assert swarm.loop.time() < begin_s + 10.0


def test_an_old_failure_replaces_no_server(serve: Callable[..., ServedSwarm]) -> None:
    model = make_model("llama")
    swarm = serve(model, num_stages=2)
    swarm.serve("a")
    remote = swarm.connect()
    cache, plain = DynamicCache(), DynamicCache()
    for number in range(1, 4):
        tokens = PROMPTS[:, :2] + number
        assert torch.equal(stepping(remote, cache, tokens), stepping(model, plain, tokens))
    session = cache._swarm_handle.session
    old = SessionFailed(session=session.id, number=1, attempt=0, stage_index=1, kind="refused", reason="late")
    session.take_failure(PeerId("a"), old)
    assert torch.equal(stepping(remote, cache, PROMPTS), stepping(model, plain, PROMPTS))
    assert session._attempt == 0


@pytest.mark.parametrize("moment", ["take_operations", "grow"])
def test_a_step_that_is_interrupted_leaves_no_cache_to_go_on_with(
    serve: Callable[..., ServedSwarm], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """By Ctrl-C in a notebook, say, after which the same cache is used again."""
    swarm = serve(make_model("llama"), num_stages=2)
    swarm.serve("a")
    remote = swarm.connect()
    cache = DynamicCache()
    stepping(remote, cache, PROMPTS)
    cache.crop(-2)

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(CacheHandle, moment, interrupt)
        with pytest.raises(KeyboardInterrupt):
            stepping(remote, cache, PROMPTS)
    with pytest.raises(ConfigError, match=r"of no use any more.*Begin with a new cache"):
        stepping(remote, cache, PROMPTS)
    stepping(remote, DynamicCache(), PROMPTS)


class Counting(DynamicCache):  # type: ignore[misc]  # transformers has no types here
    """Keeps something of its own."""

    def update(self, *args: Any, **kwargs: Any) -> Any:
        keys, values = super().update(*args, **kwargs)
        return keys, 2.0 * values


def test_a_cache_of_ones_own_class_is_refused(serve: Callable[..., ServedSwarm]) -> None:
    """Servers make one of the known classes, which would give other tokens."""
    swarm = serve(make_model("llama"), num_stages=2)
    swarm.serve("a")
    remote = swarm.connect()
    with pytest.raises(ConfigError, match=r"must be a `DynamicCache` that is not offloaded, got Counting"):
        stepping(remote, Counting(), PROMPTS)


def test_what_changes_a_cache_may_be_called_in_each_way(serve: Callable[..., ServedSwarm]) -> None:
    model = make_model("llama")
    swarm = serve(model, num_stages=2)
    swarm.serve("a")
    remote = swarm.connect()
    found = []
    for one in (remote, model):
        cache = DynamicCache()
        stepping(one, cache, PROMPTS)
        cache.reorder_cache(beam_idx=torch.tensor([1, 0]))
        cache.batch_repeat_interleave(repeats=2)
        stepping(one, cache, PROMPTS.repeat(2, 1))
        cache.batch_select_indices(torch.tensor([True, False, False, True]))
        found.append(stepping(one, cache, PROMPTS))
    assert torch.equal(*found)


def test_texts_that_are_over_count_no_more(serve: Callable[..., ServedSwarm]) -> None:
    """Else a client would in the end send every text to newcomers."""
    model = make_model("llama")
    swarm = serve(model, num_stages=4)
    swarm.serve("a")
    for name in "bcde":
        swarm.serve(name, join="a", share=0.5)
    remote = swarm.connect()
    killed: list[int] = []

    def kill() -> None:
        killed.append(1)
        swarm.network.kill(PeerId("a"))

    for number in range(6):
        criteria = [calling(kill, at=PROMPTS.shape[1] + 3)] if number == 2 else []
        write(remote, "greedy", stopping_criteria=criteria)
    gc.collect()
    swarm.sleep(1.0)
    assert killed
    assert swarm.client is not None
    assert set(swarm.client.routes._own.values()) == {0}
