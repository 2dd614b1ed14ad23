"""Packs a loop's state for peers that could take the run over, and unpacks it into a loop: without pickle.

What a callback, a metric or a hook keeps may be anything. A part that `plain_values` does not know is left out, with
a warning that names it: if another peer takes the run over, that part begins anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torchmetrics import Metric

from lightning_swarm.client.generation import DecidedRecord, Metrics
from lightning_swarm.client.session import RunNews
from lightning_swarm.protocol import plain_values
from lightning_swarm.protocol.messages.batches import NEEDED, LoggedValue, MetricState, TravellingLoop
from lightning_swarm.protocol.messages.batches import Metrics as SentMetrics
from lightning_swarm.protocol.messages.run import BatchNumber
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.plain_values import Awaited, NotPlain
from lightning_swarm.strategy import metric_states
from lightning_swarm.strategy.data import at_position
from lightning_swarm.strategy.metric_states import MetricContents
from lightning_swarm.strategy.metrics import Pending
from lightning_swarm.strategy.rollback.data_position import BatchPosition
from lightning_swarm.strategy.rollback.loop_state import LoopState, ResumePoint

_log = logging.getLogger(__name__)

_MODULE_KEYS: Final = ("hparams_name", "hparams_type", "hyper_parameters")
"""Entries of a checkpoint that are left out: the next lead's module and data module have their own."""

_LOG_OPTIONS: Final = (
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "metric_attribute",
)
"""What `self.log` was called with, as Lightning keeps it."""


def pack(point: ResumePoint, version: int, position: BatchNumber | None, left_out: set[str]) -> Sequence[Tensor]:
    """Pack a state that goes on with the weights of `version`; they know nothing of the batch at `position`.

    `left_out` holds the parts of which a warning was logged. Raises NotPlain if something in the loop's own state, or a
    scheduler's, cannot travel.
    """
    state = point.state
    parts = partial(_plain_parts, left_out=left_out)
    logs, (followed, added) = state.pending
    checkpoint = {
        key: value for key, value in state.checkpoint.items() if not any(ignored in key for ignored in _MODULE_KEYS)
    }
    rest = {key: value for key, value in checkpoint.items() if key not in (*NEEDED, "callbacks")}
    own: dict[str, Any] = {
        **{key: checkpoint[key] for key in NEEDED if key in checkpoint},
        "callbacks": parts(checkpoint.get("callbacks", {}), "the state of callback"),
        **parts(rest, "what is saved as"),
    }
    results = {name: _entry(entry, gathered) for name, (entry, gathered) in state.results.items()}
    travelling = TravellingLoop(
        checkpoint=own,
        parameter_names=list(state.parameter_names),
        made=state.position.made,
        first=state.position.first,
        now=state.position.now,
        num_batches=state.position.num_batches,
        metrics=parts(state.metrics, "what was gathered by metric"),
        results=parts(results, "what was logged in the epoch as"),
        shown={name: parts(found, "the value shown as") for name, found in state.shown.items()},
        logging=dict(state.logging),
        followed=dict(followed),
        logs={lease: list(map(encode, batch)) for lease, batch in logs.items()},
        added={lease: _sent(metric_states.pack(*part) for part in batch) for lease, batch in added.items()},
        num_counted=point.num_counted,
        heard=[_pack_record(record) for record in point.news_at(version).records],
        position=position,
    )
    return plain_values.pack(msgspec.structs.asdict(travelling))


def unpack(value: Any, version: int, trainer: Trainer) -> ResumePoint:
    """Unpack a state for a Trainer's loop that goes on with the weights of `version`.

    Raises ProtocolError if the value, as `plain_values` unpacked it, is no loop's state.
    """
    came = TravellingLoop.read(value)
    at_position(came.checkpoint, came.position)
    state = LoopState(
        checkpoint=came.checkpoint,
        gaps=list(_gaps(came.checkpoint)),
        parameter_names=came.parameter_names,
        position=BatchPosition(made=came.made, first=came.first, now=came.now, num_batches=came.num_batches),
        metrics=came.metrics,
        results=_results(came.results, trainer),
        shown=came.shown,
        logging=came.logging,
        pending=_pending(came, trainer),
    )
    news = RunNews(version, [_unpack_record(*record) for record in came.heard])
    return ResumePoint(state, came.num_counted, version, (), news)


