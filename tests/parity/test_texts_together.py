"""Texts of one endpoint whose steps are computed together: each token equals that of plain Hugging Face."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_swarm.client.inference.prefixes import KeptTexts
from lightning_swarm.core.errors import Busy, StageError
from lightning_swarm.model.inference import linear_layers
from lightning_swarm.server.inference import session_compute
from lightning_swarm.server.inference.handlers import SessionHandlers
from lightning_swarm.serving.http_fields import TextFields
from lightning_swarm.serving.joint_forward import JointForward
from lightning_swarm.serving.remote_model import prefill_chunk
from lightning_swarm.serving.text_scheduler import TextScheduler
from lightning_swarm.serving.texts import ServedText
from tests.served import FAMILIES, ServedSwarm, make_model

LENGTHS = (3, 9, 5, 5, 14, 1)  # of prompts; some exceed the windows of attention
NUM_NEW = 12
ALONE = {"bloom"}  # its blocks get a row of positions for each head


class Listener:
    """Keeps a text's tokens."""

    def __init__(self, on_token: Callable[[int], None] = lambda _: None) -> None:
        self.tokens: list[int] = []
        self.is_cancelled = False
        self.num_cached = 0
        self.ends: list[BaseException | None] = []
        self._on_token = on_token

    def begin(self) -> None:
        pass

    def add(self, token: int, _: Tensor | None) -> None:
        self.tokens.append(token)
        self._on_token(len(self.tokens))

    def end(self, *, is_complete: bool, error: BaseException | None) -> None:
        self.ends.append(error)


class Texts:
    """Texts of a served model, whose steps this thread computes."""

    def __init__(self, served: ServedText, **options: Any) -> None:
        self.served, self.sizes = served, list[int]()
        blocks = served.model.swarm.served
        step_many = blocks.step_many

        def counted(steps: Sequence[Any]) -> list[Any]:
            self.sizes.append(len(steps))
            found: list[Any] = step_many(steps)
            return found

        blocks.step_many = counted
        options = {
            "part_tokens": prefill_chunk(served.model),
            "step_tokens": lambda: 4096,
            "has_threads": False,
            **options,
        }
        self.scheduler = TextScheduler(JointForward(blocks), **options)

    def begin(self, prompt: Sequence[int], listener: Listener | None = None, **fields: Any) -> Listener:
        listener, ids = listener or Listener(), torch.tensor([prompt])
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        asked = TextFields(**{"temperature": 0.0, **fields})
        self.scheduler.submit(self.served.new_text(given, asked, prompt, None, listener, num_new=NUM_NEW, choice=0))
        return listener

    def write(self, prompts: Sequence[Sequence[int]], **fields: Any) -> list[list[int]]:
        listeners = [self.begin(prompt, **fields) for prompt in prompts]
        self.scheduler.run()
        assert [one.ends for one in listeners] == [[None]] * len(prompts)
        return [one.tokens for one in listeners]


def random_prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    torch.manual_seed(7)
    return [torch.randint(3, 29, (length,)).tolist() for length in lengths]


def plain(model: Any, prompt: Sequence[int]) -> list[int]:
    ids = torch.tensor([prompt])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False)
    return [int(token) for token in found[0, len(prompt) :]]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    swarms: list[ServedSwarm] = []

    def make(model: Any, **options: Any) -> Any:
        model.save_pretrained(tmp_path)
        swarms.append(ServedSwarm(tmp_path, num_stages=2))
        swarms[-1].serve("a")
        swarms[-1].serve("b", join="a", share=0.5)
        return swarms[-1].connect(**options)

    yield make
    for swarm in swarms:
        swarm.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_those_of_one_machine(serve: Callable[..., Any], family: str) -> None:
    model = make_model(family)
    texts, prompts = Texts(ServedText("m", serve(model), None)), random_prompts()
    for _ in range(2):  # in the first texts, it is found out what may share a forward
        texts.sizes.clear()
        assert texts.write(prompts) == [plain(model, prompt) for prompt in prompts]
    joint = sum(size for size in texts.sizes if size > 1)
    assert joint == 0 if family in ALONE else joint > 0.6 * len(prompts) * (NUM_NEW - 1)
    client = texts.served.model.swarm
    client._runtime.run(asyncio.sleep(1.0))
    assert not client.served.forwards._sessions._open, "texts that have ended hold sessions"


