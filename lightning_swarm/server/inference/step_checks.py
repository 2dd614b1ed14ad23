"""Checks the tensors of a session's step before the step is accepted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.model.inference.attention_cache import is_in_session
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.inference import SessionStep
from lightning_swarm.server.inference.host import SessionStage


def checked_tree(step: SessionStep, tensors: Sequence[Tensor]) -> tuple[Any, dict[str, Any]]:
    """Return a step's hidden state and the blocks' arguments; refuse other trees."""
    tree = serialization.unflatten(step.structure, list(tensors))
    if not isinstance(tree, tuple) or len(tree) != 2 or not isinstance(tree[1], dict):
        raise ProtocolError("a step must have a hidden state and the blocks' arguments")
    leaves = serialization.leaves(tree[0])
    if not leaves or leaves[0].ndim < 2 or 0 in leaves[0].shape[:2]:
        raise ProtocolError("a step's hidden state must be [rows, tokens, ...], and not empty")
    if step.recipe is None and any(is_in_session(value) for value in tree[1].values()):
        raise ProtocolError("a session without a cache recipe must pass no cache to its blocks")
    if step.recipe is None and (step.number > 1 or step.operations):
        raise ProtocolError("a session without a cache must have exactly one step, without operations on a cache")
    return tree


def check_tokens(hidden: Any, stage: SessionStage) -> None:
    """Refuse a step that would delay other sessions too long, judged by the largest tensor of its hidden state."""
    if stage.max_tokens is None:
        return
    leaves = serialization.leaves(hidden)
    rows, tokens = leaves[0].shape[:2]
    num_tokens = max(rows * tokens, *(math.prod(leaf.shape[:-1]) for leaf in leaves))
    if num_tokens > stage.max_tokens:
        raise ProtocolError(
            f"a step of a text must have at most {stage.max_tokens} tokens in all rows here (`Limits.step_tokens`), "
            f"got {num_tokens}: other texts would wait too long. Take fewer rows at once or a shorter text, pass "
            "`prefill_chunk_size` to `generate`, or start the servers with a higher `--step-tokens`."
        )
