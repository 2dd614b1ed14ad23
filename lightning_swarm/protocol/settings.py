"""Settings that all peers of a run share: set by the starter's arguments, distributed in the manifest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias, get_args

import msgspec
from msgspec.structs import asdict, force_setattr

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.protocol.messages.wire import NumSamples, Positive, WireMessage

# Moves of servers to other stages: none; by the paper's rule; if a move gains more than it costs.
RebalancingRule = Literal["none", "paper", "gain"]
RobustAveraging = Literal["none", "centered_clip"]
OnConviction = Literal["go_on", "go_back"]
CodecName = Literal["none", "float16", "bfloat16", "8bit", "6bit", "4bit"]  # "none": tensors travel as they are
AveragingName = Literal[CodecName, "powersgd"]  # "powersgd": matrices travel as products of two thin matrices

MAX_RANK: Final = 1024
AUDIT_SHARE: Final = 1 / 16  # `audit_share` of an audited run, unless the user sets it


def checked_fields(argument: str, record: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record's fields as a user gave them by name for an argument; refuse unknown names."""
    names = [field.name for field in fields(record)]
    if unknown := sorted(map(str, set(given) - set(names))):
        raise ConfigError(f"`{argument}` has {', '.join(names)}, got {unknown}. Correct it.")
    return dict(given)


@dataclass(frozen=True, kw_only=True)
class Compression:
    """The codecs of the tensors that peers send each other.

    Args:
        activations: Codec of hidden states: the outputs of stages, and floating-point inputs of the first stage. Small
            tensors are never encoded.
        gradients: Codec of the gradients of hidden states.
        averaging: Codec of the gradient sums that the servers of a stage exchange. ``"powersgd"`` sends each matrix as
            the product of two thin matrices, by PowerSGD (arXiv:1905.13727), where that is smaller.
        rank: Columns of these thin matrices.
        error_feedback: Add the encoding error of this step's sums to the next step's sums. None: with PowerSGD only.

    Raises:
        ConfigError: An argument is out of range.
    """

    activations: CodecName = "none"
    gradients: CodecName = "none"
    averaging: AveragingName = "none"
    rank: int = 4
    error_feedback: bool | None = None

    @classmethod
    def parse(cls, given: CodecName | Compression | Mapping[str, Any]) -> Compression:
        """Read a user's argument: one codec for all tensors, or a `Compression` or its fields.

        Raises:
            ConfigError: A field is unknown, or its value out of range.
        """
        if isinstance(given, Compression):
            return given
        if isinstance(given, str):
            return cls(activations=given, gradients=given, averaging=given)
        return cls(**checked_fields("compression", cls, given))

    def __post_init__(self) -> None:
        kinds = {"activations": CodecName, "gradients": CodecName, "averaging": AveragingName}
        for name, names in ((name, get_args(kind)) for name, kind in kinds.items()):
            value = getattr(self, name)
            if value not in names:
                instead = "`Compression(averaging='powersgd')`" if value == "powersgd" else "one of them"
                raise ConfigError(
                    f"`compression` must name one of {', '.join(names)}, got {value!r} for {name}. Choose {instead}."
                )
        rank: object = self.rank
        if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
            raise ConfigError(f"`rank` must be an integer of 1..{MAX_RANK}, got {rank!r}. Leave it out, say.")
        feedback: object = self.error_feedback
        if feedback is None:
            object.__setattr__(self, "error_feedback", self.averaging == "powersgd")
        elif not isinstance(feedback, bool) or (feedback and self.averaging == "none"):
            raise ConfigError(
                "`error_feedback` must be True or False, and True only where `averaging` has a codec, got "
                f"{self.error_feedback!r} with {self.averaging!r}. Leave it out, or choose a codec."
            )


NO_COMPRESSION: Final = Compression()


class _CompressionMessage(WireMessage, frozen=True):
    activations: CodecName
    gradients: CodecName
    averaging: AveragingName
    rank: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANK)]
    error_feedback: bool


if TYPE_CHECKING:
    _CompressionField: TypeAlias = Compression
else:
    # msgspec would ignore unknown fields of a dataclass, and fill in missing fields.
    _CompressionField = _CompressionMessage


class WithCompression(WireMessage, frozen=True, kw_only=True):
    """Base of the messages that carry a `Compression`. No field of it may be unknown or missing."""

    compression: _CompressionField = NO_COMPRESSION  # codecs of the run's tensors

    def __post_init__(self) -> None:
        decoded: Any = self.compression
        if isinstance(decoded, _CompressionMessage):
            force_setattr(self, "compression", Compression(**asdict(decoded)))


# Settings in which the programs of all trainers, or of standby leads, must agree with the run. They take all other
# settings from the manifest.
SET_BY_EACH_TRAINER: Final = ("target_batch_size",)
SET_BY_EACH_LEAD: Final = ("target_batch_size", "delay_optimizer_step", "deterministic")


