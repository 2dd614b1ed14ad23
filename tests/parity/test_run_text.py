"""Other peers have the lead of a run continue their prompts; the training is the same to the bit."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from typing_extensions import override

from lightning_swarm import SampleText
from lightning_swarm.core.errors import Busy, NotMember, ProtocolError, StageError
from lightning_swarm.network import PeerId
from lightning_swarm.peer.text_requests import MAX_WAITING
from lightning_swarm.protocol.messages.inference import RunText, RunTextRequest
from lightning_swarm.protocol.rpc import RUN_TEXT
from tests.features.test_generation import LAYERS, Letters, Quiet
from tests.parity.harness import assert_exact, run_plain, run_swarm
from tests.parity.test_generation import made
from tests.parity.test_hugging_face import loader

NUM_STEPS = 6
BEGIN = 2  # the step after which requests are sent
PIN = RunTextRequest(prompt="abc", max_new_tokens=8, follows=False, seed=None, temperature=1.0)


def changed(**changes: Any) -> RunTextRequest:
    return RunTextRequest(**{**{name: getattr(PIN, name) for name in PIN.__struct_fields__}, **changes})


REQUESTS = {
    "pin": PIN,
    "follow": changed(follows=True, max_new_tokens=40),
    "drawn": changed(seed=5, temperature=1.5),
    "long": changed(max_new_tokens=21),
    "no such letter": changed(prompt="a~"),
    "too many positions": changed(max_new_tokens=1 << 14, follows=True),
}


class Strangers(L.Callback):
    """Peers outside the run, which ask its lead for texts."""

    def __init__(self) -> None:
        self.asked: dict[str, asyncio.Task[RunText]] = {}

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        if trainer.global_step == BEGIN - 1:
            stranger = strategy.network.transport("stranger")

            async def ask() -> None:
                for name, request in REQUESTS.items():
                    work = RUN_TEXT.ask(stranger, PeerId("peer-0"), request, timeout=600.0)
                    self.asked[name] = asyncio.get_running_loop().create_task(work)

            strategy.peers[0].runtime.run(ask())


class Expected(L.Callback):
    """Continues the same texts on one machine."""

    def __init__(self) -> None:
        self.pinned: dict[int, str] = {}  # step -> text of its weights
        self.followed = torch.tensor([[1, 2, 3]])
        self.first: int | None = None  # the first step of the text that follows

    @override
    @torch.no_grad()
    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        step, model = trainer.global_step, module.model.eval()
        text = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=8, do_sample=False)
        self.pinned[step] = Letters().decode(text[0, 3:], True)
        if self.first is not None and step >= self.first and self.followed.shape[1] < 43:
            number = min(16, 43 - self.followed.shape[1])
            self.followed = model.generate(self.followed, max_new_tokens=number, do_sample=False)
        module.model.train()


def test_texts_of_strangers_change_no_bit_of_the_training() -> None:
    make = partial(made, "llama", "greedy", Quiet)
    strangers = Strangers()
    answers = SampleText([], tokenizer=Letters(), max_new_tokens=20, answers=True)
    callbacks = [strangers, answers]
    swarm = run_swarm(make, loader(), pipeline=LAYERS, max_steps=NUM_STEPS, callbacks=callbacks)
    without = run_swarm(make, loader(), pipeline=LAYERS, max_steps=NUM_STEPS)
    found: dict[str, RunText | BaseException] = {
        name: task.exception() or task.result() for name, task in strangers.asked.items()
    }
    expected = Expected()
    follow, pin, drawn = found["follow"], found["pin"], found["drawn"]
    assert isinstance(follow, RunText)
    assert isinstance(pin, RunText)
    assert isinstance(drawn, RunText)
    expected.first = follow.steps[0]
    plain = run_plain(make, loader(), max_steps=NUM_STEPS, callbacks=[expected])
    assert_exact(swarm, plain)
    assert swarm.losses == without.losses == plain.losses

    assert (pin.text, pin.num_tokens) == (expected.pinned[pin.steps[0]], 8)
    assert len(pin.steps) == 1
    assert follow.steps == [*range(follow.steps[0], follow.steps[0] + 3)]
    assert (follow.text, follow.num_tokens) == (Letters().decode(expected.followed[0, 3:], True), 40)
    assert drawn.text != expected.pinned[drawn.steps[0]]
    for name, kind, said in (
        ("long", ProtocolError, "writes at most 20 tokens of a text .* got 21. Request fewer, or follow"),
        ("no such letter", ProtocolError, "each below the model's"),
        ("too many positions", ProtocolError, "must have at most .* tokens together"),
    ):
        with pytest.raises(kind, match=said):
            strangers.asked[name].result()


def test_a_prompt_on_which_the_model_fails_ends_no_training() -> None:
    class Failing(Letters):
        @override
        def __call__(self, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
            raise ZeroDivisionError

    make, strangers = partial(made, "llama", "greedy", Quiet), Strangers()
    callbacks = [strangers, SampleText([], tokenizer=Failing(), answers=True)]
    swarm = run_swarm(make, loader(), pipeline=LAYERS, max_steps=NUM_STEPS, callbacks=callbacks)
    without = run_swarm(make, loader(), pipeline=LAYERS, max_steps=NUM_STEPS)
    assert swarm.losses == without.losses
    assert {type(task.exception()) for task in strangers.asked.values()} == {StageError}


def test_a_run_answers_only_if_it_is_asked_to_and_keeps_few_prompts() -> None:
    make, strangers = partial(made, "llama", "greedy", Quiet), Strangers()
    run_swarm(make, loader(), pipeline=LAYERS, max_steps=NUM_STEPS, callbacks=[strangers])
    for task in strangers.asked.values():
        with pytest.raises(NotMember, match=r"Give its Trainer the callback `SampleText\(answers=True\)`"):
            task.result()

    class Crowd(L.Callback):
        asked: list[asyncio.Task[RunText]]

        @override
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            strategy: Any = trainer.strategy
            if trainer.global_step == NUM_STEPS:  # no further step will answer
                stranger = strategy.network.transport("stranger")

                async def ask() -> None:
                    loop = asyncio.get_running_loop()
                    self.asked = [
                        loop.create_task(RUN_TEXT.ask(stranger, PeerId("peer-0"), PIN, timeout=600.0))
                        for _ in range(MAX_WAITING + 1)
                    ]
                    await asyncio.wait(self.asked, return_when=asyncio.FIRST_COMPLETED)

                strategy.peers[0].runtime.run(ask())

    crowd = Crowd()
    callbacks = [SampleText([], tokenizer=Letters(), answers=True), crowd]
    run_swarm(make, loader(), pipeline=LAYERS, max_steps=NUM_STEPS, callbacks=callbacks)
    errors = [task.exception() for task in crowd.asked]
    assert {type(error) for error in errors} == {Busy}
    assert sum("wait here already" in str(error) for error in errors) == 1
    assert sum("the training ended before" in str(error) for error in errors) == MAX_WAITING
