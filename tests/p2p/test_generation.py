"""Servers in real processes are killed during generation: no token changes."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from typing_extensions import override

from lightning_swarm import SampleText, SwarmStrategy
from lightning_swarm.client.inference.session import InferenceSession
from lightning_swarm.core.limits import Limits
from tests.features.test_generation import Letters, Quiet
from tests.p2p.processes import COMMAND
from tests.p2p.warm import LIMITS, SERVING, Server, WarmRun, Zygote, shared_zygote, wait_until
from tests.parity.harness import QUIET, run_plain
from tests.parity.test_generation import FAMILIES, Writing, made, write
from tests.parity.test_hugging_face import loader

# Cold starts in this file: 1, the process that all servers are forked from.

NUM_SERVERS = 4
NUM_STEPS = 3
AT_TOKEN = 5
LAYERS = FAMILIES["llama"].layers


class Strategy(SwarmStrategy):
    """Strategy of a trainer that waits for all servers before it begins."""

    @property
    @override
    def num_awaited_servers(self) -> int:
        return NUM_SERVERS


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with shared_zygote(*SERVING) as made_one:
        yield made_one


@dataclass
class Killing(LogitsProcessor):  # type: ignore[misc]
    """Kills the session's servers of some stages before a token is chosen."""

    servers: list[Server]
    stages: tuple[int, ...]
    sessions: list[InferenceSession]
    killed: list[str] = field(default_factory=list)
    num_tokens: int = 0
    at_s: list[float] = field(default_factory=list)  # per token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.num_tokens += 1
        self.at_s.append(time.monotonic())
        if self.num_tokens == AT_TOKEN:
            for peer in [self.sessions[-1]._route[stage] for stage in self.stages]:
                (server,) = [one for one in self.servers if one.peer_id == peer]
                os.kill(server.pid, signal.SIGKILL)
                self.killed.append(peer)
        return scores


class Struck(Writing):
    """Generates after each step; in the second step servers are killed."""

    killing: Killing | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.written: list[tuple[int, Tensor]] = []  # (step, tokens); a step is repeated if the run rolls back

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        strikes = self.killing is not None and len(self.written) == 1
        processors = LogitsProcessorList([self.killing] if strikes else [])
        self.written.append((self.trainer.global_step, write(self.model, self.mode, logits_processor=processors)))


@pytest.mark.thorough
@pytest.mark.parametrize(("mode", "stages"), [("sampled", (0,)), ("beams", (1,))], ids=str)
def test_servers_are_killed_while_a_text_is_generated(
    zygote: Zygote, monkeypatch: pytest.MonkeyPatch, mode: str, stages: tuple[int, ...]
) -> None:
    sessions: list[InferenceSession] = []
    begin = InferenceSession._begin

    async def noted(session: InferenceSession) -> set[int]:
        sessions.append(session)
        return await begin(session)

    monkeypatch.setattr(InferenceSession, "_begin", noted)
    servers: list[Server] = []
    for _ in range(NUM_SERVERS):
        known = [one.address for one in servers[:1]]
        servers.append(zygote.begin(known, num_stages=2, model="writer", pipeline=LAYERS))
    try:
        strategy = Strategy(
            role="trainer",
            num_stages=2,
            pipeline=LAYERS,
            initial_peers=[servers[0].address],
            limits=Limits(**LIMITS),
            microbatch_size=2,
        )
        torch.manual_seed(0)
        module = made("llama", mode, Struck)
        killing = module.killing = Killing(servers, stages, sessions)
        trainer = L.Trainer(strategy=strategy, devices=1, max_steps=NUM_STEPS, max_epochs=-1, **QUIET)
        trainer.fit(module, loader())
    finally:
        for server in servers:
            if server.alive:
                os.kill(server.pid, signal.SIGKILL)
    assert len(killing.killed) == len(stages)
    torch.manual_seed(0)
    plain = run_plain(lambda: made("llama", mode, Struck), loader(), max_steps=NUM_STEPS, max_epochs=-1)
    assert isinstance(plain.module, Struck)
    texts = dict(plain.module.written)
    assert {step for step, _ in module.written} == set(range(1, NUM_STEPS + 1)) == texts.keys()
    for step, text in module.written:
        assert torch.equal(text, texts[step])
    stalls = [later - earlier for earlier, later in zip(killing.at_s, killing.at_s[1:], strict=False)]
    print(
        f"\nkilled {stages}: stalled for {max(stalls):.2f} s, of a median of {sorted(stalls)[len(stalls) // 2]:.3f} s"
    )
    wait_until(lambda: not any(one.alive for one in servers), "a server outlived its run")


class Asks(L.Callback):
    """Runs commands beside the training, which ends when they have ended."""

    def __init__(self, *commands: list[str]) -> None:
        self.commands = commands
        self.runs: list[WarmRun] = []

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if not self.runs:
            self.runs = [WarmRun(*one, program=COMMAND, modules=SERVING) for one in self.commands]
        if all(run.process.poll() is not None for run in self.runs):
            trainer.should_stop = True


@pytest.mark.thorough
def test_commands_beside_a_run_have_it_write_texts(zygote: Zygote) -> None:
    servers: list[Server] = []
    for _ in range(NUM_SERVERS):
        known = [one.address for one in servers[:1]]
        servers.append(zygote.begin(known, num_stages=2, model="writer", pipeline=LAYERS))
    words = ["generate", servers[0].address, "--prompt", "abc"]
    asks = Asks(
        [*words, "--version", "pin", "--max-new-tokens", "8"],
        [*words, "--version", "follow", "--max-new-tokens", "40"],
        words,
    )
    strategy = Strategy(
        role="trainer", num_stages=2, pipeline=LAYERS, initial_peers=[servers[0].address], limits=Limits(**LIMITS)
    )
    torch.manual_seed(0)
    answers = SampleText([], tokenizer=Letters(), max_new_tokens=8, answers=True)
    options = {**QUIET, "callbacks": [asks, answers]}
    try:
        L.Trainer(strategy=strategy, devices=1, max_steps=-1, max_epochs=-1, **options).fit(
            made("llama", "greedy", Quiet), loader()
        )
    finally:
        for run in asks.runs:
            run.end()
        for server in servers:
            if server.alive:
                os.kill(server.pid, signal.SIGKILL)
    pin, follow, without = ("".join(run.output) for run in asks.runs)
    assert re.search(r"^abc[a-z]{8}$", pin, re.MULTILINE), pin
    assert re.search(r"8 tokens, written with the weights of step \d+$", pin, re.MULTILINE), pin
    assert re.search(r"40 tokens, written with the weights of steps \d+ to \d+$", follow, re.MULTILINE), follow
    assert "is none" in without
    assert "add `--version pin`" in without
