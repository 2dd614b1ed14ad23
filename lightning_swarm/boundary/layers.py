"""The layers themselves: two halves each, and what they are made from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Final

import torch
from einops import reduce
from torch import Tensor, nn
from typing_extensions import override

from lightning_swarm.errors import ConfigError

_NEW: Final[dict[str, Any]] = {"device": "cpu", "dtype": torch.float32}  # alike on all peers, whatever the defaults are
SCALE: Final = 8.0
"""Of the matrices in the beginning. What they compute depends on it little, for norms are around them, but an optimizer
like Adam turns large ones slower, and what later blocks add outweighs less. See `benchmarks.boundary`."""


class BoundaryLayer(nn.Module):
    """Both halves of what stands after a block.

    Args:
        compress: From ``[..., features]`` to ``[..., features / ratio]``.
        decompress: And back.
    """

    def __init__(self, compress: nn.Module, decompress: nn.Module) -> None:
        super().__init__()
        self.compress = compress
        self.decompress = decompress

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        """Both halves, one after the other."""
        out: Tensor = self.decompress(self.compress(hidden))
        return out

    def follow(self, _block: nn.Module, _inputs: Any, output: Any) -> Tensor:
        """A block's hook."""
        out: Tensor = self(output)
        return out


class Boundary(ABC):
    """Which kind of layer stands where a model is cut; `Bottleneck` or `Maxout`.

    Args:
        ratio: So many times fewer features travel; a divisor of their number.
        features: The size of the hidden state's last dimension at the cuts. None: as the last of the block's layers
            says that has one (`Linear`, `LayerNorm`, `RMSNorm`, `Embedding`).

    Raises:
        ConfigError: An argument is out of range.
    """

    def __init__(self, ratio: int, features: int | None = None) -> None:
        if not _is_whole(ratio) or ratio < 2:
            raise ConfigError(
                f"`{type(self).__name__}.ratio` must be a whole number of at least 2, got {ratio!r}. Leave `boundary` "
                "out if all features shall travel."
            )
        if features is not None and (not _is_whole(features) or features < 1):
            raise ConfigError(
                f"`{type(self).__name__}.features` must be a positive whole number or None, got {features!r}. It is "
                "the size of the hidden state's last dimension."
            )
        self.ratio = ratio
        self.features = features
        if features is not None:
            self.width(features)

    def __eq__(self, other: object) -> bool:
        """Whether both make the same layers."""
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        """As `__eq__`."""
        return hash((type(self), self.ratio, self.features))

    def __repr__(self) -> str:
        """As a user writes it."""
        features = "" if self.features is None else f", features={self.features}"
        return f"{type(self).__name__}(ratio={self.ratio}{features})"

    def width(self, features: int) -> int:
        """How many of `features` travel.

        Raises:
            ConfigError: `ratio` does not divide them.
        """
        if features % self.ratio:
            divisors = [number for number in range(2, features + 1) if features % number == 0]
            raise ConfigError(
                f"`{type(self).__name__}.ratio` must divide the number of features, got {self.ratio} and {features}. "
                f"Choose one of {divisors[:8]}."
            )
        return features // self.ratio

    @property
    def num_weights(self) -> int:
        """In the matrices of a layer, where the features are known; at most."""
        assert self.features is not None
        return 2 * self.features * self.width(self.features)

    @abstractmethod
    def layer(self, features: int, generator: torch.Generator | None = None) -> BoundaryLayer:
        """A new layer for so many features, in float32 on the CPU. None: drawn from torch's own generator."""


class Bottleneck(Boundary):
    """``h = LN(W1 LN(x) + b1)`` travels, and ``y = W2 h + b2`` goes on; `W1` has ``features / ratio`` rows.

    In the beginning `W1` has random orthogonal rows, and `W2` leads back: together they are a scaled projection.
    """

    @override
    def layer(self, features: int, generator: torch.Generator | None = None) -> BoundaryLayer:
        compress = _Project(features, self.width(features))
        decompress = _Expand(self.width(features), features)
        nn.init.orthogonal_(compress.linear.weight, gain=SCALE, generator=generator)
        with torch.no_grad():
            decompress.linear.weight.copy_(compress.linear.weight.T)
        return BoundaryLayer(compress, decompress)


class Maxout(Boundary):
    """``h = LN(max over each ratio neighbouring features of LN(x))`` travels, and ``y = W2 h + b2`` goes on.

    In the beginning `W2` gives each maximum to all the features that it is of.
    """

    @override
    def layer(self, features: int, generator: torch.Generator | None = None) -> BoundaryLayer:
        width = self.width(features)
        decompress = _Expand(width, features)
        with torch.no_grad():
            decompress.linear.weight.copy_(torch.eye(width, **_NEW).repeat_interleave(self.ratio, dim=0) * SCALE)
        return BoundaryLayer(_Pool(features, width), decompress)


class _Project(nn.Module):
    """A bottleneck's first half."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features, **_NEW)
        self.linear = _linear(features, width)
        self.norm_out = nn.LayerNorm(width, **_NEW)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.norm_out(self.linear(self.norm(_checked(hidden, self.norm))))
        return out


class _Pool(nn.Module):
    """A maxout's first half."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features, **_NEW)
        self.norm_out = nn.LayerNorm(width, **_NEW)
        self._ratio = features // width

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(_checked(hidden, self.norm))
        out: Tensor = self.norm_out(reduce(normed, "... (width ratio) -> ... width", "max", ratio=self._ratio))
        return out


class _Expand(nn.Module):
    """The second half of either."""

    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.linear = _linear(width, features)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.linear(hidden)
        return out


def _linear(num_inputs: int, num_outputs: int) -> nn.Linear:
    """Without a bias at first. The weight is for others to draw: nothing is taken from torch's own generator."""
    linear: nn.Linear = nn.utils.skip_init(nn.Linear, num_inputs, num_outputs, **_NEW)
    nn.init.zeros_(linear.bias)
    return linear


def _is_whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


def _checked(hidden: object, norm: nn.LayerNorm) -> Tensor:
    if not isinstance(hidden, Tensor):
        raise ConfigError(
            "a boundary layer must stand where the hidden state is one tensor, got a block whose output is a "
            f"{type(hidden).__name__}. Cut elsewhere, with `split=...`, or have the blocks hand on one tensor."
        )
    features = norm.normalized_shape[0]
    if hidden.shape[-1] != features:
        raise ConfigError(
            f"a boundary layer for {features} features must get them in the hidden state's last dimension, got "
            f"{list(hidden.shape)}. Say how many they are: `features={hidden.shape[-1]}`."
        )
    return hidden
