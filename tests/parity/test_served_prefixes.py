"""Texts that begin with a prefix that the servers keep: fewer tokens are computed, and each token stays the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from lightning_swarm.network import PeerId
from tests.served import FAMILIES, LIMITS, ServedSwarm, calling, make_model, writing

NUM_NEW = 6
OTHER_TEXTS = [{"mask": 0}, {"num_beams": 2}, {"use_cache": False}, {"prompt_lookup_num_tokens": 2}]
CUT_ANYWHERE = FAMILIES.keys() - {"gemma3", "mistral", "mamba", "qwen3 next"}  # the rest have windows or states


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., ServedSwarm]]:
    swarms: list[ServedSwarm] = []

    def make(model: Any, *, num_stages: int = 2, names: str = "abc", **options: Any) -> ServedSwarm:
        """Serve a model: all of it at the first server, and halves at the others."""
        model.save_pretrained(tmp_path)
        swarm = ServedSwarm(tmp_path, num_stages=num_stages)
        swarms.append(swarm)
        for name in names:
            half = {"join": names[0], "share": 0.5} if name != names[0] and num_stages > 1 else {}
            swarm.serve(name, **half, **options)
        return swarm

    yield make
    for swarm in swarms:
        swarm.close()


def connect(swarm: ServedSwarm, name: str = "client", **options: Any) -> Any:
    remote = swarm.connect(name=name, **options)
    remote.swarm.prefixes.texts.min_tokens = 4
    return remote


def drawn(number: int, seed: int) -> Tensor:
    return torch.randint(3, 29, (1, number), generator=torch.Generator().manual_seed(seed))


def write(model: Any, prompt: Tensor, **options: Any) -> tuple[Any, int]:
    """Write a text; return its tokens, and how many of the prompt's tokens the servers had before."""
    plain = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": NUM_NEW, "do_sample": False}
    with writing(model) as text:
        found = model.generate(prompt, **{**plain, **options})
    return found, text.num_kept_tokens


@pytest.mark.parametrize("options", OTHER_TEXTS)
def test_texts_that_tokens_alone_do_not_determine_have_no_prefix(
    serve: Callable[..., ServedSwarm], options: dict[str, Any]
) -> None:
    model = make_model("llama")
    swarm = serve(model, names="a")
    remote = connect(swarm)
    first, _ = write(remote, drawn(11, 1))
    mask = torch.ones(1, 22, dtype=torch.long)
    mask[0, 0] = "mask" not in options
    prompt, options = turn(first, 2), {name: value for name, value in options.items() if name != "mask"}
    found, num_kept = write(remote, prompt, attention_mask=mask, **options)
    assert num_kept == 0
    assert torch.equal(found, write(model, prompt, attention_mask=mask, **options)[0])


def test_texts_of_other_scopes_are_not_continued(serve: Callable[..., ServedSwarm]) -> None:
    swarm = serve(make_model("llama"), names="a")
    remote = connect(swarm)
    prompts, kept = [drawn(11, 1)], []
    for scope in ("one", "other", "one"):
        mask = torch.ones_like(prompts[-1])
        with writing(remote, scope) as text:
            prompts.append(turn(remote.generate(prompts[-1], attention_mask=mask, max_new_tokens=2), 2))
        kept.append(text.num_kept_tokens)
    assert kept == [0, 0, 12], "all but the last token of the scope's own text"


def sessions(swarm: ServedSwarm) -> list[Any]:
    return [host.server.sessions for host in swarm.hosts.values() if host.server is not None]


def prefixes(swarm: ServedSwarm) -> int:
    return sum(one.num_prefixes for one in sessions(swarm))


def turn(text: Tensor, seed: int, number: int = 5) -> Tensor:
    """Return the prompt of a chat's next turn."""
    return torch.cat([text, drawn(number, seed)], dim=1)


