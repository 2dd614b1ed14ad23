"""Finds the low-rank adapters that peft has put around layers in the blocks of a served model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.fidelity.hooks import user_hook_names
from lightning_swarm.model.inference.adapter_digest import adapter_digest
from lightning_swarm.protocol.messages.tuning import AdapterUpload, Lora

_WRAPPED: Final = "base_layer"  # peft's name for the layer inside an adapter
_PEFT_KINDS: Final = ("LORA", "PROMPT_TUNING", "P_TUNING")


def check_kind(config: Any) -> None:
    """Refuse a peft config whose kind of adapter served models do not support."""
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind not in _PEFT_KINDS:
        raise ConfigError(
            f"a served model can be tuned by LoRA, prompt tuning or p-tuning, got {kind}. Use one of these, or your "
            "own head."
        )
    # Refused before peft uses the config, because peft imports the module that `megatron_config` names.
    if getattr(config, "megatron_config", None):
        raise ConfigError(
            "a served model has no Megatron layers, got an adapter whose config has `megatron_config`. Use another "
            "adapter, or save this one without that setting."
        )


def is_of_adapter(name: str) -> bool:
    """Return whether a module or parameter of this name belongs to a low-rank adapter."""
    return any(part.startswith("lora_") for part in name.split("."))


@dataclass
class StageAdapter:
    """The active adapters in a stage's blocks."""

    loras: list[Lora] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)  # the client's A and B of each LoRA, alternating
    drops: bool = False  # dropout of adapters is on

    @property
    def is_trained(self) -> bool:
        """Whether any tensor requires a gradient."""
        return any(tensor.requires_grad for tensor in self.tensors)


@dataclass(frozen=True)
class FoundAdapters:
    """The active adapters in all blocks, and the mode of the blocks' own modules."""

    stages: Sequence[StageAdapter]
    trains: bool  # the blocks' own modules are in train mode

    @property
    def is_empty(self) -> bool:
        """Whether no stage has an adapter."""
        return not any(stage.loras for stage in self.stages)

    @property
    def is_trained(self) -> bool:
        """Whether any adapter requires a gradient."""
        return any(stage.is_trained for stage in self.stages)

    @property
    def wants_grad(self) -> bool:
        """Whether a forward computed now can lead to a gradient of an adapter."""
        return torch.is_grad_enabled() and self.is_trained


def find_adapters(blocks: Sequence[nn.Module], ranges: Sequence[range]) -> FoundAdapters:
    """Return the adapters of each stage. Raise `ConfigError` if anything else in the blocks would train."""
    stages, modes = [], set[bool]()
    for blocks_of_stage in ranges:
        stage, drops = StageAdapter(), set[bool]()
        for number in blocks_of_stage:
            _add_adapters(blocks[number], number, stage, drops, modes)
        if len(drops) > 1:
            raise ConfigError(
                "the dropouts of a stage's adapters must be all in train mode or all in eval mode, got both in "
                f"the blocks {blocks_of_stage.start} to {blocks_of_stage.stop - 1}. Call `train()` or `eval()` of the "
                "whole model."
            )
        stage.drops = True in drops
        stages.append(stage)
    if len(modes) > 1:
        raise ConfigError(
            "the blocks of a served model must be all in train mode or all in eval mode, got both. Call "
            "`train()` or `eval()` of the whole model."
        )
    return FoundAdapters(stages, trains=True in modes)


