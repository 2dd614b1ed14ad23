"""Boundary layers: learned ones where a model is cut, so that fewer features travel from stage to stage.

A layer stands *after* a block: its first half, `compress`, makes ``features / ratio`` numbers of each position's
``features``, its second half, `decompress`, makes as many as before of them. They are two halves of the model like
others: trained by its optimizer, saved in its checkpoint. What a swarm adds is that it cuts between the two.

Without a swarm a hook on the block does the same, so that nobody's forward, and no name in a checkpoint, changes. A
layer's own name tells where it stands: ``boundary_layers.net.3`` comes after ``net.3``.

Source: SWARM, arXiv:2301.11913, section 4.4 and appendix J.
"""

from __future__ import annotations

import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from einops import reduce
from torch import Tensor, nn
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError

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


_CONTAINER: Final = "boundary_layers"
_LAYER: Final = re.compile(rf"(?:(?P<owner>.+)\.)?{_CONTAINER}\.(?P<path>.+)")
_PARAMETER: Final = re.compile(r"(?P<layer>.+)\.(?P<rest>(?:de)?compress\.(?:norm|linear|norm_out)\.(?:weight|bias))")


class BoundaryLayers(nn.Module):
    """Holds the layers of a model, each under the name of what it stands after."""


def insert_boundary(module: nn.Module, boundary: Boundary, after: Sequence[str]) -> None:
    """Put boundary layers into a model for good: what stands before each goes through it, with and without a swarm.

    A swarm cuts such a model at these places. New layers are drawn from the seed, not from torch's generator, which is
    left as it is. Whoever wants them trained makes the optimizer afterwards.

    Args:
        module: The model.
        boundary: Which layers.
        after: Full names of submodules, such as ``"net.3"``, each of which gives one tensor.

    Raises:
        ConfigError: There is no such submodule, a layer stands there, the number of features is not known or not
            divisible, or there would be more numbers in the layers than in the model. The model is as it was.
    """
    wanted = sized(module, boundary, after)
    new = {name: _made(module, name, wanted[name]) for name in after}
    _settle(module, {**boundary_layers(module), **new})


