"""A trainer's layers around the pipeline, such as embeddings and a head, and their copies at its own server.

In a run these layers are one more stage, and each trainer's own server holds a replica. For each batch the trainer
computes gradients with the user's own parameters. `add` moves them from `grad` to the stage's sum, servers step the
stage like any other, and `refresh` copies its new weights into the user's parameters.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_swarm.client.pipeline.differentiation import GradientMarks
from lightning_swarm.core.errors import ConfigError, LeftOut
from lightning_swarm.core.event_loop import Runtime
from lightning_swarm.model.fidelity.watched import same
from lightning_swarm.model.partition import StageModule
from lightning_swarm.model.running_statistics import BatchStatistics, RunningStatistics
from lightning_swarm.protocol.messages.calls import CallKey
from lightning_swarm.protocol.messages.run import Selection

_log = logging.getLogger(__name__)
_MAX_NAMED = 5


class LocalStage(Protocol):
    """Copies of the local layers at this peer's own server, which sums their gradients and steps them."""

    async def add_batch(
        self,
        index: int,
        key: CallKey,
        gradients: Mapping[str, Tensor | None],
        weight: float,
        batch_statistics: Tensor | None,
    ) -> None:
        """Add a batch's gradients and batch norm statistics to the stage's sum, once."""

    async def wait_for_version(self, version: int) -> None:
        """Wait until the stage reaches a version."""

    async def copied_weights(self, index: int, version: int | None) -> tuple[int, dict[str, Tensor]]:
        """Return copies of the stage's weights at a version (None: the newest), and that version."""


