"""Limits of a peer: sizes, timeouts, and the waiting times for other peers."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from lightning_swarm.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on waiting and on memory.

    Args:
        cache_bytes: Bytes of microbatches that a server may keep until their backward. Beyond this it drops the oldest
            and recomputes them when needed: slower, never different. A trainer may keep as many bytes of its own
            microbatches until their step is decided, and so may a server in a run with strangers; both move the excess
            to a temporary file.
        call_timeout: Seconds until a call to another peer is abandoned, including the wait for its input.
        silence_timeout: Seconds without a sign of life after which a peer counts as gone, whatever it was asked for.
            Peers send signs of life even while they compute. The limit grows by itself where round trips are long.
        lead_timeout: Seconds that the other trainers wait for the lead's loop between two of its batches. Each batch
            that the lead validates and each file that it saves restarts the wait. If the lead's process has been silent
            for as long and no peer can take over the run, the run ends for all.
        start_timeout: Seconds that the starter waits for its peers, including their imports.
        stage_timeout: Seconds that the swarm waits for a stage that has lost all its servers, with no snapshot to roll
            back to; then the run ends.
        join_timeout: Seconds that a joining server may take to download a stage.
        join_bytes: Bytes of records that a server keeps for peers that download from it. Beyond this the slowest of
            these peers begin again.
        max_upload: Bytes a second, on average, that a server sends to joining peers: the state of its stages, and
            records. The default is more than any link carries.
        drain_timeout: Seconds that a server, once asked to leave, waits for a record that releases it; then it leaves
            as if it had died.
        leave_timeout: Seconds that a peer may take to end when the run is over; then its process is killed.
        max_pending_calls: Calls that a server holds at once; more are answered *busy*.
        max_in_flight: Microbatches that a trainer sends at once.
        max_metric_bytes: Bytes that the batches of one step, of all trainers together, may add to torchmetrics objects
            that are logged with `sync_dist=True`. Each trainer may always add an equal share.
        max_message_bytes: Bytes of tensors that one message may carry.
        receive_bytes: Bytes of tensors in messages under way from all other peers to this one; each peer may use up to
            half. Further messages wait. While a message larger than half is under way, its peer sends no other.
        snapshot_interval: Seconds between two snapshots, from which the run continues when all servers of a stage have
            died; the first is taken at the run's first step. Each snapshot copies every stage where it is held and
            sends the copy to one server of another stage. None disables snapshots, and a lost stage ends the run.
        snapshot_bytes: Bytes of snapshots that a server may keep in memory; the rest is in temporary files. It keeps
            two snapshots of each of its own stages, and two of each further stage that it was chosen to keep. If
            n servers hold a stage, all servers together keep at most 2 n + 2 snapshots of it.
        revive_timeout: Seconds to wait for a stage without an answering server before the run rolls back, and for a
            lead whose process is silent. Then a peer that has data rolls the run back, and leads it.
        session_bytes: Bytes that a server may keep for inference sessions: caches of keys and values, and outputs to
            replay to a server that replaces another. Beyond this, it drops prefixes of ended texts first, then outputs,
            then unused sessions. A dropped session that continues is recomputed: slower, never different.
        session_idle: Seconds without a step after which a server drops an inference session.
        step_tokens: Tokens of all rows together in one step of an inference session, at a server of a served
            model. A longer step is refused, because other sessions would wait for it too long; `generate`
            cuts longer prompts by itself where the model allows it.
        adapter_bytes: Bytes of adapters that a server may keep for clients who tune a served model. Beyond this, it
            drops the least recently used adapters; clients send them again when needed.
        loop_bytes: Bytes of the largest loop state, without weights, that the lead sends to peers that could take over
            the run. A larger state stays with the lead, which logs a warning.
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
            # `value < lowest` would let NaN pass.
            if isinstance(value, bool) or not isinstance(value, kinds) or not lowest <= value < math.inf:
                raise ConfigError(
                    f"`Limits.{field.name}` must be a {'whole ' if whole else ''}number of at least {lowest:g}, "
                    f"got {value!r}. Leave it out to get the default."
                )
