"""Copies of the user's optimizer for stages, over the stages' parameters, and trials of whether it can step so."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError, SwarmError
from lightning_swarm.model.fidelity.copying import copy_hooks, copy_value
from lightning_swarm.model.optimizer_closure import GradientClosure
from lightning_swarm.model.optimizer_state import parameters_of
from lightning_swarm.model.portable import PortableArithmetic, Unportable
from lightning_swarm.model.portable_numbers import portable_groups
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.wire import MAX_TEXT

_Kind = TypeVar("_Kind", bound=Hashable)

HOOKS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_TRIAL_STEPS: Final = 6
_ROUNDINGS: Final = 32  # rounding errors by which the weights of two trials may differ
# Types of objects that hooks may refer to.
_REFERABLE: Final = (
    *(bool, int, float, str, type(None), tuple, type, Tensor, Optimizer),
    *(FunctionType, BuiltinFunctionType, ModuleType, torch.dtype, torch.device),
)


# With bitsandbytes, some parameters may be optimized differently from the rest, such as embeddings with 32-bit state.
# One `GlobalOptimManager` per process holds these overrides, by parameter id and by position in a parameter group. A
# stage has only part of a group, and other optimizers in this process have other stages.
def override_manager(optimizer: Optimizer) -> Any:
    """Return the override manager or None, recognized by its attributes because importing bitsandbytes is slow."""
    manager = getattr(optimizer, "mng", None)
    return manager if hasattr(manager, "index2config") else None


def copy_overrides(optimizer: Optimizer, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy overrides to copies of parameters; `pairs` are the originals, which the optimizer still has, and copies."""
    manager = override_manager(optimizer)
    if manager is not None:
        optimizer.check_overrides()  # type: ignore[attr-defined]  # resolves overrides that were set by module
        configs = manager.pid2config  # id -> config
        for original, made in pairs:
            if id(original) in configs:
                configs[id(made)] = configs[id(original)]
            else:
                configs.pop(id(made), None)  # may be the config of a deleted parameter with the same id


def place_overrides(optimizer: Optimizer) -> None:
    """Update the overrides by position to the optimizer's present parameters; call it before each step."""
    if (manager := override_manager(optimizer)) is not None:
        manager.index2config.clear()
        manager.register_parameters(optimizer.param_groups)


