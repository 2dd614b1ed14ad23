"""Attacks of peers that lie: what an adversary says in place of what is true.

An attack only computes the lie. `adversary.py` tells it on a real server, where the true value is made, so that all
that the server commits to later is of the lie. Each class names its source; ALIE, CenteredClip and IPM stand for:

- ALIE: Baruch et al. 2019, "A Little Is Enough", arXiv:1902.06156.
- CenteredClip: Karimireddy et al. 2021, "Learning from History for Byzantine Robust Optimization", arXiv:2012.10333.
- IPM: Xie et al. 2020, "Fall of Empires", arXiv:1903.03936.
- BTARD: Gorbunov et al. 2022, "Secure Distributed Training at Scale", arXiv:2106.11257.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from types import MappingProxyType
from typing import ClassVar, Final

import torch
from msgspec.structs import replace as replaced
from torch import Tensor
from typing_extensions import override

from lightning_swarm.protocol.messages.audits import DIGEST_BYTES, AuditFinding, StageSketch

_TOLERANCE: Final = 0.05  # of a gradient that is at most 1, and may have been encoded in 8 bits


@dataclass(frozen=True)
class WeightedSum:
    """A server's gradient sum, and the weight of what it holds.

    Args:
        values: The sum ``[n]``, in floats.
        weight: The weights of its microbatches together. Only ratios between servers mean something.
    """

    values: Tensor
    weight: float

    @property
    def mean(self) -> Tensor:
        """The mean gradient ``[n]`` of what the sum holds, but for a factor that all servers share."""
        return self.values / self.weight


@dataclass(frozen=True)
class SeenSums:
    """The sums of a stage at the moment an adversary's own is frozen; it sees those of all servers.

    The vectors may be the servers' own memory: an attack must not write into them, and copies what it keeps.

    Args:
        own: The adversary's true sum.
        honest: The sums of the servers that do not lie in this step, without those that hold nothing.
        num_servers: The number of servers of the stage, liars included.
        num_liars: The number of these that lie in this step.
        earlier: The adversary's own true sums of the steps before, by how many steps ago that was.
        generator: Draws the same numbers at all adversaries of a stage in a step.
    """

    own: WeightedSum
    honest: Sequence[WeightedSum]
    num_servers: int
    num_liars: int
    earlier: Mapping[int, WeightedSum]
    generator: torch.Generator


@dataclass(frozen=True)
class SeenFinding:
    """An adversary's finding as an auditor, and its knowledge of a fellow liar whom it audits.

    Args:
        true: What it found.
        claims: What a fellow liar claims of the same microbatches; None: the audited server is no fellow.
        sketch: What the fellow says of its sum.
        sum_digest: The digest of the fellow's sum.
    """

    true: AuditFinding
    claims: bytes | None = None
    sketch: StageSketch | None = None
    sum_digest: bytes = b""


class Attack:
    """A lie; each method gets something true, and returns what the adversary says. By default that is the truth."""

    sees_others: ClassVar[bool] = False  # looks at other servers' sums, which must be in the same process

    @property
    def memory(self) -> int:
        """The number of its own earlier sums that the adversary keeps."""
        return 0

    # ------------------------------------------------------------------ of a sum

    def sum(self, seen: SeenSums) -> Tensor:
        """Return the gradient sum ``[n]`` to freeze."""
        return seen.own.values

    # ------------------------------------------------------------------ of a microbatch

    def output(self, output: Tensor, inputs: Sequence[Tensor], generator: torch.Generator) -> Tensor:
        """Return a tensor of a forward's output. A microbatch that is computed again draws the same numbers again."""
        return output

    def output_gradient(self, gradient: Tensor, output: Tensor) -> Tensor:
        """Return the gradient of an output with which to compute the backward."""
        return gradient

    def input_gradient(self, gradient: Tensor, generator: torch.Generator) -> Tensor:
        """Return the gradient of an input."""
        return gradient

    def parameter_gradient(self, gradient: Tensor) -> Tensor:
        """Return a microbatch's gradient of a parameter, which is added to the sum."""
        return gradient

    # ------------------------------------------------------------------ in averaging

    def part(self, part: Tensor, generator: torch.Generator) -> Tensor:
        """Return a part ``[m]`` of the sum for another server to reduce."""
        return part

    def reduced(self, part: Tensor, generator: torch.Generator) -> Tensor:
        """Return the part ``[m]`` of the mean that the adversary has reduced for all."""
        return part

    def squared_norm(self, squared_norm: float) -> float:
        """Return the squared norm of that part."""
        return squared_norm

    # ------------------------------------------------------------------ of a stage's state

    def downloaded_weight(self, weight: Tensor, generator: torch.Generator) -> Tensor:
        """Return a weight for a server that joins."""
        return weight

    def read_weight(self, weight: Tensor, generator: torch.Generator) -> Tensor:
        """Return a weight for a trainer that reads the model."""
        return weight

    # ------------------------------------------------------------------ as an auditor

    def finding(self, seen: SeenFinding) -> AuditFinding:
        """Return what was found of another server's work."""
        return seen.true


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a direction, with the norm of `like`."""
    drawn = torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu").to(like.device)
    noise: Tensor = drawn * (like.to(torch.float64).norm() / drawn.norm())
    return noise.to(like.dtype)


# ---------------------------------------------------------------------- of a server's sum


@dataclass(frozen=True)
class SignFlip(Attack):
    """The negative sum, so many times. Source: BTARD, with a strength of 1000; CenteredClip, with 1."""

    strength: float = 1.0

    @override
    def sum(self, seen: SeenSums) -> Tensor:
        return -self.strength * seen.own.values


@dataclass(frozen=True)
class RandomDirection(Attack):
    """A direction that all adversaries share, with a norm that is so many times the sum's. Source: BTARD."""

    strength: float = 1000.0

    @override
    def sum(self, seen: SeenSums) -> Tensor:
        return self.strength * _noise(seen.own.values, seen.generator)


