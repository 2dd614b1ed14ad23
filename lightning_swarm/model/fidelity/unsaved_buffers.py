"""Buffers that no state dict holds (``persistent=False``), which a run that resumes from a snapshot also needs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def unsaved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's buffers that its state dict leaves out, by all of their names."""
    return {
        f"{prefix}.{key}" if prefix else key: buffer
        for prefix, owner in module.named_modules(remove_duplicate=False)
        for key, buffer in owner._buffers.items()
        if buffer is not None and key in owner._non_persistent_buffers_set
    }


def restore_buffers(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Restore the values of a module's unsaved buffers from `state`; names that only one of the two has are ignored."""
    with torch.no_grad():
        for name, buffer in unsaved_buffers(module).items():
            if name not in state:
                continue
            if buffer.shape == state[name].shape:
                buffer.copy_(state[name])
            else:
                prefix, _, key = name.rpartition(".")
                module.get_submodule(prefix)._buffers[key] = state[name].to(buffer)