class OptimizerTemplate:
    """A copy of an optimizer over a whole model. The original stays unchanged; the copy's parameters take no memory."""

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """Copy an optimizer; `names` maps the ids of its parameters to their full names."""
        on_meta = {
            id(parameter): nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            for parameter in parameters_of(optimizer)
        }
        copy_overrides(optimizer, ((parameter, on_meta[id(parameter)]) for parameter in parameters_of(optimizer)))
        self._optimizer = _copy_over(optimizer, on_meta)
        self._parameters = {names[key]: parameter for key, parameter in on_meta.items() if key in names}
        self._is_on_cpu = all(parameter.device.type == "cpu" for parameter in parameters_of(optimizer))
        state = serialization.flatten(list(optimizer.state.values()))[1]
        self._has_state = bool(state)
        # State on meta has no values, so each stage must make its own. Other state comes from the lead before the first
        # step.
        self._needs_state = any(tensor.is_meta for tensor in state)

    def cut(self, parameters: Mapping[str, nn.Parameter]) -> Optimizer:
        """Make the optimizer of a stage, over its parameters by name; empty parameter groups stay."""
        pairs = [(self._parameters[name], own) for name, own in parameters.items() if name in self._parameters]
        copy_overrides(self._optimizer, pairs)
        made = _copy_over(self._optimizer, {id(template): own for template, own in pairs})
        if self._has_state:
            made.state.update(_first_state(made, needed=self._needs_state))
        return made

    def check_steps(self, *, in_stages: bool) -> frozenset[str]:
        """Refuse an optimizer that evaluates gradients at several weights, as LBFGS does.

        With `in_stages`, also refuse an optimizer whose update of a parameter uses gradients of other parameters.

        Return the keys of a parameter group that its steps write, such as a step count.
        """
        kind, written = type(self._optimizer).__name__, dict[str, Any]()
        for name, *others in self._names_to_try():
            try:
                alone = self._try_steps([name])
                together = self._try_steps([name, *others]) if in_stages and others else alone
                is_separate = _is_near(together.weight, alone.weight)
            except ConfigError:
                raise
            except Exception as error:
                if not self._is_on_cpu:  # on its device, the optimizer may work
                    return frozenset()
                raise ConfigError(
                    "an optimizer must be able to step some of its parameters, from their gradients only, as servers "
                    f"do: {kind} fails on {name!r} with {type(error).__name__}: {error}. Use another optimizer."
                ) from error
            alone.check_state(kind)
            if not is_separate:
                raise ConfigError(
                    "an optimizer must step each parameter by its own gradient, because stages have only their own "
                    f"parameters: {kind} also reads others, perhaps for a norm of all gradients. Clip by the Trainer's "
                    "`gradient_clip_val`, use another optimizer, or keep all parameters in one stage (`num_stages=1`, "
                    "the whole model in `pipeline`)."
                )
            written.update(alone.written)
        return frozenset(written)

    def unportable(self) -> str:
        """Return why steps on machines of different kinds would differ in their bits; empty if they would not."""
        kind = type(self._optimizer).__name__
        try:
            for name in self._smallest(lambda own: (own.dim(), own.dtype)).values():
                with PortableArithmetic():
                    self._try_steps([name], portable=True)
        except Unportable as error:
            return f"{kind} computes by {error.operation}"[:MAX_TEXT]
        except Exception as error:  # noqa: BLE001 - any failure counts as not portable
            return f"{kind} fails with portable arithmetic: {error!r}"[:MAX_TEXT]
        return ""

    def _names_to_try(self) -> list[list[str]]:
        """Return the names of parameters to step together in trials, one list for each number of dimensions.

        Each list begins with the smallest parameter of its number of dimensions, which is also stepped alone. The next
        are the smallest other parameter of the same shape, and the smallest of each number of dimensions.
        """
        groups = []
        for name in self._smallest(Tensor.dim).values():
            by_shape = self._smallest(lambda parameter: parameter.shape, but=name)
            alike = [other for shape, other in by_shape.items() if shape == self._parameters[name].shape]
            groups.append(list(dict.fromkeys([name, *alike, *self._smallest(Tensor.dim, but=name).values()])))
        return groups

    def _smallest(self, kind: Callable[[Tensor], _Kind], *, but: str = "") -> dict[_Kind, str]:
        """Return the name of the smallest parameter of each kind, without the parameter `but`."""
        by_size = sorted(self._parameters, key=lambda name: self._parameters[name].numel())
        return {kind(self._parameters[name]): name for name in reversed(by_size) if name != but}

    def _try_steps(self, names: Sequence[str], *, portable: bool = False) -> _Trial:
        """Step these parameters a few times with random gradients, and return the effects."""
        indices = {name: list(self._parameters).index(name) for name in names}
        dtypes = {name: self._parameters[name].dtype if portable else None for name in names}

        def random_values(name: str, step: int) -> Tensor:
            # Sizes of gradients vary between steps and parameters, so that a common factor, as of a norm, shows.
            generator = torch.Generator().manual_seed(1 + indices[name] * (_TRIAL_STEPS + 1) + step)
            size = 4.0 ** ((indices[name] + 2 * step) % 5 - 2)
            return torch.randn(self._parameters[name].shape, generator=generator, dtype=dtypes[name]) * size

        parameters = {name: nn.Parameter(random_values(name, 0)) for name in names}
        optimizer = self.cut(parameters)
        for hooks in HOOKS:  # not called, because hooks may record their calls
            vars(optimizer).get(hooks, {}).clear()
        groups = [{key: copy.copy(value) for key, value in group.items()} for group in optimizer.param_groups]
        place_overrides(optimizer)
        detector, numbers = _DrawDetector(), dict[str, Any]()
        with torch.random.fork_rng(devices=()):
            for step in range(1, _TRIAL_STEPS + 1):
                torch.default_generator.manual_seed(step)  # device generators are not used, and seeding them is slow
                for name, parameter in parameters.items():
                    parameter.grad = random_values(name, step)
                closure = GradientClosure([*parameters.values()], type(optimizer).__name__)
                with portable_groups(optimizer) if portable else detector:
                    optimizer.step(closure)  # type: ignore[arg-type]  # there is no loss here
                closure.check()
                if step == 1:  # the baseline for `changed`, because the first step may create numbers
                    numbers = {key: copy.deepcopy(value) for key, value in _own_numbers(optimizer).items()}
        pairs = zip(optimizer.param_groups, groups, strict=True)
        return _Trial(
            weight=parameters[names[0]].detach(),
            written={
                key: new
                for group, old in pairs
                for key, new in group.items()
                if key != "params" and (key not in old or not _is_same(old[key], new))
            },
            state=optimizer.state,
            draws=detector.has_drawn,
            changed=[name for name, value in _own_numbers(optimizer).items() if not _is_same(numbers.get(name), value)],
        )


