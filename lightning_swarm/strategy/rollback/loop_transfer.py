"""Records the states of a trainer's loop, and packs the lead's states for standbys, without pickle."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torchmetrics import Metric

from lightning_swarm.client.run_generation import DecidedRecord, Metrics
from lightning_swarm.client.run_session import RunNews, Session
from lightning_swarm.peer.peer import Peer
from lightning_swarm.protocol import plain_values
from lightning_swarm.protocol.messages.batches import NEEDED, LoggedValue, MetricState, TravellingLoop
from lightning_swarm.protocol.messages.batches import Metrics as SentMetrics
from lightning_swarm.protocol.messages.run import BatchNumber
from lightning_swarm.protocol.messages.state import OrderedSnapshots
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.plain_values import Awaited, NotPlain
from lightning_swarm.strategy import metric_states
from lightning_swarm.strategy.data.shared import STATE, set_position
from lightning_swarm.strategy.metric_states import MetricContents
from lightning_swarm.strategy.metrics import LOG_OPTIONS, REDUCTIONS, Pending
from lightning_swarm.strategy.optimization_loop import SwarmOptimization
from lightning_swarm.strategy.rollback.data_position import BatchPosition, DataPosition
from lightning_swarm.strategy.rollback.loop_state import LoopState, LoopStates, ResumePoint, leaves

_log = logging.getLogger(__name__)

_QUIET_FRACTION: Final = 0.9
"""For this fraction of the snapshot interval after an order of snapshots, no further order is expected. It is less than
1 because an order reaches this peer's server some time after it was issued."""


class LoopRecorder:
    """Records one trainer's loop in one run, for versions that have a snapshot or may get one."""

    def __init__(
        self, trainer: Trainer, peer: Peer, session: Session, loop: SwarmOptimization, snapshot_interval_s: float | None
    ) -> None:
        names = {name for stage in peer.lead.stages for name in stage.named_stage_tensors()}
        self.states = LoopStates(trainer, names, is_lead=session.is_lead)
        self._peer = peer
        self._session = session
        self._loop = loop
        self._snapshot_interval_s = snapshot_interval_s  # None if no snapshots are ordered
        self._first_step = session.version
        self._newest_order: OrderedSnapshots | None = None  # newest order of snapshots in this run
        self._newest_sent: int | None = None  # version of the state that standbys have
        self._left_out: set[str] = set()  # parts that cannot be sent, and that a warning has named
        loop.on_grant = self._record_grant

    def clear(self) -> None:
        """Forget all states and snapshots, which are void."""
        self.states.clear()
        self._newest_order = None

    def _record_grant(self, news: RunNews) -> None:
        self.states.record_grant(news)
        self._find_newest_order()
        self._replicate()

    def between_batches(self, position: DataPosition) -> None:
        """Save the state of the loop between two batches, if a snapshot may fit it."""
        self._find_newest_order()
        self.states.prune(self._kept_versions)
        version, completed = self._session.version, self._session.completed_places
        if self._may_have_snapshot(version, completed):
            self.states.save(version, completed, position.position, self._loop.logs.pending)
            self._replicate()

    # ------------------------------------------------------------------ snapshots

    def _find_newest_order(self) -> None:
        """Find the newest order of snapshots, from this peer's server or from the trainer's newest record."""
        record, ordered = self._session.newest_record, self._peer.ordered
        if record is not None and record.snapshot is not None and record.step >= self._first_step:
            from_record = OrderedSnapshots(record.step + 1, record.snapshot.keep, time.monotonic())
            ordered = from_record if ordered is None or ordered.version < from_record.version else ordered
        if ordered is not None and (self._newest_order is None or ordered.version > self._newest_order.version):
            self._newest_order = ordered

    @property
    def _kept_versions(self) -> list[int]:
        """The versions of the snapshots that servers keep."""
        newest = self._newest_order
        return [] if newest is None else [version for version in (newest.keep, newest.version) if version is not None]

    def _may_have_snapshot(self, version: int, completed: Collection[int]) -> bool:
        """Return whether a snapshot may fit a loop at `version` that has `completed` batches in the step after it."""
        newest = self._newest_order
        if newest is not None and newest.version == version and not completed:
            return True
        if not self._session.is_shared or self._snapshot_interval_s is None:
            return False
        # Other trainers may fill the next steps before this trainer asks for a grant again.
        return (
            newest is None
            or newest.version > version
            or time.monotonic() >= newest.at_s + _QUIET_FRACTION * self._snapshot_interval_s
        )

    # ------------------------------------------------------------------ standby leads

    def _replicate(self) -> None:
        """Send the lead's newest state to the standbys if it fits a snapshot, between two batches or after a grant."""
        session, version = self._session, self._session.version
        if not session.is_lead or version == self._newest_sent or version not in self._kept_versions:
            return
        point = self.states.find(version)
        if point is None or point.uncounted_at(version).lost:
            return
        # Another trainer can use the state only if batches have numbers, which give the position in all trainers' data.
        if session.is_shared and STATE not in point.state.checkpoint["loops"]["fit_loop"]["state_dict"]:
            return
        self._newest_sent = version
        position = session.run.position_at(version)
        self._peer.keep_loop(version, partial(pack, point, version, position, self._left_out))


