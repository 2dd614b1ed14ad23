"""Stages: runs of the user's own blocks that a server computes, and the tensors in them by the state dict's names."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from torch import Tensor, nn

from lightning_swarm.model.nn import accepted_keywords, call_blocks
from lightning_swarm.model.partition import call_binding
from lightning_swarm.network.tensors import dtype_name

Slot = tuple[str, nn.Module, str]  # full name of a tensor in the model, the module that holds it, and its name there

Named = tuple[str, nn.Module]

StageModules = Sequence[tuple[str | None, nn.Module]]
"""The modules that a stage computes, in order: blocks with their names, and boundary layers without."""


def named_within(blocks: Iterable[Named]) -> list[Named]:
    """Return all modules in named blocks, with names that begin with the block's name."""
    return [(f"{name}.{key}" if key else name, inner) for name, block in blocks for key, inner in block.named_modules()]


class ParameterSpec(msgspec.Struct, frozen=True):
    """The properties of a parameter or buffer on which peers must agree."""

    name: str  # the first of its names in the LightningModule's state dict
    shape: tuple[int, ...]
    dtype: str  # such as ``float32``
    requires_grad: bool = False
    persistent: bool = True  # whether the state dict holds it; True for parameters


class StageSpec(msgspec.Struct, frozen=True):
    """The blocks and tensors of a stage, in the LightningModule's order. Part of the run's manifest."""

    index: int
    block_names: tuple[str, ...]
    parameters: tuple[ParameterSpec, ...]
    buffers: tuple[ParameterSpec, ...]
    on_trainers: bool = False  # the last stage may have no blocks, but the parameters around the pipeline


class StageModule(nn.Module):
    """A run of the user's blocks, with boundary layers between them, and halves of boundary layers at its ends."""

    def __init__(self, spec: StageSpec, own: StageModules, slots: "TensorIndex", around: Sequence[Named] = ()) -> None:
        """Hold the stage's `own` modules; see `build_stages`."""
        super().__init__()
        self.spec = spec
        # Modules outside of all blocks. They belong to the stage only if the model is not cut.
        self.around = tuple(around)
        self.block_names, blocks = [name for name, _ in own], [block for _, block in own]  # None: a boundary layer
        self.blocks = nn.ModuleList(blocks)
        # Read here, because torch's compiler cannot read signatures.
        self._keywords = [tuple(sorted(accepted_keywords(block))) for block in blocks]
        self.keywords = frozenset[str]().union(*self._keywords)
        self.read_later = frozenset[str]()  # keywords that blocks of later stages name
        # Slots, not tensors: moving a model off meta or to a device replaces its parameter objects.
        self._slots = slots

    def forward(self, inputs: tuple[Any, ...], extras: Mapping[str, Any]) -> Any:
        """Run the blocks on the inputs of the first block. Extras for blocks of other stages are ignored."""
        return self._run(inputs, extras, slice(None))

    def run_block(self, number: int, inputs: tuple[Any, ...], extras: Mapping[str, Any]) -> Any:
        """Run one block on the output of the block before it."""
        return self._run(inputs, extras, slice(number, number + 1))

    def _run(self, inputs: tuple[Any, ...], extras: Mapping[str, Any], part: slice) -> Any:
        blocks = [*self.blocks][part]  # a slice of a `ModuleList` would be a new module
        if call_binding.CALLS in extras:
            return call_binding.call_bound(blocks, self.block_names[part], inputs, extras)
        return call_blocks(blocks, inputs, extras, self._keywords[part])

    def extras_for(self, extras: Mapping[str, Any]) -> dict[str, Any]:
        """Select the extras of a call that are for blocks of this stage."""
        if call_binding.CALLS in extras:
            return call_binding.extras_for(extras, self.spec.block_names)
        return {name: value for name, value in extras.items() if name in self.keywords}

    def named_block_modules(self) -> list[Named]:
        """Return all modules in blocks, with names that begin with the block's name."""
        pairs = zip(self.block_names, self.blocks, strict=True)
        return named_within((name, block) for name, block in pairs if name is not None)

    def counted_modules(self) -> list[nn.Module]:
        """Return the modules whose running statistics the stage keeps."""
        return [*self.modules(), *(module for _, module in self.around if self.spec.on_trainers)]

    def compile_by(self, compiler: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace the forward by the result of `compiler`, which is ``torch.compile`` with the user's options."""
        self.forward = compiler(self.forward)  # type: ignore[method-assign]

    def uncompiled(self, inputs: tuple[Any, ...], extras: Mapping[str, Any]) -> Any:
        """Run the blocks as `forward` does, but not compiled, for calls of other shapes and modes."""
        return StageModule.forward(self, inputs, extras)

    def named_stage_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return full names and parameters, each once, in the LightningModule's order."""
        return [(name, _held(owner._parameters, owner, key)) for name, owner, key in self._slots.parameters]

    def named_stage_tensors(self) -> dict[str, Tensor]:
        """Return parameters, then buffers, persistent or not, by full names."""
        buffers = ((name, _held(owner._buffers, owner, key)) for name, owner, key in self._slots.buffers)
        return {**dict(self.named_stage_parameters()), **dict(buffers)}


def _held(register: Mapping[str, Any], owner: nn.Module, key: str) -> Any:
    """Return a module's tensor from its register, if it is there, because attribute access is slower."""
    tensor = register.get(key)
    return getattr(owner, key) if tensor is None else tensor


class TensorIndex(msgspec.Struct, frozen=True):
    """The slots of a stage's tensors, each once."""

    parameters: tuple[Slot, ...]
    buffers: tuple[Slot, ...]


def spec_of(index: int, block_names: tuple[str, ...], slots: TensorIndex, *, on_trainers: bool = False) -> StageSpec:
    """Describe a stage by its tensors."""
    parameters, buffers = tuple(map(_tensor_spec, slots.parameters)), tuple(map(_tensor_spec, slots.buffers))
    return StageSpec(index, block_names, parameters, buffers, on_trainers)


def _tensor_spec(slot: Slot) -> ParameterSpec:
    name, owner, key = slot
    tensor: Tensor = getattr(owner, key)
    persistent = key not in owner._non_persistent_buffers_set
    return ParameterSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype), tensor.requires_grad, persistent)
