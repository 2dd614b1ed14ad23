"""Names kinds of machines: two of one kind compute the same bits from the same input."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path
from typing import Final

import torch
from blake3 import blake3

_FACTS: Final = Path("/proc/cpuinfo")  # Linux
_OF_THE_MODEL: Final = frozenset(
    {"vendor_id", "cpu family", "model", "model name", "stepping", "cache size"}
    | {"CPU implementer", "CPU architecture", "CPU variant", "CPU part"}
)
_OF_LIBRARIES: Final = ("MKL_", "ONEDNN_", "DNNL_", "OPENBLAS_")


def arithmetic_of(device: torch.device) -> str:
    """Name what the bits of a computation depend on, beside its input."""
    if device.type == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        kind = f"{_processor()}, {platform.machine()} {capability}, {torch.get_num_threads()} threads"
    else:
        kind = torch.get_device_module(device).get_device_name(device)
    precision = torch.get_float32_matmul_precision()  # scripts set it, and servers may be others than trainers' scripts
    return f"{device.type} {kind}, {precision} float32, torch {torch.__version__}"[:100]


def precision_of(dtype: torch.dtype) -> str:
    """Name the dtype that results of a dtype are as precise as here."""
    # With another setting products of float32 may be of TF32 or bfloat16: on some machines, and on others not.
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        dtype = torch.bfloat16
    return str(dtype).removeprefix("torch.")


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
