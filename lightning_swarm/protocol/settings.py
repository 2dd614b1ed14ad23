"""Settings that all peers of a run share: its starter sets them by arguments, and the manifest distributes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias, get_args

import msgspec
from msgspec.structs import asdict, force_setattr

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.protocol.messages.wire import NumSamples, Positive, WireMessage

# When servers move to other stages: never; by the paper's rule; if a move gains more than it costs.
RebalancingRule = Literal["none", "paper", "gain"]
RobustAveraging = Literal["none", "centered_clip"]
OnConviction = Literal["go_on", "go_back"]
CodecName = Literal["none", "float16", "bfloat16", "8bit", "6bit", "4bit"]  # "none": tensors are not encoded
AveragingName = Literal[CodecName, "powersgd"]  # "powersgd": matrices are sent as products of two thin matrices

MAX_RANK: Final = 1024
AUDIT_SHARE: Final = 1 / 16  # default `audit_share` of audited runs


def checked_fields(argument: str, record: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a record's fields that a user passed as a mapping; refuse names that are no fields."""
    names = [field.name for field in fields(record)]
    if unknown := sorted(map(str, set(values) - set(names))):
        raise ConfigError(f"`{argument}` has {', '.join(names)}, got {unknown}. Correct the names.")
    return dict(values)


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
    def parse(cls, argument: CodecName | Compression | Mapping[str, Any]) -> Compression:
        """Read a user's argument: one codec for all tensors, or a `Compression` or its fields.

        Raises:
            ConfigError: A field is unknown, or its value out of range.
        """
        if isinstance(argument, Compression):
            return argument
        if isinstance(argument, str):
            return cls(activations=argument, gradients=argument, averaging=argument)
        return cls(**checked_fields("compression", cls, argument))

    def __post_init__(self) -> None:
        for name, kind in {"activations": CodecName, "gradients": CodecName, "averaging": AveragingName}.items():
            value, codecs = getattr(self, name), get_args(kind)
            if value not in codecs:
                choice = "`Compression(averaging='powersgd')`" if value == "powersgd" else "one of them"
                raise ConfigError(
                    f"`compression` must name one of {', '.join(codecs)}, got {value!r} for {name}. Choose {choice}."
                )
        rank: object = self.rank
        if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
            raise ConfigError(f"`rank` must be an integer of 1..{MAX_RANK}, got {rank!r}. Leave it out to get 4.")
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
    # Decoded as a strict message, because msgspec ignores unknown fields of a dataclass, and fills in missing fields.
    _CompressionField = _CompressionMessage


class WithCompression(WireMessage, frozen=True, kw_only=True):
    """Base of the messages that carry a `Compression`, whose fields must all be known and present."""

    compression: _CompressionField = NO_COMPRESSION  # codecs of the run's tensors

    def __post_init__(self) -> None:
        decoded: Any = self.compression
        if isinstance(decoded, _CompressionMessage):
            force_setattr(self, "compression", Compression(**asdict(decoded)))


# Settings that must be equal in the programs of all trainers, or of all peers that may take over as the lead. These
# programs read all other settings from the manifest.
SET_BY_EACH_TRAINER: Final = ("target_batch_size",)
SET_BY_EACH_LEAD: Final = ("target_batch_size", "delay_optimizer_step", "deterministic")


