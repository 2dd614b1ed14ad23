"""The arguments of `SwarmStrategy` as a checked, frozen record, the only form that the rest of the package sees."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, get_args

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.limits import Limits
from lightning_swarm.network.addresses import Address, HostPort
from lightning_swarm.protocol.settings import (
    AUDIT_SHARE,
    Compression,
    OnConviction,
    RebalancingRule,
    RobustAveraging,
    RunSettings,
    check_choice,
    check_whole_or_none,
    checked_fields,
)
from lightning_swarm.trust.invitation_text import check_is_file_name

if TYPE_CHECKING:
    from lightning_swarm.model.boundary_layers import Boundary

# `Compression` is also public as `lightning_swarm.config.Compression`.
__all__ = [
    "Compression",
    "PeerRole",
    "Preemption",
    "Rebalancing",
    "RebalancingRule",
    "StateDictType",
    "SwarmConfig",
    "Trust",
    "TrustLevel",
]

PeerRole = Literal["auto", "both", "trainer", "server"]
Preemption = Literal["auto", "aws", "gcp", "azure"]
StateDictType = Literal["full", "sharded"]
TrustLevel = Literal["open", "invited", "audited"]

_R = TypeVar("_R")

DEFAULT_RUN_ID: Final = "swarm"
DEFAULT_LISTEN: Final = "127.0.0.1"
# Defaults of `role`, `run_id`, `listen` and `state_dict_type`.
_DEFAULTS: Final = ("auto", DEFAULT_RUN_ID, HostPort.to_listen(DEFAULT_LISTEN), "full")


@dataclass(frozen=True)
class Trust:
    """Which peers may take part in a run, and how their work is checked.

    Args:
        level: ``"invited"``: peers with an invitation of the run's owner, the user who starts it; ``"audited"``: the
            same, and servers' results are checked; ``"open"``: any peer that reaches this one. None: ``"invited"`` if
            other machines reach this peer or it has an invitation, else ``"open"``. Each peer sets its own.
        audit_share: With ``"audited"``, the share of servers' work computed again, 0..1. None: 1/16. Run-wide.
            Snapshots are then at least ``3 / audit_share`` steps apart.
        on_conviction: Reaction if audits convict a server whose earlier work counted unaudited: ``"go_back"`` returns
            to a snapshot from before most of its false work; ``"go_on"`` keeps the weights. Run-wide.
        robust_averaging: ``"centered_clip"`` clips a server's gradient if it is far from most other servers'. It limits
            malicious servers, detects none, and biases each step. ``"none"``: a plain mean. Run-wide.
    """

    level: TrustLevel | None = None
    audit_share: float | None = None
    on_conviction: OnConviction = "go_back"
    robust_averaging: RobustAveraging = "none"

    @classmethod
    def parse(cls, given: TrustLevel | Trust | Mapping[str, Any] | None, **deprecated: Any) -> Trust:
        """Read the argument `trust`, and the deprecated arguments that are now its fields.

        Raises:
            ConfigError: A field is unknown, or is set twice.
        """
        return _parse("trust", cls, given, "level", deprecated)

    @property
    def share(self) -> float | None:
        """The share of the servers' work to audit, with its default if a user left it out; None: no audits."""
        return AUDIT_SHARE if self.level == "audited" and self.audit_share is None else self.audit_share


@dataclass(frozen=True)
class Rebalancing:
    """When servers move to other stages during a run.

    Args:
        rule: ``"gain"``: if the pipeline gains more than the move costs; ``"paper"``: the rule of the SWARM paper;
            ``"none"``: never. Run-wide.
        interval: Longest time in seconds between two decisions about moves. Whenever peers come or go, the run decides
            at once. Run-wide.
    """

    rule: RebalancingRule = "gain"
    interval: float = 300.0

    @classmethod
    def parse(cls, given: RebalancingRule | Rebalancing | Mapping[str, Any], **deprecated: Any) -> Rebalancing:
        """Read the argument `rebalancing`, and the deprecated argument that is now its field.

        Raises:
            ConfigError: A field is unknown, or is set twice.
        """
        return _parse("rebalancing", cls, given, "rule", deprecated)


