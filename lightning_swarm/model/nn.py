"""`Sequential` that passes keywords, for models with and without the swarm.

``torch.nn.Sequential`` takes one value and no keywords, but the last block of a model often needs the
targets, and every block a mask. Here a keyword goes to the blocks whose ``forward`` names it, and to no other::

    self.net = lightning_swarm.nn.Sequential(Embed(), Block(), Block(), LossHead())
    losses = self.net(tokens, mask=mask, targets=targets)   # Block.forward(x, mask), LossHead.forward(x, targets)
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

__all__ = ["Sequential", "accepted_keywords", "call_blocks"]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Sequential(torch.nn.Sequential):
    """A chain of blocks that hands each keyword to the blocks that name it.

    Positional inputs go to the first block. Each later block gets the output of the block before as one value,
    even if it is a tuple, as in ``torch.nn.Sequential``. A block that takes ``**kwargs`` gets only the
    keywords that its ``forward`` spells out.
    """

    def forward(self, *inputs: Any, **extras: Any) -> Any:
        """Run the blocks in order.

        Args:
            *inputs: Passed to the first block as they are.
            **extras: Each goes to all blocks whose ``forward`` names it.

        Raises:
            TypeError: No block names a keyword.
        """
        blocks = tuple(self)
        known = frozenset[str]().union(*map(accepted_keywords, blocks))
        for name in extras:
            if name not in known:
                raise TypeError(
                    f"{type(self).__name__}.forward() got an unexpected keyword argument {name!r}: "
                    f"no block's forward names it (the blocks name: {', '.join(sorted(known)) or 'none'})"
                )
        return call_blocks(blocks, inputs, extras)


def call_blocks(
    blocks: Iterable[torch.nn.Module],
    inputs: tuple[Any, ...],
    extras: Mapping[str, Any],
    keywords: Sequence[Sequence[str]] | None = None,  # the names that each block accepts; None: read them here
) -> Any:
    """Call blocks in order: the first with all inputs, the rest with one value, each with the extras that it names."""
    for index, block in enumerate(blocks):  # extras that none of these blocks names are for other stages
        named = _names(block) if keywords is None else keywords[index]
        inputs = (block(*inputs, **{name: extras[name] for name in named if name in extras}),)
    if len(inputs) != 1:
        raise TypeError(f"a chain without blocks takes one input, got {len(inputs)}")
    return inputs[0]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch has no types here
def _names(block: torch.nn.Module) -> tuple[str, ...]:
    """Return `accepted_keywords` as a constant for torch's compiler, which supports neither signatures nor sets."""
    return tuple(sorted(accepted_keywords(block)))


def accepted_keywords(block: torch.nn.Module) -> frozenset[str]:
    """Return the names that a block's ``forward`` takes as keywords, without its first positional parameter."""
    if isinstance(block, Sequential):
        return frozenset[str]().union(*map(accepted_keywords, block))
    if "forward" in vars(block):
        # A profiler or quantiser has replaced this object's forward, so the class's signature does not apply.
        return _keywords(block.forward, is_bound=True)
    return _keywords_of_class(type(block).forward)


def _keywords(forward: Callable[..., Any], *, is_bound: bool) -> frozenset[str]:
    """Return a forward's keywords after its first positional parameter, and after `self` unless it is bound."""
    try:
        parameters = list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):  # builtins may have no signature
        return frozenset()
    if not is_bound:
        parameters = parameters[1:]
    if parameters and parameters[0].kind in _POSITIONAL:
        parameters = parameters[1:]
    return frozenset(parameter.name for parameter in parameters if parameter.kind in _KEYWORD)


@functools.cache
def _keywords_of_class(forward: Callable[..., Any]) -> frozenset[str]:
    # Reading a signature takes as long as a small layer, so each class is read once.
    return _keywords(forward, is_bound=False)
