"""A trainer's loop on its way to a peer that could go on with it, in the values of `plain`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from lightning_swarm.errors import ProtocolError
from lightning_swarm.types.batches import Logged, MetricState
from lightning_swarm.types.steps import Record
from lightning_swarm.types.wire import decode

NEEDED: Final = ("epoch", "global_step", "state_dict", "loops", "optimizer_states", "lr_schedulers")
"""Of a checkpoint: without these a loop cannot go on."""

Metrics = tuple[list[bytes], list[Any]]  # the states of metrics, and the tensors of all of them


class TravellingLoop(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is in a `Between` and its `LoopState`; what has a form on the wire is in that."""

    checkpoint: dict[str, Any]
    parameter_names: list[str]
    made: dict[str, Any]
    first: dict[str, Any]
    now: dict[str, Any]
    num_batches: int | None
    metrics: dict[str, dict[str, Any]]
    results: dict[str, dict[str, Any]]
    shown: dict[str, dict[str, Any]]
    logging: dict[str, Any]
    followed: dict[str, bool]
    logs: dict[int, list[bytes]]  # of its own batches in the step that it was in, by their leases
    added: dict[int, Metrics]  # likewise, to metrics
    num_counted: int
    heard: list[tuple[bytes, list[bytes], list[Metrics]]]  # records that it had not counted, and what came with each
    position: tuple[int, int] | None  # of the first batch that the weights know nothing of

    @classmethod
    def read(cls, value: Any) -> TravellingLoop:
        """The loop in a value that came from somebody else.

        Raises:
            ProtocolError: It is none, or some part of it could not be read when the loop goes on.
        """
        try:
            came = msgspec.convert(value, cls)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"the state of a loop has other fields: {error}") from error
        missing = [name for name in NEEDED if name not in came.checkpoint]
        loops = came.checkpoint.get("loops")
        fit_loop = loops.get("fit_loop") if isinstance(loops, dict) else None
        if missing or not isinstance(fit_loop, dict) or not isinstance(fit_loop.get("state_dict"), dict):
            raise ProtocolError(
                f"the state of a loop is a checkpoint with {', '.join(NEEDED)}; lacks {missing or 'loops'}"
            )
        for record, logs, metrics in came.heard:
            decode(record, Record)
            _check(logs, metrics)
        for batches in came.logs.values():
            _check(batches, ())
        _check((), came.added.values())
        return came


def _check(logs: Iterable[bytes], metrics: Iterable[Metrics]) -> None:
    for one in logs:
        decode(one, Logged)
    for states, tensors in metrics:
        expected = sum(sum(decode(one, MetricState).lengths) for one in states)
        if expected != len(tensors):
            raise ProtocolError(f"the states of metrics are made of {expected} tensors, got {len(tensors)}")