@pytest.mark.first_cells(1, 42, 6)
@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_turn_pays_for_its_new_tokens_alone(
    serve: Callable[..., ServedSwarm], family: str, num_stages: int
) -> None:
    model = make_model(family)
    swarm = serve(model, num_stages=num_stages)
    remote = connect(swarm)
    first, _ = write(remote, drawn(11, 1), do_sample=False)
    known = first.shape[1] - 1  # the last token was not computed
    second, num_kept = write(remote, turn(first, 2))
    assert num_kept == (0 if family == "mamba" else known)
    assert torch.equal(second, write(model, turn(first, 2))[0])
    # The answer is edited, from its fourth token on.
    edited = torch.cat([first[:, :14], (first[:, 14:15] - 2) % 26 + 3, drawn(4, 3)], dim=1)
    third, num_kept = write(remote, edited)
    assert num_kept == (14 if family in CUT_ANYWHERE else 0)
    assert torch.equal(third, write(model, edited)[0])


def test_a_continued_text_has_the_bits_of_one_session(serve: Callable[..., ServedSwarm]) -> None:
    """In float32, with the same steps; a whole prompt is one step, so it is rounded otherwise."""
    swarm = serve(make_model("llama", dtype=torch.float32), names="a")
    remote, cache = connect(swarm), DynamicCache()
    options = {"return_dict_in_generate": True, "output_logits": True}
    logits = []
    for own in ({}, {"past_key_values": cache}):
        text, _ = write(remote, drawn(40, 1), **own)
        found, num_kept = write(remote, turn(text, 2), **options, **own)
        assert num_kept == (0 if own else text.shape[1] - 1)
        logits.append(torch.stack(found.logits))
    assert torch.equal(*logits)


def test_only_new_tokens_are_computed(serve: Callable[..., ServedSwarm]) -> None:
    swarm = serve(make_model("llama"), names="a")
    remote = connect(swarm)
    first, _ = write(remote, drawn(40, 1))
    given = list[int]()
    host = swarm.hosts["a"].server
    assert host is not None
    stage_of = host.stage_of

    def counting(step: Any) -> Any:
        stage = stage_of(step)

        def compute(step: Any, parts: Any) -> Any:
            given.extend(part.tokens for part in parts)
            return stage.compute(step, parts)

        return CountingStage(stage, compute)

    class CountingStage:
        def __init__(self, stage: Any, compute: Any) -> None:
            self._stage, self.compute = stage, compute

        def __getattr__(self, name: str) -> Any:
            return getattr(self._stage, name)

    host.stage_of = counting  # type: ignore[method-assign,assignment]
    write(remote, turn(first, 2))
    assert sorted(given, reverse=True)[:3] == [6, 6, 1], "the answer's last token and five new ones, at two stages"
    assert prefixes(swarm) == 2, "the longer text replaces the shorter one that it begins with"


@pytest.mark.parametrize("when", ["between", "in the second turn"])
@pytest.mark.parametrize("victims", ["first", "last", "all"])
def test_no_death_of_a_holder_changes_a_token(serve: Callable[..., ServedSwarm], when: str, victims: str) -> None:
    model = make_model("llama")
    swarm = serve(model, names="abcde")
    remote = connect(swarm)
    first, _ = write(remote, drawn(11, 1))
    ((_, kept),) = remote.swarm.prefixes.texts._texts.items()
    holders = {"first": kept.session.route[:1], "last": kept.session.route[-1:], "all": kept.session.route}[victims]
    killed: list[PeerId] = []

    def kill() -> None:
        for name in dict.fromkeys(holders):
            swarm.network.kill(name)
            killed.append(name)

    prompt = turn(first, 2)
    options: dict[str, Any] = {}
    if when == "between":
        kill()
    else:
        options["stopping_criteria"] = [calling(kill, at=prompt.shape[1] + 3)]
    second, num_kept = write(remote, prompt, **options)
    assert killed, "the fault is due"
    assert num_kept == (0 if when == "between" else first.shape[1] - 1)
    assert torch.equal(second, write(model, prompt)[0])
    third, num_kept = write(remote, turn(second, 3))
    assert num_kept == second.shape[1] - 1
    assert torch.equal(third, write(model, turn(second, 3))[0])