def _add_adapters(block: nn.Module, number: int, stage: StageAdapter, drops: set[bool], modes: set[bool]) -> None:
    """Add a block's adapters to its stage, the modes of its dropouts to `drops`, and of its other modules to `modes`.

    Refuse adapters, hooks and changed weights that servers do not support.
    """
    sent: set[int] = set()  # ids of the adapters' parameters
    for name, layer in block.named_modules():
        if name and (hooks := user_hook_names(layer)):  # peft adds such hooks for `adapter_names`
            _refuse(f"{name!r} of block {number}", f"a forward hook, which would not be called: {hooks[0]}")
        if not hasattr(layer, _WRAPPED):
            if not is_of_adapter(name):
                modes.add(layer.training)
            continue
        where = f"{name!r} of block {number}"
        if not hasattr(layer, "lora_A"):
            _refuse(where, f"a {type(layer).__name__}")
        if getattr(layer, "merged_adapters", None):
            _refuse(where, "a merged adapter")
        if layer.disable_adapters:
            continue
        for active in layer.active_adapters:
            if active not in layer.lora_A:
                if active in layer.lora_embedding_A:
                    _refuse(where, "an adapter of an embedding")
                continue
            if kind := _kind_of(layer, active):
                _refuse(where, kind)
            down, up = layer.lora_A[active].weight, layer.lora_B[active].weight
            dropout = layer.lora_dropout[active]
            rate = float(getattr(dropout, "p", 0.0))
            if rate:
                drops.add(dropout.training)
            stage.loras.append(
                Lora(block=number, module=name, scaling=float(layer.scaling[active]), dropout=rate, rank=len(down))
            )
            stage.tensors += [down, up]
            sent |= {id(down), id(up)}
    for name, parameter in block.named_parameters():
        if parameter.requires_grad and id(parameter) not in sent:
            _refuse(f"{name!r} of block {number}", "a parameter that trains")
        # Weights of blocks are placeholders, expanded from one number; a written weight has memory for each element.
        if not is_of_adapter(name) and parameter.numel() > 1 and any(parameter.stride()):
            _refuse(f"{name!r} of block {number}", "a weight that was written here, as by merging")


@dataclass(frozen=True, eq=False)
class PackedAdapter:
    """A stage's part of an adapter, in wire form."""

    name: bytes  # its digest
    upload: AdapterUpload
    tensors: Sequence[Tensor]  # on the CPU


def names_of(adapters: Sequence[PackedAdapter | None]) -> list[bytes | None]:
    """Return the names by which servers know each stage's adapter."""
    return [None if adapter is None else adapter.name for adapter in adapters]


class AdapterPacker:
    """Packs adapters, and keeps each packed adapter while its values stay the same."""

    def __init__(self, model: str) -> None:
        self._model = model
        # stage -> (layers, copies of the tensors on their devices, packed adapter). Compared for each token of a text,
        # so the comparison must be cheap.
        self._known: dict[int, tuple[list[Lora], Sequence[Tensor], PackedAdapter]] = {}

    def packed(self, stage: int, adapter: StageAdapter) -> PackedAdapter | None:
        """Return a stage's adapter in wire form; None if it has none."""
        if not adapter.loras:
            return None
        loras, copies, known = self._known.get(stage, (None, (), None))
        # Compares values, because fused optimizers and writes to `data` do not raise a tensor's version.
        if known is not None and loras == adapter.loras and all(map(_is_same, adapter.tensors, copies)):
            return known
        # Copied, because a repeated call needs the values of its forward.
        copies = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in adapter.tensors]
        sent = tuple(copy.cpu() for copy in copies)
        name = adapter_digest(stage, adapter.loras, sent)
        upload = AdapterUpload(model=self._model, stage=stage, digest=name, loras=adapter.loras)
        packed = PackedAdapter(name, upload, sent)
        self._known[stage] = adapter.loras, copies, packed
        return packed


def _is_same(tensor: Tensor, copy: Tensor) -> bool:
    return (tensor.dtype, tensor.device) == (copy.dtype, copy.device) and torch.equal(tensor.detach(), copy)


def _kind_of(layer: Any, active: str) -> str:
    """Return the unsupported variant of an adapter; empty for a plain low-rank one."""
    if active in getattr(layer, "lora_variant", {}) or getattr(layer, "use_dora", {}).get(active, False):
        return "DoRA or another variant of LoRA"
    if getattr(layer, "lora_bias", {}).get(active, False):
        return "LoRA with `lora_bias=True`"
    return ""


def _refuse(where: str, kind: str) -> NoReturn:
    raise ConfigError(
        f"in the blocks of a served model only LoRA's A and B of linear layers can train, got {kind}: {where}. Do not "
        "use `use_dora`, `lora_bias`, `modules_to_save` or `bias` for layers in blocks, nor IA3 and other adapters. "
        "Prompt tuning, p-tuning and your own head work, because they are outside of the blocks."
    )