@dataclasses.dataclass(frozen=True)
class _Trial:
    """The effects of a few steps of an optimizer."""

    weight: Tensor  # the first parameter after the steps
    written: Mapping[str, Any]  # new values in parameter groups
    state: Mapping[Any, Any]
    draws: bool  # whether the steps draw random numbers
    changed: Sequence[str]  # names of the optimizer's own attributes whose numbers the steps change

    def check_state(self, kind: str) -> None:
        """Refuse an optimizer whose state cannot be sent from peer to peer."""
        if self.draws:
            raise ConfigError(
                "an optimizer's steps must draw no random numbers, because servers of a stage would draw different "
                f"ones: {kind} draws some. Use another optimizer, or arguments with which it draws none."
            )
        for key, value in self.written.items():
            if not isinstance(value, (int, float)):
                raise ConfigError(
                    "an optimizer may write only numbers into its parameter groups, because these travel with its "
                    f"state: {kind} writes `{key}`, a {type(value).__name__}. Keep it in `self.state[parameter]`."
                )
        elsewhere = [f"`self.{name}`" for name in self.changed]
        elsewhere += [f"`self.state[{key!r}]`" for key in self.state if not isinstance(key, Tensor)]
        if elsewhere:
            raise ConfigError(
                "an optimizer's steps may change only its parameters' state and its parameter groups, which are sent "
                f"from peer to peer: {kind} changes {', '.join(elsewhere)}. Keep it in `self.state[parameter]`, or use "
                "another optimizer."
            )
        for key, value in (item for values in self.state.values() for item in values.items()):
            try:
                serialization.flatten(value)
            except (SwarmError, TypeError, ValueError) as error:
                raise ConfigError(
                    "an optimizer's state must consist of tensors, numbers and text, in lists or dicts with text keys, "
                    f"to be sent from peer to peer: {kind} keeps {key!r}, a {type(value).__name__}. Use another "
                    "optimizer, or arguments with which it keeps no such value."
                ) from error


def _is_near(one: Tensor, other: Tensor) -> bool:
    """Return whether weights differ at most by rounding, as if products of several matrices are computed in a batch."""
    rounding = _ROUNDINGS * torch.finfo(one.dtype).eps * float(other.abs().max()) if other.numel() else 0.0
    return bool(((one - other).abs() <= rounding).all() or torch.equal(one.nan_to_num(), other.nan_to_num()))


class _DrawDetector(TorchDispatchMode):
    """Detects random draws of this thread, while other threads may draw from the same generators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_drawn = False

    @override
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        draws = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
        self.has_drawn = self.has_drawn or draws
        return func(*args, **kwargs)


def _own_numbers(optimizer: Optimizer) -> dict[str, Any]:
    """Return the numbers among an optimizer's attributes, without booleans, which mostly mark initialisation."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if (isinstance(value, (int, float)) and not isinstance(value, bool)) or isinstance(value, Tensor)
    }


def _is_same(old: Any, new: Any) -> bool:
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return old.shape == new.shape and torch.equal(old, new)
    return type(old) is type(new) and (bool(old == new) or (old != old and new != new))


def check_hooks(optimizer: Optimizer) -> None:
    """Refuse hooks that refer to objects of this process, because servers call them for each stage's parameters."""
    own_step = [step] if (step := instance_step(optimizer)) is not None else []
    for hook in own_step + [hook for name in HOOKS for hook in vars(optimizer).get(name, {}).values()]:
        for found in _referred(hook):
            if found is not optimizer and not isinstance(found, _REFERABLE):
                raise ConfigError(
                    "an optimizer's hooks and a replaced `step` must use only their arguments, such as "
                    "`optimizer.param_groups`, because they run on servers, for the parameters of one stage, and "
                    f"their other effects are lost; got a hook that refers to a {type(found).__name__}. Write weights "
                    "in `on_train_batch_end` instead."
                )