@dataclass(frozen=True)
class DelayedGradient(Attack):
    """The mean gradient of so many steps ago; the truth where there was none. Source: BTARD."""

    delay: int = 100

    @property
    @override
    def memory(self) -> int:
        return self.delay

    @override
    def sum(self, seen: SeenSums) -> Tensor:
        earlier = seen.earlier.get(self.delay)
        return seen.own.values if earlier is None else earlier.mean * seen.own.weight


@dataclass(frozen=True)
class InnerProduct(Attack):
    """The negative mean of the honest sums, times `strength`. Source: IPM, with an epsilon of 0.1 and of 0.6."""

    sees_others = True
    strength: float = 0.1

    @override
    def sum(self, seen: SeenSums) -> Tensor:
        if not seen.honest:
            return seen.own.values
        total = torch.stack([one.values for one in seen.honest]).sum(dim=0)
        return total * (-self.strength * seen.own.weight / sum(one.weight for one in seen.honest))


@dataclass(frozen=True)
class LittleIsEnough(Attack):
    """The honest servers' mean gradient minus `z` of its standard deviations. Source: ALIE.

    Args:
        z: The number of standard deviations; None: the most that still hides among the honest, by ALIE's formula.
    """

    sees_others = True
    z: float | None = None

    @override
    def sum(self, seen: SeenSums) -> Tensor:
        if not seen.honest:
            return seen.own.values
        means = torch.stack([one.mean for one in seen.honest])
        z = hidden_deviations(seen.num_servers, seen.num_liars) if self.z is None else self.z
        return (means.mean(dim=0) - z * means.std(dim=0, correction=0)) * seen.own.weight


