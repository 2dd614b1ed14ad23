"""What a served model needs and has, for people; answers of other peers do no harm."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.monitor.model_report import changes, coverage, model_table, named_stages, summarize_model
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.serving import ModelServers, ServerOffer

OFFER = ServerOffer(
    addresses=["/ip4/127.0.0.1/tcp/1/p2p/12D3KooWBTrNL8qKG3SxDRQNAcaUb5nNNixuFBXcKeMfexuaGUUR", "nonsense"],
    first_stage=0,
    num_stages=2,
    step_s=0.0125,
    num_sessions=1,
    tokens_per_s=5.0,
    free_bytes=3_000_000_000,
    step_tokens=512,
    has_files=True,
    shares_prefixes=False,
    is_draining=False,
    round_trips={},
)


def answer(*offers: ServerOffer, sizes: list[int] | None = None) -> ModelServers:
    return ModelServers(
        model="0123456789ab" + "f" * 52,
        kind="llama",
        weights="bfloat16",
        stage_bytes=[2_000_000_000] * 4 if sizes is None else sizes,
        servers={PeerId(f"peer-{index}"): offer for index, offer in enumerate(offers)},
    )


def offer(**changed: Any) -> ServerOffer:
    return msgspec.structs.replace(OFFER, **changed)


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ([range(4)], "; its servers hold 9.2 GB: each stage has a server."),
        ([range(2), range(1)], "; its servers hold 4.6 GB + 2.3 GB: 4.6 GB are missing, stages 2 to 3 have no server."),
        ([range(3)], "; its servers hold 6.9 GB: 2.3 GB are missing, stage 3 has no server."),
        ([range(4)] * 7, "; its servers hold the weights of 28 stages: each stage has a server."),
        ([], "; it has no server: 9.2 GB are missing, stages 0 to 3 have no server."),
    ],
)
def test_memory_that_is_missing_is_named(held: list[range], said: str) -> None:
    assert coverage([2_300_000_000] * 4, held) == f"The model needs 9.2 GB in 4 stages{said}"


def test_stages_are_named_by_their_groups() -> None:
    assert named_stages([3]) == "stage 3"
    assert named_stages([0, 1, 2, 5, 7, 8]) == "stages 0 to 2, 5, 7 to 8"


def test_servers_that_come_leave_or_move() -> None:
    before = {"a": range(2), "b": range(2), "c": range(2, 4)}
    now = {"a": range(2), "c": range(1), "d": range(1, 4)}
    assert changes(before, before) == []
    assert changes(before, now) == ["b left", "c moved to stage 0", "d came with stages 1 to 3"]


def test_a_table_has_a_line_for_each_server() -> None:
    report = summarize_model(
        answer(offer(), offer(first_stage=1, num_sessions=2, has_files=False), offer(first_stage=2, is_draining=True))
    )
    assert model_table(report).splitlines() == [
        "model llama 0123456789ab, bfloat16: 3 texts, 7.5 tokens/s",
        coverage([2_000_000_000] * 4, [range(2), range(1, 3)]),
        "No other server could continue the texts of stages 0, 2.",
        "",
        "stages  server  at           weights  free for texts  texts  tokens/s  ms a stage",
        "0-1     peer-0  127.0.0.1:1  4.0 GB   3.0 GB          1      5.0       12.5        has the files",
        "1-2     peer-1  127.0.0.1:1  4.0 GB   3.0 GB          2      5.0       12.5",
        "2-3     peer-2  127.0.0.1:1  4.0 GB   3.0 GB          1      5.0       12.5        leaving, has the files",
    ]


def test_a_false_answer_is_shown_without_harm() -> None:
    false = answer(offer(addresses=["\x1b[2J"], tokens_per_s=1e300, num_sessions=10**30))
    false = msgspec.structs.replace(false, model="\x1b[2J" + "f" * 60, kind="\x1b[31mx", weights="\n\r")
    text = model_table(summarize_model(false))
    assert "\x1b" not in text
    assert "an unknown place" in text
    for stages in ({"first_stage": 10**12}, {"first_stage": 3}, {"num_stages": 5}):
        with pytest.raises(ProtocolError, match="must serve some of its 4 stages"):
            summarize_model(answer(offer(**stages)))
