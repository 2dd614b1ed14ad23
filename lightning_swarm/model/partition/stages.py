"""Stages: runs of blocks that a server computes, and what they hold under which names.

A stage holds the user's own modules, not copies, and knows their tensors by the names that the
LightningModule's state dict gives them. So a checkpoint needs no translation.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from torch import Tensor, nn

from lightning_swarm.model.nn import accepted_keywords, call_blocks
from lightning_swarm.model.partition import call_binding

Slot = tuple[str, nn.Module, str]
"""Full name of a tensor in the model, the module that holds it, and its name there."""

Named = tuple[str, nn.Module]

Run = Sequence[tuple[str | None, nn.Module]]
"""What a stage computes, in order: blocks with their names, and boundary layers without."""


class ParameterSpec(msgspec.Struct, frozen=True):
    """What must agree between peers about a parameter or buffer.

    Attributes:
        name: Its name in the LightningModule's state dict (the first one, if it has several).
        shape: Its shape.
        dtype: Its dtype, as in ``float32``.
        requires_grad: Whether it is trained; never, for a buffer.
        persistent: Whether the state dict holds it; always, for a parameter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = False
    persistent: bool = True


class StageSpec(msgspec.Struct, frozen=True):
    """What a stage holds, in the LightningModule's order. Part of the run's manifest.

    The last one may be *on the trainers*: without blocks, it has the parameters that stand around the pipeline.
    """

    index: int
    block_names: tuple[str, ...]
    parameters: tuple[ParameterSpec, ...]
    buffers: tuple[ParameterSpec, ...]
    on_trainers: bool = False


class StageModule(nn.Module):
    """A run of the user's blocks, with the boundary layers between them, and the halves of those at its ends.

    Attributes:
        spec: What it holds.
        keywords: The extras that its blocks name.
    """

    def __init__(self, spec: StageSpec, run: "Run", slots: "TensorIndex") -> None:
        """Hold blocks; see `cut`."""
        super().__init__()
        self.spec = spec
        self._names, blocks = [name for name, _ in run], [block for _, block in run]
        self.blocks = nn.ModuleList(blocks)
        self.keywords = frozenset[str]().union(*map(accepted_keywords, blocks))
        # Places, not tensors: moving a model off meta or to a device replaces its parameter objects.
        self._slots = slots

    def forward(self, inputs: tuple[Any, ...], extras: Mapping[str, Any]) -> Any:
        """Run the blocks.

        Args:
            inputs: All inputs of the first block; of a stage that is not the first, one value.
            extras: Keyword arguments of the pipeline's call, those that no block here names are ignored; or what
                `call_binding.bind` made of the calls of a list's blocks.
        """
        if call_binding.CALLS in extras:
            return call_binding.call_bound(self.blocks, self._names, inputs, extras)
        return call_blocks(self.blocks, inputs, extras)

    def taken(self, extras: Mapping[str, Any]) -> dict[str, Any]:
        """Of a call's extras, those that are for blocks here."""
        if call_binding.CALLS in extras:
            return call_binding.taken(extras, self.spec.block_names)
        return {name: value for name, value in extras.items() if name in self.keywords}

    def compile_by(self, compiler: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Have the whole run of blocks compiled when it is called.

        Args:
            compiler: What ``torch.compile`` makes of the user's options: it takes a function and gives a compiled one.
        """
        self.forward = compiler(self.forward)  # type: ignore[method-assign]

    def named_stage_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Full names and parameters, each once, in the LightningModule's order."""
        return [(name, getattr(owner, key)) for name, owner, key in self._slots.parameters]

    def named_stage_buffers(self) -> list[tuple[str, Tensor]]:
        """Full names and buffers, persistent or not, each once, in the LightningModule's order."""
        return [(name, getattr(owner, key)) for name, owner, key in self._slots.buffers]

    def named_stage_tensors(self) -> dict[str, Tensor]:
        """Both."""
        return {**dict(self.named_stage_parameters()), **dict(self.named_stage_buffers())}

    def copied(self) -> "StageModule":
        """A stage without blocks that has copies of this one's parameters."""
        holder = nn.ParameterList(
            nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            for _, parameter in self.named_stage_parameters()
        )
        slots = tuple((name, holder, str(place)) for place, (name, *_) in enumerate(self._slots.parameters))
        return StageModule(self.spec, (), TensorIndex(slots, ()))


class TensorIndex(msgspec.Struct, frozen=True):
    """Where a stage's tensors are, each once."""

    parameters: tuple[Slot, ...]
    buffers: tuple[Slot, ...]


def spec_of(index: int, block_names: tuple[str, ...], slots: TensorIndex, *, on_trainers: bool = False) -> StageSpec:
    """Of the stage that holds these tensors."""
    parameters, buffers = tuple(map(_tensor_spec, slots.parameters)), tuple(map(_tensor_spec, slots.buffers))
    return StageSpec(index, block_names, parameters, buffers, on_trainers)


def _tensor_spec(slot: Slot) -> ParameterSpec:
    name, owner, key = slot
    tensor: Tensor = getattr(owner, key)
    dtype = str(tensor.dtype).removeprefix("torch.")
    persistent = key not in owner._non_persistent_buffers_set
    return ParameterSpec(name, tuple(tensor.shape), dtype, tensor.requires_grad, persistent)
