"""Limits of a peer: sizes, timeouts, and how long it waits for others."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from lightning_swarm.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on waiting and on memory.

    Args:
        cache_bytes: Bytes that a server may keep of microbatches that wait for their backward. Beyond this the oldest
            are dropped and computed again when they are needed: slower, never different. A trainer may keep as much of
            its microbatches until their step is decided, and in audited runs a server of its own; beyond it they go to
            a temporary file.
        call_timeout: Seconds until a call to another peer, the wait for its input included, is given up.
        silence_timeout: Seconds without a sign of life after which a peer counts as gone, whatever it was asked for. A
            peer that computes gives signs of life. Where round trips are long, this grows by itself.
        lead_timeout: Seconds that the other trainers wait for the lead's loop between two of its batches. Each batch
            that the lead validates and each file that it saves restarts the wait. If the lead's process has been silent
            for as long and no peer can take the run over, the run ends for all.
        start_timeout: Seconds that the starter waits for its peers, imports included.
        stage_timeout: Seconds that the swarm waits for a stage that has lost all its servers, with no snapshot to roll
            back to; then the run ends.
        join_timeout: Seconds that a joining server may take to download a stage.
        join_bytes: Bytes of records that a server keeps for peers that download from it. Beyond this the slowest of
            them begin again.
        max_upload: Bytes a second, on average, that a server sends to joining peers: the state of its stages, and
            records. The default is more than any link carries.
        drain_timeout: Seconds that a server which is told to leave waits for a record that lets it go; then it goes
            all the same, as if it had died.
        leave_timeout: Seconds that a peer may take to end when the run is over; then its process is killed.
        max_pending_calls: Calls that a server holds at once; more are answered *busy*.
        max_in_flight: Microbatches that a trainer sends at once.
        max_metric_bytes: Bytes that the batches of one step, of all trainers together, may add to torchmetrics objects
            that are logged with `sync_dist=True`. Each trainer may add an equal share of it whatever others add.
        max_message_bytes: Bytes of tensors that one message may carry.
        receive_bytes: Bytes of tensors that other peers, all together, may have on their way to this one; one of them
            has up to half. More wait. A larger message is the only one of its peer.
        snapshot_interval: Seconds between two snapshots, from which the run goes on when all servers of a stage have
            died; the first is taken at the run's first step. Each copies every stage where it is held and sends it to
            one server of another stage. None takes no snapshots, and such a run breaks off. In an audited run they are
            also at least ``3 / audit_share`` steps apart.
        snapshot_bytes: Bytes of snapshots that a server may keep in memory; the rest is in temporary files. It keeps
            two snapshots of each of its own stages, and two of each stage that it was chosen to keep for others. All
            servers together keep, twice, at most one copy of a stage for each server that holds it, and one more.
        revive_timeout: Seconds to wait for a stage without an answering server before the run rolls back, and for a
            lead whose process does not answer before another peer that has data rolls back in its place.
        session_bytes: Bytes that a server may keep for inference sessions: caches of keys and values, and outputs for
            servers that come in the place of others. Beyond this, outputs are dropped first, then sessions that are
            not used; those that go on are computed again: slower, never different.
        session_idle: Seconds after which a server drops an inference session that nobody continues.
        step_tokens: Tokens, in all rows together, that one step of an inference session may bring to a server of a
            served model. A longer step is refused, because other sessions would wait for it too long; `generate`
            cuts longer prompts by itself where the model allows it.
        adapter_bytes: Bytes that a server may keep of adapters of clients who tune a served model. Beyond this, those
            that were not used for longest are dropped, and sent again when they are needed.
        loop_bytes: Bytes of the largest loop state that the lead sends to peers which could take the run over; it has
            no weights. A larger one stays with the lead, which a warning says.
    """

    cache_bytes: int = 4 << 30
    call_timeout: float = 300.0
    silence_timeout: float = 10.0
    lead_timeout: float = 1800.0
    start_timeout: float = 120.0
    stage_timeout: float = 86400.0
    join_timeout: float = 3600.0
    join_bytes: int = 4 << 30
    max_upload: int = 1 << 40
    drain_timeout: float = 120.0
    leave_timeout: float = 5.0
    max_pending_calls: int = 1024
    max_in_flight: int = 64
    max_metric_bytes: int = 256 << 20
    max_message_bytes: int = 8 << 30
    receive_bytes: int = 8 << 30
    snapshot_interval: float | None = 300.0
    snapshot_bytes: int = 4 << 30
    session_bytes: int = 4 << 30
    session_idle: float = 300.0
    step_tokens: int = 16384
    adapter_bytes: int = 1 << 30
    revive_timeout: float = 60.0
    loop_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.type == "float | None":
                continue
            whole = field.type == "int"
            lowest: float = 0.001 if not whole else 0 if field.name in ("cache_bytes", "snapshot_bytes") else 1
            kinds = int if whole else (int, float)
            # Not `value < lowest`: that lets NaN pass.
            if isinstance(value, bool) or not isinstance(value, kinds) or not lowest <= value < math.inf:
                raise ConfigError(
                    f"`Limits.{field.name}` must be a {'whole ' if whole else ''}number of at least {lowest:g}, "
                    f"got {value!r}. Leave it out to get the default."
                )
