"""A model server's answers to its clients, and the refusals on both sides."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from lightning_swarm.core.errors import ConfigError, NotMember, ProtocolError, SwarmError
from lightning_swarm.core.readable import size_text
from lightning_swarm.model.pretrained import PretrainedFolder, PretrainedModel
from lightning_swarm.monitor.model_report import ModelReport, model_table, summarize_model
from lightning_swarm.monitor.survey import _ask_either
from lightning_swarm.network import Message, PeerId
from lightning_swarm.protocol.messages.serving import (
    CardFile,
    CardRequest,
    ModelCard,
    ModelServers,
    PartRequest,
    StayReply,
    StayRequest,
)
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.rpc import MODEL_CARD, MODEL_PART, MODEL_STAY
from lightning_swarm.serving import memory
from lightning_swarm.serving.directory import REFRESH_S
from tests.served import ServedSwarm, make_model

A = PeerId("a")


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[ServedSwarm]:
    make_model("llama").save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    made = ServedSwarm(tmp_path, num_stages=2)
    made.serve("a")
    yield made
    made.close()


def ask(swarm: ServedSwarm, request: Any) -> Message:
    client = swarm.network.transport()
    try:
        message = Message(request if isinstance(request, bytes) else encode(request))
        return swarm.loop.run_until_complete(client.stream(A, MODEL_PART.name, message, timeout=5.0))
    finally:
        swarm.loop.run_until_complete(client.close())


def test_parts_of_the_model_are_given_and_nothing_else(swarm: ServedSwarm) -> None:
    server = swarm.hosts["a"].server
    assert server is not None
    card = server.card
    (tensor,) = ask(swarm, PartRequest(model=card.id, kind="tensor", name="model.norm.weight")).tensors
    assert tensor.shape == (16,)
    (content,) = ask(swarm, PartRequest(model=card.id, kind="file", name="tokenizer.json")).tensors
    assert content.numpy().tobytes() == b"{}"
    for kind, name in [
        ("tensor", "model.other"),
        ("file", "config.json"),
        ("file", "../secret"),
        ("file", "/etc/passwd"),
        ("tensor", ""),
    ]:
        with pytest.raises(NotMember, match="is not here"):
            ask(swarm, msgspec.convert({"model": card.id, "kind": kind, "name": name}, PartRequest))
    with pytest.raises(NotMember, match="got a request for model 0000"):
        ask(swarm, PartRequest(model="0" * 64, kind="tensor", name="model.norm.weight"))


def test_mutated_requests_are_refused(swarm: ServedSwarm) -> None:
    server = swarm.hosts["a"].server
    assert server is not None
    rng, good = random.Random(0), encode(PartRequest(model=server.card.id, kind="tensor", name="model.norm.weight"))
    client = swarm.network.transport()
    for _ in range(300):
        body = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        if bytes(body) != good:
            with pytest.raises((ProtocolError, NotMember)):
                ask(swarm, bytes(body))
    with pytest.raises(ProtocolError):
        swarm.loop.run_until_complete(client.call(A, MODEL_CARD.name, b"x", timeout=5.0))
    card = swarm.loop.run_until_complete(client.call(A, MODEL_CARD.name, encode(CardRequest()), timeout=5.0))
    assert decode(card, ModelCard) == server.card
    swarm.loop.run_until_complete(client.close())


def test_a_server_promises_to_stay_and_mutated_requests_change_nothing(swarm: ServedSwarm) -> None:
    server = swarm.hosts["a"].server
    assert server is not None
    client = swarm.network.transport()

    def asked(body: bytes) -> bool:
        answer = swarm.loop.run_until_complete(client.call(A, MODEL_STAY.name, body, timeout=5.0))
        return decode(answer, StayReply).stays

    good = encode(StayRequest(model=server.card.id, stages=[0, 1], for_s=50.0))
    rng = random.Random(0)
    for _ in range(300):
        body = bytearray(good)
        body[rng.randrange(len(body))] = rng.randrange(256)
        try:
            stays = asked(bytes(body))
        except (ProtocolError, NotMember):
            continue
        request = decode(bytes(body), StayRequest)
        assert stays == (bool(request.stages) and set(request.stages) <= {0, 1})
    assert not asked(encode(StayRequest(model=server.card.id, stages=[2], for_s=50.0)))
    assert asked(good)
    assert not server.promises.begin_leaving(swarm.loop.time() + 49.0)
    assert not asked(encode(StayRequest(model=server.card.id, stages=[], for_s=0.0)))
    server.is_draining = True
    assert not asked(good)
    assert server.promises.begin_leaving(swarm.loop.time())
    swarm.loop.run_until_complete(client.close())


def test_a_file_of_a_forged_card_is_no_path(swarm: ServedSwarm, tmp_path: Path) -> None:
    host = swarm.hosts["a"]
    assert host.server is not None
    server = host.server
    bad = CardFile(name="../../forged", num_bytes=2, sha256=b"0" * 32)
    server.card = msgspec.structs.replace(server.card, files=[bad])
    server._id = server.card.id
    host.models.card = server.card
    swarm.loop.run_until_complete(host._announce())
    swarm.connect()
    assert swarm.client is not None
    with pytest.raises(ProtocolError, match="a model's files must be among"):
        swarm.client.tokenizer()
    assert not list(tmp_path.parent.rglob("forged"))


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"model_type": "no such"}, "must be one that transformers"),
        ({"hidden_size": "many"}, "must be one that transformers"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "must be plain, or quantised"),
    ],
)
def test_a_config_that_builds_no_model_is_refused(swarm: ServedSwarm, changes: dict[str, Any], refusal: str) -> None:
    settings = json.loads((swarm.folder / "config.json").read_text())
    with pytest.raises(ConfigError, match=refusal):
        PretrainedModel(json.dumps({**settings, **changes}), "", dtype="float64")


def test_a_config_names_no_code(swarm: ServedSwarm) -> None:
    settings = json.loads((swarm.folder / "config.json").read_text())
    named = {"attn_implementation": "someone/kernels", "auto_map": {"AutoModelForCausalLM": "evil.Model"}}
    model = PretrainedModel(json.dumps({**settings, **named, "_attn_implementation": "x/y"}), "", dtype="float64")
    assert model.config._attn_implementation in ("sdpa", "eager")


def test_a_server_of_another_model_is_no_place_to_join(swarm: ServedSwarm) -> None:
    with pytest.raises((ConfigError, SwarmError), match="must name a running server of a model"):
        swarm.serve("b", join="nobody")


# ---------------------------------------------------------------------- memory and servers


@pytest.fixture
def large(tmp_path: Path) -> Iterator[ServedSwarm]:
    """A model of four equal stages, without a server."""
    make_model("llama", dtype=torch.float32, hidden_size=64, intermediate_size=64).save_pretrained(tmp_path)
    made = ServedSwarm(tmp_path, num_stages=4)
    yield made
    made.close()


def stage_size(swarm: ServedSwarm) -> int:
    model = PretrainedModel(PretrainedFolder(swarm.folder).config, "", dtype="float32")
    return model.stage_bytes([range(index, index + 1) for index in range(4)])[0]


def test_a_model_that_needs_more_servers_says_so_before_it_is_read(large: ServedSwarm) -> None:
    size, said = stage_size(large), list[str]()
    first = large.serve("a", weight_bytes=2 * size, say=said.append)
    assert first.stage_bytes == [size] * 4  # as in the card, of tensors that were read
    one, two, four = (size_text(number * size) for number in (1, 2, 4))
    needs = f"The model needs {four} in 4 stages; its servers hold"
    assert said[0].startswith(
        f"{needs} {two}: {two} are missing, stages 2 to 3 have no server. By `--quantize nf4` it would need "
    )
    assert said[1].startswith("Reading ")
    joins: list[str] = []
    large.serve("b", join="a", has_files=False, weight_bytes=size, say=joins.append)
    assert joins[0].startswith(f"{needs} {two} + {one}: {one} are missing, stage 3 has no server. By `--q")
    joins.clear()
    large.serve("c", join="a", has_files=False, weight_bytes=size, say=joins.append)
    assert joins[0] == f"{needs} {two} + {one} + {one}: each stage has a server."

    said.clear()
    large.sleep(3 * REFRESH_S)
    assert said == [f"b came with stage 2, c came with stage 3. {joins[0]}"]
    large.leave("c")
    large.sleep(6 * REFRESH_S)
    assert said[1:] == [f"c left. {needs} {two} + {one}: {one} are missing, stage 3 has no server."]


@pytest.mark.parametrize("name", ["a", "b"])
def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    large: ServedSwarm, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name == "b":
        large.serve("a")
    said: list[str] = []
    monkeypatch.setattr(memory, "free_bytes", lambda _: 3 * stage_size(large))
    with pytest.raises(
        ConfigError, match=r"must fit into the free memory of cpu, got .* of free memory. Lower `--memory`"
    ):
        large.serve(name, join="a" if name == "b" else "", say=said.append)
    assert len(said) == 1, "nothing was read"


def test_who_asks_for_the_status_of_a_server_sees_its_model(large: ServedSwarm) -> None:
    large.serve("a", weight_bytes=2 * stage_size(large))
    large.serve("b", join="a")
    large.sleep(3 * REFRESH_S)
    model, observer = large.connect(), large.network.transport("observer")

    def look() -> ModelReport:
        found = large.loop.run_until_complete(_ask_either(observer, A, "a", timeout=5.0))
        assert isinstance(found, ModelServers)
        return summarize_model(found)

    report = look()
    assert (report.kind, report.weights) == ("llama", "float32")
    assert [(server.peer_id, server.stages, server.has_files) for server in report.servers] == [
        ("a", (0, 1), True),
        ("b", (0, 1, 2, 3), True),
    ]
    text = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    large.sleep(3 * REFRESH_S)
    busy = look()
    assert 0.0 == report.tokens_per_s < busy.tokens_per_s < text.sequences.shape[1] / REFRESH_S
    assert model_table(busy).startswith(f"model llama {report.model[:12]}, float32: 1 text, ")
