"""A run's settings arrive over the wire unchanged, and invalid settings are refused."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from typing import Any

import msgspec
import pytest

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.protocol.messages.reports import ServerReport
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.settings import SET_BY_EACH_LEAD, SET_BY_EACH_TRAINER, Compression, RunSettings
from lightning_swarm.strategy.strategy import SwarmStrategy

SETTINGS = RunSettings(
    target_batch_size=64,
    microbatch_size=4,
    delay_optimizer_step=True,
    rebalancing="paper",
    rebalance_interval=5,
    compression=Compression(activations="8bit", averaging="powersgd", rank=2),
)


COMPRESSION: dict[str, Any] = asdict(SETTINGS.compression)


def test_settings_survive_the_wire() -> None:
    came = decode(encode(SETTINGS), RunSettings)
    assert came == SETTINGS
    assert type(came.compression) is Compression


def test_a_report_tells_the_compression_in_full() -> None:
    report = ServerReport(
        lead="lead",
        coordinator="a",
        num_stages=1,
        stages=[0],
        trainers_stage=None,
        first_step=0,
        step=0,
        age_s=0.0,
        num_samples=0,
        queued=0,
        compression=SETTINGS.compression,
    )
    assert decode(encode(report), ServerReport) == report
    fields = msgspec.msgpack.decode(encode(report))
    for changed in ({**COMPRESSION, "unknown": 1}, {}):
        with pytest.raises(ProtocolError, match="must hold one ServerReport"):
            decode(msgspec.msgpack.encode({**fields, "compression": changed}), ServerReport)


@pytest.mark.parametrize(
    "changes",
    [
        {"target_batch_size": 0},
        {"microbatch_size": "4"},
        {"deterministic": True},  # not with this averaging
        {"rebalancing": "often"},
        {"rebalance_interval": 0.0},
        {"compression": "8bit"},
        {"compression": {**COMPRESSION, "rank": 0}},
        {"compression": {**COMPRESSION, "averaging": "none", "error_feedback": True}},
        {"compression": {**COMPRESSION, "error_feedback": None}},
        {"compression": {**COMPRESSION, "unknown": 1}},
        *(
            {"compression": {name: value for name, value in COMPRESSION.items() if name != left_out}}
            for left_out in COMPRESSION
        ),
        {"unknown": 1},
    ],
)
def test_settings_that_cannot_be_are_refused_as_a_message(changes: dict[str, Any]) -> None:
    fields = msgspec.msgpack.decode(encode(SETTINGS))
    with pytest.raises(ProtocolError, match="must hold one RunSettings"):
        decode(msgspec.msgpack.encode({**fields, **changes}), RunSettings)


def test_settings_without_a_batch_size_are_refused_as_a_message() -> None:
    fields = msgspec.msgpack.decode(encode(SETTINGS))
    del fields["target_batch_size"]
    with pytest.raises(ProtocolError, match="missing required field `target_batch_size`"):
        decode(msgspec.msgpack.encode(fields), RunSettings)


def test_the_first_difference_is_named() -> None:
    changed = msgspec.structs.replace(SETTINGS, delay_optimizer_step=False, microbatch_size=8)
    assert SETTINGS.first_difference(changed, SET_BY_EACH_LEAD) == "delay_optimizer_step"
    assert SETTINGS.first_difference(changed, SET_BY_EACH_TRAINER) is None


def test_each_setting_is_an_argument_of_the_strategy() -> None:
    assert set(RunSettings.__struct_fields__) <= inspect.signature(SwarmStrategy).parameters.keys()
