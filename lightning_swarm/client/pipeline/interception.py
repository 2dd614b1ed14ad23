"""Combines the calls of a `ModuleList`'s blocks, which the user's forward makes one by one, into one pipeline call."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction
from typing_extensions import override

from lightning_swarm.client.inference.generating import TextGeneration
from lightning_swarm.client.pipeline.left_values import PendingValues
from lightning_swarm.client.pipeline.pipeline import Pipeline
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.autocast import capture
from lightning_swarm.model.fidelity.hooks import user_hook_names
from lightning_swarm.model.inference.attention_cache import IN_SESSION, is_cache
from lightning_swarm.model.partition import BlockCall, Blocks, Pick, bind, guard
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.calls import ComputeMode


@dataclass(frozen=True)
class _ChainProgress:
    """The calls so far of a chain of blocks: all blocks of a list, called in order by the user's forward."""

    list_name: str
    block_name: str  # the block that was called last
    hidden: Any  # the first block's input
    calls: tuple[BlockCall, ...]
    mode: ComputeMode
    checkpoint: FrameType | None  # frame of the reentrant checkpoint in which the chain began, if any
    versions: tuple[tuple[Tensor, int], ...]  # (tensor of the arguments, its count of in-place changes)
    cache: Any  # the first block's cache of keys and values, or None

    def with_picks(self, picks: tuple[Pick, ...]) -> _ChainProgress:
        """Return the progress after the forward selected a part of the last block's output by `picks`."""
        return replace(self, calls=(*self.calls[:-1], replace(self.calls[-1], picks=picks)))


def _is_tokenizer(value: object) -> bool:
    return any(base.__name__ == "PreTrainedTokenizerBase" for base in type(value).__mro__)


