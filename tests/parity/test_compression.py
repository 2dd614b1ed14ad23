"""With codecs a swarm trains as one machine does whose layers exchange what these make of each microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_swarm.compression import Codecs, packing
from lightning_swarm.config import CodecName, Compression
from lightning_swarm.types.runs import Encoding
from tests.parity.harness import Run, SwarmRun, assert_exact, deviation, run_plain, run_swarm
from tests.parity.models import NUM_STEPS, DigitsMLP, Net, digits, loader
from tests.wire import sent

MICROBATCH = 3
CUTS = (3, 6)
"""Where the stages of three begin, as `split` says it below."""


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """These models' tensors are too small to be encoded else."""
    monkeypatch.setattr(packing, "SMALLEST", 1)


def on_one_machine(compression: Compression, cuts: Sequence[int]) -> Net:
    """The model with its layers' wires in it: to the first stage, between stages, and back from the last one."""
    module = DigitsMLP()
    codecs = Codecs.of(Encoding(**asdict(compression)))

    def send(x: Tensor) -> Tensor:
        return torch.cat([sent(part, codecs) for part in x.split(MICROBATCH)])

    module.net[0].register_forward_pre_hook(lambda _, args: send(args[0]))
    for cut in [*cuts, len(module.net)]:
        module.net[cut - 1].register_forward_hook(lambda _, __, output: send(output))
    return module


def run_both(compression: Compression, **swarm: Any) -> tuple[Run, SwarmRun]:
    epochs = {"max_steps": NUM_STEPS, "max_epochs": -1}
    plain = run_plain(lambda: on_one_machine(compression, CUTS), loader(digits()), **epochs)
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


@pytest.mark.parametrize("num_servers", [2, 4])
@pytest.mark.parametrize("codec", ["float16", "bfloat16", "8bit", "6bit", "4bit"])
def test_activations_and_gradients_are_what_the_codecs_make_of_them(codec: CodecName, num_servers: int) -> None:
    """Whoever computes what: also where one peer holds two stages, and nothing travels."""
    plain, swarm = run_both(Compression(activations=codec, gradients=codec), num_servers=num_servers)
    assert_exact(swarm, plain)
    bare = run_plain(DigitsMLP, loader(digits()), max_steps=NUM_STEPS, max_epochs=-1)
    assert deviation(swarm, bare)[0] > 1e-6, "nothing was encoded"
