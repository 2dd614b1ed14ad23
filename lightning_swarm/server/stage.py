"""One stage on one peer: weights, optimizer, and the gradients of the open steps; used on the compute thread."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_swarm.core.errors import ProtocolError, TicketGone
from lightning_swarm.core.moving_average import MovingAverage
from lightning_swarm.model.fingerprint import Fingerprint, fingerprint, proof
from lightning_swarm.model.optimizer_state import GROUP
from lightning_swarm.model.partition import StageModule
from lightning_swarm.model.partition.timing import synchronize
from lightning_swarm.model.running_statistics import RunningStatistics
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.compression import PLAIN, Codecs
from lightning_swarm.protocol.messages.run import Selection, trained_names
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.server.averaging.all_reduce import AveragingState
from lightning_swarm.server.compute import Computation
from lightning_swarm.server.gradient_buffer import ExactSum, GradientSum
from lightning_swarm.server.optimizer import StageOptimizer

_SMOOTHING: Final = 0.05  # weight of the newest microbatch
_STEP_SMOOTHING: Final = 0.3  # weight of the newest step
_MAX_REFUSED: Final = 3  # failed microbatches in a row; a single one may be unusually long
_MIN_MEASURED: Final = 4  # microbatches before a rate is reported, because libraries load and compile during the first


class StageLoad:
    """The load of one stage on one server."""

    def __init__(self) -> None:
        self._num_samples, self._busy_s, self._queued = (MovingAverage(_SMOOTHING) for _ in range(3))
        self._num_measured = 0
        self._busy_share = MovingAverage(_STEP_SMOOTHING)
        self._busy_in_step_s = 0.0
        self._step_began_s: float | None = None
        self._num_refused = 0  # microbatches since the last success for which memory was too small

    def count_refusal(self) -> None:
        """Count a microbatch for which this server has too little memory."""
        self._num_refused += 1

    @property
    def lacks_memory(self) -> bool:
        """True if this server has too little memory for a single microbatch of the stage."""
        return self._num_refused >= _MAX_REFUSED

    def count_samples(self, num_samples: int, *, busy_s: float, queued: int) -> None:
        """Count a microbatch that was computed."""
        self._num_measured += 1
        self._num_refused = 0
        self._num_samples.measure(num_samples)
        self._busy_s.measure(busy_s)
        self._queued.measure(queued)
        self._busy_in_step_s += busy_s

    def start_step(self, *, now_s: float) -> None:
        """Begin the first step, or the first step after an absence."""
        self._step_began_s, self._busy_in_step_s = now_s, 0.0

    def note_step(self, *, now_s: float) -> None:
        """Measure the busy share of the step that ends, and begin the next step."""
        if (share := self._so_far(now_s)) is not None:
            self._busy_share.measure(share)
        self.start_step(now_s=now_s)

    @property
    def samples_per_s(self) -> float | None:
        """Recent samples per second of computing time, forward plus backward; None until a few microbatches ran."""
        num_samples, busy_s = self._num_samples.value, self._busy_s.value
        return num_samples / busy_s if num_samples and busy_s and self._num_measured >= _MIN_MEASURED else None

    @property
    def microbatch_size(self) -> float | None:
        """Mean number of samples in recent microbatches; None before the first."""
        return self._num_samples.value

    @property
    def queued(self) -> float:
        """Mean number of jobs that waited when recent microbatches ended."""
        return self._queued.value or 0.0

    def busy_share(self, *, now_s: float) -> float | None:
        """Return the share of recent steps in which the stage was computed; in the first step, the share so far."""
        return self._busy_share.value if self._busy_share.value is not None else self._so_far(now_s)

    def _so_far(self, now_s: float) -> float | None:
        """Return the busy share of the open step; None if it has just begun."""
        began_s = self._step_began_s
        return min(self._busy_in_step_s / (now_s - began_s), 1.0) if began_s is not None and now_s > began_s else None


# Before a step, parameters are copied to other memory, where the optimizer steps them. Microbatches whose backward is
# pending can then still compute with the weights of their forward.
class WeightVersions:
    """Two versions of some parameters: the newest, in the parameters themselves, and the previous version."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters  # name -> parameter
        self._previous: dict[str, Tensor] = {}  # name -> value before the last step
        self._previous_shared: dict[str, Tensor] = {}  # name -> the same, kept by another stage here
        self._spare: dict[str, Tensor] = {}  # name -> memory for a later version
        self.has_previous = False

    @torch.no_grad()
    def begin_version(self, names: Collection[str], sharing: Mapping[str, WeightVersions]) -> None:
        """Keep the present weights as the previous version; until the next call, only parameters in `names` may change.

        `sharing` has the versions of other stages here that share some of these parameters and have begun this version.
        """
        self._spare.update(self._previous)
        self._previous, self._previous_shared = {}, {}
        for name in names:
            if name in sharing:
                other = sharing[name]
                self._previous_shared[name] = (other._previous | other._previous_shared)[name]
                continue
            parameter, spare = self._parameters[name], self._spare.pop(name, None)
            newest = torch.empty_like(parameter.data) if spare is None else spare
            newest.copy_(parameter.data)
            self._previous[name], parameter.data = parameter.data, newest
        self.has_previous = True

    def previous(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the parameters hold the previous version."""
        return _holding(self._parameters, self._previous | self._previous_shared)


@contextlib.contextmanager
def _holding(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Put other values into tensors within the context, and restore the original values afterwards."""
    original = {name: tensors[name].data for name in values}
    try:
        for name, value in values.items():
            tensors[name].data = value
        yield
    finally:
        for name, value in original.items():
            tensors[name].data = value


@dataclass
class StageGeneration:
    """A stage's state that ends with a generation of the run, in addition to weights and optimizer."""

    sums: dict[int, GradientSum] = field(default_factory=dict)  # step -> sum
    carried: AveragingState = field(default_factory=AveragingState)  # averaging state that one step leaves to the next
    evaluation_weights: tuple[int, dict[str, Tensor]] | None = None  # number, and name -> weight


class StateHash:
    """Hashes a stage's weights, buffers and optimizer state: after each step, piece by piece, while idle."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        # The hash that is in progress after a step: identities of the tensors, and their fingerprint.
        self._in_progress: tuple[object, Fingerprint] | None = None

    def begin(self) -> None:
        """Begin to hash the state after a step."""
        self._in_progress = self._new_fingerprint()

    def clear(self) -> None:
        """Drop the hash in progress, and the tensors that it refers to."""
        self._in_progress = None

    def advance(self) -> bool:
        """Hash one more piece; return whether more is left."""
        return self._in_progress is not None and self._in_progress[1].advance()

    def fingerprint(self) -> int:
        """Return the hash: finish the hash in progress, or hash all tensors again if one has changed since."""
        in_progress, (identities, new) = self._in_progress, self._new_fingerprint()
        return (in_progress[1] if in_progress is not None and in_progress[0] == identities else new).finish()

    def prove(self, challenge: int) -> int:
        """Return the hash under a challenge other than 0."""
        return proof(self._tensors(), challenge)

    def _new_fingerprint(self) -> tuple[object, Fingerprint]:
        """Return identities that change if a tensor is replaced or written to, and a fingerprint not yet computed."""
        tensors = self._tensors()
        return [(tensor.data_ptr(), tensor._version) for tensor in tensors], Fingerprint(tensors)

    def _tensors(self) -> list[Tensor]:
        """Return weights, buffers and the tensors of the optimizer's state."""
        state = serialization.flatten(list(self._stage.optimizer.state().values()))[1]
        return [*self._stage.module.named_stage_tensors().values(), *state]


class Stage:
    """A stage's weights and optimizer, at one version."""

    def __init__(
        self,
        module: StageModule,
        optimizer: StageOptimizer,
        device: torch.device,
        *,
        version: int = 0,
        codecs: Codecs = PLAIN,
        keeps_previous: bool = False,
        exact: bool = False,
    ) -> None:
        self.module, self.device = module, device
        self.index, self.on_trainers = module.spec.index, module.spec.on_trainers
        self.version, self.codecs = version, codecs
        self.exact = exact  # sums gradients in fixed point, so the order of adding does not matter
        self.statistics = RunningStatistics(module)
        self.computation = Computation(module, device, codecs, self.statistics)
        self.parameters = dict(module.named_stage_parameters())
        self.optimizer = optimizer
        self.selection: Selection | None = None  # trained parameters and their groups; None: none train
        self._versions = WeightVersions(self.parameters) if keeps_previous else None  # None: keep only the newest
        self.generation = StageGeneration()
        self.state_hash = StateHash(self)
        self._spare: GradientSum | None = None  # an empty sum, for the next step that opens
        self.load = StageLoad()
        self._train([])

    # ------------------------------------------------------------------ trained parameters

    def select(self, selection: Selection) -> None:
        """Train the parameters of `selection` from now on. Each parameter keeps its optimizer state."""
        if selection == self.selection:
            return
        frozen = set(selection.frozen)
        for name, parameter in self.parameters.items():
            if parameter.requires_grad == (name in frozen):
                parameter.requires_grad_(name not in frozen)
        self.optimizer.select(selection)
        # Parameters outside of all groups are neither stepped nor counted in the norm for clipping.
        trained = trained_names(selection)
        trainable = [parameter for name, parameter in self.parameters.items() if name in trained]
        if list(map(id, trainable)) != list(map(id, self.trainable)):
            self._train(trainable)
        self.selection = selection

    def _train(self, trainable: list[nn.Parameter]) -> None:
        """Train these parameters, with new sums for their gradients."""
        self.computation.train(trainable)
        self.generation.sums, self.generation.carried = {}, AveragingState()
        self._spare = None

    @property
    def trainable(self) -> Sequence[Tensor]:
        """The parameters that train, in the whole model's order."""
        return self.computation.trainable

    @property
    def trainable_names(self) -> list[str]:
        """The names of `trainable`, in its order."""
        trainable = set(map(id, self.trainable))
        return [name for name, parameter in self.parameters.items() if id(parameter) in trainable]

    # ------------------------------------------------------------------ a step

    def sum_of(self, step: int) -> GradientSum:
        """Return the gradient sum of an open step, which the first call makes."""
        if step < self.version:
            raise ProtocolError(f"stage {self.index} is at version {self.version}; step {step} is decided")
        sums = self.generation.sums
        if step not in sums:
            spare, self._spare = self._spare, None
            sums[step] = spare or self.new_sum()
        return sums[step]

    def new_sum(self) -> GradientSum:
        """Return an empty sum for the gradients of the trainable parameters."""
        return (ExactSum if self.exact else GradientSum)(self.trainable, self.device)

    @property
    def next_sum(self) -> GradientSum:
        """The gradient sum of the step whose record is next."""
        return self.sum_of(self.version)

    def check_version(self, version: int) -> None:
        """Refuse a call for other weights than the newest."""
        if version != self.version:
            raise ProtocolError(f"stage {self.index} is at version {self.version}, not at {version}")

    @property
    def oldest(self) -> int:
        """The oldest version whose weights are here."""
        return self.version - (self._versions is not None and self._versions.has_previous)

    def at(self, version: int) -> contextlib.AbstractContextManager[None]:
        """Return a context with the weights of a version: the newest, or the previous version if it is kept."""
        if version == self.oldest < self.version and self._versions is not None:
            return self._versions.previous()
        self.check_version(version)
        return contextlib.nullcontext()

    def enter_generation(self, version: int, selection: Selection | None) -> None:
        """Reset the stage to `version`. Weights and optimizer state are loaded later."""
        self.version = version
        self.generation = StageGeneration()
        self.state_hash.clear()
        if selection is not None:
            self.select(selection)
        self.optimizer.clear_state()
        self.statistics.clear()
        if self._versions is not None:
            self._versions = WeightVersions(self.parameters)

    def check_applies(self, record: Record) -> None:
        """Refuse a record on which `apply` would fail, before anything is changed."""
        if record.step != self.version:
            raise ProtocolError(f"stage {self.index} is at version {self.version}; record {record.step} is not next")
        selection = record.change.selection or self.selection
        num_groups, num_given = selection.num_groups if selection is not None else 0, len(record.hyperparameters)
        if record.outcome == "apply" and num_groups != num_given:
            raise ProtocolError(f"the optimizer has {num_groups} parameter groups, record {record.step} {num_given}")
        if wrong := self.optimizer.incompatible(record.hyperparameters):
            raise ProtocolError(f"hyperparameters keep their types, and record {record.step} changes those of {wrong}")

    def apply(
        self, record: Record, mean_gradient: Tensor, touched: Sequence[bool], *, applied: Sequence[Stage] = ()
    ) -> None:
        """Apply a record, ``v_{k+1} = f(v_k, record)``; nothing else changes weights and optimizer state.

        The mean gradient has `mean_length` elements, and the same bytes on every replica. `touched` states for each
        trainable parameter whether any microbatch had a gradient for it: optimizers skip the rest, as on one machine.
        `applied` are the stages here that have applied the record already, and so have stepped the parameters that they
        share with this stage.
        """
        if record.change.selection is not None:
            self.select(record.change.selection)
        self.check_applies(record)
        mean_gradient, statistics = self._split_statistics(mean_gradient)
        if statistics is not None and bool(statistics.isfinite().all()):
            self.statistics.set(statistics, record.step)
        applies = record.outcome == "apply"
        parameters, names = self.parameters, self.trainable_names
        stepped = {name: other for other in applied for name in names if other.parameters.get(name) is parameters[name]}
        if self._versions is not None:
            sharing = {name: other._versions for name, other in stepped.items() if other._versions is not None}
            self._versions.begin_version(names if applies else (), sharing)
        sum_ = self.sum_of(record.step)
        self.state_hash.clear()  # frees the tensors that the step replaces
        if applies:
            views = zip(names, sum_.views(mean_gradient), touched, strict=True)
            gradients = {name: view if has_gradient else None for name, view, has_gradient in views}
            gradients.update(dict.fromkeys(stepped))  # None: another stage has stepped these parameters
            portable = self.index in (record.portable or ())
            self.optimizer.step(gradients, record.clip_factor, record.hyperparameters, portable=portable)
            for other in applied:
                self.optimizer.share(other.optimizer)
        self.version += 1
        self.state_hash.begin()
        self._spare = self.generation.sums.pop(record.step, None)  # memory for a later step
        if self._spare is not None:
            self._spare.clear()
        synchronize(self.device)  # so that the next microbatch's time does not include the step

    def fingerprint(self, challenge: int = 0) -> int:
        """Return a hash of weights, buffers and optimizer state; under a challenge other than 0, a proof."""
        return self.state_hash.prove(challenge) if challenge else self.state_hash.fingerprint()

    def fingerprints(self) -> dict[str, int]:
        """Return a fingerprint of each weight and buffer, and of each parameter's optimizer state."""
        parts = {name: [tensor] for name, tensor in self.module.named_stage_tensors().items()}
        for name, state in self.optimizer.state().items():
            parts[f"optimizer state of {name}"] = serialization.flatten(state)[1]
        return {name: fingerprint(tensors) for name, tensors in parts.items()}

    @property
    def mean_length(self) -> int:
        """The number of elements of a round's result: the mean gradient, followed by the running statistics."""
        like = self.next_sum.like
        return like.numel() + self.statistics.length * torch.float64.itemsize // like.itemsize

    def with_statistics(self, mean_gradient: Tensor, statistics: Tensor) -> Tensor:
        """Append running statistics to a mean gradient, reinterpreted in its dtype: the vector that a round returns."""
        return torch.cat([mean_gradient, statistics.view(mean_gradient.dtype).to(mean_gradient.device)])

    def _split_statistics(self, mean: Tensor) -> tuple[Tensor, Tensor | None]:
        """Undo `with_statistics`; None: the stage has no running statistics."""
        if not self.statistics:
            return mean, None
        length = self.next_sum.like.numel()
        return mean[:length], mean[length:].clone().view(torch.float64)

    # ------------------------------------------------------------------ state

    def weights(self) -> dict[str, Tensor]:
        """Return parameters and buffers, not copied, by their names in the model's state dict."""
        return {name: tensor.detach() for name, tensor in self.module.named_stage_tensors().items()}

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Overwrite parameters and buffers; if a name, shape or dtype differs, raise and change nothing."""
        for name, tensor in self._check_weights(weights).items():
            tensor.copy_(weights[name])

    def set_evaluation_weights(self, number: int, weights: dict[str, Tensor]) -> None:
        """Keep weights for evaluations under `number`; if `weights` is empty, drop those of that number."""
        if not weights:
            self.check_evaluation_weights(number)
            self.generation.evaluation_weights = None
            return
        self._check_weights(weights)
        copies = {name: tensor.to(self.device, copy=True) for name, tensor in weights.items()}
        self.generation.evaluation_weights = number, copies

    def check_evaluation_weights(self, number: int) -> None:
        """Refuse a call for evaluation weights that are not here; 0: the call is for the stage's own weights."""
        if number:
            self.evaluation_weights(number)

    def evaluation_weights(self, number: int) -> dict[str, Tensor]:
        """Return the evaluation weights of a number; raise `TicketGone` if they are not here."""
        kept_number, weights = self.generation.evaluation_weights or (0, {})
        if number != kept_number:
            raise TicketGone(f"stage {self.index} has no evaluation weights {number}; it has {kept_number or None}")
        return weights

    def holding(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Return a context with the evaluation weights of `number`; 0: the stage keeps its own weights."""
        self.check_evaluation_weights(number)
        weights = self.generation.evaluation_weights
        if number == 0 or weights is None:
            return contextlib.nullcontext()
        return _holding(self.module.named_stage_tensors(), weights[1])

    def _check_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return this stage's own weights; refuse `weights` that differ in name, shape or dtype."""
        present = self.weights()
        if present.keys() != weights.keys():
            raise ProtocolError(f"stage {self.index} has the weights {sorted(present)}, got {sorted(weights)}")
        for name, tensor in present.items():
            if (tensor.shape, tensor.dtype) != (weights[name].shape, weights[name].dtype):
                raise ProtocolError(
                    f"`{name}` has shape {tuple(tensor.shape)} and {tensor.dtype}, "
                    f"got {tuple(weights[name].shape)} and {weights[name].dtype}"
                )
        return present

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Load optimizer state, bit for bit as `StageOptimizer.state` returned it; refuse another stage's state."""
        unknown = sorted(state.keys() - self.parameters.keys())
        are_dicts = (isinstance(each, dict) and isinstance(each.get(GROUP, {}), dict) for each in state.values())
        if unknown or not all(are_dicts):
            raise ProtocolError(f"optimizer state must be of parameters of stage {self.index}, got {unknown}")
        self.optimizer.load_state(state)
