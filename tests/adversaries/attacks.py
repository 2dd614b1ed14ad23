"""Attacks of malicious servers: the false values that an adversary reports in place of the true ones.

An attack only computes the lie. `lying_server.py` puts it in place of the true value where a real server produces that
value, so that the server's later commitments agree with the lie. Each class names its source:

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

from lightning_swarm.protocol.messages.audits import AuditFinding, StageSketch
from lightning_swarm.protocol.messages.step import DIGEST_BYTES

_TOLERANCE: Final = 0.05  # absolute error of gradients of at most 1, which may have been encoded in 8 bits


@dataclass(frozen=True)
class WeightedSum:
    """A server's gradient sum, and its weight.

    Args:
        values: The sum ``[n]``, as floats.
        weight: The total weight of its microbatches. Only ratios between servers are meaningful.
    """

    values: Tensor
    weight: float

    @property
    def mean(self) -> Tensor:
        """The mean gradient ``[n]`` of the sum's microbatches, up to a factor common to all servers."""
        return self.values / self.weight


@dataclass(frozen=True)
class SeenSums:
    """The sums of all servers of a stage, as an adversary sees them when its own sum is frozen.

    The vectors may be the servers' own memory, so an attack must not write into them, and must copy any that it keeps.

    Args:
        own: The adversary's true sum.
        honest: The sums of the servers that do not lie in this step, without empty sums.
        num_servers: The number of servers of the stage, liars included.
        num_liars: The number of these servers that lie in this step.
        earlier: The adversary's own true sums of earlier steps; the key is the number of steps since then.
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
    """An adversary's finding as an auditor, and its knowledge of the audited server if that one colludes.

    Args:
        true: The true finding.
        claims: The colluding server's claims about the same microbatches; None: the audited server does not collude.
        sketch: The colluding server's sketch of its reported sum.
        sum_digest: The digest of the colluding server's reported sum.
    """

    true: AuditFinding
    claims: bytes | None = None
    sketch: StageSketch | None = None
    sum_digest: bytes = b""


class Attack:
    """A lie: each method receives a true value and returns the value to report, by default the true one."""

    sees_others: ClassVar[bool] = False  # needs the sums of other servers, which must be in the same process

    @property
    def memory(self) -> int:
        """The number of its own earlier sums that the adversary keeps."""
        return 0

    # ------------------------------------------------------------------ sums

    def sum(self, seen: SeenSums) -> Tensor:
        """Return the gradient sum ``[n]`` to freeze."""
        return seen.own.values

    # ------------------------------------------------------------------ microbatches

    def output(self, output: Tensor, inputs: Sequence[Tensor], generator: torch.Generator) -> Tensor:
        """Return a tensor of a forward's output. Computing a microbatch again draws the same random numbers."""
        return output

    def output_gradient(self, gradient: Tensor, output: Tensor) -> Tensor:
        """Return the gradient of an output from which to compute the backward."""
        return gradient

    def input_gradient(self, gradient: Tensor, generator: torch.Generator) -> Tensor:
        """Return the gradient of an input."""
        return gradient

    def parameter_gradient(self, gradient: Tensor) -> Tensor:
        """Return a microbatch's gradient of a parameter, to add to the sum."""
        return gradient

    # ------------------------------------------------------------------ averaging

    def part(self, part: Tensor, generator: torch.Generator) -> Tensor:
        """Return a part ``[m]`` of the sum for another server to reduce."""
        return part

    def reduced(self, part: Tensor, generator: torch.Generator) -> Tensor:
        """Return the part ``[m]`` of the mean that the adversary reduced for all servers."""
        return part

    def squared_norm(self, squared_norm: float) -> float:
        """Return the squared norm of the part that the adversary reduced."""
        return squared_norm

    # ------------------------------------------------------------------ a stage's state

    def downloaded_weight(self, weight: Tensor, generator: torch.Generator) -> Tensor:
        """Return a weight tensor for a server that joins."""
        return weight

    def read_weight(self, weight: Tensor, generator: torch.Generator) -> Tensor:
        """Return a weight tensor for a trainer that reads the model."""
        return weight

    # ------------------------------------------------------------------ audits

    def finding(self, seen: SeenFinding) -> AuditFinding:
        """Return the finding about another server's work."""
        return seen.true


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a random direction, with the norm of `like`."""
    drawn = torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu").to(like.device)
    noise: Tensor = drawn * (like.to(torch.float64).norm() / drawn.norm())
    return noise.to(like.dtype)


# ---------------------------------------------------------------------- sums


@dataclass(frozen=True)
class SignFlip(Attack):
    """The negative sum, times `strength`. Source: BTARD, with a strength of 1000; CenteredClip, with 1."""

    strength: float = 1.0

    @override
    def sum(self, seen: SeenSums) -> Tensor:
        return -self.strength * seen.own.values


@dataclass(frozen=True)
class RandomDirection(Attack):
    """A random direction that all adversaries share, with `strength` times the sum's norm. Source: BTARD."""

    strength: float = 1000.0

    @override
    def sum(self, seen: SeenSums) -> Tensor:
        return self.strength * _noise(seen.own.values, seen.generator)


