"""The user's optimizer as it was made: stages get copies of it over their own parameters, by name."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.copying import copied, copied_hooks
from lightning_swarm.model.optimizer_closure import GradientClosure
from lightning_swarm.model.portable import PortableArithmetic, Unportable
from lightning_swarm.model.portable_numbers import portable_groups
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.wire import MAX_TEXT

HOOKS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_TRIED_STEPS: Final = 3
_REFERABLE: Final = (
    *(bool, int, float, str, type(None), tuple, type, Tensor, Optimizer),
    *(FunctionType, BuiltinFunctionType, ModuleType, torch.dtype, torch.device),
)


# A user of bitsandbytes may have some parameters optimized otherwise than the rest, embeddings with 32 bits of state,
# say. One `GlobalOptimManager` for the whole process knows them, by a parameter's id and by its place in its parameter
# group. A stage has only part of a group, and other optimizers in this process have other stages.
def override_manager(optimizer: Optimizer) -> Any:
    """The manager of overrides, recognized by what it has: bitsandbytes is slow to import, and few use it."""
    manager = getattr(optimizer, "mng", None)
    return manager if hasattr(manager, "index2config") else None


def copy_overrides(optimizer: Optimizer, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Let copies be optimized as the parameters are, which the optimizer still has; `pairs` are of both."""
    manager = override_manager(optimizer)
    if manager is not None:
        optimizer.check_overrides()  # type: ignore[attr-defined]  # only now are those that a module named found
        configs = manager.pid2config
        configs.update({id(made): configs[id(own)] for own, made in pairs if id(own) in configs})


class OptimizerTemplate:
    """A copy of an optimizer over a whole model, which is left as it is. Its parameters take no memory."""

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """Copy an optimizer; `names` are its parameters' full names by their ids."""
        like = {
            id(parameter): nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            for parameter in parameters_of(optimizer)
        }
        copy_overrides(optimizer, ((parameter, like[id(parameter)]) for parameter in parameters_of(optimizer)))
        self._optimizer = _copy_over(optimizer, like)
        self._parameters = {names[key]: parameter for key, parameter in like.items() if key in names}
        state = serialization.flatten(list(optimizer.state.values()))[1]
        self._has_state = bool(state)
        # Else the lead hands out what it has before the first step, whatever is made here.
        self._needs_state = any(tensor.is_meta for tensor in state)

    def cut(self, parameters: Mapping[str, nn.Parameter]) -> Optimizer:
        """Make the optimizer of a stage, over its parameters by name; empty parameter groups stay."""
        pairs = [(self._parameters[name], own) for name, own in parameters.items() if name in self._parameters]
        copy_overrides(self._optimizer, pairs)
        made = _copy_over(self._optimizer, {id(like): own for like, own in pairs})
        if self._has_state:
            made.state.update(_first_state(made, needed=self._needs_state))
        return made

    def check_steps(self, *, separable: bool) -> frozenset[str]:
        """Refuse an optimizer that needs gradients at other weights, or, if `separable`, those of other parameters.

        Returns the keys of a parameter group that its steps write, such as a count of them.
        """
        pair = self._smallest(2)
        try:
            alone, groups = self._tried(pair[:1])
            apart = not separable or torch.equal(self._tried(pair)[0], alone)
        except ConfigError:
            raise
        except Exception:  # noqa: BLE001 - it cannot be tried on these; it may well step where it is wanted
            return frozenset()
        for key, value in groups.items():
            if not isinstance(value, (int, float)):
                raise ConfigError(
                    "an optimizer may write numbers into its parameter groups, for these go with its state from peer "
                    f"to peer: {type(self._optimizer).__name__} writes `{key}`, a {type(value).__name__}. Keep it in "
                    "`self.state[parameter]`."
                )
        if not apart:
            raise ConfigError(
                "an optimizer must step each parameter by its own gradient, for stages have only their own parameters: "
                f"{type(self._optimizer).__name__} also looks at others, for a norm of all gradients, say. Clip by the "
                "Trainer's `gradient_clip_val`, take another optimizer, or have all parameters in one stage "
                "(`num_stages=1`, the whole model in `pipeline`)."
            )
        return frozenset(groups)

    def unportable(self) -> str:
        """Say why machines of different kinds could not step to the same bits; empty if they can."""
        largest_first = sorted(self._parameters.items(), key=lambda item: -item[1].numel())
        alike = {(own.dim(), own.dtype): name for name, own in largest_first}  # of each kind the smallest
        kind = type(self._optimizer).__name__
        try:
            for name in alike.values():
                with PortableArithmetic():
                    self._tried([name], portable=True)
        except Unportable as error:
            return f"{kind} computes by {error.operation}"[:MAX_TEXT]
        except Exception as error:  # noqa: BLE001 - then nothing shows that it steps alike
            return f"{kind} fails with portable arithmetic: {error!r}"[:MAX_TEXT]
        return ""

    def _smallest(self, count: int) -> list[str]:
        """The names of the smallest parameters, in the order of all: a first one draws the same numbers alone."""
        names = sorted(self._parameters, key=lambda name: self._parameters[name].numel())[:count]
        return sorted(names, key=list(self._parameters).index)

    def _tried(self, names: Sequence[str], *, portable: bool = False) -> tuple[Tensor, dict[str, Any]]:
        """Return what some steps make of the first of these parameters, and what they write into its groups."""
        dtypes = {name: self._parameters[name].dtype if portable else None for name in names}
        made = {name: nn.Parameter(torch.ones(self._parameters[name].shape, dtype=dtypes[name])) for name in names}
        optimizer = self.cut(made)
        for register in HOOKS:  # they may note what they are called for
            vars(optimizer).get(register, {}).clear()
        before = [{key: copy.copy(value) for key, value in group.items()} for group in optimizer.param_groups]
        with torch.random.fork_rng(devices=()):
            for step in range(_TRIED_STEPS):
                torch.default_generator.manual_seed(step)  # those of devices are not used, and take longer
                for place, parameter in enumerate(made.values()):
                    parameter.grad = torch.full_like(parameter, 0.1 + step + 10 * place)
                closure = GradientClosure([*made.values()], type(optimizer).__name__)
                with portable_groups(optimizer) if portable else nullcontext():
                    optimizer.step(closure)  # type: ignore[arg-type]  # nobody has a loss here
                closure.check()
        pairs = zip(optimizer.param_groups, before, strict=True)
        written = {key: new for group, old in pairs for key, new in group.items() if _is_other(key, new, old)}
        return made[names[0]].detach(), written


