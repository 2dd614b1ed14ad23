"""Detects reads and writes of a trainer's module by user code, while the weights live on the servers."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_swarm.client import model_state
from lightning_swarm.client.pipeline.local_layers import quote_names, written_in_mid_step
from lightning_swarm.client.run_session import Session
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.limits import Limits
from lightning_swarm.core.override import changed
from lightning_swarm.model.fidelity.watched import aliased, is_watched, same, unwatched, watch
from lightning_swarm.model.partition import StageModule
from lightning_swarm.peer.peer import Peer
from lightning_swarm.protocol.messages.run import StepChange, WrittenWeights

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class ModuleAccess:
    """Synchronizes a trainer's module with the servers' weights, in both directions, when user code uses it.

    The stages' tensors are watched: before user code reads a tensor, the newest weights are gathered into the module.
    To find writes, tensors are compared with copies. Written weights become the run's when the next step begins. If an
    evaluation comes first, servers get them earlier, and use them for evaluations only. The trainer itself computes the
    layers around the pipeline, so their tensors are compared, but not watched.
    """

    def __init__(self, peer: Peer, session: Session, stages: Sequence[StageModule], limits: Limits) -> None:
        self._peer = peer
        self._session = session
        self._stages = stages
        self._limits = limits
        self._thread = threading.get_ident()
        self.is_paused = False  # if True, accesses do not count as user code's
        self._warned = False  # True after the warning that user code keeps views
        self._closing = contextlib.ExitStack()
        self._version = session.version  # version of the stages' weights in the module
        self._copies: dict[str, Tensor] = {}  # tensors that user code used, copied before the use
        # Tensors that user code had written, with their values when they were last sent for evaluations.
        self._evaluation_weights: dict[str, Tensor] = {}
        self._evaluation_number = 0  # number of the newest weights that were sent for evaluations
        self._check_optimizer: Callable[[], None] = lambda: None
        self._tensors: dict[str, Tensor] = {}  # name -> tensor of a stage
        self._watched: set[str] = set()  # names of tensors that could be watched
        for stage in stages:
            if not stage.spec.on_trainers:
                self._tensors.update(stage.named_stage_tensors())
        for name, tensor in self._tensors.items():
            release = watch(tensor, partial(self._use, name))
            if release is not None:
                self._watched.add(name)
                self._closing.callback(release)
        session.pipeline.before_call = self._before_call
        with self.paused():
            self._note_aliased()

    def end(self) -> None:
        """Stop after training, when the module holds the trained weights; servers drop evaluation weights."""
        self._drop_evaluation_weights()
        self.close()

    def close(self) -> None:
        """Stop watching the tensors. No server is called."""
        self._session.pipeline.before_call = None
        self._closing.close()

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which accesses to the module do not count as user code's."""
        return changed(self, is_paused=True)

    def add_optimizer(self, check: Callable[[], None], close: Callable[[], None]) -> None:
        """Register an optimizer's `check`, called before written weights are sent, and its `close`."""
        self._check_optimizer = check
        self._closing.callback(close)

    # ------------------------------------------------------------------ reading

    def refresh(self, *, timeout: float | None = None) -> None:
        """Gather the stages' newest weights into the module. Raises ConfigError if user code wrote any in mid-step."""
        if self._version == self._session.version:
            return
        if written := self._written():
            raise ConfigError(written_in_mid_step(written))
        self._copies = {}
        pipelined = [stage.spec.index for stage in self._stages if not stage.spec.on_trainers]
        weights = self.gather(partial(model_state.gather_weights, stages=pipelined), timeout=timeout)
        with torch.no_grad(), self.paused():
            for name, tensor in weights.items():
                self._tensors[name].copy_(tensor)
            self._note_aliased()
        self._version = self._session.version

    def gather(self, function: Callable[..., Coroutine[Any, Any, _T]], *, timeout: float | None = None) -> _T:
        """Run a function of `model_state` that gathers from the servers, at the newest version."""
        session, limits = self._session, self._limits
        session.settle_weights()
        session.renew()
        timeout = limits.call_timeout if timeout is None else timeout
        work = function(
            self._peer.transport,
            session.run,
            session.version,
            timeout=timeout,
            max_bytes=limits.max_message_bytes,
            events=self._peer.events,
        )
        return self._peer.runtime.run(work)

    def poison(self) -> None:
        """Fill the stages' tensors in the module with NaN until user code reads them, for tests."""
        if self._copies:
            return  # user code may have written weights that were not sent yet
        with torch.no_grad(), unwatched():
            for tensor in self._tensors.values():
                if not tensor.is_meta and tensor.is_floating_point():
                    tensor.fill_(float("nan"))
        self._version = -1

    def note_current(self) -> None:
        """Record that the module holds the newest weights, which were just loaded into it or sent from it."""
        self._version, self._copies = self._session.version, {}
        with self.paused():
            self._note_aliased()
        if self._session.local_layers is not None:
            self._session.local_layers.note_current()

    def refresh_aliases(self) -> None:
        """Gather weights if user code keeps views or arrays of any, because uses of a view cannot be detected."""
        if self._version == self._session.version or threading.get_ident() != self._thread:
            return
        if names := aliased(self._tensors):
            if not self._warned:
                _log.warning(
                    "Weights are gathered after every step, because the script keeps views of some: %s. If it does not "
                    "need the newest values, keep copies, by `clone()`.",
                    quote_names(names),
                )
            self._warned = True
            self.refresh()

    def _note_aliased(self) -> None:
        """Copy tensors that user code has views of, because only a comparison finds writes through a view."""
        self._copies.update((name, self._tensors[name].detach().clone()) for name in aliased(self._tensors))

    def _use(self, name: str) -> None:
        """Gather the newest weights before user code uses a tensor, and copy the tensor to detect a write."""
        if self.is_paused or threading.get_ident() != self._thread:
            return
        with self.paused():
            self.refresh()
            if name not in self._copies:
                self._copies[name] = self._tensors[name].detach().clone()

    # ------------------------------------------------------------------ writing

    @property
    def pending(self) -> Mapping[str, Tensor]:
        """Return copies of the tensors that user code wrote and the servers do not have yet, by name."""
        local = self._session.local_layers
        return {**self._written(), **(local.written() if local is not None else {})}

    def _written(self) -> dict[str, Tensor]:
        """Return copies of the stages' tensors that user code has written at this version of the weights."""
        if not self._copies:
            return {}
        with torch.no_grad(), self.paused():
            return {
                name: self._tensors[name].detach().clone()
                for name, copied in self._copies.items()
                if not same(self._tensors[name], copied)
            }

    def _forget_unwritten(self, written: Collection[str]) -> None:
        """Stop comparing tensors that user code used but did not write. A further use is detected again."""
        if self._copies.keys() - written:
            with self.paused():
                kept = {*written, *aliased(self._tensors)}
            self._copies = {name: copied for name, copied in self._copies.items() if name in kept}

    def send_written(self, *, pending_samples: int) -> None:
        """Send servers the weights that user code wrote. Servers use these weights from the step that begins."""
        session, local = self._session, self._session.local_layers
        self._check_optimizer()
        self._check_same_objects()
        written = self.pending
        if self._evaluation_weights and not written:
            self._drop_evaluation_weights()
        self._forget_unwritten(written)
        if not written:
            return
        if pending_samples:  # in an open step, user code may write only frozen tensors around the pipeline
            trained = [name for name in written if local is None or not local.is_frozen(name)]
            if trained:
                raise ConfigError(written_in_mid_step(trained))
            return  # no server uses these before the next step, which sends them
        if session.is_shared or session.delays:
            raise ConfigError(
                "weights may be written during `fit` only if one trainer trains, and steps are not delayed; "
                f"{quote_names(written)} were written in a run of several trainers, or with `delay_optimizer_step`. "
                "Write them before `fit`, or use `role='auto'` without `delay_optimizer_step`."
            )
        session.catch_up()
        changed_stages = [stage for stage in self._stages if not written.keys().isdisjoint(stage.named_stage_tensors())]
        stages = [stage.spec.index for stage in changed_stages]  # also those with a tensor tied to a written tensor
        self._set_evaluation_weights(stages)
        session.change(StepChange(written=WrittenWeights(number=self._evaluation_number, stages=stages)))
        # From the step that begins, these weights are the run's own, and not only for evaluations.
        self._copies.update((name, tensor) for name, tensor in written.items() if name in self._tensors)
        self._evaluation_weights = {}
        session.pipeline.factory.evaluation_number = 0
        if local is not None:
            local.note_stage_has(written)

    def _before_call(self, evaluates: bool) -> None:
        """Send written weights before a call of the pipeline that evaluates; refuse them before a call that trains."""
        if not self._copies and not self._evaluation_weights:
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
        self._session.pipeline.factory.evaluation_number = self._evaluation_number
        self._evaluation_weights = written

    def _set_evaluation_weights(self, stages: Collection[int]) -> None:
        """Send the servers of `stages` the module's weights. Servers keep them beside the run's, under a new number."""
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
        """Make servers forget the evaluation weights, and evaluate with the run's weights again."""
        factory = self._session.pipeline.factory
        self._evaluation_weights = {}
        number, factory.evaluation_number = factory.evaluation_number, 0
        if number:
            dropping = model_state.drop_evaluation_weights(
                self._peer.transport, self._session.run, number, timeout=self._limits.call_timeout
            )
            self._peer.runtime.run(dropping)

    def _check_same_objects(self) -> None:
        """Refuse replaced tensors, because optimizer and stages still use the former objects."""
        for stage in self._stages:
            for name, tensor in stage.named_stage_tensors().items():
                former = self._tensors.get(name)  # `torch.utils.swap_tensors` keeps the object, but ends its watch
                if former is not None and (tensor is not former or is_watched(former) != (name in self._watched)):
                    raise ConfigError(
                        f"parameters and buffers of blocks must stay the same objects during `fit`: {name!r} was "
                        "replaced. Write into it, by `copy_` under `torch.no_grad()`."
                    )