def restore_boundary(module: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Put the boundary layers into a model that a checkpoint has, to load it afterwards.

    Args:
        module: The model. If it has such layers, nothing happens.
        state_dict: The checkpoint's, of which the names and shapes count. Without such layers nothing happens.

    Raises:
        ConfigError: They stand after something that this model does not have.
    """
    if not boundary_layers(module):
        layers = {name: one for name, one in state_dict.items() if f"{_CONTAINER}." in name}  # others may be no tensors
        adopt(module, {name: tuple(tensor.shape) for name, tensor in layers.items()})


def sized(module: nn.Module, boundary: Boundary, after: Sequence[str]) -> dict[str, Boundary]:
    """All layers that a model would have with these new ones, with their features. Nothing is made.

    Args:
        module: The model.
        boundary: Which layers.
        after: What they would stand after.

    Raises:
        ConfigError: As `insert_boundary` does.
    """
    wanted = described(module)
    for name in after:
        if name in wanted:
            raise ConfigError(f"at most one boundary layer may stand after a module, got {name!r} again. Name it once.")
        wanted[name] = _with_features(module, name, boundary)
    _check_size(module, wanted)
    return wanted


def boundary_layers(module: nn.Module) -> dict[str, BoundaryLayer]:
    """The layers in a model, in its order, by the full names of what they stand after."""
    found = {}
    for name, inner in module.named_modules():
        place = _LAYER.fullmatch(name) if isinstance(inner, BoundaryLayer) else None
        if place is not None:
            found[".".join(filter(None, place.group("owner", "path")))] = inner
    return found


def adopt(module: nn.Module, shapes: Mapping[str, Sequence[int]]) -> None:
    """Have the very boundary layers in a model that another one has.

    Args:
        module: The model.
        shapes: Of the other's parameters, by their full names.

    Raises:
        ConfigError: They stand after something that this model does not have, are none, or have more numbers than the
            model. No memory was taken for them.
    """
    own = described(module)
    wanted = _described(shapes)
    if own != wanted:
        for name in wanted:
            _submodule(module, name)
        _check_size(module, wanted)
        layers = boundary_layers(module)
        same = {name for name in layers if own[name] == wanted.get(name)}
        made = {name: layers[name] if name in same else _made(module, name, one) for name, one in wanted.items()}
        _settle(module, made)


def described(module: nn.Module) -> dict[str, Boundary]:
    """What `boundary_layers` are, with their features."""
    return _described({name: tuple(parameter.shape) for name, parameter in module.named_parameters()})


def unhook(module: nn.Module) -> None:
    """Leave what the layers stand after without them: whoever calls these computes the layers, too."""
    for inner in module.modules():
        for key, hook in list(inner._forward_hooks.items()):
            if isinstance(getattr(hook, "__self__", None), BoundaryLayer):
                del inner._forward_hooks[key]


def hook(module: nn.Module) -> None:
    """Have what the layers stand after go through them. Twice is fine."""
    unhook(module)
    for name, layer in boundary_layers(module).items():
        _submodule(module, name).register_forward_hook(layer.follow)


# ---------------------------------------------------------------------- parts


_SMALL: Final = 1 << 24
"""Numbers that any model has room for."""


def _check_size(module: nn.Module, wanted: Mapping[str, Boundary]) -> None:
    """Refuse layers for which whoever has the model may not have the memory: a peer is told of them by others."""
    layers = {id(one) for layer in boundary_layers(module).values() for one in layer.parameters()}
    own = sum(one.numel() for one in module.parameters() if id(one) not in layers)
    if sum(one.num_weights for one in wanted.values()) > max(own, _SMALL):
        name = max(wanted, key=lambda name: wanted[name].num_weights)
        raise ConfigError(
            f"boundary layers must not have more numbers than the model, which has {own:.3g}; got "
            f"{wanted[name].num_weights:.3g} after {name!r}. Raise `ratio`, or cut where there are fewer features."
        )


def _with_features(module: nn.Module, name: str, boundary: Boundary) -> Boundary:
    block = _submodule(module, name)
    features = boundary.features or _features(block)
    if features is None:
        raise ConfigError(
            f"the number of features after {name!r} must be known, and {type(block).__name__} has no layer that says "
            f"it. Say it: `{type(boundary).__name__}(ratio={boundary.ratio}, features=...)`, the size of the hidden "
            "state's last dimension."
        )
    return type(boundary)(boundary.ratio, features)


def _made(module: nn.Module, name: str, boundary: Boundary) -> BoundaryLayer:
    """A layer of known features."""
    assert boundary.features is not None
    block = _submodule(module, name)
    seed = (torch.initial_seed() + zlib.crc32(name.encode())) % (1 << 63)
    layer = boundary.layer(boundary.features, torch.Generator().manual_seed(seed))
    like = next((p for part in (block, module) for p in part.parameters() if p.is_floating_point()), None)
    if like is not None:
        layer.to(None if like.is_meta else like.device, like.dtype)
    return layer.train(block.training)


def _features(block: nn.Module) -> int | None:
    """Of what a block gives, as the last of its layers says."""
    said: int | None = None
    for layer in block.modules():
        if isinstance(layer, nn.Linear):
            said = layer.out_features
        elif isinstance(layer, nn.LayerNorm | nn.RMSNorm):
            said = layer.normalized_shape[-1]
        elif isinstance(layer, nn.Embedding):
            said = layer.embedding_dim
    return said


def _settle(module: nn.Module, layers: Mapping[str, BoundaryLayer]) -> None:
    """Have these layers and no others, in the model's order whoever came first, so that numbers of parameters agree."""
    owners = {name: _owner(module, name) for name in layers}
    unhook(module)
    for inner in list(module.modules()):
        if isinstance(getattr(inner, _CONTAINER, None), BoundaryLayers):
            delattr(inner, _CONTAINER)
    for name in [name for name, _ in module.named_modules(remove_duplicate=False) if name in layers]:
        node: nn.Module = module.get_submodule(owners[name])
        path = [_CONTAINER, *name.removeprefix(f"{owners[name]}.").split(".")]
        for part in path[:-1]:
            if part not in node._modules:
                node.add_module(part, BoundaryLayers())
            node = node.get_submodule(part)
        node.add_module(path[-1], layers[name])
    hook(module)


def _owner(module: nn.Module, name: str) -> str:
    """The nearest module around another one that does not run its children in a row."""
    while name:
        name = name.rpartition(".")[0]
        owner = module.get_submodule(name)
        if not isinstance(owner, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            if not isinstance(getattr(owner, _CONTAINER, BoundaryLayers()), BoundaryLayers):
                break
            return name
    raise ConfigError(
        f"the module around what boundary layers stand after must have room for them under the name `{_CONTAINER}`, "
        f"got a {type(owner).__name__} that has it otherwise. Put it into a module of its own, or rename what is there."
    )


def _described(shapes: Mapping[str, Sequence[int]]) -> dict[str, Boundary]:
    """Which layers have parameters of these names and shapes, by what they stand after."""
    found: dict[str, dict[str, Sequence[int]]] = {}
    for name, shape in shapes.items():
        parameter = _PARAMETER.fullmatch(name)
        layer = _LAYER.fullmatch(parameter["layer"]) if parameter else None
        if parameter and layer:
            after = ".".join(filter(None, layer.group("owner", "path")))
            found.setdefault(after, {})[parameter["rest"]] = shape
    boundaries: dict[str, Boundary] = {}
    for after, parts in found.items():
        shape = parts.get("decompress.linear.weight", ())
        if len(shape) != 2 or not 0 < shape[1] < shape[0] or shape[0] % shape[1]:
            raise ConfigError(f"what stands after {after!r} must be a boundary layer, got {parts}. Correct its names.")
        kind = Bottleneck if "compress.linear.weight" in parts else Maxout
        boundaries[after] = kind(shape[0] // shape[1], shape[0])
    return boundaries


def _submodule(module: nn.Module, name: str) -> nn.Module:
    try:
        found = module.get_submodule(name)
        if found is module:
            raise AttributeError("a part of itself")
        return found
    except AttributeError as error:
        raise ConfigError(
            f"a boundary layer stands after a submodule, got {name!r}, which {type(module).__name__} does not have. "
            "Build the same model, or correct the name."
        ) from error


__all__ = [
    "Bottleneck",
    "Boundary",
    "BoundaryLayer",
    "Maxout",
    "adopt",
    "boundary_layers",
    "described",
    "hook",
    "insert_boundary",
    "restore_boundary",
    "sized",
    "unhook",
]
