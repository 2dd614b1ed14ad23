"""Describes a machine's arithmetic: machines with equal descriptions compute the same bits from the same input."""

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

_CPUINFO: Final = Path("/proc/cpuinfo")  # exists on Linux only
_MODEL_LINES: Final = frozenset(
    {"vendor_id", "cpu family", "model", "model name", "stepping", "cache size"}
    | {"CPU implementer", "CPU architecture", "CPU variant", "CPU part"}
)
_FULL_PRECISION: Final = ("highest", *itertools.product(("none", "ieee"), repeat=2))
"""Settings of `ComputeMode.matmul_precision` that compute float32 products in float32: a word, or (CUDA, CPU)."""

_LIBRARY_VARIABLES: Final = ("MKL_", "ONEDNN_", "DNNL_", "OPENBLAS_")


def arithmetic_of(device: torch.device, *, offloads: bool = False) -> str:
    """Describe the hardware and software that determine a device's results; with `offloads`, also those of the CPU."""
    if offloads and device.type != "cpu":
        return shortened(f"{arithmetic_of(device)}; {arithmetic_of(torch.device('cpu'))}")
    if device.type == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        hardware = f"{_processor()}, {platform.machine()} {capability}, {torch.get_num_threads()} threads"
    else:
        hardware = torch.get_device_module(device).get_device_name(device)
    return shortened(f"{device.type} {hardware}, torch {torch.__version__}")


def shortened(name: str) -> str:
    """Shorten a name to the limit of a message; different names stay different."""
    if len(name) <= MAX_TEXT:
        return name
    return f"{name[: MAX_TEXT - 17]} {blake3(name.encode()).hexdigest()[:16]}"


def precision_of(mode: ComputeMode, dtype: torch.dtype) -> str:
    """Return the name of the dtype whose precision a stage's results have, given the dtype of its weights."""
    # Other settings permit TF32 or bfloat16 in products of float32. Not all machines use them, so assume the worst.
    if dtype == torch.float32 and mode.matmul_precision not in _FULL_PRECISION:
        dtype = torch.bfloat16
    return mode.autocast or dtype_name(dtype)


@cache
def _processor() -> str:
    """Return a digest of torch's build, the processor's model and the environment variables of its math libraries."""
    # MKL and oneDNN choose kernels by processor model and cache size, so equal instruction sets are not enough.
    facts = [torch.__config__.show(), platform.processor()]
    if _CPUINFO.exists():
        first_core = _CPUINFO.read_text(errors="replace").split("\n\n", 1)[0]
        facts += [line for line in first_core.splitlines() if line.split("\t")[0].strip() in _MODEL_LINES]
    facts += [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_LIBRARY_VARIABLES)]
    return blake3("\n".join(facts).encode()).hexdigest()[:8]