def _parse(argument: str, record: type[_R], given: Any, first: str, deprecated: Mapping[str, Any]) -> _R:
    """Make a record of a user's argument, which is the record, its fields by name, or the value of its first field."""
    # `deprecated` has the values of arguments that are now fields, by field; None: the argument was not used.
    if isinstance(given, record):
        values = dict(vars(given))
    else:
        values = checked_fields(argument, record, given) if isinstance(given, Mapping) else {first: given}
    for name, value in deprecated.items():
        if value is None:
            continue
        if isinstance(given, (record, Mapping)):
            raise ConfigError(
                f"the field `{name}` of `{record.__name__}` must not also be set by its deprecated argument, got that "
                f"beside `{argument}={given!r}`. Leave the deprecated argument out."
            )
        values[name] = value
    return record(**values)


def _split_hint(split: str) -> str:
    near = difflib.get_close_matches(split, ("parameters", "time"), n=1)
    return f"Did you mean {near[0]!r}? " if near else f"Write [{split!r}] if a block has that name. "


@dataclass(frozen=True, kw_only=True)
class SwarmConfig:
    """The arguments of `SwarmStrategy`, checked. The docstring of `SwarmStrategy` explains each of them."""

    num_stages: int | None
    pipeline: str | None
    split: str | tuple[str, ...]
    boundary: Boundary | None
    shared: tuple[str, ...]
    role: PeerRole
    run_id: str
    initial_peers: tuple[Address, ...]
    listen: HostPort
    announce: tuple[HostPort, ...]
    identity_path: str | None
    trust: TrustLevel | None = None
    invite: str | None = None
    gather_on_end: bool
    state_dict_type: StateDictType = "full"
    offload_optimizer: bool = False
    preemption: Preemption | None
    settings: RunSettings  # settings that all peers of the run share
    limits: Limits

    def __post_init__(self) -> None:
        check_whole_or_none("num_stages", self.num_stages)
        check_choice(
            "role",
            self.role,
            get_args(PeerRole),
            "'auto' (the peer that starts the run trains and serves, a peer that joins it serves), 'both' (trains and "
            "serves), 'trainer' (holds no stage) or 'server'",
        )
        check_choice(
            "state_dict_type",
            self.state_dict_type,
            get_args(StateDictType),
            "'full' (a checkpoint is one file, written by the lead) or 'sharded' (a folder, to which each server "
            "writes its stages)",
        )
        check_choice(
            "preemption",
            self.preemption,
            (None, *get_args(Preemption)),
            "'aws', 'gcp', 'azure', 'auto' (detects which of these clouds this machine is in) or None (watches for no "
            "notice)",
        )
        if isinstance(self.split, str) and self.split not in ("parameters", "time"):
            raise ConfigError(
                f"`split` must be 'parameters', 'time' or a list of the names of the blocks where stages begin, "
                f"got {self.split!r}. {_split_hint(self.split)}Leave it out to balance by parameters."
            )
        if self.boundary is not None:
            self._check_boundary()
        if not self.run_id or not self.run_id.isprintable() or len(self.run_id) > 100:
            raise ConfigError(
                f"`run_id` must be 1..100 printable characters, got {self.run_id!r}. Choose another name."
            )
        self._check_trust()
        if self.settings.deterministic:
            self._check_deterministic()

    def _check_boundary(self) -> None:
        from lightning_swarm.model.boundary_layers import Boundary  # imports torch, which commands can do without

        if not isinstance(self.boundary, Boundary):
            raise ConfigError(
                "`boundary` must be a `Bottleneck`, a `Maxout` or None (all features travel), got "
                f"{self.boundary!r}. Write for example `boundary=Bottleneck(ratio=4)`."
            )

    def _check_trust(self) -> None:
        check_choice(
            "trust",
            self.trust,
            (None, *get_args(TrustLevel)),
            "'invited' (only peers with an invitation take part), 'audited' (likewise, and their work is checked), "
            "'open' (any peer that reaches a port does) or None ('invited' if other machines reach this one)",
        )
        if self.settings.has_strangers and self.trust != "audited":
            raise ConfigError(
                f"`audit_share` needs `trust='audited'`, got trust {self.trust!r}. Write "
                "`Trust('audited', audit_share=...)`."
            )
        if self.settings.goes_back and self.limits.snapshot_interval is None:
            raise ConfigError(
                "with `trust='audited'`, a run rolls back to a snapshot if false work has counted, so it must take "
                "snapshots; got `Limits(snapshot_interval=None)`. Leave it out, or write "
                "`trust=Trust('audited', on_conviction='go_on')`."
            )
        if self.trust == "audited" and self.role == "both":
            raise ConfigError(
                "with `trust='audited'` only one process may train, because the data that a trainer reads cannot be "
                "checked; got role 'both'. Use role 'auto', with only servers beside it."
            )
        if self.invite is None:
            return
        check_is_file_name(self.invite)
        if self.trust == "open":
            raise ConfigError(
                "`invite` is for runs where only invited peers take part, got trust 'open' with the invitation "
                f"{self.invite!r}. Leave one of them out."
            )

    def _check_deterministic(self) -> None:
        """Refuse settings that make the weights depend on the participating peers, or on timing."""
        if self.role == "both":
            raise ConfigError(
                "with `deterministic=True` only one process may train, because timing decides which step gets which "
                "trainer's batch: got role 'both'. Use role 'auto', with only servers beside it."
            )
        if self.split == "time":
            raise ConfigError(
                "with `deterministic=True` every run must cut the model alike, got split 'time', which measures times. "
                "Leave `split` out, or name the blocks where stages begin."
            )

    def may_stay_uncut(self, num_devices: int) -> bool:
        """Return whether a run of this process, on this many devices, may leave the model uncut."""
        # A user who sets options of the cut wants one. Several devices need one if only one of them reads data.
        settings = self.settings
        for_cut = (self.pipeline, self.boundary, settings.microbatch_size, settings.audit_share, self.shared or None)
        if any(value is not None for value in for_cut) or self.split != "parameters":
            return False
        return (self.num_stages or num_devices) == 1 and (
            self.role == "both" or (self.role, num_devices) == ("auto", 1)
        )

    def needs_no_swarm(self, num_devices: int) -> bool:
        """Return whether this process trains alone, because no argument refers to other peers."""
        own = (self.role, self.run_id, self.listen, self.state_dict_type)
        for_swarms = (
            *(self.initial_peers, self.announce, self.identity_path, self.preemption, self.offload_optimizer),
            *(self.trust, self.invite),
        )
        # A single process ignores the settings of moves; any other setting that differs from its default needs a swarm.
        moves = {name: getattr(self.settings, name) for name in ("rebalancing", "rebalance_interval")}
        needs_swarm = self.settings != RunSettings(target_batch_size=None, **moves)
        return own == _DEFAULTS and not any(for_swarms) and not needs_swarm and self.may_stay_uncut(num_devices)

    @property
    def is_local(self) -> bool:
        """True if no other machine reaches this peer."""
        return all(address.is_loopback for address in (self.listen, *self.announce))

    @property
    def is_invited(self) -> bool:
        """True if only peers with an invitation take part in the run."""
        if self.trust is None:
            return self.invite is not None or not self.is_local
        return self.trust != "open"

    @property
    def only_serves(self) -> bool:
        """True if this process trains nothing: it needs no data and never enters a loop."""
        return self.role == "server" or (self.role == "auto" and bool(self.initial_peers))
