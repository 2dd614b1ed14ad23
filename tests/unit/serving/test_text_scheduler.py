"""Which texts' steps are computed at the same time, and how prompts are cut."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers

from lightning_swarm.network import PeerId
from lightning_swarm.serving.growing_text import GrowingText
from lightning_swarm.serving.http_fields import TextFields
from lightning_swarm.serving.policy import Groups, PromptParts
from lightning_swarm.serving.sampling import Sampling, TextSampler
from lightning_swarm.serving.text_scheduler import TextScheduler

NUM_NEW = 6


class Listener:
    """Keeps the end of a text."""

    is_cancelled = False

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.tokens: list[int] = []
        self.error: BaseException | None = None

    def begin(self) -> None:
        pass

    def add(self, token: int, _: Any) -> None:
        self.tokens.append(token)

    def end(self, *, is_complete: bool, error: BaseException | None) -> None:
        self.error = error
        self.is_over.set()


class Text(GrowingText):
    """A text without a model, on these servers."""

    route: Any = ()

    def __init__(self, *servers: str, num_prompt: int = 3, is_exact: bool = False) -> None:
        asked = TextFields(temperature=0.0)
        sampler = TextSampler(
            asked, Sampling.of(asked, transformers.GenerationConfig()), prompt=[0], ends=[], seed=None
        )
        given = {"input_ids": torch.zeros(1, num_prompt, dtype=torch.long)}
        super().__init__(None, given, {}, sampler, Listener(), num_new=NUM_NEW, ends=[], is_exact=is_exact)
        self.route = tuple(map(PeerId, servers))

    def prepare(self) -> bool:
        self.is_prepared, self._criteria = True, []
        return True


class Forward:
    """Computes nothing, and notes the groups."""

    def __init__(self, on_step: Callable[[Sequence[Text]], None] = lambda _: None) -> None:
        self._on_step = on_step
        self.log: list[tuple[Text, ...]] = []  # texts of each step or part
        self.parts: list[int] = []
        self.under_way: list[Any] = []  # routes
        self.most: dict[Any, int] = {}  # route -> greatest number of groups under way

    def group(self, due: Sequence[Text], most: int) -> tuple[list[Text], bool]:
        return list(due[:most]), False

    def feed(self, text: Text, num_tokens: int) -> torch.Tensor | None:
        self.parts.append(num_tokens)
        self.log.append((text,))
        text.num_fed += num_tokens
        return None if text.num_fed < text.num_prompt else torch.tensor([0.0, 1.0])

    def step(self, texts: Sequence[Text]) -> Any:
        route = texts[0].route
        assert {text.route for text in texts} == {route}
        self.log.append(tuple(texts))
        self.under_way.append(route)
        self.most[route] = max(self.most.get(route, 0), self.under_way.count(route))
        try:
            self._on_step(texts)
        finally:
            self.under_way.remove(route)
        return torch.tensor([[0.0, 1.0]] * len(texts)), {}


def scheduler(forward: Any, **options: Any) -> TextScheduler:
    return TextScheduler(forward, **{"part_tokens": 4, "step_tokens": lambda: 100, **options})


def written(forward: Forward, texts: Sequence[Text], **options: Any) -> None:
    """Write texts on the scheduler's threads."""
    own = scheduler(forward, **options)
    for text in texts:
        own.submit(text)
    for text in texts:
        assert text.listener.is_over.wait(60.0)  # type: ignore[attr-defined]


def test_each_server_has_a_group_of_texts() -> None:
    texts = [Text("a", "b") for _ in range(8)]
    both = threading.Barrier(2, timeout=60.0)
    forward = Forward(lambda group: both.wait() if len(group) == 4 else None)  # type: ignore[arg-type,return-value]
    own = scheduler(forward, has_threads=False)
    own._due = {texts[0].route: list(texts)}
    for text in texts:
        text.prepare()
    threads = [threading.Thread(target=own.run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert forward.most == {texts[0].route: 2}
    assert [len(group) for group in forward.log[:2]] == [4, 4]
    assert all(text.listener.tokens == [1] * NUM_NEW for text in texts)  # type: ignore[attr-defined]


def test_texts_on_other_servers_are_other_groups() -> None:
    texts = [Text(*route) for route in ("aa", "aa", "bb", "aa", "bb")]
    forward = Forward()
    written(forward, texts)
    assert forward.most == {texts[0].route: 1, texts[2].route: 1}


def test_where_positions_depend_on_the_text_so_far_texts_take_turns() -> None:
    texts = [Text("a", num_prompt=9) for _ in range(3)]
    forward = Forward()
    written(forward, texts, max_texts=1)
    assert [one for (one,) in forward.log] == [text for text in texts for _ in range(3 + NUM_NEW - 1)]


def test_an_error_ends_the_texts_of_its_group() -> None:
    def fail(group: Sequence[Text]) -> None:
        if group[0].route[0] == "a":
            raise ValueError("the forward fails")

    texts = [Text("a"), Text("b"), Text("a")]
    written(Forward(fail), texts)
    assert [type(text.listener.error) for text in texts] == [ValueError, type(None), ValueError]  # type: ignore[attr-defined]


def test_whole_prompts_leave_places_for_other_prompts() -> None:
    long, may_end = [Text("a", num_prompt=99, is_exact=True) for _ in range(20)], threading.Event()

    class Slow(Forward):
        def feed(self, text: Text, num_tokens: int) -> torch.Tensor | None:
            if text.is_exact:
                assert may_end.wait(60.0)
            return super().feed(text, num_tokens)

    own, short = scheduler(Slow()), Text("b")
    for text in (*long, short):
        own.submit(text)
    try:
        assert short.listener.is_over.wait(30.0)  # type: ignore[attr-defined]
    finally:
        may_end.set()
    for text in long:
        assert text.listener.is_over.wait(60.0)  # type: ignore[attr-defined]
        assert text.listener.tokens == [1] * NUM_NEW  # type: ignore[attr-defined]


@pytest.mark.parametrize(("took_s", "wanted"), [(1.0, 32), (0.1, 256), (9.0, 16)])
def test_parts_of_prompts_take_about_as_long_as_steps(took_s: float, wanted: int) -> None:
    parts = PromptParts(256)
    for _ in range(10):
        parts.measure_step(1.0)
        parts.measure_part(parts.num_tokens(is_alone=False), took_s)
    assert parts.num_tokens(is_alone=False) == wanted
    assert parts.num_tokens(is_alone=True) == 256


@pytest.mark.parametrize("split_s", [1.0, 3.0])
def test_the_faster_number_of_groups_is_kept(split_s: float) -> None:
    groups, used = Groups(), list[bool]()
    for _ in range(1000):
        used.append(groups.splits)
        assert groups.num_groups(3) == (3 if groups.splits else 1)
        groups.measure(split_s if groups.splits else 2.0, 8, splits=groups.splits)
        groups.measure(100.0, 8, splits=not groups.splits)  # it began before the change
    assert {*used[:50]} == {True, False}
    assert {*used[50:]} == {split_s < 2.0}
    for _ in range(200):
        used.append(groups.splits)
        groups.measure(1.5, 8, splits=groups.splits)
    assert {*used[1000:]} == {True, False}, "the other number is not tried again"
