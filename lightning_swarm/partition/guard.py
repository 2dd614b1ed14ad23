"""Keeps a trainer from computing with blocks by itself: its own weights are not those that the swarm trains."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.utils.hooks import RemovableHandle

from lightning_swarm.errors import ConfigError

_computing: ContextVar[bool] = ContextVar("_computing", default=False)


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """Here a stage computes, so its blocks may be called."""
    token = _computing.set(True)
    try:
        yield
    finally:
        _computing.reset(token)


def is_computing() -> bool:
    """Whether a stage computes here."""
    return _computing.get()


def guard(blocks: Iterable[nn.Module], *, callable_blocks: bool = False) -> list[RemovableHandle]:
    """Refuse every call of the blocks' parts with parameters outside of `computing`, until the handles are removed.

    Args:
        blocks: Of the pipeline.
        callable_blocks: The blocks themselves may be called: something else stands in for their forward.
    """
    blocks = list(blocks)
    parts = {
        id(part): part
        for block in blocks
        for part in block.modules()
        if part._parameters or isinstance(part, OptimizedModule)
    }
    if callable_blocks:
        for block in blocks:
            parts.pop(id(block), None)
    return [part.register_forward_pre_hook(_refuse) for part in parts.values()]


def _refuse(part: nn.Module, _inputs: Any) -> None:
    # Traced into a compiled stage, it would break the graph; what is compiled is looked at from outside.
    if not torch.compiler.is_compiling() and not _computing.get():
        raise ConfigError(
            "parts of the pipelined module must not be called by themselves while a swarm holds it, the weights here "
            f"are old: got a call of {type(part).__name__}. Call the pipelined module, or do without the part."
        )
