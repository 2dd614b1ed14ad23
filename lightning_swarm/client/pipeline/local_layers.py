"""What stands around the pipeline on a trainer: embeddings before a list of blocks, a head after it.

The trainer computes with the module's own parameters, as if there were no swarm. A stage that all trainers hold has
copies of them: the batches' gradients are added up there, averaged and stepped like any other stage's. The module's own
are written between batches only, by the main thread: never under the user's code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_swarm.core.errors import LeftOut
from lightning_swarm.core.event_loop import Runtime
from lightning_swarm.model.partition import StageModule
from lightning_swarm.protocol.messages.calls import CallKey

_log = logging.getLogger(__name__)
_MAX_NAMED = 5


class LocalStage(Protocol):
    """The copies of these layers that this peer's own server sums gradients for and steps."""

    async def add_batch(self, index: int, key: CallKey, gradients: Mapping[str, Tensor | None], weight: float) -> None:
        """Add a batch's gradients to the stage's sum, once."""
        ...

    async def reached(self, version: int) -> None:
        """Wait until the stage is at a version."""
        ...

    async def copied_weights(self, index: int, version: int | None) -> tuple[int, dict[str, Tensor]]:
        """Copies of the stage's weights at a version (None: the newest), and that version."""
        ...


class LocalLayers:
    """The parameters that this trainer computes with itself.

    Args:
        module: The stage that has them; its tensors are the user's own.
        stage: The copies at this peer's server.
        runtime: The way to the swarm's loop.
        is_held: Whether the copies are the run's, as far as this trainer knows: whether it is in that stage's roster.
    """

    def __init__(self, module: StageModule, stage: LocalStage, runtime: Runtime, is_held: Callable[[], bool]) -> None:
        self._module = module
        self._stage = stage
        self._runtime = runtime
        self._is_held = is_held
        self._version: int | None = None  # of the module's own
        self._looked = False

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The user's own, by name."""
        return dict(self._module.named_stage_parameters())

    def add(self, key: CallKey, weight: float) -> None:
        """Hand over what the batch's backward left in ``grad``, and clear it.

        Args:
            key: Of the batch.
            weight: Of the batch.
        """
        own = self.parameters
        gradients = {name: parameter.grad for name, parameter in own.items()}
        self.clear()
        if not self._looked:
            self._looked = True
            missing = [name for name, one in own.items() if one.requires_grad and gradients[name] is None]
            if missing:
                _log.warning(
                    "%d parameters outside of the pipeline got no gradient from the first batch: %s. If they belong to "
                    "what `configure_stages` returns, it left them out.",
                    len(missing),
                    ", ".join(missing[:_MAX_NAMED]),
                )
        self._runtime.run(self._stage.add_batch(self._module.spec.index, key, gradients, weight))

    def clear(self) -> None:
        """Forget the batch's gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def enter_generation(self) -> None:
        """Take the module's weights as they are: they came with the snapshot that the run rolled back to."""
        self._version = None
        self.clear()

    def refresh(self, version: int, *, exactly: bool = False) -> None:
        """Bring the module's own to a version.

        Args:
            version: Of the weights.
            exactly: No later one will do, and one that is earlier than what is held may be meant.

        Raises:
            LeftOut: A record has left this peer out, and with it the copies.
        """
        if not self._is_held():
            raise LeftOut(
                "this trainer was not heard of for `Limits.silence_timeout`, and the run goes on without its server. "
                "What stands around the pipeline is trained on the trainers, and this one's copy is an old one, so it "
                "ends here; other trainers go on. Raise `Limits.silence_timeout`, or have the whole module in "
                "`pipeline`, if peers fall silent for longer."
            )
        if self._version is not None and (self._version == version or (self._version > version and not exactly)):
            return
        self._runtime.run(self._stage.reached(version))  # the record may have come to its server late
        copied = self._stage.copied_weights(self._module.spec.index, version if exactly else None)
        self._version, weights = self._runtime.run(copied)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(weights[name])
