"""One stage on one peer: its weights, its optimizer, and the gradients of the steps that are open.

Everything here runs on the compute thread, one call at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_swarm import trees
from lightning_swarm.averaging.averager import Carried
from lightning_swarm.compression import PLAIN, Codecs
from lightning_swarm.errors import ProtocolError
from lightning_swarm.optimizer_states import GROUP
from lightning_swarm.partition import StageModule
from lightning_swarm.selection import trained_names
from lightning_swarm.server.computation import Computation
from lightning_swarm.server.fingerprint import Fingerprint
from lightning_swarm.server.gradient_sum import ExactSum, GradientSum
from lightning_swarm.server.load import StageLoad
from lightning_swarm.server.running_statistics import RunningStatistics
from lightning_swarm.server.stepper import Stepper
from lightning_swarm.server.versions import Versions
from lightning_swarm.types.runs import Selection
from lightning_swarm.types.steps import Record


class Stage:
    """A stage's weights and optimizer, at one version.

    Args:
        module: The stage's run of blocks.
        stepper: Of its parameters.
        device: Where it computes.
        version: Of its initial weights.
        selection: Which parameters train, and in which group; None: it is not going to train.
        codecs: By which its tensors travel.
        keeps_before: Keep the weights of the version before the newest, too.
        exact: Add gradients up so that their sums do not depend on the order.

    Attributes:
        computation: Of its microbatches.
        statistics: Of its batch norms.
        load: What these take.
        carried: From the last step's averaging to the next one's.
    """

    def __init__(
        self,
        module: StageModule,
        stepper: Stepper,
        device: torch.device,
        *,
        version: int = 0,
        selection: Selection | None = None,
        codecs: Codecs = PLAIN,
        keeps_before: bool = False,
        exact: bool = False,
    ) -> None:
        self.module = module
        self.index = module.spec.index
        self.on_trainers = module.spec.on_trainers
        self.device = device
        self.version = version
        self.codecs = codecs
        self.exact = exact
        self.statistics = RunningStatistics(module)
        self.computation = Computation(module, device, codecs, self.statistics)
        self.parameters = dict(module.named_stage_parameters())
        self.stepper = stepper
        self.selection: Selection | None = None
        self._borrowed: tuple[int, dict[str, Tensor]] | None = None
        self._versions = Versions(self.parameters) if keeps_before else None
        self._ahead: tuple[object, Fingerprint] | None = None  # what it is of, and how far it is; after a step
        self.load = StageLoad()
        self._train([])
        if selection is not None:
            self.select(selection)

    # ------------------------------------------------------------------ what trains

    def select(self, selection: Selection) -> None:
        """Train what `selection` says from now on. What the optimizer knows of a parameter stays with it."""
        if selection == self.selection:
            return
        frozen = set(selection.frozen)
        for name, parameter in self.parameters.items():
            if parameter.requires_grad == (name in frozen):
                parameter.requires_grad_(name not in frozen)
        self.stepper.select(selection)
        # What no parameter group holds is neither stepped nor counted in the norm that clipping goes by.
        trained = trained_names(selection)
        trainable = [parameter for name, parameter in self.parameters.items() if name in trained]
        if list(map(id, trainable)) != list(map(id, self.trainable)):
            self._train(trainable)
        self.selection = selection

    def _train(self, trainable: list[nn.Parameter]) -> None:
        """Make room for the gradients of `trainable`."""
        self.computation.train(trainable)
        self._sums: dict[int, GradientSum] = {}  # by step
        self._spare: GradientSum | None = None
        self.carried = Carried()

    @property
    def trainable(self) -> list[nn.Parameter]:
        """The parameters that train, in the whole model's order."""
        return self.computation.trainable

    @property
    def trainable_names(self) -> list[str]:
        """Names of `trainable`, in its order."""
        trainable = set(map(id, self.trainable))
        return [name for name, parameter in self.parameters.items() if id(parameter) in trainable]

    # ------------------------------------------------------------------ a step

    def sum_of(self, step: int) -> GradientSum:
        """What was added up in a step that is open."""
        if step < self.version:
            raise ProtocolError(f"stage {self.index} is at version {self.version}; step {step} is decided")
        if step not in self._sums:
            spare, self._spare = self._spare, None
            self._sums[step] = spare or (ExactSum if self.exact else GradientSum)(self.trainable, self.device)
        return self._sums[step]

    @property
    def next_sum(self) -> GradientSum:
        """Of the step whose record is next."""
        return self.sum_of(self.version)

    def check_version(self, version: int) -> None:
        """Refuse to compute with other weights than those that are meant."""
        if version != self.version:
            raise ProtocolError(f"stage {self.index} is at version {self.version}, not at {version}")

    @contextlib.contextmanager
    def at(self, version: int) -> Iterator[None]:
        """Hold the weights of a version inside: the newest, or where they are kept those before."""
        if version == self.version - 1 and self._versions is not None and self._versions.has_before:
            with self._versions.before():
                yield
            return
        self.check_version(version)
        yield

    def go_back(self, version: int, selection: Selection | None) -> None:
        """Begin anew at `version`: its weights and its optimizer's state are still to come."""
        self.version = version
        if selection is not None:
            self.select(selection)
        self.stepper.forget()
        self.statistics.forget()
        self._borrowed, self.carried, self._ahead = None, Carried(), None
        self._sums = {}
        if self._versions is not None:
            self._versions.forget()

    def check_applies(self, record: Record) -> None:
        """Refuse a record that `apply` would fail on, before anything is changed."""
        if record.step != self.version:
            raise ProtocolError(f"stage {self.index} is at version {self.version}; record {record.step} is not next")
        selection = record.selection or self.selection
        num_groups, num_given = selection.num_groups if selection is not None else 0, len(record.hyperparameters)
        if record.outcome == "apply" and num_groups != num_given:
            raise ProtocolError(f"the optimizer has {num_groups} parameter groups, record {record.step} {num_given}")
        if wrong := self.stepper.unfit(record.hyperparameters):
            raise ProtocolError(f"record {record.step} has hyperparameters of another kind: {wrong}")

    def apply(
        self, record: Record, mean_gradient: Tensor, touched: Sequence[bool], *, before: Sequence[Stage] = ()
    ) -> None:
        """``v_{k+1} = f(v_k, record)``: the only thing that changes weights and optimizer state.

        Args:
            record: Decided, of this stage's version.
            mean_gradient: ``[elements of the trainable parameters]``, the same bytes on every replica; and what
                `with_statistics` put behind it.
            touched: For each trainable parameter, whether any microbatch gave it a gradient. Optimizers pass over
                those that have none, on one machine as here.
            before: The stages here that have applied the record. What they hold, too, has taken its step.
        """
        if record.selection is not None:
            self.select(record.selection)
        self.check_applies(record)
        mean_gradient, statistics = self._apart(mean_gradient)
        if statistics is not None and bool(statistics.isfinite().all()):
            self.statistics.enter(statistics, record.step)
        applies = record.outcome == "apply"
        stepped = {name: other for other in before for name in self.trainable_names if self._shares(name, other)}
        if self._versions is not None:
            elsewhere = {name: other._versions for name, other in stepped.items() if other._versions is not None}
            self._versions.turn(self.trainable_names if applies else (), elsewhere)
        sum_ = self.sum_of(record.step)
        if applies:
            views = zip(self.trainable_names, sum_.views(mean_gradient), touched, strict=True)
            gradients = {name: view if has_gradient else None for name, view, has_gradient in views}
            gradients.update(dict.fromkeys(stepped))
            self.stepper.step(gradients, record.clip_factor, record.hyperparameters)
            for other in before:
                self.stepper.share(other.stepper)
        self.version += 1
        self._ahead = self._begun_fingerprint()
        self._spare = self._sums.pop(record.step, None)  # memory for a later step
        if self._spare is not None:
            self._spare.clear()

    def _shares(self, name: str, other: Stage) -> bool:
        """Whether a parameter is another stage's, too."""
        return other.parameters.get(name) is self.parameters[name]

    def fingerprint(self) -> int:
        """Of weights, buffers and optimizer state at this version."""
        before, (identities, taken) = self._ahead, self._begun_fingerprint()
        return (before[1] if before is not None and before[0] == identities else taken).finish()

    def look_ahead(self) -> bool:
        """Where there is nothing else to do, take a piece of the fingerprint after a step; whether more is left."""
        return self._ahead is not None and self._ahead[1].advance()

    def _begun_fingerprint(self) -> tuple[object, Fingerprint]:
        """And what changes where a tensor takes another's place, or is written to."""
        state = trees.flatten(list(self.stepper.state().values()))[1]
        held = [*self.module.named_stage_tensors().values(), *state]
        return [(tensor.data_ptr(), tensor._version) for tensor in held], Fingerprint(held)

    @property
    def mean_length(self) -> int:
        """Of what a round ends with: the mean gradient, and the running statistics behind it."""
        like = self.next_sum.like
        return like.numel() + self.statistics.length * torch.float64.itemsize // like.itemsize

    def with_statistics(self, mean_gradient: Tensor, statistics: Tensor) -> Tensor:
        """Both in one vector: what the round ends with."""
        return torch.cat([mean_gradient, statistics.view(mean_gradient.dtype).to(mean_gradient.device)])

    def _apart(self, mean: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self.statistics:
            return mean, None
        length = self.next_sum.like.numel()
        gradient, statistics = mean.split([length, len(mean) - length])
        return gradient, statistics.clone().view(torch.float64)

    # ------------------------------------------------------------------ state

    def weights(self) -> dict[str, Tensor]:
        """Parameters and buffers by their names in the whole model's state dict. Shared memory, not copies."""
        return {name: tensor.detach() for name, tensor in self.module.named_stage_tensors().items()}

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Overwrite parameters and buffers.

        Raises:
            ProtocolError: A name, shape or dtype differs; nothing was changed then.
        """
        own = self._check_weights(weights)
        for name, tensor in own.items():
            tensor.copy_(weights[name])

    def borrow(self, number: int, weights: dict[str, Tensor]) -> None:
        """Keep weights that evaluations may mean by `number`; with no weights, drop those.

        Raises:
            ProtocolError: A name, shape or dtype differs; nothing was changed then.
        """
        if not weights:
            self.check_borrowed(number)
            self._borrowed = None
            return
        self._check_weights(weights)
        self._borrowed = number, {name: tensor.to(self.device, copy=True) for name, tensor in weights.items()}

    def check_borrowed(self, number: int) -> None:
        """Refuse to compute with other weights than those that are meant."""
        here = self._borrowed[0] if self._borrowed is not None else 0
        if number not in (0, here):
            raise ProtocolError(f"stage {self.index} has borrowed no weights {number}; it has {here or None}")

    @contextlib.contextmanager
    def holding(self, number: int) -> Iterator[None]:
        """Hold the weights borrowed by `number` inside, and the stage's own again afterwards; 0: nothing changes."""
        self.check_borrowed(number)
        if number == 0 or self._borrowed is None:
            yield
            return
        own = self.module.named_stage_tensors()
        before = {name: tensor.data for name, tensor in own.items()}
        try:
            for name, tensor in own.items():
                tensor.data = self._borrowed[1][name]
            yield
        finally:
            for name, tensor in own.items():
                tensor.data = before[name]

    def _check_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """This stage's own, which those given are alike in name, shape and dtype."""
        own = self.weights()
        if own.keys() != weights.keys():
            raise ProtocolError(f"stage {self.index} has the weights {sorted(own)}, got {sorted(weights)}")
        for name, tensor in own.items():
            if (tensor.shape, tensor.dtype) != (weights[name].shape, weights[name].dtype):
                raise ProtocolError(
                    f"`{name}` has shape {tuple(tensor.shape)} and {tensor.dtype}, "
                    f"got {tuple(weights[name].shape)} and {weights[name].dtype}"
                )
        return own

    def optimizer_state(self) -> dict[str, Any]:
        """For each parameter that has some, its optimizer state: a tree of tensors and numbers."""
        return self.stepper.state()

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Take over optimizer state, as `optimizer_state` gave it, to the bit.

        Raises:
            ProtocolError: It is not of this stage's parameters; nothing was changed then.
        """
        unknown = sorted(state.keys() - self.parameters.keys())
        if unknown or not all(isinstance(one, dict) and isinstance(one.get(GROUP, {}), dict) for one in state.values()):
            raise ProtocolError(f"optimizer state must be of parameters of stage {self.index}, got {unknown}")
        self.stepper.load_state(state)