class RunSettings(WithCompression, frozen=True):
    """The settings that all peers of a run share. Each field is an argument of `SwarmStrategy`, or a field of one."""

    # A new setting needs a field here with its check, an argument of `SwarmStrategy`, and documentation.
    target_batch_size: NumSamples | None  # samples of one optimizer step; None: the lead closes each step
    microbatch_size: NumSamples | None = None  # samples routed together; None: chosen to keep the stages busy
    delay_optimizer_step: bool = False  # each step but the first computes on weights that are one record older
    deterministic: bool = False  # sums of gradients have the same bits, independent of the servers that add them
    rebalancing: RebalancingRule = "none"
    rebalance_interval: Positive = 300.0  # seconds between two decisions on moves, at the latest
    audit_share: float | None = None  # share of the servers' work in each step to recompute; None: no audits
    on_conviction: OnConviction = "go_back"  # reaction if unaudited work of a convicted server counted
    robust_averaging: RobustAveraging = "none"  # replacement of the mean

    @property
    def goes_back(self) -> bool:
        """Return whether the run rolls back to a snapshot if false work may have counted."""
        return self.has_strangers and self.on_conviction == "go_back"

    @property
    def steps_to_conviction(self) -> int | None:
        """Steps within which audits find 19 of 20 servers that do false work in every step; None: no audits."""
        return math.ceil(3 / self.audit_share) if self.audit_share else None  # because exp(-3) is 1 / 20

    @property
    def has_strangers(self) -> bool:
        """Return whether servers are strangers: then only keepers decide, and a share of the work is audited."""
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
                "moves, set `rebalancing='none'`."
            )
        if not isinstance(self.deterministic, bool):
            raise ConfigError(
                "`deterministic` must be True or False (weights may differ in their last bits from run to run), got "
                f"{self.deterministic!r}. To choose kernels, set `Trainer(deterministic=...)`."
            )
        check_choice(
            "robust_averaging",
            self.robust_averaging,
            get_args(RobustAveraging),
            "'centered_clip' (a robust mean, which no server can move far) or 'none' (the true mean)",
        )
        check_choice(
            "on_conviction",
            self.on_conviction,
            get_args(OnConviction),
            "'go_back' (to a snapshot, if earlier work of the server counted without an audit) or 'go_on' (the run "
            "continues without the server)",
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
                f"`audit_share`, the share of the servers' work to recompute, must be a number of 0..1, got {share!r}. "
                " Leave it out to get 1/16."
            )
        if self.delay_optimizer_step:
            raise ConfigError(
                "with `trust='audited'` each step must be decided before the next step begins, because audits compute "
                "on its weights: got `delay_optimizer_step=True`. Leave it out."
            )
        if self.compression.averaging != "none":
            raise ConfigError(
                "with `trust='audited'` sums of gradients must travel as they are, because other servers check the "
                f"averaging: got averaging {self.compression.averaging!r}. Write `compression=Compression("
                "activations=..., gradients=...)`, or leave it out."
            )
        if self.rebalancing == "paper":
            raise ConfigError(
                "with `trust='audited'` servers must move by measured gains, because the paper's rule relies on their "
                "own reports: got rebalancing 'paper'. Write `rebalancing='gain'` or 'none'."
            )

    def _check_robust(self) -> None:
        """Refuse settings with which `robust_averaging` cannot be combined."""
        reasons = {
            "`deterministic=True`": (
                self.deterministic,
                "the clipped mean depends on how microbatches are distributed",
            ),
            "`trust='audited'`": (self.has_strangers, "audits accept only the true mean"),
            f"averaging {self.compression.averaging!r}": (
                self.compression.averaging != "none",
                "clipped parts are not encoded",
            ),
        }
        for setting, (is_set, reason) in reasons.items():
            if is_set:
                raise ConfigError(
                    f"`Trust(robust_averaging={self.robust_averaging!r})` clips each server's part of a mean, so it "
                    f"must be used without {setting}, because {reason}. Leave one of them out."
                )

    def _check_deterministic(self) -> None:
        """Refuse settings that make the weights depend on the participating peers."""
        if self.microbatch_size is None:
            raise ConfigError(
                "`deterministic=True` needs `microbatch_size`, because by default the number of microbatches depends "
                "on the run's servers: got None. Set the number of samples."
            )
        if self.compression.averaging != "none":
            raise ConfigError(
                "with `deterministic=True` sums of gradients must travel as they are, because a codec's result "
                f"depends on which server added which gradients: got averaging {self.compression.averaging!r}. Write "
                "`compression=Compression(activations=..., gradients=...)`, or leave it out."
            )


def check_whole_or_none(name: str, value: object) -> None:
    """Refuse a count that is neither None nor a positive whole number."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(
            f"`{name}` must be a positive whole number or None, got {value!r}. Leave it out to get the default."
        )


def check_choice(name: str, value: object, choices: tuple[object, ...], description: str) -> None:
    """Refuse a value that is not among the choices; the error contains their `description`."""
    if value not in choices:
        raise ConfigError(f"`{name}` must be {description}, got {value!r}. Choose one of them.")
