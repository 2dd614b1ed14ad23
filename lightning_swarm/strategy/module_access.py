"""Notices what user code reads of a trainer's module and writes to it, while its weights live on the servers."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_swarm.client import model_state
from lightning_swarm.client.pipeline.local_layers import some_of, written_in_mid_step
from lightning_swarm.client.session import Session
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.limits import Limits
from lightning_swarm.model.partition import StageModule
from lightning_swarm.model.watched import aliased, is_watched, same, unwatched, watch
from lightning_swarm.peer.peer import Peer
from lightning_swarm.protocol.messages.run import StepChange, WrittenWeights

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


# What stands in stages is watched: before user code reads it, the newest weights come into the module, and what it
# writes is found by comparing. What stands around the pipeline is computed with here, so it is compared, not watched.
class ModuleAccess:
    """Keeps the weights in a trainer's module those of the servers for user code, in both directions."""

    def __init__(self, peer: Peer, session: Session, stages: Sequence[StageModule], limits: Limits) -> None:
        self._peer = peer
        self._session = session
        self._stages = stages
        self._limits = limits
        self._thread = threading.get_ident()
        self._paused = self._warned = False
        self._closing = contextlib.ExitStack()
        self._version = session.version  # of the stages' weights in the module
        self._before: dict[str, Tensor] = {}  # weights of that version that user code has used since, as they were
        self._evaluation_weights: dict[
            str, Tensor
        ] = {}  # what user code had written when weights were last sent for evaluations
        self._evaluation_number = 0
        self._check_optimizer: Callable[[], None] = lambda: None
        self._own: dict[str, Tensor] = {}
        self._watched: set[str] = set()
        for stage in stages:
            if not stage.spec.on_trainers:
                self._own.update(stage.named_stage_tensors())
        for name, tensor in self._own.items():
            release = watch(tensor, partial(self._use, name))
            if release is not None:
                self._watched.add(name)
                self._closing.callback(release)
        session.pipeline.before_call = self._before_call
        with self.paused():
            self._note_aliased()

    def end(self) -> None:
        """Training is over, and the module holds what was trained: it is the user's own."""
        self._drop_evaluation_weights()
        self.close()

    def close(self) -> None:
        """Watch no more."""
        self._session.pipeline.before_call = None
        self._closing.close()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Take what happens inside for no use of the user's."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def add_optimizer(self, check: Callable[[], None], close: Callable[[], None]) -> None:
        """Have `check` refuse what user code did to the optimizer, and `close` end that, when this ends."""
        self._check_optimizer = check
        self._closing.callback(close)

    @property
    def is_paused(self) -> bool:
        """True where what happens is no use of the user's."""
        return self._paused

    # ------------------------------------------------------------------ reading

    def refresh(self, *, timeout: float | None = None) -> None:
        """Put the stages' newest weights into the module, but for what user code wrote since."""
        if self._version == self._session.version:
            return
        if late := self._written():
            raise ConfigError(written_in_mid_step(late))
        self._before = {}
        pipelined = [stage.spec.index for stage in self._stages if not stage.spec.on_trainers]
        weights = self.gather(partial(model_state.gather_weights, stages=pipelined), timeout=timeout)
        with torch.no_grad(), self.paused():
            for name, tensor in weights.items():
                self._own[name].copy_(tensor)
            self._note_aliased()
        self._version = self._session.version

    def gather(self, gather: Callable[..., Coroutine[Any, Any, _T]], *, timeout: float | None = None) -> _T:
        """Run a function of `model_state` that gathers from the servers, at the newest version."""
        session, limits = self._session, self._limits
        session.hold_still()
        session.renew()
        timeout = limits.call_timeout if timeout is None else timeout
        work = gather(
            self._peer.transport,
            session.run,
            session.version,
            timeout=timeout,
            max_bytes=limits.max_message_bytes,
            events=self._peer.events,
        )
        return self._peer.runtime.run(work)

    def poison(self) -> None:
        """Make what the module holds of the stages useless until user code reads it: for tests."""
        if self._before:
            return  # what user code wrote is still to be carried
        with torch.no_grad(), unwatched():
            for tensor in self._own.values():
                if not tensor.is_meta and tensor.is_floating_point():
                    tensor.fill_(float("nan"))
        self._version = -1

    def note_current(self) -> None:
        """The module holds the newest weights: they were just put there, or handed out from there."""
        self._version, self._before = self._session.version, {}
        with self.paused():
            self._note_aliased()
        if self._session.local_layers is not None:
            self._session.local_layers.note_current()

    def refresh_aliases(self) -> None:
        """Bring weights up to date that user code keeps views of, or arrays: it may read and write them unseen."""
        if self._version == self._session.version or threading.get_ident() != self._thread:
            return
        if found := aliased(self._own):
            if not self._warned:
                _log.warning(
                    "Weights are gathered after every step, for views of some are kept: %s. Keep copies, by `clone()`, "
                    "where the newest values are not needed.",
                    some_of(found),
                )
            self._warned = True
            self.refresh()

    def _note_aliased(self) -> None:
        self._before.update((name, self._own[name].detach().clone()) for name in aliased(self._own))

    def _use(self, name: str) -> None:
        if self._paused or threading.get_ident() != self._thread:
            return
        with self.paused():
            self.refresh()
            if name not in self._before:
                self._before[name] = self._own[name].detach().clone()

    # ------------------------------------------------------------------ writing

    @property
    def pending(self) -> Mapping[str, Tensor]:
        """Tensors that user code wrote, and the servers do not have yet: copies, by name."""
        local = self._session.local_layers
        return {**self._written(), **(local.written() if local is not None else {})}

    def _written(self) -> dict[str, Tensor]:
        if not self._before:
            return {}
        with torch.no_grad(), self.paused():
            return {
                name: self._own[name].detach().clone()
                for name, before in self._before.items()
                if not same(self._own[name], before)
            }

    def _forget_unwritten(self, written: Collection[str]) -> None:
        """Compare no more, step after step, what was used and not written. A further use is noticed again."""
        if self._before.keys() - written:
            with self.paused():
                kept = {*written, *aliased(self._own)}
            self._before = {name: before for name, before in self._before.items() if name in kept}

    def carry(self, *, pending_samples: int) -> None:
        """Have the servers go on with what user code wrote, from the step on that begins."""
        session, local = self._session, self._session.local_layers
        self._check_optimizer()
        self._check_kept()
        written = self.pending
        if self._evaluation_weights and not written:
            self._drop_evaluation_weights()
        self._forget_unwritten(written)
        if not written:
            return
        if pending_samples:
            trained = [name for name in written if local is None or not local.is_frozen(name)]
            if trained:
                raise ConfigError(written_in_mid_step(trained))
            return  # what is frozen around the pipeline is used here alone, and carried with the next step
        if session.is_shared or session.delays:
            raise ConfigError(
                "weights may be written during `fit` where one trainer trains, and steps are not delayed; "
                f"{some_of(written)} were written in a run of several trainers, or with `delay_optimizer_step`. Write "
                "them before `fit`, or use `role='auto'` without `delay_optimizer_step`."
            )
        session.catch_up()
        stages = self._holding(written)
        self._set_evaluation_weights(stages)
        session.change(StepChange(written=WrittenWeights(number=self._evaluation_number, stages=stages)))
        self._before.update((name, tensor) for name, tensor in written.items() if name in self._own)
        self._evaluation_weights = {}
        session.pipeline.evaluation_number = 0
        if local is not None:
            local.accept(written)

    def _before_call(self, evaluates: bool) -> None:
        """See to it that a call of the pipeline computes with what user code wrote, or refuse it."""
        if not self._before and not self._evaluation_weights:
            return
        written = self._written()
        if not evaluates:
            if written:
                raise ConfigError(written_in_mid_step(written))
            return
        if written.keys() == self._evaluation_weights.keys() and all(
            same(written[name], sent) for name, sent in self._evaluation_weights.items()
        ):
            return
        if not written:
            self._drop_evaluation_weights()
            return
        self._set_evaluation_weights([stage.spec.index for stage in self._stages if not stage.spec.on_trainers])
        self._session.pipeline.evaluation_number, self._evaluation_weights = self._evaluation_number, written

    def _set_evaluation_weights(self, stages: Collection[int]) -> None:
        self._evaluation_number += 1
        with self.paused():
            self.refresh()
            sending = model_state.set_evaluation_weights(
                self._peer.transport,
                self._session.run,
                [stage for stage in self._stages if stage.spec.index in stages],
                self._evaluation_number,
                timeout=self._limits.call_timeout,
            )
            self._peer.runtime.run(sending)

    def _drop_evaluation_weights(self) -> None:
        pipeline = self._session.pipeline
        number, pipeline.evaluation_number, self._evaluation_weights = pipeline.evaluation_number, 0, {}
        if number:
            dropping = model_state.drop_evaluation_weights(
                self._peer.transport, self._session.run, number, timeout=self._limits.call_timeout
            )
            self._peer.runtime.run(dropping)

    def _holding(self, names: Collection[str]) -> list[int]:
        """The stages that hold one of these tensors, or one that is tied to it."""
        return [stage.spec.index for stage in self._stages if not set(names).isdisjoint(stage.named_stage_tensors())]

    def _check_kept(self) -> None:
        """Refuse parameters that user code replaced: optimizer and stages have the old ones."""
        for stage in self._stages:
            for name, tensor in stage.named_stage_tensors().items():
                own = self._own.get(name)
                if own is not None and (tensor is not own or is_watched(own) != (name in self._watched)):
                    raise ConfigError(
                        f"parameters and buffers of blocks must stay the same objects during `fit`: {name!r} was "
                        "replaced. Write into it, by `copy_` under `torch.no_grad()`."
                    )
