"""Steps a stage's parameters with the user's optimizer, reduced to these parameters; its state may be on the CPU."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_swarm.model.optimizer_closure import GradientClosure
from lightning_swarm.model.optimizer_state import GROUP, as_saved, set_hyperparameters
from lightning_swarm.model.optimizer_template import copy_overrides, place_overrides
from lightning_swarm.model.portable import PortableArithmetic
from lightning_swarm.model.portable_numbers import portable_groups
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.run import Selection


class StageOptimizer:
    """The user's optimizer, over the parameters of one stage; without an optimizer, the run does not train."""

    def __init__(
        self,
        optimizer: Optimizer | None,
        parameters: Mapping[str, nn.Parameter],
        *,
        clip_value: float | None = None,
        offload: bool = False,
        separate_objects: bool = False,
    ) -> None:
        self.torch_optimizer = optimizer or torch.optim.SGD([{"params": []}], lr=0.0)
        self._own = self._stepped = dict(parameters)
        # With `offload`, the optimizer steps copies on the CPU, where its state is, too. With `separate_objects`, it
        # steps other objects with the parameters' memory, because autograd refuses a backward after a step of the
        # parameter itself.
        if offload or separate_objects:
            self._stepped = {name: _copied(parameter, offload=offload) for name, parameter in parameters.items()}
        self.offloads = offload
        self._clip_value = clip_value  # each element of a gradient is clamped to this range
        self._written: list[dict[str, Any]] = [{} for _ in self.torch_optimizer.param_groups]  # values written by steps
        if self._stepped is not self._own:
            copy_overrides(self.torch_optimizer, zip(self._own.values(), self._stepped.values(), strict=True))
        initial = dict(self.torch_optimizer.state)  # some optimizers have state before their first step
        self.torch_optimizer.state.clear()
        self.load_state({name: initial[parameter] for name, parameter in self._own.items() if parameter in initial})

    def select(self, selection: Selection) -> None:
        """Adopt the parameter groups of `selection`. Each parameter keeps its state."""
        groups = self.torch_optimizer.param_groups
        del groups[selection.num_groups :]
        while len(groups) < selection.num_groups:  # the next record brings their hyperparameters
            groups.append(copy.deepcopy(self.torch_optimizer.defaults))
        self._written = [*self._written[: len(groups)], *({} for _ in groups[len(self._written) :])]
        for index, group in enumerate(groups):  # keep empty groups, because records address groups by index
            group["params"] = [each for name, each in self._stepped.items() if selection.groups.get(name) == index]

    def incompatible(self, hyperparameters: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the hyperparameters of the first incompatible group that cannot replace its present values."""
        groups = zip(self.torch_optimizer.param_groups, self._written, hyperparameters, strict=False)
        for group, written, values in groups:  # hyperparameters that steps wrote are not replaced
            new = {key: value for key, value in values.items() if key not in written}
            wrong = [key for key, value in new.items() if key == "params" or not _fits(group.get(key), value)]
            if wrong:
                return sorted(wrong)
        return []

    def step(
        self,
        gradients: Mapping[str, Tensor | None],
        factor: float,
        hyperparameters: Sequence[Mapping[str, Any]],
        *,
        portable: bool = False,
    ) -> None:
        """Step with gradients times `factor`; a parameter whose gradient is None is skipped.

        With `portable` the result has the same bits on machines of all kinds.
        """
        with PortableArithmetic() if portable else contextlib.nullcontext():
            stepped = [self._stepped[name] for name in gradients]
            self._fetch(gradients)
            for parameter, gradient in zip(stepped, gradients.values(), strict=True):
                scaled = gradient.to(parameter.device) * factor if gradient is not None else None
                parameter.grad = scaled.to(parameter.dtype) if scaled is not None else None
            if self._clip_value is not None:
                torch.nn.utils.clip_grad_value_(stepped, self._clip_value)
            groups = self.torch_optimizer.param_groups
            for group, values, written in zip(groups, hyperparameters, self._written, strict=True):
                set_hyperparameters(group, {**values, **written})  # hyperparameters that steps wrote stay
            old_groups = [dict(group) for group in groups]
            place_overrides(self.torch_optimizer)
            closure = GradientClosure(stepped, type(self.torch_optimizer).__name__)
            with portable_groups(self.torch_optimizer) if portable else contextlib.nullcontext():
                self.torch_optimizer.step(closure)  # type: ignore[arg-type]  # it returns no loss
            closure.check()
            self._make_contiguous()
            for group, old, written in zip(groups, old_groups, self._written, strict=True):
                written.update(
                    {key: new for key, new in group.items() if _is_written(key, new) and old.get(key) != new}
                )
            for parameter in stepped:
                parameter.grad = None
            for name in gradients if self._stepped is not self._own else ():
                if self.offloads:
                    self._own[name].data.copy_(self._stepped[name])
                else:
                    self._own[name].data = self._stepped[name].data  # some optimizers replace a parameter's memory

    def _make_contiguous(self) -> None:
        """Lay out state as joiners do, which receive only bytes: the layout affects the rounding of matrix products."""
        for parameter, state in self.torch_optimizer.state.items():
            for tensor in serialization.leaves(dict(state)):
                if isinstance(tensor, Tensor) and not _is_laid_out(tensor, parameter):
                    tensor.data = tensor.data.contiguous()

    @torch.no_grad()
    def _fetch(self, names: Iterable[str]) -> None:
        """Copy the parameters' values, which other code may have set since the last step, to the stepped tensors."""
        if self.offloads:
            for name in names:
                self._stepped[name].copy_(self._own[name])
        elif self._stepped is not self._own:
            for name in names:
                self._stepped[name].data = self._own[name].data

    def state(self) -> dict[str, dict[str, Any]]:
        """Return each parameter's state, if any: trees of tensors, not copied, and numbers; `GROUP` has its group's."""
        states, groups = self.torch_optimizer.state, zip(self.torch_optimizer.param_groups, self._written, strict=True)
        written = {id(each): {GROUP: dict(values)} for group, values in groups if values for each in group["params"]}
        merged = {name: {**states.get(each, {}), **written.get(id(each), {})} for name, each in self._stepped.items()}
        return {name: state for name, state in merged.items() if state or self._stepped[name] in states}

    def saved_state(self) -> dict[str, dict[str, Any]]:
        """Return the state as the optimizer itself saves it; some optimizers save only a part."""
        names = {id(parameter): name for name, parameter in self._stepped.items()}
        return as_saved(self.torch_optimizer, names, self.state())

    def load_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Load the state of this stage's parameters, bit for bit, in place of their former state."""
        groups = {
            id(parameter): (group, written)
            for group, written in zip(self.torch_optimizer.param_groups, self._written, strict=True)
            for parameter in group["params"]
        }
        # Not with `load_state_dict`: it casts state to the parameter's dtype, so a replica that loaded it would differ
        # from the others, and it ignores parameters outside of all groups.
        for name, parameter in self._stepped.items():
            self.torch_optimizer.state.pop(parameter, None)
            group, written = groups.get(id(parameter), ({}, {}))
            loaded = dict(state.get(name, {}))
            written.update({key: value for key, value in loaded.pop(GROUP, {}).items() if _is_written(key, value)})
            if loaded or (name in state and GROUP not in state[name]):  # an empty state is one, too
                self.torch_optimizer.state[parameter] = _placed(loaded, parameter, group)

    def share(self, other: StageOptimizer) -> None:
        """Use the state objects of `other` for the parameters that both hold and that `other` has stepped."""
        for name, parameter in self._own.items():
            if other._own.get(name) is parameter and other._stepped[name] in other.torch_optimizer.state:
                self.torch_optimizer.state[self._stepped[name]] = other.torch_optimizer.state[other._stepped[name]]

    def clear_state(self) -> None:
        """Drop all state."""
        self.torch_optimizer.state.clear()
        self._written = [{} for _ in self.torch_optimizer.param_groups]


def _is_written(key: str, value: object) -> bool:
    """Return whether an optimizer's step may have written this value of a parameter group, which must be a number."""
    return key != "params" and isinstance(value, (int, float))


def _copied(parameter: nn.Parameter, *, offload: bool) -> nn.Parameter:
    # `data` shares the memory; `detach` would also share the version counter.
    data = parameter.detach().to("cpu", copy=True) if offload else parameter.data
    return nn.Parameter(data, requires_grad=parameter.requires_grad)


def _placed(state: Mapping[str, Any], parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a parameter's state to the device that the optimizer expects: the parameter's, or for step counts the CPU.

    It is copied because an optimizer steps in place, and the loaded state may belong to the user's own optimizer.
    """
    keeps_count_on_device = group.get("capturable") or group.get("fused")
    placed = {}
    for key, value in state.items():
        structure, tensors = serialization.flatten(value)
        device = parameter.device if key != "step" or keeps_count_on_device else torch.device("cpu")
        placed[key] = serialization.unflatten(
            structure, [_copied_like(tensor.to(device), parameter) for tensor in tensors]
        )
    return placed


def _is_laid_out(tensor: Tensor, parameter: Tensor) -> bool:
    """Return whether a tensor of a parameter's state has the layout that all servers have."""
    return tensor.is_contiguous() or (tensor.shape == parameter.shape and tensor.stride() == parameter.stride())


def _copied_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Copy a tensor of a parameter's state; if the shapes are equal, use its layout, such as channels last."""
    if tensor.shape != parameter.shape:
        return tensor.clone(memory_format=torch.contiguous_format)
    return torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device, requires_grad=False).copy_(tensor)


def _fits(present: object, new: object) -> bool:
    """Return whether `new` can replace a hyperparameter. Messages carry neither tuples nor tensors."""
    if isinstance(present, (list, tuple)):
        if not isinstance(new, list) or len(new) != len(present):
            return False
        return all(_fits(*values) for values in zip(present, new, strict=True))
    if isinstance(present, (bool, str)):
        return type(new) is type(present)
    if isinstance(present, (int, float, Tensor)):
        return isinstance(new, (int, float)) and not isinstance(new, bool)
    return True