def instance_step(optimizer: Optimizer) -> Any:
    """Return the function that user code assigned to this object's `step`, or None."""
    step = vars(optimizer).get("step")
    return None if hasattr(step, "_wrapped_by_lr_sched") else step  # schedulers assign a wrapper


def _referred(hook: Any) -> Iterator[Any]:
    """Yield the objects that a hook refers to, without globals."""
    if isinstance(hook, functools.partial):
        yield from (*hook.args, *hook.keywords.values(), *_referred(hook.func))
    elif isinstance(hook, MethodType):
        yield hook.__self__
    elif isinstance(hook, FunctionType):
        contents = [cell.cell_contents for cell in hook.__closure__ or () if cell != CellType()]
        yield from (value.__self__ if isinstance(value, MethodType) else value for value in contents)
    else:
        yield hook


def replace_parameters(optimizer: Optimizer, replaced: Mapping[int, nn.Parameter]) -> None:
    """Replace parameters of an optimizer, and drop their state; `replaced` maps ids of old parameters to the new."""
    for parameter in parameters_of(optimizer):
        if id(parameter) in replaced:
            optimizer.state.pop(parameter, None)
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(id(parameter), parameter) for parameter in group["params"]]


def _copy_over(optimizer: Optimizer, counterparts: Mapping[int, nn.Parameter]) -> Optimizer:
    """Copy an optimizer, without state, over counterparts of its parameters; parameters without one are left out."""
    known: dict[int, Any] = {id(parameter): parameter for parameter in parameters_of(optimizer)}
    known.update(counterparts)
    originals = list(optimizers_in(optimizer))
    known.update({id(original): object.__new__(type(original)) for original in originals})
    manager = override_manager(optimizer)
    known[id(manager)] = manager
    for original in originals:  # a wrapper may share attributes with its inner optimizer
        for group in vars(original).get("param_groups", ()):
            parameters = [known[id(parameter)] for parameter in group["params"] if id(parameter) in counterparts]
            rest = {key: copy_value(value, known) for key, value in group.items() if key != "params"}
            known.setdefault(id(group), {"params": parameters, **rest})
        if isinstance(state := vars(original).get("state"), dict):
            empty = copy.copy(state)
            empty.clear()
            known.setdefault(id(state), empty)
    for original in originals:
        vars(known[id(original)]).update(_attributes(original, known))
    made: Optimizer = known[id(optimizer)]
    return made


def _attributes(optimizer: Optimizer, known: dict[int, Any]) -> dict[str, Any]:
    """Copy an optimizer's attributes; `known` maps the ids of objects that were replaced to their counterparts."""
    attributes = {}
    for name, value in vars(optimizer).items():
        if hasattr(value, "_wrapped_by_lr_sched"):  # a scheduler's wrapper would step the original optimizer
            continue
        if isinstance(value, nn.Module):
            attributes[name] = value
        else:
            attributes[name] = copy_hooks(value, known) if name.endswith("_hooks") else copy_value(value, known)
    return attributes


def optimizers_in(optimizer: Optimizer, seen: set[int] | None = None) -> Iterator[Optimizer]:
    """Yield an optimizer and the optimizers that it wraps."""
    seen = {id(optimizer)} if seen is None else seen
    yield optimizer
    for value in vars(optimizer).values():
        for inner in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(inner, Optimizer) and id(inner) not in seen:
                seen.add(id(inner))
                yield from optimizers_in(inner, seen)


def _first_state(optimizer: Optimizer, *, needed: bool) -> dict[Tensor, Any]:
    """Return the state that an optimizer's own constructor makes before the first step."""
    kind = type(optimizer)
    try:
        return dict(kind([dict(group) for group in optimizer.param_groups], **optimizer.defaults).state)
    except Exception as error:
        if not needed:
            return {}
        raise ConfigError(
            "an optimizer over a module on torch's meta device must have no state before its first step, or its class "
            f"must accept its `defaults` as arguments, but {kind.__name__} fails with them: {error}. Use another "
            "optimizer, or build the module on a device."
        ) from error
