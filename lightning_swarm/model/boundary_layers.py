"""Boundary layers: learned layers where a model is cut, so that fewer features travel from stage to stage.

A layer stands *after* a block. Its first half, `compress`, reduces each position's ``features`` to ``features / ratio``
numbers. Its second half, `decompress`, restores as many as before. Both are ordinary parts of the model, trained by its
optimizer and saved in its checkpoint. A swarm cuts the model between the two.

Without a swarm, a hook on the block does the same, so no forward and no name in a checkpoint changes. A layer's name
contains its place: ``boundary_layers.net.3`` comes after ``net.3``.

Source: SWARM, arXiv:2301.11913, section 4.4 and appendix J.
"""

from __future__ import annotations

import re
import zlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from einops.layers.torch import Reduce
from torch import Tensor, nn
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError

# Arguments of new layers, which must be equal on all peers, whatever the defaults of their processes are.
_NEW: Final[dict[str, Any]] = {"device": "cpu", "dtype": torch.float32}
SCALE: Final = 8.0
"""Initial scale of a layer's matrices. Norms around the matrices undo most of it.

But an optimizer like Adam turns large matrices more slowly, and later blocks' output outweighs the layer's output less.
See `benchmarks.boundary`.
"""


class BoundaryLayer(nn.Module):
    """Both halves of a layer that stands after a block.

    Args:
        compress: Maps ``[..., features]`` to ``[..., features / ratio]``.
        decompress: Maps back.
    """

    def __init__(self, compress: nn.Module, decompress: nn.Module) -> None:
        super().__init__()
        self.compress = compress
        self.decompress = decompress

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        """Run both halves, one after the other."""
        return self.decompress(self.compress(hidden))  # type: ignore[no-any-return]

    def follow(self, _block: nn.Module, _inputs: Any, output: Any) -> Tensor:
        """Run both halves on a block's output, as its forward hook."""
        return self(output)  # type: ignore[no-any-return]


