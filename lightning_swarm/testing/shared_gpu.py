"""Several peers on one GPU."""

from __future__ import annotations

import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError


class SharedGPU(CUDAAccelerator):
    """The first CUDA GPU as each of the Trainer's ``devices``; Lightning itself requires a GPU for each.

    ``Trainer(accelerator=SharedGPU(), devices=4, strategy=SwarmStrategy(num_stages=2))`` starts four peers on one card,
    to try a swarm. They share its memory and take turns to compute, so this is not faster than one peer.

    Raises:
        ConfigError: ``devices`` is not a number of peers.
    """

    @staticmethod
    @override
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        """Return the number of one GPU for each peer."""
        text = str(devices)
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError(
                f"`devices` must be the number of peers on the GPU, got {devices!r}. Use an integer of at least 1."
            )
        return [0] * int(text)

    @staticmethod
    @override
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        """Return the device of each peer."""
        return [torch.device("cuda", index) for index in devices]

    @staticmethod
    @override
    def auto_device_count() -> int:
        """Return the default number of peers."""
        return 1