class BlockChain:
    """Turns the calls of a list's blocks into one call of the pipeline, which the last block's call runs."""

    def __init__(
        self,
        blocks: Blocks,
        pipeline: Callable[..., Any],
        generate: Callable[[Any, dict[str, Any], Any], Any],  # called in place of the pipeline if blocks get a cache
        device_type: str,
        shared: Collection[str] = (),
        sites: Collection[tuple[str, str]] = (),  # (module, attribute) of values that forwards have left so far
    ) -> None:
        self._pipeline, self._generate = pipeline, generate
        self._device_type = device_type
        self._shared = shared
        self._list_name = blocks.root_name
        self._keys = blocks.names  # names in the list
        self._names = [f"{blocks.root_name}.{name}" for name in blocks.names]  # names in the model, for errors
        self._modules = blocks.modules
        self._inner = dict(blocks.named_modules())  # name -> module, for all modules in the blocks
        self._sites = sites
        self._pending: PendingValues | None = None  # values that the current chain's forwards will leave
        # Read now, because `Interception` replaces the forwards.
        self._signatures = [inspect.signature(block.forward) for block in blocks.modules]

    def call(self, number: int, *args: Any, **kwargs: Any) -> Any:
        """Run in place of a block's forward; return a `DeferredOutput`, or at the last block the pipeline's output."""
        # `number` is the block's first index in the list, which may contain a block several times.
        if hooks := user_hook_names(self._modules[number]):
            raise ConfigError(
                "blocks that are called one by one must have no forward hooks themselves, because their outputs are on "
                f"other peers: got {hooks[0]} on {self._names[number]!r}. Register it on a layer within the block, or "
                "return the observed value from the block. `output_attentions`, `output_hidden_states` and "
                "`output_router_logits` of Hugging Face models register such hooks: do not set them."
            )
        hidden, arguments, tensors, cache = self._bind(number, args, kwargs)
        before = hidden._progress.with_picks(hidden._picks) if isinstance(hidden, DeferredOutput) else None
        index = 0 if before is None else len(before.calls)
        if index == len(self._modules) or self._modules[index] is not self._modules[number]:
            source = "something else" if before is None else f"the output of block {before.block_name!r}"
            self._refuse(f"block {self._names[number]!r} was called with {source}")
        if before is None:
            progress = self._begin(hidden, arguments, tensors, cache)
        elif before.cache is cache:
            progress = self._extend(before, arguments, tensors)
        else:
            self._refuse(f"block {self._names[number]!r} was called with another cache than the block before")
        if index < len(self._modules) - 1:
            return DeferredOutput(progress)
        if any(tensor._version != version for tensor, version in progress.versions):
            self._refuse("an argument was changed in place between the calls of the first block and of the last")
        self.restore()
        # With an inline runtime, stages compute in this thread. These hooks prevent a checkpoint around this block from
        # handling the tensors that the stages save.
        with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda tensor: tensor):
            if progress.cache is not None:
                _, extras = bind(self._keys, progress.calls, carries=False)
                output = self._generate(progress.hidden, extras, progress.cache)
                if self._pending is not None:
                    self._pending.make_unavailable()
                return output
            carried, extras = bind(self._keys, progress.calls, self._shared)
            output = self._pipeline(
                progress.hidden, *(_expand_rows(value, progress.hidden) for value in carried), **extras
            )
        if self._pending is not None:
            self._pending.settle()
            self._pending = None
        return output

    def restore(self) -> None:
        """Restore the attributes that the blocks' forwards assign to their values before the chain began."""
        if self._pending is not None:
            self._pending.restore()

    def _bind(
        self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any], list[Tensor], Any]:
        """Return a call's hidden state, its other arguments by name, their tensors, and its cache or None."""
        signature = self._signatures[number]
        unnamed: list[Any] = []
        arguments: dict[str, Any] = {}
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            kind = signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                # `generate` passes its tokenizer to blocks, which do not use it.
                arguments.update({key: extra for key, extra in value.items() if not _is_tokenizer(extra)})
            elif kind is inspect.Parameter.VAR_POSITIONAL:
                unnamed += value
            elif name == next(iter(signature.parameters)) or kind is inspect.Parameter.POSITIONAL_ONLY:
                unnamed.append(value)
            else:
                arguments[name] = value
        if len(unnamed) != 1:
            self._refuse(
                f"block {self._names[number]!r} was called with {len(unnamed)} arguments without names, but only the "
                "hidden state may have none"
            )
        caches = {id(value): value for value in arguments.values() if is_cache(value)}
        if len(caches) > 1:
            self._refuse(f"block {self._names[number]!r} was called with {len(caches)} caches")
        arguments = {name: IN_SESSION if is_cache(value) else value for name, value in arguments.items()}
        tensors = [tensor for name, value in arguments.items() for tensor in self._tensors_of(number, name, value)]
        return unnamed[0], arguments, tensors, next(iter(caches.values()), None)

    def _tensors_of(self, number: int, name: str, value: Any) -> list[Tensor]:
        if isinstance(value, DeferredOutput):
            self._refuse(
                f"block {self._names[number]!r} got the output of block {value._progress.block_name!r} as `{name}`"
            )
        try:
            return serialization.flatten(value)[1]
        except ConfigError as error:
            cache_remedy = (
                " A cache of keys and values supports only generating text: otherwise set `use_cache=False` in a "
                "Hugging Face model's config."
            )
            raise ConfigError(
                f"arguments of blocks are sent to other peers: block {self._names[number]!r} got a "
                f"{type(value).__name__} as `{name}`, and {error}{'' if isinstance(value, Tensor) else cache_remedy}"
            ) from error

    def _begin(self, hidden: Any, arguments: dict[str, Any], tensors: list[Tensor], cache: Any) -> _ChainProgress:
        self.restore()  # the former chain may be unfinished
        self._pending = PendingValues(self._inner, self._sites)
        return _ChainProgress(
            list_name=self._list_name,
            block_name=self._names[0],
            hidden=hidden,
            calls=(BlockCall(arguments),),
            mode=self._mode(),
            checkpoint=_reentrant_checkpoint(),
            versions=_versions([*serialization.flatten(hidden)[1], *tensors]),
            cache=cache,
        )

    def _extend(self, progress: _ChainProgress, arguments: dict[str, Any], tensors: list[Tensor]) -> _ChainProgress:
        """Add the next block's call; refuse a changed mode, or another reentrant checkpoint."""
        name = self._names[len(progress.calls)]
        if progress.mode != self._mode():
            self._refuse(
                f"`no_grad`, autocast or another mode changed between block {progress.block_name!r} and {name!r}"
            )
        if progress.checkpoint is not _reentrant_checkpoint():
            raise ConfigError(
                f"checkpointing single blocks of {self._list_name!r} requires `use_reentrant=False`, got "
                f"`use_reentrant=True` around block {name!r}. Pass False, or omit checkpointing: servers recompute "
                "activations if they are short of memory."
            )
        return replace(
            progress,
            block_name=name,
            calls=(*progress.calls, BlockCall(arguments)),
            versions=progress.versions + _versions(tensors),
        )

    def _mode(self) -> ComputeMode:
        return capture(self._device_type, training=False, grad=torch.is_grad_enabled(), input_grad=False)

    def _refuse(self, mistake: str) -> NoReturn:
        _refuse(self._list_name, mistake)