@pytest.mark.parametrize("where", ["first", "last"])
def test_a_text_whose_servers_are_busy_delays_no_other(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """All servers of a stage refuse one text for a while; then it goes on with the others, and no token changes."""
    model = make_model("llama")
    texts, prompts = Texts(ServedText("m", serve(model), None)), random_prompts()
    client = texts.served.model.swarm
    loop, accept = client._runtime._loop, SessionHandlers._accept
    assert texts.write(prompts) == [plain(model, prompt) for prompt in prompts]
    victims: dict[str, float] = {}  # session -> end of the refusals, in seconds
    times = list[float]()  # of the refusals
    ends = dict[int, float]()

    async def refuse(own: Any, caller: Any, step: Any, *given: Any, **options: Any) -> bool:
        if loop.time() < victims.get(step.session, 0.0) and step.stage_index == (0 if where == "first" else 1):
            times.append(loop.time())
            raise Busy("no room")
        return await accept(own, caller, step, *given, **options)

    def choose(number: int) -> None:
        if number == 4 and not victims:
            sessions = client.served.forwards._sessions
            assert sessions is not None
            victims[[*sessions._open][-1]] = loop.time() + 20.0

    monkeypatch.setattr(SessionHandlers, "_accept", refuse)

    def listener(index: int) -> Listener:
        def note(number: int) -> None:
            ends[index] = loop.time()
            choose(number)

        return Listener(note)

    listeners = [texts.begin(prompt, listener(index)) for index, prompt in enumerate(prompts)]
    texts.scheduler.run()
    assert [one.tokens for one in listeners] == [plain(model, prompt) for prompt in prompts]
    assert [one.ends for one in listeners] == [[None]] * len(prompts)
    (until_s,) = victims.values()
    assert 10 < len(times) < 60  # in each half second, and not all the time
    assert sorted(end_s >= until_s for end_s in ends.values()) == [False] * (len(prompts) - 1) + [True]


def test_sampled_texts_depend_on_their_seed_alone(serve: Callable[..., Any]) -> None:
    texts, prompts = Texts(ServedText("m", serve(make_model("llama")), None)), random_prompts()
    fields = {"temperature": 1.5, "top_p": 0.95, "presence_penalty": 0.5, "seed": 5}
    alone = [texts.write([prompt], **fields)[0] for prompt in prompts]
    assert not any(size > 1 for size in texts.sizes)
    assert texts.write(prompts, **fields) == alone == texts.write(prompts, **fields)
    assert any(size > 1 for size in texts.sizes)
    assert texts.write(prompts, **{**fields, "seed": 6}) != alone


def test_exact_texts_are_computed_alone(serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    texts, prompts = Texts(ServedText("m", serve(model), None)), random_prompts()
    forwards, opened = texts.served.model.swarm.served.forwards, list[bool]()
    open_session = forwards._open

    def noted(step: Any, handle: Any) -> Any:
        opened.append(step.exact)
        return open_session(step, handle)

    monkeypatch.setattr(forwards, "_open", noted)
    listeners = [texts.begin(prompt, exact=index < 2) for index, prompt in enumerate(prompts)]
    texts.scheduler.run()
    assert [one.tokens for one in listeners] == [plain(model, prompt) for prompt in prompts]
    assert opened == [True, True, False, False, False, False]
    assert 1 < max(texts.sizes) <= 4


@pytest.mark.parametrize("exact", [False, True])
def test_layers_by_onednn_write_the_texts_of_one_machine(
    serve: Callable[..., Any], exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_texts, product = [1], linear_layers._product

    def counted(hidden: Tensor, *weights: Tensor) -> Tensor:
        num_texts.append(len(hidden))
        return product(hidden, *weights)

    monkeypatch.setattr(linear_layers, "is_onednn_faster", lambda: True)
    monkeypatch.setattr(linear_layers, "_product", counted)
    model = make_model("llama", dtype=torch.float32)
    texts, prompts = Texts(ServedText("m", serve(model), None)), random_prompts()
    for _ in range(2):
        assert texts.write(prompts, exact=exact) == [plain(model, prompt) for prompt in prompts]
    assert (max(num_texts) > 1) is not exact


def test_texts_come_and_go_amid_others(serve: Callable[..., Any]) -> None:
    """A newcomer's prompt goes in parts between the steps of others, and a cancelled text gets no further step."""
    model = make_model("llama")
    texts = Texts(ServedText("m", serve(model), None), part_tokens=4)
    *prompts, long = random_prompts((3, 9, 5, 40))
    newcomer = Listener()
    seen, had = list[tuple[int, int]](), list[int]()

    def on_token(number: int) -> None:
        if number == 3:
            texts.begin(long, newcomer)
        if number == 6:
            leaving.is_cancelled = True
            had.append(len(leaving.tokens))

    leader, leaving = Listener(on_token), Listener()
    listeners = [texts.begin(prompt, one) for prompt, one in zip(prompts, (leader, leaving, Listener()), strict=True)]
    texts.served.model.model.embed_tokens.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape))
    texts.scheduler.run()
    assert newcomer.tokens == plain(model, long)
    assert listeners[0].tokens == plain(model, prompts[0])
    assert listeners[2].tokens == plain(model, prompts[2])
    assert leaving.tokens == plain(model, prompts[1])[: len(leaving.tokens)]
    assert len(leaving.tokens) <= had[0] + 1 < NUM_NEW  # the newest step may have been drawn already
    parts = [index for index, shape in enumerate(seen) if shape == (1, 4)]
    assert len(parts) >= len(long) // 4
    steps = [index for index, shape in enumerate(seen) if shape[1] == 1 and parts[-9] < index < parts[-1]]
    assert len(steps) >= 4, "the others wait for a whole prompt"


@pytest.mark.parametrize("exact", [False, True])
def test_second_turns_begin_with_the_first_amid_others(
    serve: Callable[..., Any], exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two branches of one kept text step together with texts that its steps were computed with."""
    model = make_model("llama")
    texts, prompts = Texts(ServedText("m", serve(model), None)), random_prompts((9, 5, 14, 7))
    client = texts.served.model.swarm
    texts.write(prompts)  # finds out what may share a forward
    make_padded, sizes = session_compute.PaddedCache, list[int]()

    def noted(caches: Sequence[Any], *arguments: Any) -> Any:
        sizes.append(len(caches))
        return make_padded(caches, *arguments)

    monkeypatch.setattr(session_compute, "PaddedCache", noted)
    client.prefixes.texts = KeptTexts(min_tokens=4)
    seconds, turns = (Listener(), Listener()), list[list[int]]()

    def on_token(number: int) -> None:
        leaving.is_cancelled = number >= 4
        if number == 6:
            sizes.clear()
            turns.extend([*prompts[1], *leaving.tokens, *new] for new in ([5, 6, 7], [8]))
            for turn, listener in zip(turns, seconds, strict=True):
                texts.begin(turn, listener, exact=exact)

    leader, leaving = Listener(on_token), Listener()
    listeners = [leader, leaving, Listener(), Listener()]
    for prompt, listener in zip(prompts, listeners, strict=True):
        texts.begin(prompt, listener)
    texts.scheduler.run()
    assert 0 < len(leaving.tokens) < NUM_NEW
    known = len(prompts[1]) + len(leaving.tokens) - 1  # the last token was not computed
    assert [one.num_cached for one in seconds] == [0 if exact else known] * 2
    assert (max(sizes) > 3) is not exact, "the branches step with the three others at the servers"
    for prompt, one in zip([*prompts, *turns], [*listeners, *seconds], strict=True):
        assert one.tokens == plain(model, prompt)[: len(one.tokens)]
        assert one is leaving or len(one.tokens) == NUM_NEW


def test_endpoints_share_the_chunks_of_a_prompt(tmp_path: Path) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path)
    system, cached = random_prompts((600,))[0], list[int]()
    with closing(ServedSwarm(tmp_path, num_stages=2)) as swarm:
        swarm.serve("a", shares_prefixes=True)
        for number, name in enumerate(("one", "other")):
            texts, prompt = Texts(ServedText("m", swarm.connect(name=name), None)), [*system, 3 + number]
            listener = texts.begin(prompt)
            texts.scheduler.run()
            assert listener.tokens == plain(model, prompt)
            cached.append(listener.num_cached)
    assert cached == [0, 512]


def test_an_error_of_one_text_leaves_the_others(serve: Callable[..., Any]) -> None:
    model = make_model("llama")
    texts, prompts = Texts(ServedText("m", serve(model), None)), random_prompts()
    texts.write(prompts)
    blocks, failed = texts.served.model.swarm.served, list[int]()
    step_many = blocks.step_many

    def failing(steps: Sequence[Any]) -> list[Any]:
        found: list[Any] = step_many(steps)
        if len(steps) > 2 and not failed:
            failed.append(1)
            found[1] = StageError("a stage fails")
        return found

    blocks.step_many = failing
    listeners = [texts.begin(prompt) for prompt in prompts]
    texts.scheduler.run()
    assert failed, "the fault is due"
    errors = [one.ends[0] for one in listeners]
    assert [type(error) for error in errors if error is not None] == [StageError]
    for prompt, one, error in zip(prompts, listeners, errors, strict=True):
        assert one.tokens == plain(model, prompt)[: len(one.tokens)]
        assert len(one.tokens) == NUM_NEW or error is not None


@pytest.mark.parametrize("problem", ["positions", "head"])
def test_a_model_whose_rows_are_not_independent_is_computed_one_by_one(
    serve: Callable[..., Any], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What a row gets depends on the number of rows: in the blocks' arguments, or after the blocks."""
    model = make_model("llama")
    remote = serve(model)
    site = remote.model.rotary_emb if problem == "positions" else remote.model.norm

    def mixed(_: Any, __: Any, output: Any) -> Any:
        if problem == "head":
            return output * len(output)
        return tuple(one * len(one) for one in output)

    site.register_forward_hook(mixed)
    texts, prompts = Texts(ServedText("m", remote, None)), random_prompts()
    with caplog.at_level("INFO", logger="lightning_swarm.serving.joint_forward"):
        assert texts.write(prompts) == [plain(model, prompt) for prompt in prompts]
    assert "computed one by one from now on" in caplog.text
    assert not any(size > 1 for size in texts.sizes)
