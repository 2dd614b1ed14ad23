"""Attention that draws through dropout, where torch would take a fused kernel with a source of its own."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

_plain = torch.ops.aten._scaled_dot_product_attention_math


class PlainAttention(TorchFunctionMode):
    """Computes attention with dropout by matrix products, as torch does on the CPU.

    The fused kernels of GPUs cannot be given numbers. Attention without dropout stays with them. The usual way to
    choose, ``torch.nn.attention.sdpa_kernel``, sets flags of the whole process, which other threads would see.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function of torch, as it is unless it is attention with dropout."""
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention and _dropout_p(*args, **kwargs):
            return _attention(*args, **kwargs)
        return func(*args, **kwargs)


def plain_attention() -> AbstractContextManager[object]:
    """`PlainAttention` where it may matter: on the CPU attention with dropout is plain anyway."""
    return PlainAttention() if torch.cuda.is_initialized() else nullcontext()


def _dropout_p(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *_: Any,
    **__: Any,
) -> float:
    return dropout_p


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
    output: Tensor = _plain(query, key, value, attn_mask, dropout_p, is_causal, None, **options)[0]
    return output
