"""A stage's parameters at two versions, for a step that computes with weights which are not the newest any more.

A step of the optimizer goes into other memory than that of the weights before it. So a microbatch whose backward is
still to come finds what its forward computed with, and no copy is made but one for each step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor, nn

NOWHERE: Final[Mapping[str, Versions]] = MappingProxyType({})


class Versions:
    """The newest of some parameters, which they hold themselves, and those before.

    Args:
        parameters: By name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._own = parameters
        self._before: dict[str, Tensor] = {}  # of those that were stepped last
        self._elsewhere: dict[str, Tensor] = {}  # likewise, of those that another stage's versions take care of
        self._spare: dict[str, Tensor] = {}  # memory of older ones
        self.has_before = False

    @torch.no_grad()
    def turn(self, names: Collection[str], elsewhere: Mapping[str, Versions] = NOWHERE) -> None:
        """Begin a version, with the weights of the one before.

        Args:
            names: Of what it will change; nothing else may be changed until the next one.
            elsewhere: Whose turn was before this one, and has had some of these change already.
        """
        self._spare.update(self._before)
        self._before, self._elsewhere = {}, {}
        for name in names:
            if name in elsewhere:
                there = elsewhere[name]
                self._elsewhere[name] = (there._before | there._elsewhere)[name]
                continue
            own, spare = self._own[name], self._spare.pop(name, None)
            newest = torch.empty_like(own.data) if spare is None else spare
            newest.copy_(own.data)
            self._before[name], own.data = own.data, newest
        self.has_before = True

    def forget(self) -> None:
        """There is one version only."""
        self._before, self._elsewhere, self._spare, self.has_before = {}, {}, {}, False

    @contextlib.contextmanager
    def before(self) -> Iterator[None]:
        """Have the parameters hold the version before inside."""
        before = self._before | self._elsewhere
        newest = {name: self._own[name].data for name in before}
        try:
            for name, tensor in before.items():
                self._own[name].data = tensor
            yield
        finally:
            for name, tensor in newest.items():
                self._own[name].data = tensor
