"""Sixteen texts of all kinds on servers with little memory, which die, freeze and move: no token changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_swarm.client.inference.prefixes import KeptTexts
from lightning_swarm.network import PeerId
from lightning_swarm.server.inference.handlers import SessionHandlers
from lightning_swarm.serving.grammar import Grammar
from lightning_swarm.serving.grammar_masks import GrammarCompiler
from lightning_swarm.serving.growing_text import GrowingText
from lightning_swarm.serving.http_fields import TextFields
from lightning_swarm.serving.joint_forward import JointForward
from lightning_swarm.serving.remote_model import prefill_chunk, step_tokens
from lightning_swarm.serving.text_scheduler import TextScheduler
from lightning_swarm.serving.texts import ServedText
from tests.parity.test_texts_together import Listener
from tests.served import LIMITS, ServedSwarm, bytes_tokenizer, make_model

NUM_NEW, CANCELLED = 60, 5
# Bytes of a server. With one server left in stage 0, the caches of all texts would need three times as many.
SESSION_BYTES = {"float64": 3 << 19, "nf4": 11 << 18}
KEPT_BYTES = 1 << 20  # of the client
FIELDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 0.0, "frequency_penalty": 0.4},
    {"temperature": 1.0},  # by a grammar
]
GRAMMAR = Grammar("structured_outputs", rule=r"/[a-z]{3,9}( [0-9]{2,5}[a-z]{2}){8,20}/")


class Endpoint:
    """Writes texts of all kinds on this thread."""

    def __init__(self, served: ServedText) -> None:
        self.served = served
        blocks = served.model.swarm.served
        options: dict[str, Any] = {"part_tokens": prefill_chunk(served.model), "has_threads": False}
        self.scheduler = TextScheduler(JointForward(blocks), step_tokens=lambda: step_tokens(served.model), **options)
        compiler = GrammarCompiler(served.tokenizer, num_tokens=264, ends=[2])
        self._grammar = compiler.compile(GRAMMAR)

    def begin(self, number: int, prompt: list[int], listener: Listener, *, exact: bool = False) -> GrowingText:
        ids = torch.tensor([prompt])
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        asked = TextFields(**FIELDS[number % 4], seed=number, exact=exact)
        grammar = self._grammar if number % 4 == 3 else None
        num_new = 20 + 5 * (number % 8) if number % 4 else NUM_NEW + number
        text = self.served.new_text(
            given, asked, prompt, grammar, listener, num_new=num_new, choice=0, scope=number % 2
        )
        self.scheduler.submit(text)
        return text


def random_prompt(number: int, length: int) -> list[int]:
    drawn = torch.randint(3, 259, (length,), generator=torch.Generator().manual_seed(number))
    return [int(token) for token in drawn]


@pytest.mark.parametrize("weights", ["float64", pytest.param("nf4", marks=pytest.mark.thorough)])
def test_no_token_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str) -> None:
    quantize = {"quantize": weights, "dtype": "float32"} if weights == "nf4" else {}
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64} if quantize else {}
    model = make_model("llama", vocab_size=264, eos_token_id=2, max_position_embeddings=4096, **sizes)
    model.save_pretrained(tmp_path)
    evicted, make_room = list[int](), SessionHandlers._make_room

    def counted(handlers: SessionHandlers, **options: Any) -> int:
        before = handlers._used_bytes()
        excess = make_room(handlers, **options)
        evicted.append(before - handlers._used_bytes())
        return excess

    monkeypatch.setattr(SessionHandlers, "_make_room", counted)
    for _ in range(4):  # timing decides how the texts are spread, and so whether a server lacks memory
        with closing(ServedSwarm(tmp_path, num_stages=2)) as swarm:
            write_all(swarm, quantize, SESSION_BYTES[weights])
        if sum(evicted):
            break
    assert sum(evicted), "nothing was evicted"


def write_all(swarm: ServedSwarm, quantize: dict[str, Any], session_bytes: int) -> None:
    limits = replace(LIMITS, session_bytes=session_bytes)
    for name in "abcdefg":
        own = {"join": "a", "share": 0.5} if name != "a" else quantize
        swarm.serve(name, limits=limits, shares_prefixes=True, **own)
    swarm.network.kill(PeerId("a"))
    del swarm.hosts["a"]
    remote = swarm.connect(host="b", weights=swarm.folder)
    client = remote.swarm
    client.prefixes.texts = KeptTexts(max_bytes=KEPT_BYTES, min_tokens=16)
    endpoint = Endpoint(ServedText("m", remote, bytes_tokenizer()))
    system = random_prompt(100, 300)
    prompts = [system[: 300 * (n % 3 == 0)] + random_prompt(n, 5 + 37 * n % 150) for n in range(15)]
    prompts.append(random_prompt(99, 900))  # comes later
    firsts = [Listener() for _ in prompts[:4]]
    for number, listener in enumerate(firsts):
        endpoint.begin(number, prompts[number], listener)
    endpoint.scheduler.run()
    faults = {8: "kill", 14: "newcomer", 24: "freeze", 36: "move", 44: "thaw", 48: "leave"}
    sizes = list[int]()
    step_many = remote.swarm.served.step_many

    def sized(steps: Sequence[Any]) -> Any:
        sizes.append(len(steps))
        return step_many(steps)

    remote.swarm.served.step_many = sized
    struck = dict[str, tuple[str, int]]()  # fault -> server, and the number of texts under way there
    most = Counter[str]()

    def on_token(num_tokens: int) -> None:
        for name, host in swarm.hosts.items():
            assert host.server is not None
            most[name] = max(most[name], host.server.sessions._used_bytes())
        assert client.prefixes.texts._num_bytes <= KEPT_BYTES
        if (fault := faults.pop(num_tokens, None)) is not None:
            strike(fault)

    def strike(fault: str) -> None:
        if fault == "newcomer":
            texts.append(endpoint.begin(15, prompts[15], listeners[15]))
            return
        if fault == "thaw":
            swarm.network.thaw(PeerId(struck["freeze"][0]))
            swarm.serve("h", join=struck["move"][0], share=0.5, limits=limits, shares_prefixes=True)
            swarm.sleep(10.0)  # until the client knows it
            assert swarm.hosts["h"].span == range(1), "the stage has one other server"
            return
        stage = 1 if fault == "freeze" else 0
        at = texts[0].route[stage]
        struck[fault] = at, sum(at in text.route for text in texts)
        if fault == "move":
            swarm.loop.run_until_complete(swarm.hosts[at].move(range(1, 2)))
            assert swarm.hosts[at].span == range(1, 2)
        elif fault == "leave":
            swarm.leave(at)
        else:
            getattr(swarm.network, fault)(PeerId(at))
        if fault == "kill":
            del swarm.hosts[at]

    def cancel(num_tokens: int) -> None:
        listeners[CANCELLED].is_cancelled = num_tokens >= 10

    on_tokens = {0: on_token, CANCELLED: cancel}
    listeners = [Listener(on_tokens.get(number, lambda _: None)) for number in range(16)]
    texts = [endpoint.begin(number, prompts[number], listeners[number]) for number in range(15)]
    endpoint.scheduler.run()
    assert not faults, (faults, [listener.ends for listener in listeners])
    assert max(number for _, number in struck.values()) > 1
    assert client.routes.num_replaced >= len(struck)
    assert max(most.values()) <= session_bytes
    assert sum(one.num_cached > 0 for one in listeners) > 2
    assert max(sizes) > 1, "no texts stepped together"
    assert [one.ends for one in listeners] == [[None]] * 16
    for number, prompt in enumerate(prompts):
        alone = Listener()
        endpoint.begin(number, prompt, alone, exact=True)
        endpoint.scheduler.run()
        assert alone.num_cached == 0
        if number == CANCELLED:
            assert 10 <= len(listeners[number].tokens) < len(alone.tokens)
            del alone.tokens[len(listeners[number].tokens) :]
        assert listeners[number].tokens == alone.tokens, number