@dataclass(frozen=True)
class DelayedGradient(Attack):
    """The mean gradient of `delay` steps ago, or the true sum if there was none. Source: BTARD."""

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
        z: The number of standard deviations; None: the most that stays hidden among the honest servers.
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
    """Return ALIE's `z`: enough honest servers deviate by more than that to be a majority with the liars."""
    num_honest = num_servers - num_liars
    supporters = max(1, num_servers // 2 + 1 - num_liars)  # honest servers that the liars need for a majority
    share = (num_honest - supporters) / max(1, num_honest)
    return NormalDist().inv_cdf(share) if share > 0.5 else 0.0


@dataclass(frozen=True)
class ZeroSum(Attack):
    """A sum of zeros, with the receipts of the true sum. Source: after BTARD."""

    @override
    def sum(self, seen: SeenSums) -> Tensor:
        return torch.zeros_like(seen.own.values)


@dataclass(frozen=True)
class NotANumber(Attack):
    """A sum that is NaN everywhere. Source: after BTARD."""

    @override
    def sum(self, seen: SeenSums) -> Tensor:
        return torch.full_like(seen.own.values, math.nan)


@dataclass(frozen=True)
class ScaledSum(Attack):
    """The sum, times `strength`. Source: BTARD."""

    strength: float = 10.0

    @override
    def sum(self, seen: SeenSums) -> Tensor:
        return self.strength * seen.own.values


# ---------------------------------------------------------------------- microbatches


@dataclass(frozen=True)
class NoCompute(Attack):
    """Zeros in place of the parameters' gradients, with receipts as if they had been computed. Source: after BTARD."""

    @override
    def parameter_gradient(self, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient)


@dataclass(frozen=True)
class NoisyOutput(Attack):
    """A forward's output with noise of `strength` times its norm. Source: after BTARD."""

    strength: float = 0.01

    @override
    def output(self, output: Tensor, inputs: Sequence[Tensor], generator: torch.Generator) -> Tensor:
        return output + self.strength * _noise(output, generator)


@dataclass(frozen=True)
class ScaledOutput(Attack):
    """A forward's output, times `strength`; 0 gives zeros. Source: after BTARD."""

    strength: float = 1.05

    @override
    def output(self, output: Tensor, inputs: Sequence[Tensor], generator: torch.Generator) -> Tensor:
        return self.strength * output


@dataclass(frozen=True)
class SkippedBlocks(Attack):
    """A forward's input in place of its output, if an input has the output's shape. Source: after BTARD."""

    @override
    def output(self, output: Tensor, inputs: Sequence[Tensor], generator: torch.Generator) -> Tensor:
        alike = (one for one in inputs if (one.shape, one.dtype) == (output.shape, output.dtype))
        return next(alike, output)


@dataclass(frozen=True)
class ScaledInputGradient(Attack):
    """The gradient of the input, times `strength`; 0 gives zeros. Source: after BTARD."""

    strength: float = -1.0

    @override
    def input_gradient(self, gradient: Tensor, generator: torch.Generator) -> Tensor:
        return self.strength * gradient


@dataclass(frozen=True)
class NoisyInputGradient(Attack):
    """The gradient of the input with noise of `strength` times its norm. Source: after BTARD."""

    strength: float = 0.01

    @override
    def input_gradient(self, gradient: Tensor, generator: torch.Generator) -> Tensor:
        return gradient + self.strength * _noise(gradient, generator)


@dataclass(frozen=True)
class LabelFlip(Attack):
    """The backward of a cross entropy with labels ``C - 1 - y`` in place of `y`. Source: CenteredClip; BTARD.

    It applies only if the server's output ``[..., C]`` is the logits. Then the gradient of a row is
    ``s * (softmax - 1_y)``, whose only negative number is at the label. Other gradients stay as they are.
    """

    @override
    def output_gradient(self, gradient: Tensor, output: Tensor) -> Tensor:
        if gradient.dim() == 0 or not bool(((gradient < 0).sum(dim=-1) == 1).all()):
            return gradient
        label, softmax = gradient.argmin(dim=-1, keepdim=True), output.detach().softmax(dim=-1)
        missing = (1.0 - softmax.gather(-1, label)).sum()
        # Sums over all rows, because both numbers of a row are zero if its label is predicted with certainty.
        scale = -gradient.gather(-1, label).sum() / missing
        ones = torch.zeros_like(softmax).scatter(-1, label, 1.0)
        if not bool(((gradient / scale - softmax + ones).abs() < _TOLERANCE).all()):
            return gradient
        return gradient + (scale * (ones - ones.flip(-1))).to(gradient.dtype)


# ---------------------------------------------------------------------- averaging


@dataclass(frozen=True)
class _Shift(Attack):
    strength: float = 1e-3  # shift of an element, as a multiple of the part's root mean square
    num_elements: int | None = None  # number of shifted elements, drawn at random; None: all

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
    """A shifted part of the mean, which its reducer sends to all servers alike. Source: BTARD."""

    @override
    def reduced(self, part: Tensor, generator: torch.Generator) -> Tensor:
        return self._shifted(part, generator)


@dataclass(frozen=True)
class ChangedPart(_Shift):
    """Shifted parts of the frozen sum, sent to the servers that reduce them. Source: BTARD."""

    @override
    def part(self, part: Tensor, generator: torch.Generator) -> Tensor:
        return self._shifted(part, generator)


@dataclass(frozen=True)
class FalseNorm(Attack):
    """The squared norm of the reduced part, times `strength`; clipping depends on it. Source: after BTARD."""

    strength: float = 100.0

    @override
    def squared_norm(self, squared_norm: float) -> float:
        return self.strength * squared_norm


# ---------------------------------------------------------------------- a stage's state


@dataclass(frozen=True)
class PoisonedDownload(Attack):
    """Weights with noise of `strength` times their norm, for servers that join. Source: after BTARD."""

    strength: float = 0.1

    @override
    def downloaded_weight(self, weight: Tensor, generator: torch.Generator) -> Tensor:
        return weight + self.strength * _noise(weight, generator)


@dataclass(frozen=True)
class PoisonedReading(Attack):
    """Weights with noise of `strength` times their norm, for trainers that read the model. Source: after BTARD."""

    strength: float = 0.1

    @override
    def read_weight(self, weight: Tensor, generator: torch.Generator) -> Tensor:
        return weight + self.strength * _noise(weight, generator)


# ---------------------------------------------------------------------- audits


@dataclass(frozen=True)
class FalseAccusation(Attack):
    """Findings that contradict all results that an honest server claims. Source: BTARD."""

    @override
    def finding(self, seen: SeenFinding) -> AuditFinding:
        if seen.claims is not None:
            return seen.true
        # Digests of its inputs stay true. If false, they would look as if the accused had sent it other inputs.
        results = (place // DIGEST_BYTES % 2 for place in range(len(seen.true.claims)))
        said = (255 - byte if of_result else byte for byte, of_result in zip(seen.true.claims, results, strict=True))
        return replaced(seen.true, claims=bytes(said))


@dataclass(frozen=True)
class CoverUp(Attack):
    """Findings that agree with all that a colluding server claims about its microbatches and sum. Source: BTARD."""

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