def missing_files(checkpoint: Mapping[str, Any]) -> list[str]:
    """Files that callbacks refer to, and that are not on this machine."""
    found = (
        path
        for state in checkpoint.get("callbacks", {}).values()
        if isinstance(state, Mapping)
        for name in ("best_model_path", "last_model_path")
        if isinstance(path := state.get(name), str) and path
    )
    return sorted({path for path in found if "://" not in path and not Path(path).exists()})


def _plain_parts(parts: Mapping[str, Any], what: str, *, left_out: set[str]) -> dict[str, Any]:
    found = {}
    for name, part in parts.items():
        try:
            plain_values.pack(part)
        except NotPlain as error:
            if f"{what} {name!r}" not in left_out:
                left_out.add(f"{what} {name!r}")
                _log.warning(
                    "If another peer takes this run over, %s %r begins anew there, for it cannot travel: %s.",
                    what,
                    name,
                    error,
                )
        else:
            found[name] = part
    return found


def _gaps(tree: Any) -> Iterator[Awaited]:
    if isinstance(tree, Awaited):
        yield tree
    elif isinstance(tree, Mapping):
        for child in tree.values():
            yield from _gaps(child)
    elif isinstance(tree, (list, tuple)):
        for child in tree:
            yield from _gaps(child)


# ---------------------------------------------------------------------- what trainers share


def _sent(packed: Iterable[tuple[MetricState, Sequence[Tensor]]]) -> SentMetrics:
    parts = list(packed)
    return [encode(state) for state, _ in parts], [tensor for _, tensors in parts for tensor in tensors]


def _pack_record(heard: DecidedRecord) -> tuple[bytes, list[bytes], list[SentMetrics]]:
    metrics = [(list(map(encode, states)), list(tensors)) for states, tensors in heard.metrics]
    return encode(heard.record), list(map(encode, heard.logs)), metrics


def _unpack_record(record: bytes, logs: Sequence[bytes], metrics: Sequence[SentMetrics]) -> DecidedRecord:
    came: list[Metrics] = [([decode(state, MetricState) for state in states], tensors) for states, tensors in metrics]
    return DecidedRecord(decode(record, Record), [decode(value, LoggedValue) for value in logs], came)


def _pending(came: TravellingLoop, trainer: Trainer) -> Pending:
    modules = dict(trainer.lightning_module.named_modules())

    def contents(sent: SentMetrics) -> Iterator[tuple[str, MetricContents]]:
        states, tensors = sent
        rest = iter(tensors)
        for packed in states:
            state = decode(packed, MetricState)
            own, metric = list(islice(rest, sum(state.lengths))), modules.get(state.name)
            if isinstance(metric, Metric):
                yield state.name, metric_states.unpack(metric, state, own)

    logs = {lease: [decode(value, LoggedValue) for value in batch] for lease, batch in came.logs.items()}
    return logs, (came.followed, {lease: list(contents(sent)) for lease, sent in came.added.items()})


# ---------------------------------------------------------------------- what was logged


_REDUCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "max": torch.max,
    "min": torch.min,
}


def _entry(entry: Any, gathered: Mapping[str, Any]) -> dict[str, Any]:
    """Pack an entry of Lightning's results."""
    meta = entry.meta
    return {
        "fx": meta.fx,
        "name": meta.name,
        "is_tensor": entry.is_tensor,
        "reduce_fx": meta.reduce_fx.__name__,
        "options": {name: getattr(meta, name) for name in _LOG_OPTIONS},
        "gathered": dict(gathered),
    }


def _results(entries: Mapping[str, Mapping[str, Any]], trainer: Trainer) -> dict[str, tuple[Metric, Mapping[str, Any]]]:
    """Make the entries anew, as `self.log` does. Those of metrics that this module does not have are left out."""
    results = type(trainer.fit_loop.epoch_loop._results)(training=True)
    modules = dict(trainer.lightning_module.named_modules())
    made = {}
    for key, entry in entries.items():
        options, device = dict(entry["options"]), trainer.strategy.root_device
        value = torch.tensor(0.0, device=device) if entry["is_tensor"] else modules.get(options["metric_attribute"])
        if value is None:
            continue
        results.log(
            entry["fx"],
            entry["name"],
            value,
            reduce_fx=_REDUCTIONS[entry["reduce_fx"]],
            sync_dist_fn=trainer.strategy.reduce,
            batch_size=1,
            **options,
        )
        made[key] = results[key], entry["gathered"]
    return made
