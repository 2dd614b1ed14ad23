"""With codecs a swarm equals one machine whose layers exchange each microbatch through the same codecs."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_swarm.protocol import compression as wire_compression
from lightning_swarm.protocol.settings import CodecName, Compression
from tests.parity.harness import Run, SwarmRun, assert_exact, deviation, run_plain, run_swarm
from tests.parity.models import DigitsMLP, Net, digits, loader
from tests.wire import wired

NUM_STEPS = 16
MICROBATCH = 3
CUTS = (3, 6)
"""First blocks of the stages if `split` cuts the model into three."""


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the size from which tensors are encoded, because these models' tensors are small."""
    monkeypatch.setattr(wire_compression, "MIN_ELEMENTS", 1)


def on_one_machine(compression: Compression) -> Net:
    """Return the model with codecs between its layers."""
    module = DigitsMLP()
    wired(module.net, compression, CUTS, MICROBATCH)
    return module


def run_both(compression: Compression, **swarm: Any) -> tuple[Run, SwarmRun]:
    epochs = {"max_steps": NUM_STEPS, "max_epochs": -1}
    plain = run_plain(lambda: on_one_machine(compression), loader(digits()), **epochs)
    trained = run_swarm(
        DigitsMLP,
        loader(digits()),
        num_stages=3,
        split=[str(cut) for cut in CUTS],
        microbatch_size=MICROBATCH,
        compression=compression,
        **swarm,
        **epochs,
    )
    return plain, trained


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("num_servers", [2, 4])
@pytest.mark.parametrize("codec", ["float16", "bfloat16", "8bit", "6bit", "4bit"])
def test_activations_and_gradients_are_what_the_codecs_make_of_them(codec: CodecName, num_servers: int) -> None:
    """The codecs apply in every arrangement, also where one peer holds two stages and no tensor travels."""
    plain, swarm = run_both(Compression(activations=codec, gradients=codec), num_servers=num_servers)
    assert_exact(swarm, plain)
    bare = run_plain(DigitsMLP, loader(digits()), max_steps=NUM_STEPS, max_epochs=-1)
    assert deviation(swarm, bare)[0] > 1e-6, "nothing was encoded"
