"""What a server computes on, for whoever asks."""

from __future__ import annotations

import os
from functools import cache

import torch

from lightning_swarm.types.reports import MachineReport


@cache
def describe(device: torch.device) -> MachineReport:
    """The machine around a device. Memory is all that there is, whoever uses it."""
    host_bytes = _host_bytes()
    if device.type == "cuda":
        memory_bytes = torch.cuda.get_device_properties(device).total_memory
        return MachineReport(processor="accelerator", memory_bytes=memory_bytes, host_memory_bytes=host_bytes)
    if device.type == "cpu":
        return MachineReport(processor="cpu", memory_bytes=host_bytes)
    return MachineReport(processor="accelerator", host_memory_bytes=host_bytes)


def _host_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not every system says so
        return None
