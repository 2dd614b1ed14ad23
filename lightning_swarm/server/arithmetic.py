"""Names kinds of machines: two of one kind compute the same bits from the same input."""

from __future__ import annotations

import itertools
import os
import platform
from functools import cache
from pathlib import Path
from typing import Final

import torch
from blake3 import blake3

from lightning_swarm.network.tensors import dtype_name
from lightning_swarm.protocol.messages.calls import ComputeMode
from lightning_swarm.protocol.messages.wire import MAX_TEXT

_FACTS: Final = Path("/proc/cpuinfo")  # Linux
_OF_THE_MODEL: Final = frozenset(
    {"vendor_id", "cpu family", "model", "model name", "stepping", "cache size"}
    | {"CPU implementer", "CPU architecture", "CPU variant", "CPU part"}
)
_FULL: Final = ("highest", *itertools.product(("none", "ieee"), repeat=2))
_OF_LIBRARIES: Final = ("MKL_", "ONEDNN_", "DNNL_", "OPENBLAS_")


def arithmetic_of(device: torch.device, *, offloads: bool = False) -> str:
    """Name the hardware and software that determine a device's bits; with `offloads`, the CPU's, too."""
    if offloads and device.type != "cpu":
        return shortened(f"{arithmetic_of(device)}; {arithmetic_of(torch.device('cpu'))}")
    if device.type == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        kind = f"{_processor()}, {platform.machine()} {capability}, {torch.get_num_threads()} threads"
    else:
        kind = torch.get_device_module(device).get_device_name(device)
    return shortened(f"{device.type} {kind}, torch {torch.__version__}")


def shortened(name: str) -> str:
    """Shorten a name to the limit of a message; different names stay different."""
    if len(name) <= MAX_TEXT:
        return name
    return f"{name[: MAX_TEXT - 17]} {blake3(name.encode()).hexdigest()[:16]}"


def precision_of(mode: ComputeMode, dtype: torch.dtype) -> str:
    """Return the name of the dtype whose precision results have, in a mode and with weights of a dtype."""
    # Other settings permit TF32 or bfloat16 in products of float32, but only some machines then use them.
    if dtype == torch.float32 and mode.matmul_precision not in _FULL:
        dtype = torch.bfloat16
    return mode.autocast or dtype_name(dtype)


@cache
def _processor() -> str:
    """Return a digest of torch's build, the processor's model and the environment variables of its math libraries."""
    # MKL and oneDNN choose kernels by the model and its caches, so processors with equal instructions may differ.
    known = [torch.__config__.show(), platform.processor()]
    if _FACTS.exists():
        first = _FACTS.read_text(errors="replace").split("\n\n", 1)[0]
        known += [line for line in first.splitlines() if line.split("\t")[0].strip() in _OF_THE_MODEL]
    known += [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_OF_LIBRARIES)]
    return blake3("\n".join(known).encode()).hexdigest()[:8]
