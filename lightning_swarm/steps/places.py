"""Places in the open step: who is granted one, who waits for one in the step after, and who has it already."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable

from msgspec.structs import replace as replaced

from lightning_swarm.errors import ProtocolError
from lightning_swarm.network import PeerId
from lightning_swarm.run_state import RunState
from lightning_swarm.steps.policy import OpenStep
from lightning_swarm.types.batches import Grant, GrantReply, GrantRequest, Wait

_log = logging.getLogger(__name__)


class Places:
    """Grants them.

    Args:
        run: As the coordinator's server knows it.
        first_lease: Of those that this coordinator grants.
        on_grant: Called with a step and the trainer that has a place in it from now on.
    """

    def __init__(self, run: RunState, first_lease: int, on_grant: Callable[[OpenStep, PeerId], None]) -> None:
        self._run = run
        self._leases = itertools.count(first_lease)
        self._on_grant = on_grant
        self._waiting: dict[PeerId, GrantRequest] = {}  # who found the step full, first come first
        self._reserved: dict[PeerId, tuple[GrantRequest, Grant]] = {}  # their places in the step after
        self._warned_large = False

    def go_back(self) -> None:
        """The run entered its next generation."""
        self._waiting, self._reserved = {}, {}

    def ask(self, step: OpenStep, trainer: PeerId, request: GrantRequest) -> GrantReply:
        """A trainer asks for a place in the open step.

        Raises:
            ProtocolError: No step has a place for this batch.
        """
        if self._is_beyond(step):
            return GrantReply(over=True)
        if request.step < step.step:  # a place may be kept for it, and it must know the record before that step first
            return GrantReply(wait=Wait(step=step.step - 1))
        asked, grant = self._reserved.get(trainer, (None, None))
        if grant is not None and asked == replaced(request, step=step.step - 1):
            del self._reserved[trainer]
            return GrantReply(grant=grant)
        grant = self._grant(step, trainer, request)
        if grant is None:
            self._waiting[trainer] = request
            return GrantReply(wait=Wait(step=step.step))
        self._waiting.pop(trainer, None)
        self._warn_of_large(request)
        return GrantReply(grant=grant)

    def ahead(self, step: OpenStep, trainer: PeerId, request: GrantRequest) -> Grant | None:
        """A place for a batch that its trainer has not begun, if there is one now.

        It may be asked for a second time when the batch has long been given up: nobody would ever take that place.
        """
        if self._is_beyond(step) or step.gave_up(trainer, request.number):
            return None
        with contextlib.suppress(ProtocolError):  # which it will get when it asks for one again
            grant = self._grant(step, trainer, request)
            if grant is not None:
                self._warn_of_large(request)
            return grant
        return None

    def opened(self, number: int) -> OpenStep:
        """A step with places for those who wait.

        The lead comes first, so that it waits for one record only; but where a batch is a step, nobody else would ever
        have a place: there they take turns.
        """
        manifest = self._run.manifest
        step = OpenStep(number, manifest.target_batch_size)
        waiting = sorted(self._waiting.items(), key=lambda item: item[0] != manifest.lead or self._fills(item[1]))
        self._waiting, self._reserved = {}, {}
        for trainer, request in () if self._is_beyond(step) else waiting:
            with contextlib.suppress(ProtocolError):  # which it will get when it asks again
                grant = self._grant(step, trainer, request)
                if grant is None:
                    self._waiting[trainer] = replaced(request, step=number)
                else:
                    self._reserved[trainer] = (request, grant)
        return step

    def _grant(self, step: OpenStep, trainer: PeerId, request: GrantRequest) -> Grant | None:
        before = step.granted(trainer, request.number)
        if before is not None:
            lease, first, weight = before
        else:
            lease = next(self._leases)
            place = step.grant(lease, trainer, request.num_samples, request.gradient_scale, request.number)
            if place is None:
                return None
            first, weight = place
        self._on_grant(step, trainer)
        generation = self._run.manifest.generation
        return Grant(lease=lease, generation=generation, step=step.step, attempt=0, first=first, weight=weight)

    def _fills(self, request: GrantRequest) -> bool:
        target = self._run.manifest.target_batch_size
        return target is not None and request.num_samples >= target

    def _is_beyond(self, step: OpenStep) -> bool:
        max_steps = self._run.manifest.max_steps
        return max_steps is not None and step.step >= max_steps

    def _warn_of_large(self, request: GrantRequest) -> None:
        target = self._run.manifest.target_batch_size
        if target is not None and request.num_samples > target and not self._warned_large:
            self._warned_large = True
            _log.warning("A batch of %d samples is a step: `target_batch_size` is %d.", request.num_samples, target)