# ---------------------------------------------------------------------- packing


_MODULE_KEYS: Final = ("hparams_name", "hparams_type", "hyper_parameters")
"""Parts of the names of a checkpoint's entries that are left out, because the next lead's own modules have them."""

_LOG_OPTIONS: Final = (*LOG_OPTIONS, "enable_graph", "add_dataloader_idx", "metric_attribute")
"""Options of `self.log` that Lightning keeps."""


def pack(point: ResumePoint, version: int, position: BatchNumber | None, left_out: set[str]) -> Sequence[Tensor]:
    """Pack a state that fits the weights of `version`; `position` is the first batch that they do not include.

    `left_out` collects parts that a warning has named. Raises NotPlain if the loop's own state cannot be sent.
    """
    state = point.state
    plain = partial(_plain_parts, left_out=left_out)
    logs, (followed, added) = state.pending  # see `Pending`
    checkpoint = {
        key: value for key, value in state.checkpoint.items() if not any(ignored in key for ignored in _MODULE_KEYS)
    }
    rest = {key: value for key, value in checkpoint.items() if key not in (*NEEDED, "callbacks")}
    sent: dict[str, Any] = {
        **{key: checkpoint[key] for key in NEEDED if key in checkpoint},
        "callbacks": plain(checkpoint.get("callbacks", {}), "the state of callback"),
        **plain(rest, "the checkpoint's entry"),
    }
    results = {name: _pack_result(result, contents) for name, (result, contents) in state.results.items()}
    travelling = TravellingLoop(
        checkpoint=sent,
        parameter_names=list(state.parameter_names),
        made=state.position.at_iterator,
        first=state.position.at_first_batch,
        now=state.position.at_next_batch,
        num_batches=state.position.num_batches,
        metrics=plain(state.metrics, "the contents of metric"),
        attributes={name: dict(values) for name, values in state.attributes.items()},
        results=plain(results, "the epoch's logged result"),
        shown={name: plain(values, "the displayed value") for name, values in state.shown.items()},
        logging=dict(state.logging),
        followed=dict(followed),
        logs={lease: list(map(encode, batch)) for lease, batch in logs.items()},
        added={lease: _join(metric_states.pack(*part) for part in batch) for lease, batch in added.items()},
        num_counted=point.loop_version,
        heard=[_pack_record(record) for record in point.uncounted_at(version).records],
        position=position,
    )
    return plain_values.pack(msgspec.structs.asdict(travelling))


def unpack(value: Any, version: int, trainer: Trainer) -> ResumePoint:
    """Unpack a state for a Trainer's loop that resumes with the weights of `version`. Raises ProtocolError."""
    travelled = TravellingLoop.read(value)
    set_position(travelled.checkpoint, travelled.position)
    state = LoopState(
        checkpoint=travelled.checkpoint,
        gaps=[leaf for _, leaf in leaves(travelled.checkpoint) if isinstance(leaf, Awaited)],
        parameter_names=travelled.parameter_names,
        position=BatchPosition(
            at_iterator=travelled.made,
            at_first_batch=travelled.first,
            at_next_batch=travelled.now,
            num_batches=travelled.num_batches,
        ),
        metrics=travelled.metrics,
        attributes=travelled.attributes,
        results=_unpack_results(travelled.results, trainer),
        shown=travelled.shown,
        logging=travelled.logging,
        pending=_unpack_pending(travelled, trainer),
    )
    news = RunNews(version, [_unpack_record(*record) for record in travelled.heard])
    return ResumePoint(state, travelled.num_counted, version, (), news)