def test_a_holder_that_does_not_answer_costs_seconds_alone(serve: Callable[..., ServedSwarm]) -> None:
    model = make_model("llama")
    swarm = serve(model, names="ab")
    remote = connect(swarm)
    first, _ = write(remote, drawn(11, 1))
    ((_, kept),) = remote.swarm.prefixes.texts._texts.items()
    swarm.serve("c", join="a")
    swarm.sleep(10.0)
    swarm.network.freeze(kept.session.route[-1])
    begin_s = swarm.loop.time()
    second, num_kept = write(remote, turn(first, 2))
    assert num_kept == 0
    assert torch.equal(second, write(model, turn(first, 2))[0])
    assert swarm.loop.time() < begin_s + 30.0


def test_prefixes_make_room_for_texts_and_no_token_changes(serve: Callable[..., ServedSwarm]) -> None:
    model = make_model("llama")
    size = 2 * 2 * 8 * 4 * 8  # bytes of a token's keys and values in all blocks, at least
    swarm = serve(model, names="a", limits=replace(LIMITS, session_bytes=60 * size))
    remote = connect(swarm)
    first, _ = write(remote, drawn(20, 1))
    swarm.sleep(1.0)
    before = prefixes(swarm)
    for seed in range(2, 8):
        assert write(remote, drawn(20, seed), max_new_tokens=2)[1] == 0
        assert sessions(swarm)[0]._used_bytes() <= 60 * size
    swarm.sleep(1.0)
    assert 0 < prefixes(swarm) < 6 * before, "some are dropped"
    second, num_kept = write(remote, turn(first, 2))
    assert num_kept == 0, "the oldest is dropped first"
    assert torch.equal(second, write(model, turn(first, 2))[0])
    newest = drawn(20, 7)
    assert write(remote, turn(newest, 9))[1] == 20, "the newest is dropped last"


def test_prefixes_that_nobody_uses_are_dropped(serve: Callable[..., ServedSwarm]) -> None:
    swarm = serve(make_model("llama"), names="a")
    remote = connect(swarm)
    first, _ = write(remote, drawn(11, 1))
    swarm.sleep(1800.0)
    assert write(remote, turn(first, 2))[1] > 0
    swarm.sleep(3000.0)
    assert prefixes(swarm) == 2
    swarm.sleep(1000.0)
    assert prefixes(swarm) == 0
    assert sessions(swarm)[0].free_bytes == LIMITS.session_bytes


@pytest.mark.parametrize("shares", [False, True])
def test_clients_share_prefixes_only_if_the_servers_do(serve: Callable[..., ServedSwarm], shares: bool) -> None:
    model = make_model("llama")
    swarm = serve(model, shares_prefixes=shares)
    remotes = [connect(swarm, name, seed=seed) for seed, name in enumerate(("client", "other", "third"))]
    system = drawn(600, 1)
    # All clients take the same route, or no server could have the prefix.
    last = next(name for name in "bc" if 1 in swarm.hosts[name].span)
    prompts = [turn(system, 2), turn(system, 3), turn(system[:, :400], 4)]
    for remote, prompt, num_shared in zip(remotes, prompts, (0, 512, 256), strict=True):
        remote.swarm.routes.begin = lambda rows, like=(): [PeerId("a"), PeerId(last)]
        text, num_kept = write(remote, prompt, prefill_chunk_size=256)
        assert num_kept == (num_shared if shares else 0)
        assert torch.equal(text, write(model, prompt)[0])


def test_a_client_cannot_spoil_the_prefix_of_others(serve: Callable[..., ServedSwarm]) -> None:
    """The first stage's steps are the same, but the attacker has the last stage compute otherwise."""
    model = make_model("llama")
    swarm = serve(model, shares_prefixes=True)
    last = next(name for name in "bc" if 1 in swarm.hosts[name].span)
    kept = []
    for seed, name in enumerate(("client", "attacker", "other")):
        remote = connect(swarm, name, seed=seed)
        remote.swarm.routes.begin = lambda rows, like=(): [PeerId("a"), PeerId(last)]
        if name == "attacker":
            served = remote.swarm.served
            first, second = served._modes()
            modes = [first, msgspec.structs.replace(second, anomaly=True)]
            served._modes = lambda modes=modes, **_: modes
        prompt = turn(drawn(300, 1), seed + 2)
        text, num_kept = write(remote, prompt, prefill_chunk_size=256)
        assert torch.equal(text, write(model, prompt)[0])
        kept.append(num_kept)
    assert kept == [0, 0, 256]
