"""The settings of a run come over the wire as they were given, and only if they could have been given."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec
import pytest

from lightning_swarm.core.errors import ProtocolError
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


def test_settings_survive_the_wire() -> None:
    assert decode(encode(SETTINGS), RunSettings) == SETTINGS


@pytest.mark.parametrize(
    "changes",
    [
        {"target_batch_size": 0},
        {"microbatch_size": "4"},
        {"deterministic": True},  # with this averaging
        {"rebalancing": "often"},
        {"rebalance_interval": 0.0},
        {"compression": "8bit"},
        {"compression": {"rank": 0}},
        {"compression": {"error_feedback": True}},
        {"unknown": 1},
    ],
)
def test_settings_that_cannot_be_are_refused_as_a_message(changes: dict[str, Any]) -> None:
    fields = msgspec.msgpack.decode(encode(SETTINGS))
    with pytest.raises(ProtocolError, match="must hold one RunSettings"):
        decode(msgspec.msgpack.encode({**fields, **changes}), RunSettings)


def test_the_first_difference_is_named() -> None:
    changed = msgspec.structs.replace(SETTINGS, delay_optimizer_step=False, microbatch_size=8)
    assert SETTINGS.first_difference(changed, SET_BY_EACH_LEAD) == "delay_optimizer_step"
    assert SETTINGS.first_difference(changed, SET_BY_EACH_TRAINER) is None


def test_each_setting_is_an_argument_of_the_strategy() -> None:
    assert set(RunSettings.__struct_fields__) <= inspect.signature(SwarmStrategy).parameters.keys()