def missing_files(checkpoint: Mapping[str, Any]) -> list[str]:
    """Return the files that callbacks refer to, but that are not on this machine."""
    paths = (
        path
        for state in checkpoint.get("callbacks", {}).values()
        if isinstance(state, Mapping)
        for name in ("best_model_path", "last_model_path")
        if isinstance(path := state.get(name), str) and path
    )
    return sorted({path for path in paths if "://" not in path and not Path(path).exists()})


def _plain_parts(parts: Mapping[str, Any], description: str, *, left_out: set[str]) -> dict[str, Any]:
    """Return the parts that `plain_values` can pack, and warn of all other parts. `description` says what they are."""
    plain = {}
    for name, part in parts.items():  # callbacks and hooks may keep any objects
        try:
            plain_values.pack(part)
        except NotPlain as error:
            if f"{description} {name!r}" not in left_out:
                left_out.add(f"{description} {name!r}")
                _log.warning(
                    "If another peer takes over this run, it will lack %s %r, which cannot be sent: %s.",
                    description,
                    name,
                    error,
                )
        else:
            plain[name] = part
    return plain


# ---------------------------------------------------------------------- logs and metrics that trainers share


def _join(packed: Iterable[tuple[MetricState, Sequence[Tensor]]]) -> SentMetrics:
    parts = list(packed)
    return [encode(state) for state, _ in parts], [tensor for _, tensors in parts for tensor in tensors]


def _pack_record(decided: DecidedRecord) -> tuple[bytes, list[bytes], list[SentMetrics]]:
    metrics = [(list(map(encode, states)), list(tensors)) for states, tensors in decided.metrics]
    return encode(decided.record), list(map(encode, decided.logs)), metrics


def _unpack_record(record: bytes, logs: Sequence[bytes], metrics: Sequence[SentMetrics]) -> DecidedRecord:
    unpacked: list[Metrics] = [
        ([decode(state, MetricState) for state in states], tensors) for states, tensors in metrics
    ]
    return DecidedRecord(decode(record, Record), [decode(value, LoggedValue) for value in logs], unpacked)


def _unpack_pending(travelled: TravellingLoop, trainer: Trainer) -> Pending:
    """Unpack the logged values and metric contents of batches that no record counts yet."""
    modules = dict(trainer.lightning_module.named_modules())

    def contents(sent: SentMetrics) -> Iterator[tuple[str, MetricContents]]:
        states, tensors = sent
        rest = iter(tensors)
        for packed in states:
            state = decode(packed, MetricState)
            parts, metric = list(islice(rest, sum(state.lengths))), modules.get(state.name)
            if isinstance(metric, Metric):
                yield state.name, metric_states.unpack(metric, state, parts)

    logs = {lease: [decode(value, LoggedValue) for value in batch] for lease, batch in travelled.logs.items()}
    return logs, (travelled.followed, {lease: list(contents(sent)) for lease, sent in travelled.added.items()})


# ---------------------------------------------------------------------- Lightning's results


def _pack_result(result: Any, contents: Mapping[str, Any]) -> dict[str, Any]:
    meta = result.meta
    return {
        "fx": meta.fx,
        "name": meta.name,
        "is_tensor": result.is_tensor,
        "reduce_fx": meta.reduce_fx.__name__,
        "options": {name: getattr(meta, name) for name in _LOG_OPTIONS},
        "gathered": dict(contents),
    }


def _unpack_results(
    entries: Mapping[str, Mapping[str, Any]], trainer: Trainer
) -> dict[str, tuple[Metric, Mapping[str, Any]]]:
    """Create Lightning's results again, as `self.log` does, except results of metrics that this module lacks."""
    results = type(trainer.fit_loop.epoch_loop._results)(training=True)
    modules = dict(trainer.lightning_module.named_modules())
    unpacked = {}
    for key, entry in entries.items():
        options, device = dict(entry["options"]), trainer.strategy.root_device
        value = torch.tensor(0.0, device=device) if entry["is_tensor"] else modules.get(options["metric_attribute"])
        if value is None:
            continue
        results.log(
            entry["fx"],
            entry["name"],
            value,
            reduce_fx=REDUCTIONS[entry["reduce_fx"]],
            sync_dist_fn=trainer.strategy.reduce,
            batch_size=1,
            **options,
        )
        unpacked[key] = results[key], entry["gathered"]
    return unpacked