class RunSettings(WithCompression, frozen=True):
    """The settings that all peers of a run share. Each field is an argument of `SwarmStrategy`, or a field of one."""

    # A new setting needs a field here with its check, an argument of `SwarmStrategy`, and documentation.
    target_batch_size: NumSamples | None  # samples of one optimizer step; None: the lead closes each step
    microbatch_size: NumSamples | None = None  # samples routed together; None: chosen to keep the stages busy
    delay_optimizer_step: bool = False  # each step but the first computes on the weights before the newest record's
    deterministic: bool = False  # sums of gradients have the same bits, independent of the servers that add them
    rebalancing: RebalancingRule = "none"
    rebalance_interval: Positive = 300.0  # seconds between two decisions on moves, at the latest
    audit_share: float | None = None  # share of the servers' work in each step to recompute; None: no audits
    on_conviction: OnConviction = "go_back"  # reaction if unaudited work of a convicted server counted
    robust_averaging: RobustAveraging = "none"  # replacement of the mean

    @property
    def goes_back(self) -> bool:
        """Return whether the run goes back to a snapshot where false work may have counted."""
        return self.has_strangers and self.on_conviction == "go_back"

    @property
    def steps_to_conviction(self) -> int | None:
        """Steps within which audits find 19 of 20 servers that do false work in every step; None: no work is drawn."""
        return math.ceil(3 / self.audit_share) if self.audit_share else None  # because exp(-3) is 1 / 20

    @property
    def has_strangers(self) -> bool:
        """Return whether servers are strangers: only keepers decide, and a share of the work is computed again."""
        return self.audit_share is not None

    def first_difference(self, other: RunSettings, names: tuple[str, ...]) -> str | None:
        """Return the name of the first of these settings that differs; None if all agree."""
        return next((name for name in names if getattr(self, name) != getattr(other, name)), None)

    def __post_init__(self) -> None:
        # While a message is decoded, a `ConfigError` from here becomes a `ProtocolError` of `decode`.
        super().__post_init__()
        for name in ("microbatch_size", "target_batch_size"):
            check_whole_or_none(name, getattr(self, name))
        check_choice(
            "rebalancing",
            self.rebalancing,
            get_args(RebalancingRule),
            "'gain' (peers move where that gains more than it costs), 'paper' (by the SWARM paper's rule) or 'none' "
            "(no server moves)",
        )
        interval_s: object = self.rebalance_interval
        if isinstance(interval_s, bool) or not isinstance(interval_s, (int, float)) or not 0 < interval_s < math.inf:
            raise ConfigError(
                f"the interval of `Rebalancing` must be a positive number of seconds, got {interval_s!r}. To prevent "
                "moves, write `rebalancing='none'`."
            )
        if not isinstance(self.deterministic, bool):
            raise ConfigError(
                "`deterministic` must be True or False (weights may differ in their last bits from run to run), got "
                f"{self.deterministic!r}. `Trainer(deterministic=...)` sets what kernels do."
            )
        check_choice(
            "robust_averaging",
            self.robust_averaging,
            get_args(RobustAveraging),
            "'centered_clip' (a mean that no server pulls far, and that is not the true one) or 'none'",
        )
        check_choice(
            "on_conviction",
            self.on_conviction,
            get_args(OnConviction),
            "'go_back' (to a snapshot, if earlier work of the server counted without an audit) or 'go_on' (the run "
            "only does without the server from then on)",
        )
        if self.robust_averaging != "none":
            self._check_robust()
        if self.deterministic:
            self._check_deterministic()
        if self.audit_share is not None:
            self._check_audited()

    def _check_audited(self) -> None:
        """Refuse an invalid share, and settings that cannot be audited."""
        share: object = self.audit_share
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise ConfigError(
                f"`audit_share` must be a number of 0..1, the share of the servers' work that is computed again, got "
                f"{share!r}. Leave it out to get 1/16."
            )
        if self.delay_optimizer_step:
            raise ConfigError(
                "with `trust='audited'` each step is decided before the next one begins, for audits compute on its "
                "weights: got `delay_optimizer_step=True`. Leave it out."
            )
        if self.compression.averaging != "none":
            raise ConfigError(
                "with `trust='audited'` sums of gradients must travel as they are, because other servers check the "
                f"averaging: got averaging {self.compression.averaging!r}. Write `compression=Compression("
                "activations=..., gradients=...)`, which keep their codecs, or leave it out."
            )
        if self.rebalancing == "paper":
            raise ConfigError(
                "with `trust='audited'` servers must move by measured gains, because the paper's rule relies on their "
                "own reports: got rebalancing 'paper'. Write `rebalancing='gain'` or 'none'."
            )

    def _check_robust(self) -> None:
        reasons = {
            "`deterministic=True`": (self.deterministic, "its result depends on which servers compute what"),
            "`trust='audited'`": (self.has_strangers, "audits find liars out, and check that means are true"),
            f"averaging {self.compression.averaging!r}": (
                self.compression.averaging != "none",
                "parts travel as they are",
            ),
        }
        for given, (is_given, why) in reasons.items():
            if is_given:
                raise ConfigError(
                    f"`Trust(robust_averaging={self.robust_averaging!r})` clips what single servers add to a mean: "
                    f"{why}, got {given}. Leave one of them out."
                )

    def _check_deterministic(self) -> None:
        """Refuse settings that make the weights depend on the participating peers."""
        if self.microbatch_size is None:
            raise ConfigError(
                "`deterministic=True` needs `microbatch_size`: by default batches are cut into as many microbatches as "
                "the run's servers can use, got None. Set the number of samples."
            )
        if self.compression.averaging != "none":
            raise ConfigError(
                "with `deterministic=True` sums of gradients must travel as they are, because a codec's result "
                f"depends on which server added which gradients: got averaging {self.compression.averaging!r}. Write "
                "`compression=Compression(activations=..., gradients=...)`, which keep their codecs, or leave it out."
            )


def check_whole_or_none(name: str, value: object) -> None:
    """Refuse a count that is neither None nor a positive whole number."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(
            f"`{name}` must be a positive whole number or None, got {value!r}. Leave it out to get the default."
        )


def check_choice(name: str, value: object, choices: tuple[object, ...], description: str) -> None:
    """Refuse a value that is none of the choices; the error contains their `description`."""
    if value not in choices:
        raise ConfigError(f"`{name}` must be {description}, got {value!r}. Choose one of them.")
