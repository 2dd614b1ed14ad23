"""Puts the pipeline in the place of the user's own forward, and takes it away again."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_swarm.partition import Blocks, guard, is_computing
from lightning_swarm.pipeline.chain import Chain
from lightning_swarm.pipeline.pipeline import Pipeline


class Interception:
    """Calls of the pipelined module go to the pipeline, until `remove`.

    Args:
        blocks: The pipelined module; of a list, each block is called by itself.
        pipeline: Takes the calls.
    """

    def __init__(self, blocks: Blocks, pipeline: Pipeline) -> None:
        self.removed = False
        self._guards = guard(blocks.modules, callable_blocks=blocks.one_by_one)
        self._own: list[tuple[nn.Module, dict[str, Any]]] = []
        if not blocks.one_by_one:
            self._replace(blocks.root, pipeline)
            return
        chain = Chain(blocks, pipeline, pipeline.config.device.type, pipeline.config.shared)
        places: dict[int, tuple[int, nn.Module]] = {}
        for place, block in enumerate(blocks.modules):
            places.setdefault(id(block), (place, block))
        for place, block in places.values():
            self._replace(block, functools.partial(chain.call, place))

    def _replace(self, module: nn.Module, call: Callable[..., Any]) -> None:
        # Not `setattr`: a compiled module passes that on to the one that it wraps.
        self._own.append((module, {name: value for name, value in vars(module).items() if name == "forward"}))
        vars(module)["forward"] = _StandIn(module.forward, call, self)

    def remove(self) -> None:
        """Give the user's own forwards back. Twice is fine."""
        self.removed = True
        while self._guards:
            self._guards.pop().remove()
        while self._own:
            module, own = self._own.pop()
            vars(module).pop("forward", None)
            vars(module).update(own)


class _StandIn:
    """Takes the place of a module's forward: on the trainer, not where a stage computes with the same module.

    A copy of the module calls the same pipeline; a pickled one has its own forward.
    """

    def __init__(self, own: Callable[..., Any], call: Callable[..., Any], interception: Interception) -> None:
        self.__wrapped__ = own  # where `inspect.signature` looks
        self._call = call
        self._interception = interception

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._interception.removed or is_computing():
            return self.__wrapped__(*args, **kwargs)
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _StandIn:
        return _StandIn(copy.deepcopy(self.__wrapped__, memo), self._call, self._interception)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _itself, (self.__wrapped__,)


def _itself(value: Any) -> Any:
    return value