# The stage sums, averages and steps its copies as any other stage. Only the main thread writes the module's own
# parameters, between batches, so they never change while user code runs.
@dataclass
class LocalLayers:
    """Parameters and buffers of the layers that the trainer itself computes, and their copies in the run."""

    module: StageModule  # holds the user's own tensors
    stage: LocalStage
    runtime: Runtime
    is_in_roster: Callable[[], bool]  # returns whether this trainer's server is in the stage's roster, as far as known
    wait_until_in_roster: Callable[[], None] | None = None  # None: a server that left the roster never returns
    selection: Selection | None = None  # parameters in the optimizer; None: nothing trains
    _version: int | None = None  # version of the module's own parameters
    _checked_gradients: bool = False
    _has_added: bool = False  # a batch's gradients were added
    _statistics_are_ahead: bool = False  # the module's running statistics include a batch that is in no record yet
    # name -> the stage's value, as far as this trainer knows
    _known: dict[str, Tensor] = field(default_factory=dict)
    _known_buffers: dict[str, Tensor] = field(default_factory=dict)  # running statistics: after the newest forward

    def __post_init__(self) -> None:
        self._running_statistics = RunningStatistics(self.module)
        self._batch_statistics = BatchStatistics()  # of the current batch
        # Once a batch is in the stage's sum, marks replace its `grad`, and raise an error when used. Lightning's next
        # `zero_grad` may remove them.
        self._batch_marks = GradientMarks(list(self.parameters.values()))
        names = {id(buffer): name for name, buffer in self._buffers().items()}
        self._names_of_norms = [
            [names[id(buffer)] for buffer in norm.buffers(recurse=False)] for norm in self._running_statistics.norms
        ]
        self.note_current()

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The user's own parameters, by name."""
        return dict(self.module.named_stage_parameters())

    @contextlib.contextmanager
    def collect_batch_statistics(self) -> Iterator[None]:
        """Within this context, collect the batch statistics of the current batch."""
        # The module's running statistics include the batch at once, but the stage's only with the step's record.
        self._batch_marks.clear()  # a user's own `.backward()` would add to them
        self.check_buffers()
        with self._running_statistics.watched() as self._batch_statistics:
            yield
        if self._batch_statistics.values is not None:
            self._statistics_are_ahead = True
            buffers, counts = self._buffers(), self._batch_statistics.values.tolist()
            # The statistics begin with the number of uses of each norm.
            written = [name for num, names in zip(counts, self._names_of_norms, strict=False) if num for name in names]
            self._known_buffers.update((name, buffers[name].detach().clone()) for name in written)

    def add(self, key: CallKey, weight: float) -> None:
        """Move the batch's gradients from ``grad`` to the stage's sum. Later uses of ``grad`` raise."""
        self.check_buffers()
        gradients = {name: parameter.grad for name, parameter in self.parameters.items()}
        self.clear()
        self._batch_marks.set()
        self._has_added = True
        if not self._checked_gradients:
            self._checked_gradients = True
            missing = [name for name, gradient in gradients.items() if self.trains(name) and gradient is None]
            if missing:
                _log.warning(
                    "%d parameters outside of the pipeline got no gradient from the first batch: %s. "
                    "`configure_stages` may have omitted them.",
                    len(missing),
                    ", ".join(missing[:_MAX_NAMED]),
                )
        statistics, self._batch_statistics = self._batch_statistics.values, BatchStatistics()
        self.runtime.run(self.stage.add_batch(self.module.spec.index, key, gradients, weight, statistics))

    def check_no_stray_gradients(self) -> None:
        """Raise if a `.backward()` of user code has left gradients before Lightning's own backward."""
        # Plain Lightning would add both gradients; here only Lightning's backward counts.
        stray = [name for name, parameter in self.parameters.items() if parameter.grad is not None]
        if stray:
            raise ConfigError(
                "only the backward that Lightning runs adds to a step: within an accumulation window your code called "
                f"`.backward()` itself, which left gradients at {stray[:_MAX_NAMED]}. Return the sum of all losses."
            )

    @contextlib.contextmanager
    def forbid_grad_after_batch(self) -> Iterator[None]:
        """Within this context, refuse uses of the previous batch's gradients, which are in the stage's sum."""
        if self._has_added:
            self._batch_marks.set()
        try:
            yield
        finally:
            self._batch_marks.clear()

    def clear(self) -> None:
        """Drop the batch's gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    @contextlib.contextmanager
    def forbid_grad_at_step_end(self) -> Iterator[None]:
        """Within this context, refuse uses of `grad`, which has at most the last batch's part of a step's gradient."""
        parameters = list(self.parameters.values())
        gradients = [parameter.grad for parameter in parameters]
        self.clear()
        # Hooks of user code that run before the optimizer steps must leave these marks in place, else `check` raises.
        marks = GradientMarks(parameters)
        marks.set_for_step()
        try:
            yield
            marks.check()
        finally:
            marks.clear()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

    def enter_generation(self) -> None:
        """Accept the module's present weights, because a rollback has set them from its snapshot."""
        self._version, self._known, self._known_buffers, self._statistics_are_ahead = None, {}, {}, False
        self.clear()

    def note_current(self) -> None:
        """Record that the stage's values equal the module's present values."""
        self._known_buffers = {name: buffer.detach().clone() for name, buffer in self._buffers().items()}
        self._known = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def written(self) -> dict[str, Tensor]:
        """Return copies of the parameters that user code wrote since the last `refresh`."""
        params = self.parameters
        changed = [name for name, known in self._known.items() if not same(params[name], known)]
        return {name: params[name].detach().clone() for name in changed}

    def trains(self, name: str) -> bool:
        """Return whether a local parameter trains. A target network, for example, may be in no optimizer."""
        return self.parameters[name].requires_grad and self.selection is not None and name in self.selection.groups

    def is_frozen(self, name: str) -> bool:
        """Return whether a parameter is local and does not train."""
        return name in self.parameters and not self.trains(name)

    def check_buffers(self) -> None:
        """Refuse buffers that user code changed, because the trainers' buffers would differ."""
        known = self._known_buffers
        # Compared by value, because writes through `.data` leave no other trace.
        changed = [name for name, value in self._buffers().items() if name in known and not same(value, known[name])]
        if changed:
            raise ConfigError(
                "outside of blocks, only the forwards of batch norms in `training_step` may change buffers; otherwise "
                f"the trainers' buffers would differ. Changed: {quote_names(changed)}. On one device, "
                "`Trainer(strategy='swarm', devices=1)` without further arguments trains such a model as plain "
                "Lightning does."
            )

    def _buffers(self) -> dict[str, Tensor]:
        parameters = self.parameters
        return {name: tensor for name, tensor in self.module.named_stage_tensors().items() if name not in parameters}

    def note_stage_has(self, written: Mapping[str, Tensor]) -> None:
        """Record that the stage has received the values that user code has written."""
        self._known.update((name, tensor) for name, tensor in written.items() if name in self._known)

    def refresh(self, version: int, *, exactly: bool = False) -> None:
        """Update the module's own parameters to a version or a later one; if `exactly`, to this version only."""
        if not self.is_in_roster() and self.wait_until_in_roster is not None:
            self.wait_until_in_roster()
        elif not self.is_in_roster():
            raise LeftOut(
                "this trainer was silent for `Limits.silence_timeout`, so the run continues without its server. The "
                "layers around the pipeline are trained on the trainers, and this trainer's copy is out of date, so it "
                "ends here, and other trainers continue. Raise `Limits.silence_timeout` if peers are silent for "
                "longer, or put the whole module into `pipeline`."
            )
        self.check_buffers()
        if self._version is not None and (self._version == version or (self._version > version and not exactly)):
            return
        self.runtime.run(self.stage.wait_for_version(version))  # this peer's server may lag behind
        parameters, written = self.parameters, self.written()
        if lost := [name for name in written if self.trains(name)]:
            raise ConfigError(written_in_mid_step(lost))
        copied = self.stage.copied_weights(self.module.spec.index, version if exactly else None)
        self._version, weights = self.runtime.run(copied)
        with torch.no_grad():
            for name, parameter in parameters.items():
                if name not in written:  # written frozen parameters go to the stage with the next step
                    parameter.copy_(weights[name])
        self._known.update((name, weights[name]) for name in parameters)
        self._set_buffers(weights)

    def _set_buffers(self, weights: Mapping[str, Tensor]) -> None:
        buffers = self._buffers()
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(weights[name])
        self._known_buffers.update((name, weights[name]) for name in buffers)
        self._statistics_are_ahead = False

    def drop_uncounted(self, version: int) -> None:
        """Reset the running statistics to those of the last record, without the batches of an unfinished step."""
        if not self._statistics_are_ahead:
            return
        self.runtime.run(self.stage.wait_for_version(version))
        _, weights = self.runtime.run(self.stage.copied_weights(self.module.spec.index, None))
        self._set_buffers(weights)


def written_in_mid_step(names: Collection[str]) -> str:
    """Return the error text for weights that were written in the middle of a step."""
    return (
        "weights of blocks, and weights that train, may be written only between two steps: all gradients of a step are "
        f"computed with the same weights. {quote_names(names)} were written in the middle of a step. Write them in "
        "`on_train_batch_end` or `on_train_batch_start`, at the end of an accumulation window. This also concerns "
        "layers whose forward writes their weights, such as `nn.Embedding(max_norm=...)`: omit `max_norm`, and "
        "renormalise in one of these hooks."
    )


def quote_names(names: Collection[str]) -> str:
    """Return the first names, quoted."""
    return ", ".join(map(repr, sorted(names)[:_MAX_NAMED]))
