"""What a user sets, as frozen records. Everything below the strategy sees these, never its arguments."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.limits import Limits
from lightning_swarm.model.boundary_layers import Boundary
from lightning_swarm.network.addresses import Address, HostPort
from lightning_swarm.protocol.messages.run import MAX_RANK, AveragingName, CodecName, Rebalancing

Role = Literal["auto", "both", "trainer", "server"]
Preemption = Literal["auto", "aws", "gcp", "azure"]
StateDictType = Literal["full", "sharded"]
"""Who moves to another stage: nobody; by the paper's rule; whoever gains more by it than it costs."""


@dataclass(frozen=True, kw_only=True)
class Compression:
    """By which codec tensors travel between peers.

    Args:
        activations: Outputs of stages, and floating-point inputs of the first one. Small ones travel as they are.
        gradients: Their gradients, on the way back.
        averaging: Sums of gradients, between the servers of a stage. ``"powersgd"``: each matrix as the product of two
            thin ones, by PowerSGD (arXiv:1905.13727), where that is less.
        rank: Of these products: their columns.
        error_feedback: Add to the next step's sums what was lost of those of this one. None: with PowerSGD only.
    """

    activations: CodecName = "none"
    gradients: CodecName = "none"
    averaging: AveragingName = "none"
    rank: int = 4
    error_feedback: bool | None = None

    @classmethod
    def parse(cls, given: CodecName | Compression | Mapping[str, Any]) -> Compression:
        """What a user gives: one codec for all, or a record."""
        if isinstance(given, Compression):
            return given
        if isinstance(given, str):
            return cls(activations=given, gradients=given, averaging=given)
        names = [field.name for field in fields(cls)]
        unknown = sorted(set(given) - set(names))
        if unknown:
            raise ConfigError(f"`compression` has {', '.join(names)}, got {unknown}. Correct it.")
        return cls(**given)

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


def _nearest(split: str) -> str:
    near = difflib.get_close_matches(split, ("parameters", "time"), n=1)
    return f"Did you mean {near[0]!r}? " if near else f"Write [{split!r}] if a block has that name. "


@dataclass(frozen=True, kw_only=True)
class SwarmConfig:
    """The arguments of `SwarmStrategy`, checked."""

    num_stages: int | None
    pipeline: str | None
    split: str | tuple[str, ...]
    boundary: Boundary | None
    microbatch_size: int | None
    shared: tuple[str, ...]
    target_batch_size: int | None
    role: Role
    run_id: str
    initial_peers: tuple[Address, ...]
    listen: HostPort
    announce: tuple[HostPort, ...]
    identity_path: str | None
    gather_on_end: bool
    state_dict_type: StateDictType = "full"
    offload_optimizer: bool = False
    delay_optimizer_step: bool = False
    deterministic: bool = False
    rebalancing: Rebalancing
    rebalance_interval: float
    preemption: Preemption | None
    compression: Compression = Compression()
    limits: Limits

    def __post_init__(self) -> None:
        for name in ("num_stages", "microbatch_size", "target_batch_size"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(
                    f"`{name}` must be a positive whole number or None, got {value!r}. Leave it out to get the default."
                )
        if self.role not in get_args(Role):
            raise ConfigError(
                "`role` must be 'auto' (who starts the run trains and serves, who joins it serves), 'both' (trains and "
                f"serves), 'trainer' (holds no stage) or 'server', got {self.role!r}. Choose one of them."
            )
        if isinstance(self.split, str) and self.split not in ("parameters", "time"):
            raise ConfigError(
                f"`split` must be 'parameters', 'time' or a list of the names of the blocks where stages begin, "
                f"got {self.split!r}. {_nearest(self.split)}Leave it out to balance by parameters."
            )
        if self.boundary is not None and not isinstance(self.boundary, Boundary):
            raise ConfigError(
                "`boundary` must be a `Bottleneck`, a `Maxout` or None (all features travel), got "
                f"{self.boundary!r}. Write `boundary=Bottleneck(ratio=4)`, say."
            )
        if self.state_dict_type not in get_args(StateDictType):
            raise ConfigError(
                "`state_dict_type` must be 'full' (a checkpoint is one file, written by the lead) or 'sharded' (a "
                f"folder, to which each server writes its stages), got {self.state_dict_type!r}. Choose one of them."
            )
        if self.rebalancing not in get_args(Rebalancing):
            raise ConfigError(
                "`rebalancing` must be 'gain' (peers move where that gains more than it costs), 'paper' (by the SWARM "
                f"paper's rule) or 'none' (nobody moves), got {self.rebalancing!r}. Choose one of them."
            )
        interval_s: object = self.rebalance_interval
        if isinstance(interval_s, bool) or not isinstance(interval_s, (int, float)) or not 0 < interval_s < math.inf:
            raise ConfigError(
                f"`rebalance_interval` must be a positive number of seconds, got {interval_s!r}. To have nobody move, "
                "write `rebalancing='none'`."
            )
        if self.preemption is not None and self.preemption not in get_args(Preemption):
            raise ConfigError(
                "`preemption` must be 'aws', 'gcp', 'azure', 'auto' (whichever of them this machine is of) or None "
                f"(notices are not looked for), got {self.preemption!r}. Choose one of them."
            )
        if not self.run_id or not self.run_id.isprintable() or len(self.run_id) > 100:
            raise ConfigError(
                f"`run_id` must be 1..100 printable characters, got {self.run_id!r}. Choose another name."
            )

        if not isinstance(self.deterministic, bool):
            raise ConfigError(
                "`deterministic` must be True or False (weights may differ in their last bits from run to run), got "
                f"{self.deterministic!r}. What kernels do is the word of `Trainer(deterministic=...)`."
            )
        if self.deterministic:
            self._check_deterministic()

    def _check_deterministic(self) -> None:
        """Refuse what makes the weights depend on who takes part, or on how long something takes."""
        if self.microbatch_size is None:
            raise ConfigError(
                "`deterministic=True` needs `microbatch_size`: by default batches are cut into as many microbatches as "
                "the run's servers can use, got None. Set the number of samples."
            )
        if self.compression.averaging != "none":
            raise ConfigError(
                "with `deterministic=True` sums of gradients must travel as they are, for what a codec makes of them "
                f"depends on who has added up what: got averaging {self.compression.averaging!r}. Write "
                "`compression=Compression(activations=..., gradients=...)`, which keep their codecs, or leave it out."
            )
        if self.role == "both":
            raise ConfigError(
                "with `deterministic=True` one process must train, for which trainer's batch comes into which step is "
                "a matter of time: got role 'both'. Use role 'auto', with servers only beside it."
            )
        if self.split == "time":
            raise ConfigError(
                "with `deterministic=True` the model must be cut alike each time, got split 'time', which measures. "
                "Leave `split` out, or name the blocks where stages begin."
            )

    @property
    def only_serves(self) -> bool:
        """Whether this process trains nothing: it needs no data and never enters a loop."""
        return self.role == "server" or (self.role == "auto" and bool(self.initial_peers))
