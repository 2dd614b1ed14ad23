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
    """Name what the bits of computations there depend on, beside their input; of the CPU's, too, if it steps."""
    if offloads and device.type != "cpu":
        return shortened(f"{arithmetic_of(device)}; {arithmetic_of(torch.device('cpu'))}")
    if device.type == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        kind = f"{_processor()}, {platform.machine()} {capability}, {torch.get_num_threads()} threads"
    else:
        kind = torch.get_device_module(device).get_device_name(device)
    return shortened(f"{device.type} {kind}, torch {torch.__version__}")


def shortened(name: str) -> str:
    """Shorten a name to what a message may hold; different ones stay different."""
    if len(name) <= MAX_TEXT:
        return name
    return f"{name[: MAX_TEXT - 17]} {blake3(name.encode()).hexdigest()[:16]}"


def precision_of(mode: ComputeMode, dtype: torch.dtype) -> str:
    """Name the dtype that results in a mode, of weights of a dtype, are as precise as."""
    # With another setting products of float32 may be of TF32 or bfloat16: on some machines, and on others not.
    if dtype == torch.float32 and mode.matmul_precision not in _FULL:
        dtype = torch.bfloat16
    return mode.autocast or dtype_name(dtype)


@cache
def _processor() -> str:
    """A digest of torch's build, the processor's model, and what its libraries were told by the environment."""
    # MKL and oneDNN choose their kernels by the model and its caches: two with the same instructions may round apart.
    known = [torch.__config__.show(), platform.processor()]
    if _FACTS.exists():
        first = _FACTS.read_text(errors="replace").split("\n\n", 1)[0]
        known += [line for line in first.splitlines() if line.split("\t")[0].strip() in _OF_THE_MODEL]
    known += [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_OF_LIBRARIES)]
    return blake3("\n".join(known).encode()).hexdigest()[:8]