# Every use except the next block's call is refused, because this process does not have the hidden state.
class DeferredOutput:
    """A placeholder for a block's output, or a part of it, which only the next block of the chain accepts."""

    __slots__ = ("_picks", "_progress")

    def __init__(self, progress: _ChainProgress, picks: tuple[Pick, ...] = ()) -> None:
        self._progress = progress
        self._picks = picks  # selections from the block's output that yield this part; see `BlockCall.picks`

    def __getitem__(self, key: Any) -> DeferredOutput:
        if type(key) not in (int, str):
            self._refuse("`__getitem__`")
        return DeferredOutput(self._progress, (*self._picks, key))

    def __iter__(self) -> Iterator[DeferredOutput]:
        count = _num_unpacked(sys._getframe(1))
        if count is None:
            self._refuse("`__iter__`")
        return iter([DeferredOutput(self._progress, (*self._picks, (index, count))) for index in range(count)])

    @override
    def __repr__(self) -> str:
        return f"<output of block {self._progress.block_name!r}, computed when the last block is called>"

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse(f"`.{name}`")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        name = torch.overrides.resolve_name(func) or getattr(func, "__name__", str(func))
        values = [*args, *(kwargs or {}).values()]
        flat = [item for value in values for item in (value if isinstance(value, (list, tuple)) else [value])]
        next(item for item in flat if isinstance(item, cls))._refuse(f"`{name}`")
        raise AssertionError

    def _refuse(self, use: str) -> NoReturn:
        progress = self._progress
        _refuse(progress.list_name, f"the output of block {progress.block_name!r} went to {use} before the last block")


