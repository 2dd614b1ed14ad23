"""Adapters that a server receives: invalid adapters are refused, and change nothing."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from lightning_swarm.core.errors import AdapterMissing, InputMissing, SwarmError, TicketGone
from lightning_swarm.model.inference.adapter_digest import adapter_digest
from lightning_swarm.network import Message, PeerId, Transport
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.calls import ComputeMode
from lightning_swarm.protocol.messages.tuning import AdapterUpload, Lora, TuneBackward, TuneFetch, TuneForward
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.rpc import TUNE_ADAPTER, TUNE_BACKWARD, TUNE_FETCH, TUNE_FORWARD
from lightning_swarm.server.inference.adapters import Adapter, AdapterStore
from lightning_swarm.serving.server import ModelServer
from tests.served import ServedSwarm, make_model

WIDTH, RANK = 16, 3
LORA = Lora(block=0, module="self_attn.q_proj", scaling=2.0, dropout=0.0, rank=RANK)
NUM_FLIPPED = 300 * int(os.environ.get("SWARM_TIMES", "1"))
SERVER = PeerId("a")


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@dataclass
class Stranger:
    """A client that sends arbitrary messages."""

    swarm: ServedSwarm
    transport: Transport

    @property
    def server(self) -> ModelServer:
        server = self.swarm.hosts["a"].server
        assert server is not None
        return server

    def send(self, method: str, message: Message) -> Message:
        sending = self.transport.stream(SERVER, method, message, timeout=5.0, max_bytes=1 << 20)
        return self.swarm.loop.run_until_complete(sending)

    def upload(self, loras: list[Lora], tensors: list[Tensor], **changes: Any) -> Message:
        digest = changes.pop("digest", None) or adapter_digest(0, loras, tensors)
        upload = AdapterUpload(model=self.server.card.id, stage=0, digest=digest, loras=loras)
        return Message(encode(replace(upload, **changes)), tuple(tensors))

    def forward(self, adapter: bytes | None) -> Message:
        turned = numbers(1, 5, 8), numbers(1, 5, 8)
        extras = {"attention_mask": None, "position_embeddings": turned}
        structure, tensors = serialization.flatten(((numbers(2, 5, WIDTH),), extras))
        request = TuneForward(
            model=self.server.card.id,
            stage=0,
            call="0" * 32,
            seed=1,
            mode=ComputeMode(training=False, grad=True, default_dtype="float64"),
            wants_grad=[True],
            adapter=adapter,
            drops=False,
            structure=structure,
        )
        return Message(encode(request), tuple(tensors))


@pytest.fixture
def stranger(tmp_path: Path) -> Iterator[Stranger]:
    make_model("llama").save_pretrained(tmp_path)
    with closing(ServedSwarm(tmp_path, num_stages=2)) as swarm:
        swarm.serve("a")
        yield Stranger(swarm, swarm.network.transport("stranger"))


GOOD = (numbers(RANK, WIDTH), numbers(WIDTH, RANK))
BAD: dict[str, Callable[[Stranger], Message]] = {
    "another rank": lambda one: one.upload([replace(LORA, rank=RANK + 1)], [*GOOD]),
    "another width": lambda one: one.upload([LORA], [numbers(RANK, WIDTH + 1), GOOD[1]]),
    "no number": lambda one: one.upload([LORA], [GOOD[0] * torch.nan, GOOD[1]]),
    "infinite": lambda one: one.upload([LORA], [GOOD[0], GOOD[1] + torch.inf]),
    "infinite scaling": lambda one: one.upload([replace(LORA, scaling=float("inf"))], [*GOOD]),
    "integers": lambda one: one.upload([LORA], [part.to(torch.int64) for part in GOOD]),
    "two dtypes": lambda one: one.upload([LORA], [GOOD[0].float(), GOOD[1].half()]),
    "8 bits": lambda one: one.upload([LORA], [part.to(torch.float8_e4m3fn) for part in GOOD]),
    "no such layer": lambda one: one.upload([replace(LORA, module="self_attn")], [*GOOD]),
    "a block of another stage": lambda one: one.upload([replace(LORA, block=3)], [*GOOD]),
    "a tensor too few": lambda one: one.upload([LORA], [GOOD[0]]),
    "another digest": lambda one: one.upload([LORA], [*GOOD], digest=bytes(32)),
    "another model": lambda one: one.upload([LORA], [*GOOD], model="0" * 64),
    "a stage that there is not": lambda one: one.upload([LORA], [*GOOD], stage=7),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_does_not_fit_is_refused(stranger: Stranger, kind: str) -> None:
    with pytest.raises(SwarmError):
        stranger.send(TUNE_ADAPTER.name, BAD[kind](stranger))
    assert stranger.server.tuning.adapters.num_bytes == 0


def test_what_fits_is_taken_once(stranger: Stranger) -> None:
    message = stranger.upload([LORA], [*GOOD])
    for _ in range(2):
        stranger.send(TUNE_ADAPTER.name, message)
    assert stranger.server.tuning.adapters.num_bytes == sum(part.nbytes for part in GOOD)
    name = decode(message.body, AdapterUpload).digest
    assert stranger.send(TUNE_FORWARD.name, stranger.forward(name)).tensors
    with pytest.raises(AdapterMissing):
        stranger.send(TUNE_FORWARD.name, stranger.forward(bytes(32)))


def test_one_that_is_too_large_is_refused_and_older_ones_go_first() -> None:
    def adapter(length: int) -> Adapter:
        return Adapter(0, [LORA], [torch.zeros(length)])

    store = AdapterStore(max_bytes=100)
    with pytest.raises(SwarmError, match="100 bytes"):
        store.add(b"large", adapter(26))
    for name in (b"a", b"b", b"c"):
        store.add(name, adapter(10))
    assert store.num_bytes == 80
    with pytest.raises(AdapterMissing):
        store.get(b"a", 0)
    with pytest.raises(AdapterMissing):
        store.get(b"b", 1)  # it belongs to another stage
    assert store.get(b"b", 0).num_bytes == 40


def test_flipped_bytes_harm_nothing(stranger: Stranger) -> None:
    """In uploads, forwards and backwards: an error or an answer results, and the server goes on."""
    message = stranger.upload([LORA], [*GOOD])
    stranger.send(TUNE_ADAPTER.name, message)
    name = decode(message.body, AdapterUpload).digest
    backward = TuneBackward(model=stranger.server.card.id, stage=0, call="0" * 32, structure=[None])
    sent = [
        (TUNE_ADAPTER.name, message),
        (TUNE_FORWARD.name, stranger.forward(name)),
        (TUNE_BACKWARD.name, Message(encode(backward))),
    ]
    rng, refused = random.Random(0), 0
    for _ in range(NUM_FLIPPED):
        method, good = rng.choice(sent)
        body = bytearray(good.body)
        for _ in range(rng.randint(1, 3)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        try:
            stranger.send(method, Message(bytes(body), good.tensors))
        except SwarmError:
            refused += 1
    assert refused > NUM_FLIPPED // 2
    tuning = stranger.server.tuning
    assert tuning.adapters.num_bytes <= stranger.swarm.hosts["a"].server.tuning.adapters._max_bytes  # type: ignore[union-attr]
    stranger.send(TUNE_ADAPTER.name, message)
    assert stranger.send(TUNE_FORWARD.name, stranger.forward(name)).tensors


@pytest.mark.parametrize("grad", [False, True])
def test_a_held_output_goes_to_those_who_know_its_call(stranger: Stranger, *, grad: bool) -> None:
    message = stranger.forward(None)
    request = decode(message.body, TuneForward)
    returned = stranger.send(TUNE_FORWARD.name, message)
    held = replace(request, returns=False, mode=replace(request.mode, grad=grad))
    assert stranger.send(TUNE_FORWARD.name, Message(encode(held), message.tensors)) == Message()
    fetch = TuneFetch(client=PeerId("stranger"), call=request.call, stage=0, direction="forward")
    for wrong in ({"call": "1" * 32}, {"client": PeerId("a")}, {"stage": 1}, {"direction": "backward"}):
        with pytest.raises(TicketGone):
            stranger.send(TUNE_FETCH.name, Message(encode(replace(fetch, **wrong))))
    for _ in range(2 if grad else 1):  # without a graph it is dropped as soon as it was fetched
        found = stranger.send(TUNE_FETCH.name, Message(encode(fetch)))
        assert all(map(torch.equal, found.tensors, returned.tensors))
    if not grad:
        assert stranger.server.tuning.kept_bytes == 0
        with pytest.raises(TicketGone):
            stranger.send(TUNE_FETCH.name, Message(encode(fetch)))


def test_an_input_that_does_not_come_is_no_fault_of_the_server(stranger: Stranger) -> None:
    structure, tensors = serialization.flatten({"attention_mask": None})
    request = decode(stranger.forward(None).body, TuneForward)
    for source in ("a", "nobody"):
        asked = replace(request, stage=1, source=PeerId(source), patience_s=1.0, structure=structure)
        with pytest.raises(InputMissing, match=f"{source} did not send stage 0's result"):
            stranger.send(TUNE_FORWARD.name, Message(encode(asked), tuple(tensors)))