class Boundary(ABC):
    """The kind of layer that stands where a model is cut: `Bottleneck` or `Maxout`.

    Args:
        ratio: How many times fewer features travel; a divisor of their number.
        features: The size of the hidden state's last dimension at the cuts. None: the size of the block's last
            `Linear`, `LayerNorm`, `RMSNorm` or `Embedding`.

    Raises:
        ConfigError: An argument is out of range.
    """

    def __init__(self, ratio: int, features: int | None = None) -> None:
        if not _is_whole(ratio) or ratio < 2:
            raise ConfigError(
                f"`{type(self).__name__}.ratio` must be a whole number of at least 2, got {ratio!r}. Leave `boundary` "
                "out to send all features."
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
        """Return whether both make the same layers."""
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        """Hash the fields that `__eq__` compares."""
        return hash((type(self), self.ratio, self.features))

    def __repr__(self) -> str:
        """Write the constructor's call."""
        features = "" if self.features is None else f", features={self.features}"
        return f"{type(self).__name__}(ratio={self.ratio}{features})"

    def width(self, features: int) -> int:
        """Return the number of features that travel instead of `features`, which `ratio` must divide."""
        if features % self.ratio:
            divisors = [number for number in range(2, features + 1) if features % number == 0]
            raise ConfigError(
                f"`{type(self).__name__}.ratio` must divide the number of features, got {self.ratio} and {features}. "
                f"Choose one of {divisors[:8]}."
            )
        return features // self.ratio

    @property
    def num_weights(self) -> int:
        """Upper bound of the number of weights in a layer's matrices; the features must be known."""
        assert self.features is not None
        return 2 * self.features * self.width(self.features)

    @abstractmethod
    def layer(self, features: int, generator: torch.Generator | None = None) -> BoundaryLayer:
        """Make a layer, in float32 on the CPU; without a generator, torch's own is used."""


class Bottleneck(Boundary):
    """``h = LN(W1 LN(x) + b1)`` travels, and ``y = W2 h + b2`` goes on; `W1` has ``features / ratio`` rows.

    Initially `W1` has random orthogonal rows and `W2` is its transpose: together they are a scaled projection.
    """

    @override
    def layer(self, features: int, generator: torch.Generator | None = None) -> BoundaryLayer:
        width = self.width(features)
        project, expand = _linear(features, width), _linear(width, features)
        nn.init.orthogonal_(project.weight, gain=SCALE, generator=generator)
        with torch.no_grad():
            expand.weight.copy_(project.weight.T)
        compress = _named(norm=_InputNorm(features, **_NEW), linear=project, norm_out=nn.LayerNorm(width, **_NEW))
        return BoundaryLayer(compress, _named(linear=expand))


class Maxout(Boundary):
    """``h = LN(max(LN(x)))`` travels, with maxima over `ratio` neighbouring features; ``y = W2 h + b2`` goes on.

    Initially `W2` copies each maximum to all the features over which it was taken.
    """

    @override
    def layer(self, features: int, generator: torch.Generator | None = None) -> BoundaryLayer:
        width = self.width(features)
        expand, pool = _linear(width, features), Reduce("... (width ratio) -> ... width", "max", ratio=self.ratio)
        with torch.no_grad():
            expand.weight.copy_(torch.eye(width, **_NEW).repeat_interleave(self.ratio, dim=0) * SCALE)
        compress = _named(norm=_InputNorm(features, **_NEW), pool=pool, norm_out=nn.LayerNorm(width, **_NEW))
        return BoundaryLayer(compress, _named(linear=expand))


class _InputNorm(nn.LayerNorm):
    """A norm that refuses hidden states with another number of features."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(input, Tensor):
            raise ConfigError(
                "a boundary layer must stand where the hidden state is one tensor, got a block whose output is a "
                f"{type(input).__name__}. Cut elsewhere, with `split=...`, or let the blocks return one tensor."
            )
        if input.shape[-1] != self.normalized_shape[0]:
            raise ConfigError(
                f"the last dimension of a boundary layer's input must have {self.normalized_shape[0]} features, got "
                f"{list(input.shape)}. Set `features={input.shape[-1]}`."
            )
        return super().forward(input)


def _named(**modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(modules))


def _linear(num_inputs: int, num_outputs: int) -> nn.Linear:
    """Make a layer with a zero bias and an empty weight, without drawing from torch's own generator."""
    linear: nn.Linear = nn.utils.skip_init(nn.Linear, num_inputs, num_outputs, **_NEW)
    nn.init.zeros_(linear.bias)
    return linear


def _is_whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


_CONTAINER: Final = "boundary_layers"
# A layer's full name: the module that owns the container, and the path from there to the module before the layer.
_LAYER: Final = re.compile(rf"(?:(?P<owner>.+)\.)?{_CONTAINER}\.(?P<path>.+)")
_PARAMETER: Final = re.compile(r"(?P<layer>.+)\.(?P<rest>(?:de)?compress\.(?:norm|linear|norm_out)\.(?:weight|bias))")


class BoundaryLayers(nn.Module):
    """Holds a model's boundary layers, each under the name of the module that it stands after."""


def insert_boundary(module: nn.Module, boundary: Boundary, after: Sequence[str]) -> None:
    """Insert boundary layers into a model for good: the output of each named module goes through its layer.

    This holds with and without a swarm; a swarm cuts such a model at these places. New layers are drawn from the seed,
    not from torch's generator, which is left as it is. To have them trained, make the optimizer afterwards.

    Args:
        module: The model.
        boundary: The kind of layers.
        after: Full names of submodules, such as ``"net.3"``, each of which returns one tensor.

    Raises:
        ConfigError: There is no such submodule, it has a layer already, its number of features is unknown or not
            divisible, or the layers would be larger than the model. The model is unchanged.
    """
    wanted = plan_layers(module, boundary, after)
    new = {name: _new_layer(module, name, wanted[name]) for name in after}
    _install(module, {**boundary_layers(module), **new})


def restore_boundary(module: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Insert the boundary layers of a checkpoint into a model, to load the checkpoint afterwards.

    Args:
        module: The model. If it has boundary layers already, nothing happens.
        state_dict: The checkpoint's state; only names and shapes are read. If it has no layers, nothing happens.

    Raises:
        ConfigError: The model lacks a module that a layer stands after.
    """
    if not boundary_layers(module):
        # Entries with other names may not be tensors.
        layers = {name: tensor for name, tensor in state_dict.items() if f"{_CONTAINER}." in name}
        adopt_layers(module, {name: tuple(tensor.shape) for name, tensor in layers.items()})


def plan_layers(module: nn.Module, boundary: Boundary, after: Sequence[str]) -> dict[str, Boundary]:
    """Describe a model's present and new boundary layers, or raise `ConfigError`; nothing is inserted."""
    wanted = describe_layers(module)
    for name in after:
        if name in wanted:
            raise ConfigError(f"at most one boundary layer may stand after a module, got {name!r} again. Name it once.")
        wanted[name] = _with_known_features(module, name, boundary)
    _check_size(module, wanted)
    return wanted


def boundary_layers(module: nn.Module) -> dict[str, BoundaryLayer]:
    """Return a model's boundary layers in its order, by the full names of the modules that they stand after."""
    layers = [(_LAYER.fullmatch(name), inner) for name, inner in module.named_modules()]
    return {_after(match): inner for match, inner in layers if match and isinstance(inner, BoundaryLayer)}


def adopt_layers(module: nn.Module, shapes: Mapping[str, Sequence[int]]) -> None:
    """Insert the boundary layers of another peer's model, given the names and shapes of its parameters."""
    # Other peers send these shapes, so check all of them before the first allocation.
    current, wanted = describe_layers(module), _layers_of_shapes(shapes)
    if current != wanted:
        for name in wanted:
            _submodule(module, name)
        _check_size(module, wanted)
        layers = boundary_layers(module)
        for name, boundary in wanted.items():
            if name not in layers or current[name] != boundary:
                layers[name] = _new_layer(module, name, boundary)
        _install(module, {name: layers[name] for name in wanted})


def describe_layers(module: nn.Module) -> dict[str, Boundary]:
    """Describe a model's boundary layers, with their features."""
    return _layers_of_shapes({name: tuple(parameter.shape) for name, parameter in module.named_parameters()})


def remove_hooks(module: nn.Module) -> None:
    """Remove the hooks of boundary layers, because stages call the layers themselves."""
    for inner in module.modules():
        for key, hook in list(inner._forward_hooks.items()):
            if isinstance(getattr(hook, "__self__", None), BoundaryLayer):
                del inner._forward_hooks[key]


def add_hooks(module: nn.Module) -> None:
    """Hook boundary layers to the modules that they stand after. May be called twice."""
    remove_hooks(module)
    for name, layer in boundary_layers(module).items():
        _submodule(module, name).register_forward_hook(layer.follow)


_SMALL: Final = 1 << 24  # weights; assumed to fit into memory anywhere


def _check_size(module: nn.Module, wanted: Mapping[str, Boundary]) -> None:
    """Refuse layers that may not fit into memory, because other peers may send any sizes."""
    layers = {id(parameter) for layer in boundary_layers(module).values() for parameter in layer.parameters()}
    model_size = sum(parameter.numel() for parameter in module.parameters() if id(parameter) not in layers)
    if sum(boundary.num_weights for boundary in wanted.values()) > max(model_size, _SMALL):
        name = max(wanted, key=lambda name: wanted[name].num_weights)
        raise ConfigError(
            f"boundary layers must not have more numbers than the model, which has {model_size:.3g}; got "
            f"{wanted[name].num_weights:.3g} after {name!r}. Raise `ratio`, or cut where there are fewer features."
        )


def _with_known_features(module: nn.Module, name: str, boundary: Boundary) -> Boundary:
    """Return the kind of the layer after a module, with the number of features that the user gave or the module has."""
    block = _submodule(module, name)
    features = boundary.features or _features(block)
    if features is None:
        raise ConfigError(
            f"the number of features after {name!r} must be known, but {type(block).__name__} has no layer that shows "
            f"it. Write `{type(boundary).__name__}(ratio={boundary.ratio}, features=...)`, the size of the hidden "
            "state's last dimension."
        )
    return type(boundary)(boundary.ratio, features)


def _new_layer(module: nn.Module, name: str, boundary: Boundary) -> BoundaryLayer:
    """Make the layer after a module, drawn from the seed and the module's name, on the model's device and dtype."""
    assert boundary.features is not None
    block = _submodule(module, name)
    seed = (torch.initial_seed() + zlib.crc32(name.encode())) % (1 << 63)
    layer = boundary.layer(boundary.features, torch.Generator().manual_seed(seed))
    like = next((p for part in (block, module) for p in part.parameters() if p.is_floating_point()), None)
    if like is not None:
        layer.to(None if like.is_meta else like.device, like.dtype)
    return layer.train(block.training)


def _features(block: nn.Module) -> int | None:
    """Return the number of a block's output features by its last layer that has one, or None."""
    features: int | None = None
    for layer in block.modules():
        if isinstance(layer, nn.Linear):
            features = layer.out_features
        elif isinstance(layer, nn.LayerNorm | nn.RMSNorm):
            features = layer.normalized_shape[-1]
        elif isinstance(layer, nn.Embedding):
            features = layer.embedding_dim
    return features


def _install(module: nn.Module, layers: Mapping[str, BoundaryLayer]) -> None:
    """Replace a model's boundary layers by these."""
    owners = {name: _owner(module, name) for name in layers}
    remove_hooks(module)
    for inner in list(module.modules()):
        if isinstance(getattr(inner, _CONTAINER, None), BoundaryLayers):
            delattr(inner, _CONTAINER)
    # In the model's order, so that the numbers of parameters agree between peers.
    for name in [name for name, _ in module.named_modules(remove_duplicate=False) if name in layers]:
        node: nn.Module = module.get_submodule(owners[name])
        path = [_CONTAINER, *name.removeprefix(f"{owners[name]}.").split(".")]
        for part in path[:-1]:
            if part not in node._modules:
                node.add_module(part, BoundaryLayers())
            node = node.get_submodule(part)
        node.add_module(path[-1], layers[name])
    add_hooks(module)


def _owner(module: nn.Module, name: str) -> str:
    """Return the name of the nearest enclosing module that is no `Sequential`, `ModuleList` or `ModuleDict`."""
    while name:
        name = name.rpartition(".")[0]
        owner = module.get_submodule(name)
        if not isinstance(owner, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            if not isinstance(getattr(owner, _CONTAINER, BoundaryLayers()), BoundaryLayers):
                break
            return name
    raise ConfigError(
        f"the module around the blocks must have room for their boundary layers under the name `{_CONTAINER}`, got a "
        f"{type(owner).__name__} that uses it otherwise. Put it into a module of its own, or rename its attribute."
    )


def _layers_of_shapes(shapes: Mapping[str, Sequence[int]]) -> dict[str, Boundary]:
    """Describe the layers whose parameters have these names and shapes, by the modules that they stand after."""
    layers: dict[str, dict[str, Sequence[int]]] = {}
    for name, shape in shapes.items():
        parameter = _PARAMETER.fullmatch(name)
        layer = _LAYER.fullmatch(parameter["layer"]) if parameter else None
        if parameter and layer:
            layers.setdefault(_after(layer), {})[parameter["rest"]] = shape
    boundaries: dict[str, Boundary] = {}
    for after, parts in layers.items():
        shape = parts.get("decompress.linear.weight", ())
        if len(shape) != 2 or not 0 < shape[1] < shape[0] or shape[0] % shape[1]:
            raise ConfigError(f"the module after {after!r} must be a boundary layer, got {parts}. Correct its names.")
        kind = Bottleneck if "compress.linear.weight" in parts else Maxout
        boundaries[after] = kind(shape[0] // shape[1], shape[0])
    return boundaries


def _after(layer_name: re.Match[str]) -> str:
    return ".".join(filter(None, layer_name.group("owner", "path")))


def _submodule(module: nn.Module, name: str) -> nn.Module:
    try:
        if not name:
            raise AttributeError("a module is no part of itself")
        return module.get_submodule(name)
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
    "boundary_layers",
    "insert_boundary",
    "restore_boundary",
]