def _operation(name: str) -> Callable[..., NoReturn]:
    def refuse(self: DeferredOutput, *_: Any) -> NoReturn:
        self._refuse(f"`{name}`")

    return refuse


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_OTHER = ("neg", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge", "bool", "int", "float", "index")
_CONTAINER = ("setitem", "delitem", "len", "contains")
for _name in (*_ARITHMETIC, *(f"r{name}" for name in _ARITHMETIC), *_OTHER, *_CONTAINER):
    setattr(DeferredOutput, f"__{_name}__", _operation(f"__{_name}__"))
DeferredOutput.__hash__ = object.__hash__  # type: ignore[method-assign]  # `__eq__` removed it


def _num_unpacked(frame: FrameType) -> int | None:
    """Return the number of names to which a frame unpacks, as in ``x, weights = block(x)``; None if it does not."""
    # `__iter__` does not get this number, and the output is not known yet. So read the instruction that calls it.
    code, index = frame.f_code.co_code, frame.f_lasti
    return code[index + 1] if dis.opname[code[index]] == "UNPACK_SEQUENCE" else None


def _refuse(list_name: str, mistake: str) -> NoReturn:
    raise ConfigError(
        f"the forward around {list_name!r} must call its blocks one after the other, each with the output of the block "
        f"before, and do nothing else in between, because the swarm computes them together: {mistake}. Change the "
        "forward, or define `configure_stages(self)` that returns all of it in blocks."
    )


def _expand_rows(value: Any, hidden: Any) -> Any:
    """Expand tensors with one row for all samples to one row per sample; autograd sums the gradients."""
    rows = next((len(leaf) for leaf in serialization.flatten(hidden)[1] if leaf.ndim), 1)
    structure, tensors = serialization.flatten(value)
    return serialization.unflatten(
        structure, [leaf.expand(rows, *leaf.shape[1:]) if leaf.ndim and len(leaf) == 1 else leaf for leaf in tensors]
    )


def _versions(tensors: Iterable[Tensor]) -> tuple[tuple[Tensor, int], ...]:
    """Return each tensor with its count of in-place changes, which inference tensors do not have."""
    return tuple((tensor, tensor._version) for tensor in tensors if not tensor.is_inference())


def _reentrant_checkpoint() -> FrameType | None:
    """Return the frame of a reentrant checkpoint around this call, if any. Its first run of a block has no graph."""
    if torch.is_grad_enabled():
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back
    return frame


def intercept(blocks: Blocks, pipeline: Pipeline) -> Interception:
    """Redirect calls of the pipelined module, or of each block of a list, to a pipeline."""
    if not blocks.one_by_one:
        return Interception(blocks, pipeline)
    config, sites = pipeline.config, pipeline.leftovers.sites
    generate = TextGeneration(pipeline).step
    return Interception(blocks, BlockChain(blocks, pipeline, generate, config.device.type, config.shared, sites))


class Interception:
    """Redirects calls of a module, or of each block of a list, until `remove`."""

    def __init__(self, blocks: Blocks, calls: BlockChain | Callable[..., Any]) -> None:
        self.removed = False
        self._guards = guard(blocks.modules, callable_blocks=blocks.one_by_one)
        self._originals: list[tuple[nn.Module, dict[str, Any]]] = []  # (module, its `forward` attribute, if any)
        self._chain: BlockChain | None = None
        if not isinstance(calls, BlockChain):
            self._replace(blocks.root, functools.partial(_call_whole, _registrations(blocks), calls))
            return
        chain = self._chain = calls
        first_calls: dict[int, tuple[int, nn.Module]] = {}
        for number, block in enumerate(blocks.modules):
            first_calls.setdefault(id(block), (number, block))
        for number, block in first_calls.values():
            self._replace(block, functools.partial(chain.call, number))

    def _replace(self, module: nn.Module, call: Callable[..., Any]) -> None:
        # Not `setattr`, which a compiled module passes on to the module that it wraps.
        self._originals.append((module, {name: value for name, value in vars(module).items() if name == "forward"}))
        vars(module)["forward"] = _ForwardOverride(module.forward, call, self)

    def remove(self) -> None:
        """Restore the modules' own forwards. A second call does nothing."""
        self.removed = True
        if self._chain is not None:
            self._chain.restore()
        while self._guards:
            self._guards.pop().remove()
        while self._originals:
            module, former = self._originals.pop()
            vars(module).pop("forward", None)
            vars(module).update(former)


def _registrations(blocks: Blocks) -> list[tuple[dict[str, Any], str, nn.Module]]:
    """Return (owner's children, name, block) of each registration of a block in the root and the modules below it."""
    block_ids = set(map(id, blocks.modules))
    owners = [module._modules for module in blocks.root.modules()]
    return [
        (owner, name, child)
        for owner in owners
        for name, child in owner.items()
        if id(child) in block_ids and child is not None
    ]


def _call_whole(
    registrations: list[tuple[dict[str, Any], str, nn.Module]], pipeline: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call the pipeline; refuse if another module has replaced a block, because servers still use the block."""
    for owner, name, block in registrations:
        if owner.get(name) is not block:
            raise ConfigError(
                f"blocks must not be replaced during a run: another module, a {type(owner.get(name)).__name__}, "
                f"took the place of block {name!r}, a {type(block).__name__}. Replace blocks where every peer does, in "
                "`__init__`, `setup` or `configure_model`, or switch inside a block by a plain attribute."
            )
    return pipeline(*args, **kwargs)


class _ForwardOverride:
    """Replaces a module's forward on the trainer."""

    of_swarm = True  # shows `module_states` that this forward is no change by user code

    def __init__(self, forward: Callable[..., Any], call: Callable[..., Any], interception: Interception) -> None:
        self.__wrapped__ = forward  # read by `inspect.signature`
        self._call = call
        self._interception = interception

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._interception.removed:
            return self.__wrapped__(*args, **kwargs)
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:  # a copied module has weights of its own
        return _identity, (self.__wrapped__,)


def _identity(value: Any) -> Any:
    return value