def hidden_deviations(num_servers: int, num_liars: int) -> float:
    """Return ALIE's `z`: so many honest servers are farther from the mean that with the liars they are a majority."""
    num_honest = num_servers - num_liars
    supporters = max(1, num_servers // 2 + 1 - num_liars)  # that the liars need to be a majority
    share = (num_honest - supporters) / max(1, num_honest)
    return NormalDist().inv_cdf(share) if share > 0.5 else 0.0


@dataclass(frozen=True)
class ZeroSum(Attack):
    """A sum of nothing, with receipts as if of all. Source: after BTARD."""

    @override
    def sum(self, seen: SeenSums) -> Tensor:
        return torch.zeros_like(seen.own.values)


@dataclass(frozen=True)
class NotANumber(Attack):
    """A sum that is no number anywhere. Source: after BTARD."""

    @override
    def sum(self, seen: SeenSums) -> Tensor:
        return torch.full_like(seen.own.values, math.nan)


@dataclass(frozen=True)
class ScaledSum(Attack):
    """The sum, so many times. Source: BTARD."""

    strength: float = 10.0

    @override
    def sum(self, seen: SeenSums) -> Tensor:
        return self.strength * seen.own.values


# ---------------------------------------------------------------------- of a microbatch


@dataclass(frozen=True)
class NoCompute(Attack):
    """Receipts as if the gradients of parameters had been computed, and zeros in their place. Source: after BTARD."""

    @override
    def parameter_gradient(self, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient)


@dataclass(frozen=True)
class NoisyOutput(Attack):
    """A forward's output with noise of so many times its norm. Source: after BTARD."""

    strength: float = 0.01

    @override
    def output(self, output: Tensor, inputs: Sequence[Tensor], generator: torch.Generator) -> Tensor:
        return output + self.strength * _noise(output, generator)


@dataclass(frozen=True)
class ScaledOutput(Attack):
    """A forward's output, so many times; 0 gives zeros. Source: after BTARD."""

    strength: float = 1.05

    @override
    def output(self, output: Tensor, inputs: Sequence[Tensor], generator: torch.Generator) -> Tensor:
        return self.strength * output


@dataclass(frozen=True)
class SkippedBlocks(Attack):
    """A forward's input in place of its output, where one has the output's shape. Source: after BTARD."""

    @override
    def output(self, output: Tensor, inputs: Sequence[Tensor], generator: torch.Generator) -> Tensor:
        alike = (one for one in inputs if (one.shape, one.dtype) == (output.shape, output.dtype))
        return next(alike, output)


@dataclass(frozen=True)
class ScaledInputGradient(Attack):
    """The gradient of the input, so many times; 0 gives zeros. Source: after BTARD."""

    strength: float = -1.0

    @override
    def input_gradient(self, gradient: Tensor, generator: torch.Generator) -> Tensor:
        return self.strength * gradient


@dataclass(frozen=True)
class NoisyInputGradient(Attack):
    """The gradient of the input with noise of so many times its norm. Source: after BTARD."""

    strength: float = 0.01

    @override
    def input_gradient(self, gradient: Tensor, generator: torch.Generator) -> Tensor:
        return gradient + self.strength * _noise(gradient, generator)


@dataclass(frozen=True)
class LabelFlip(Attack):
    """The backward of a cross entropy whose labels `y`, of `C`, became ``C - 1 - y``. Source: CenteredClip; BTARD.

    Only a server whose output ``[..., C]`` is the logits can tell it: the gradient of a row is
    ``s * (softmax - 1_y)``, with one negative number, at the label. Other gradients stay as they are.
    """

    @override
    def output_gradient(self, gradient: Tensor, output: Tensor) -> Tensor:
        if gradient.dim() == 0 or not bool(((gradient < 0).sum(dim=-1) == 1).all()):
            return gradient
        label, softmax = gradient.argmin(dim=-1, keepdim=True), output.detach().softmax(dim=-1)
        missing = (1.0 - softmax.gather(-1, label)).sum()
        # Of all rows together: where one is learnt by heart, both numbers are zero.
        scale = -gradient.gather(-1, label).sum() / missing
        ones = torch.zeros_like(softmax).scatter(-1, label, 1.0)
        if not bool(((gradient / scale - softmax + ones).abs() < _TOLERANCE).all()):
            return gradient
        return gradient + (scale * (ones - ones.flip(-1))).to(gradient.dtype)


# ---------------------------------------------------------------------- in averaging


@dataclass(frozen=True)
class _Shift(Attack):
    strength: float = 1e-3  # the number that is added, in root mean squares of the part
    num_elements: int | None = None  # elements, drawn at random, that it is added to; None: all

    def _shifted(self, part: Tensor, generator: torch.Generator) -> Tensor:
        if not len(part):
            return part
        shift = self.strength * part.square().mean().sqrt()
        if self.num_elements is None:
            return part + shift
        changed = part.clone()
        changed[torch.randperm(len(part), generator=generator)[: self.num_elements].to(part.device)] += shift
        return changed


@dataclass(frozen=True)
class ChangedReduction(_Shift):
    """A part of the mean with something added, as its reducer tells all alike. Source: BTARD."""

    @override
    def reduced(self, part: Tensor, generator: torch.Generator) -> Tensor:
        return self._shifted(part, generator)


@dataclass(frozen=True)
class ChangedPart(_Shift):
    """Parts for others to reduce that are not those of the frozen sum. Source: BTARD."""

    @override
    def part(self, part: Tensor, generator: torch.Generator) -> Tensor:
        return self._shifted(part, generator)


@dataclass(frozen=True)
class FalseNorm(Attack):
    """The squared norm of the part that was reduced, so many times: clipping goes by it. Source: after BTARD."""

    strength: float = 100.0

    @override
    def squared_norm(self, squared_norm: float) -> float:
        return self.strength * squared_norm


# ---------------------------------------------------------------------- of a stage's state


@dataclass(frozen=True)
class PoisonedDownload(Attack):
    """Weights with noise of so many times their norm, for servers that join. Source: after BTARD."""

    strength: float = 0.1

    @override
    def downloaded_weight(self, weight: Tensor, generator: torch.Generator) -> Tensor:
        return weight + self.strength * _noise(weight, generator)


@dataclass(frozen=True)
class PoisonedReading(Attack):
    """Weights with noise of so many times their norm, for trainers that read the model. Source: after BTARD."""

    strength: float = 0.1

    @override
    def read_weight(self, weight: Tensor, generator: torch.Generator) -> Tensor:
        return weight + self.strength * _noise(weight, generator)


# ---------------------------------------------------------------------- as an auditor


@dataclass(frozen=True)
class FalseAccusation(Attack):
    """Findings that agree with nothing an honest server claims. Source: BTARD."""

    @override
    def finding(self, seen: SeenFinding) -> AuditFinding:
        if seen.claims is not None:
            return seen.true
        # It says truly what it was given: else nobody could tell that the accused did not give it something else.
        results = (place // DIGEST_BYTES % 2 for place in range(len(seen.true.claims)))
        said = (255 - byte if of_result else byte for byte, of_result in zip(seen.true.claims, results, strict=True))
        return replaced(seen.true, claims=bytes(said))


@dataclass(frozen=True)
class CoverUp(Attack):
    """Findings that agree with all that a fellow liar claims of its microbatches and of its sum. Source: BTARD."""

    @override
    def finding(self, seen: SeenFinding) -> AuditFinding:
        if seen.claims is None or seen.sketch is None:
            return seen.true
        return replaced(seen.true, claims=seen.claims, values=seen.sketch.values, sum_digest=seen.sum_digest)


ATTACKS: Final[Mapping[str, Callable[..., Attack]]] = MappingProxyType[str, Callable[..., Attack]](
    {
        "sign_flip": SignFlip,
        "random_direction": RandomDirection,
        "delayed_gradient": DelayedGradient,
        "inner_product": InnerProduct,
        "little_is_enough": LittleIsEnough,
        "zero_sum": ZeroSum,
        "not_a_number": NotANumber,
        "scaled_sum": ScaledSum,
        "no_compute": NoCompute,
        "noisy_output": NoisyOutput,
        "scaled_output": ScaledOutput,
        "skipped_blocks": SkippedBlocks,
        "scaled_input_gradient": ScaledInputGradient,
        "noisy_input_gradient": NoisyInputGradient,
        "label_flip": LabelFlip,
        "changed_reduction": ChangedReduction,
        "changed_part": ChangedPart,
        "false_norm": FalseNorm,
        "poisoned_download": PoisonedDownload,
        "poisoned_reading": PoisonedReading,
        "false_accusation": FalseAccusation,
        "cover_up": CoverUp,
    }
)
"""Attacks by name."""