def _is_other(key: str, new: Any, old: Mapping[str, Any]) -> bool:
    """Return whether a value in a parameter group is another one than before."""
    return key != "params" and (key not in old or type(new) is not type(old[key]) or bool(new != old[key]))


def check_hooks(optimizer: Optimizer) -> None:
    """Refuse hooks that refer to what is not on the servers, which call them for the parameters of each stage."""
    own_step = [step] if (step := step_of_its_own(optimizer)) is not None else []
    for hook in own_step + [hook for name in HOOKS for hook in vars(optimizer).get(name, {}).values()]:
        for found in _referred(hook):
            if found is not optimizer and not isinstance(found, _REFERABLE):
                raise ConfigError(
                    "hooks of an optimizer, and a function in the place of its `step`, run on servers, for the "
                    "parameters of a stage, and what they note or change elsewhere never gets here: got one that "
                    f"refers to a {type(found).__name__}. Use what it is called with, such as "
                    "`optimizer.param_groups`, or write weights in `on_train_batch_end`."
                )


def step_of_its_own(optimizer: Optimizer) -> Any:
    """Return the function that user code put in the place of this object's `step`; None if that is its class's."""
    step = vars(optimizer).get("step")
    return None if hasattr(step, "_wrapped_by_lr_sched") else step  # as schedulers do


def _referred(hook: Any) -> Iterator[Any]:
    """Give what a hook refers to beside globals."""
    if isinstance(hook, functools.partial):
        yield from (*hook.args, *hook.keywords.values(), *_referred(hook.func))
    elif isinstance(hook, MethodType):
        yield hook.__self__
    elif isinstance(hook, FunctionType):
        found = [cell.cell_contents for cell in hook.__closure__ or () if cell != CellType()]
        yield from (one.__self__ if isinstance(one, MethodType) else one for one in found)
    else:
        yield hook


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """All parameters of an optimizer, in its order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def replace_parameters(optimizer: Optimizer, replaced: Mapping[int, nn.Parameter]) -> None:
    """Have an optimizer hold other parameters, by the ids of those whose places they take, without their state."""
    for parameter in parameters_of(optimizer):
        if id(parameter) in replaced:
            optimizer.state.pop(parameter, None)
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(id(parameter), parameter) for parameter in group["params"]]


def _copy_over(optimizer: Optimizer, counterparts: Mapping[int, nn.Parameter]) -> Optimizer:
    """Copy an optimizer, without state, over the counterparts of its parameters; those without one are left out."""
    known: dict[int, Any] = {id(parameter): parameter for parameter in parameters_of(optimizer)}
    known.update(counterparts)
    wrapped = list(optimizers_in(optimizer))
    known.update({id(one): object.__new__(type(one)) for one in wrapped})
    manager = override_manager(optimizer)
    known[id(manager)] = manager
    for one in wrapped:  # a wrapper may share what it wraps has
        for group in vars(one).get("param_groups", ()):
            own = [known[id(parameter)] for parameter in group["params"] if id(parameter) in counterparts]
            rest = {key: copied(value, known) for key, value in group.items() if key != "params"}
            known.setdefault(id(group), {"params": own, **rest})
        if isinstance(state := vars(one).get("state"), dict):
            empty = copy.copy(state)
            empty.clear()
            known.setdefault(id(state), empty)
    for one in wrapped:
        vars(known[id(one)]).update(_attributes(one, known))
    made: Optimizer = known[id(optimizer)]
    return made


def _attributes(optimizer: Optimizer, known: dict[int, Any]) -> dict[str, Any]:
    found = {}
    for name, value in vars(optimizer).items():
        if hasattr(value, "_wrapped_by_lr_sched"):  # a scheduler's wrapper steps the optimizer that it has
            continue
        if isinstance(value, nn.Module):
            found[name] = value
        else:
            found[name] = copied_hooks(value, known) if name.endswith("_hooks") else copied(value, known)
    return found


def optimizers_in(optimizer: Optimizer, seen: set[int] | None = None) -> Iterator[Optimizer]:
    """Give an optimizer and those that it wraps."""
    seen = {id(optimizer)} if seen is None else seen
    yield optimizer
    for value in vars(optimizer).values():
        for inner in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(inner, Optimizer) and id(inner) not in seen:
                seen.add(id(inner))
                yield from optimizers_in(inner, seen)


def _first_state(optimizer: Optimizer, *, needed: bool) -> dict[Tensor, Any]:
    """The state that an optimizer's own constructor makes before the first step."""
    kind = type(optimizer)
    try:
        return dict(kind([dict(group) for group in optimizer.param_groups], **optimizer.defaults).state)
    except TypeError as error:
        if not needed:
            return {}
        raise ConfigError(
            f"an optimizer over a module on torch's meta device must have no state before its first step, or take its "
            f"own `defaults` as arguments, got {kind.__name__}: {error}. Use another one, or build the module on a "
            "device."
        ) from error
