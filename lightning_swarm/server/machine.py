"""The machine that a server runs on: its processor, and the memory that it has and that this process took."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

import torch

from lightning_swarm.protocol.messages.reports import MachineReport


@cache
def describe(device: torch.device) -> MachineReport:
    """Describe the machine around a device. Its memory counts in full, whoever uses it."""
    host_bytes = _host_bytes()
    if device.type == "cuda":
        memory_bytes = torch.cuda.get_device_properties(device).total_memory
        return MachineReport(processor="accelerator", memory_bytes=memory_bytes, host_memory_bytes=host_bytes)
    if device.type == "cpu":
        return MachineReport(processor="cpu", memory_bytes=host_bytes)
    return MachineReport(processor="accelerator", host_memory_bytes=host_bytes)


def peak_bytes(device: torch.device) -> int | None:
    """Return the most of a device's memory that this process has held at once; None: it cannot be told.

    On a GPU that is what torch had allocated there. On a CPU it is all of the process, Python and libraries included.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _peak_resident_bytes() if device.type == "cpu" else None


def describe_peak(device: torch.device) -> str:
    """Say `peak_bytes` in a sentence, after a space; an empty text where it cannot be told."""
    num_bytes = peak_bytes(device)
    return f" It took at most {num_bytes / 1e9:.2f} GB of memory here." if num_bytes is not None else ""


def _peak_resident_bytes() -> int | None:
    try:
        # Not by `getrusage`: there a child begins with what its parent held.
        found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else None
    except OSError:  # not Linux
        return None


def _host_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not every system says so
        return None
