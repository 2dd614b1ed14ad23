"""What a run's weights are at first where the starter's module has none: its tensors on torch's meta device."""

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

from lightning_swarm.blueprint import Blueprint, Place
from lightning_swarm.errors import ConfigError
from lightning_swarm.partition import Blocks, StageModule
from lightning_swarm.shards import Folder

_MOVES: Final = (Tensor.to, Tensor.cpu, Tensor.cuda)
_MAX_NAMED: Final = 5


class Origin:
    """Makes values of a module's tensors on meta, of one stage after the other, and forgets them."""

    def __init__(self) -> None:
        self._blueprint = Blueprint()
        self._places: dict[str, Place] = {}
        self._spent: weakref.ref[nn.Module] | None = None  # its values are not those that it was made with

    def recording(self, device: torch.device) -> AbstractContextManager[None]:
        """Write down what is done to tensors on meta, as if they were on `device`."""
        return self._blueprint.recording(device)

    @contextmanager
    def restoring(self, module: nn.Module, state: Mapping[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
        """Load a checkpoint's state into the module inside: what is on meta takes it from there when it is needed.

        Args:
            module: Into which.
            state: Of the checkpoint. What is on meta itself has its values from `stand_in`.
            device: As for `recording`.
        """
        own = module.state_dict()
        on_meta = {name for name, value in own.items() if isinstance(value, Tensor) and value.is_meta}
        self._spent = None
        with self.recording(device) if on_meta else contextlib.nullcontext():
            yield {name: self._stand_in(value) if name in on_meta else value for name, value in state.items()}

    def _stand_in(self, value: Any) -> Any:
        has_values = isinstance(value, Tensor) and not value.is_meta
        return self._blueprint.stand_in(value, lambda: value) if has_values else value

    def read(self, module: nn.Module, folder: Folder) -> dict[str, Any]:
        """The weights in a folder, as `restoring` takes them: what the module has on meta is read when it is needed."""
        on_meta = {name for name, tensor in _tensors(module) if tensor.is_meta}
        found = folder.weights
        here = folder.read_weights(name for name in found if name not in on_meta)
        return {
            name: here[name] if name in here else self._blueprint.stand_in(like, partial(_read, folder, name))
            for name, like in found.items()
        }

    def look(self, module: nn.Module) -> None:
        """Know where the module's tensors on meta are, before they are converted or moved.

        Raises:
            ConfigError: Some have no values, or those that they were made with are no longer theirs.
        """
        self._places = {name: self._blueprint.place(tensor) for name, tensor in _tensors(module) if tensor.is_meta}
        if self._places and self._spent is not None and self._spent() is module:
            raise ConfigError(
                f"the weights of a module on meta are in no process as a whole, got {type(module).__name__} after a "
                "run of it. Name the checkpoint to go on from: `ckpt_path=...`."
            )
        blank = set(self._blueprint.blank(list(self._places.values())))
        if blank:
            names = [name for name, place in self._places.items() if place in blank]
            more = f", ... ({len(names)} in all)" if len(names) > _MAX_NAMED else ""
            raise ConfigError(
                "what is on meta must have been filled where that is written down, got nothing that fills "
                f"{', '.join(names[:_MAX_NAMED])}{more}. Build the layers in `configure_model`, have each parameter "
                "and buffer initialised there, or go on from a checkpoint."
            )

    def fill_outside(self, module: nn.Module, blocks: Blocks, device: torch.device) -> None:
        """Give what is in no block its values: the trainer computes with it itself."""
        inside = {id(one) for block in blocks.modules for one in (*block.parameters(), *block.buffers())}
        outside = [(name, tensor) for name, tensor in _tensors(module) if tensor.is_meta and id(tensor) not in inside]
        # One for each, however many modules share it.
        made: dict[int, Any] = {}
        for (_, tensor), value in zip(outside, self._values(outside, device), strict=True):
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(value, requires_grad=tensor.requires_grad) if is_parameter else value
        for owner in module.modules():
            for tensors in (owner._parameters, owner._buffers):
                tensors.update({key: made[id(one)] for key, one in tensors.items() if id(one) in made})

    def weights(self, stage: StageModule) -> dict[str, Tensor]:
        """Parameters and buffers of a stage, by name: its own, and for those on meta what they would be."""
        tensors = stage.named_stage_tensors()
        made = [(name, tensor) for name, tensor in tensors.items() if tensor.is_meta]
        return {**tensors, **dict(zip(dict(made), self._values(made, torch.device("cpu")), strict=True))}

    def spend(self, module: nn.Module, *, trains: bool) -> None:
        """A run has begun: what a checkpoint has brought is forgotten, and what it `trains` is not what was made."""
        brought = self._blueprint.forget_sources()
        if is_on_meta(module) and (brought or trains):
            self._spent = weakref.ref(module)

    def _values(self, tensors: Sequence[tuple[str, Tensor]], device: torch.device) -> list[Tensor]:
        values = self._blueprint.values([self._places[name] for name, _ in tensors], device)
        return [value.to(tensor.dtype) for value, (_, tensor) in zip(values, tensors, strict=True)]


def _read(folder: Folder, name: str) -> Tensor:
    tensor: Tensor = folder.read_weights([name])[name]
    return tensor


def is_on_meta(module: nn.Module) -> bool:
    """Whether some of its parameters are on torch's meta device, and have no values."""
    return any(parameter.is_meta for parameter in module.parameters())


@contextmanager
def staying_on_meta() -> Iterator[None]:
    """Have modules moved to another device inside of it, but for what is on meta."""
    with _Staying():
        yield


class _Staying(TorchFunctionMode):
    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MOVES and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
