"""Initialises only the part of a meta-device model that a process needs, to the same values as the whole model."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.readable import few
from lightning_swarm.model.fidelity.unsaved_buffers import unsaved_buffers
from lightning_swarm.model.init_record import InitRecord, StorageView
from lightning_swarm.model.partition import Blocks, StageModule
from lightning_swarm.model.sharded_format import ShardedCheckpoint

_MOVES: Final = (Tensor.to, Tensor.cpu, Tensor.cuda)  # functions that move a tensor to another device


# A model that is too large for any machine is built by its author's code, unchanged. Each part gets the same values as
# if the whole model had been built on a device, random values included. The idea is `deferred_init` of torchdistX.
class InitialWeights:
    """Computes the initial values of a module's tensors on meta, stage by stage."""

    def __init__(self) -> None:
        self._record = InitRecord()
        self._views: dict[str, StorageView] = {}
        self._outdated: weakref.ref[nn.Module] | None = None  # a module whose initial values a run has replaced

    def recording(self, device: torch.device) -> AbstractContextManager[None]:
        """Record the initialisation of tensors on meta, as if they were on `device`."""
        return self._record.recording(device)

    @contextmanager
    def restoring(self, module: nn.Module, state: Mapping[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
        """Yield a checkpoint's state to be loaded inside, with stand-ins for the module's tensors on meta."""

        def stand_in(value: Any) -> Any:
            # The stand-in's value is read when it is needed. A tensor on meta in `state` is a stand-in already.
            has_values = isinstance(value, Tensor) and not value.is_meta
            return self._record.stand_in(value, lambda: value) if has_values else value

        state_dict = {**module.state_dict(), **unsaved_buffers(module)}
        on_meta = {name for name, value in state_dict.items() if isinstance(value, Tensor) and value.is_meta}
        self._outdated = None
        with self.recording(device) if on_meta else contextlib.nullcontext():
            yield {name: stand_in(value) if name in on_meta else value for name, value in state.items()}

    def read_folder(self, module: nn.Module, folder: ShardedCheckpoint) -> dict[str, Any]:
        """Read a folder's weights for `restoring`; weights of tensors on meta are read only when they are needed."""
        on_meta = {name for name, tensor in _tensors(module) if tensor.is_meta}
        weights = folder.weights
        loaded = folder.read_weights(name for name in weights if name not in on_meta)
        return {
            name: loaded[name] if name in loaded else self._record.stand_in(like, partial(folder.read_weight, name))
            for name, like in weights.items()
        }

    def index_tensors(self, module: nn.Module) -> None:
        """Record the storages of the module's tensors on meta, before they are converted or moved."""
        self._views = {name: self._record.view(tensor) for name, tensor in _tensors(module) if tensor.is_meta}
        if self._views and self._outdated is not None and self._outdated() is module:
            raise ConfigError(
                "a second run of a module on the meta device must continue from a checkpoint, because only checkpoints "
                f"hold the weights of the first; got {type(module).__name__} without one. Pass `ckpt_path=...`."
            )
        uninitialised = set(self._record.uninitialised(list(self._views.values())))
        if uninitialised:
            names = [name for name, view in self._views.items() if view in uninitialised]
            raise ConfigError(
                "tensors on meta must be filled while their initialisation is recorded, but nothing fills "
                f"{few(names)}. Build the layers and initialise each parameter and buffer in `configure_model`, or "
                "continue from a checkpoint."
            )

    def fill_outside(self, module: nn.Module, blocks: Blocks, device: torch.device) -> None:
        """Initialise the tensors outside of blocks, with which the trainer itself computes."""
        inside = {id(tensor) for block in blocks.modules for tensor in (*block.parameters(), *block.buffers())}
        outside = [(name, tensor) for name, tensor in _tensors(module) if tensor.is_meta and id(tensor) not in inside]
        if not outside:
            return  # because `put_tensors` cannot update the registers of compiled modules, which are not dicts
        new: dict[int, Any] = {}  # one tensor for each old tensor, however many modules share it
        for (_, tensor), value in zip(outside, self._values(outside, device), strict=True):
            new[id(tensor)] = in_place_of(tensor, value)
        put_tensors(module, new)

    def weights(self, stage: StageModule) -> dict[str, Tensor]:
        """Return a stage's parameters and buffers by name, with initial values for tensors on meta."""
        tensors = stage.named_stage_tensors()
        on_meta = [(name, tensor) for name, tensor in tensors.items() if tensor.is_meta]
        return {**tensors, **dict(zip(dict(on_meta), self._values(on_meta, torch.device("cpu")), strict=True))}

    def mark_used(self, module: nn.Module, *, trains: bool) -> None:
        """Drop a checkpoint's values when a run begins. If there were any, or the run trains, refuse later runs."""
        had_checkpoint = self._record.forget_sources()
        if is_on_meta(module) and (had_checkpoint or trains):
            self._outdated = weakref.ref(module)

    def _values(self, tensors: Sequence[tuple[str, Tensor]], device: torch.device) -> list[Tensor]:
        values = self._record.values([self._views[name] for name, _ in tensors], device)
        return [value.to(tensor.dtype) for value, (_, tensor) in zip(values, tensors, strict=True)]


def put_tensors(module: nn.Module, new: Mapping[int, Any]) -> None:
    """Replace tensors in all modules; `new` maps the `id` of an old tensor to the new tensor."""
    for owner in module.modules():
        for tensors in (owner._parameters, owner._buffers):
            tensors.update({key: new[id(tensor)] for key, tensor in tensors.items() if id(tensor) in new})


def in_place_of(tensor: Tensor, value: Tensor) -> Tensor:
    """Return a tensor's new value, as a parameter if the tensor is a parameter."""
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


def is_on_meta(module: nn.Module) -> bool:
    """Return whether some of a module's parameters are on torch's meta device, without values."""
    return any(parameter.is_meta for parameter in module.parameters())


class StayOnMeta(TorchFunctionMode):
    """Inside this mode, tensors on meta stay on meta when their modules are moved to another device."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MOVES and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
