"""Serves stages of a model for inference and tuning, and sends the model's weights to other servers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import Busy, NotMember, ProtocolError
from lightning_swarm.core.limits import Limits
from lightning_swarm.core.process import release_free_memory
from lightning_swarm.core.tasks import TaskOwner
from lightning_swarm.model.partition import StageModule
from lightning_swarm.model.running_statistics import RunningStatistics
from lightning_swarm.network import Message, PeerId, Transport
from lightning_swarm.protocol.compression import PLAIN
from lightning_swarm.protocol.messages.inference import SessionBranch, SessionStep
from lightning_swarm.protocol.messages.serving import CardRequest, ModelCard, PartRequest, StayReply, StayRequest
from lightning_swarm.protocol.rpc import MODEL_CARD, MODEL_PART, MODEL_STAY
from lightning_swarm.server.compute import Computation
from lightning_swarm.server.executor import Executor
from lightning_swarm.server.inference.adapters import LayersOfStage
from lightning_swarm.server.inference.handlers import SessionHandlers
from lightning_swarm.server.inference.host import SessionStage
from lightning_swarm.server.inference.prefixes import PrefixPolicy
from lightning_swarm.serving.promises import Promises
from lightning_swarm.serving.tuning_server import TunedStage, TuningHandlers

_FREEING_S: Final = 0.5  # delay before freed memory is returned to the system


@dataclass(frozen=True)
class ServedParts:
    """The parts of a model that a server has."""

    stages: Mapping[int, StageModule]  # stage -> module that computes it
    tensor: Callable[[str], Tensor]  # reads a tensor by its name; KeyError if it is not here
    files: Mapping[str, bytes]  # file name -> content; empty if the server has no model folder
    has_files: bool  # whether all tensors and files of the model are here

    def without_stages(self) -> ServedParts:
        """Return the parts that remain without the stages."""
        return dataclasses.replace(self, stages={}, tensor=self.tensor if self.has_files else _no_tensor)


def _no_tensor(name: str) -> Tensor:
    raise KeyError(name)


class ModelServer:
    """Serves stages of the model that `card` describes: steps of sessions, tuning, and downloads of weights."""

    def __init__(
        self,
        transport: Transport,
        executor: Executor,
        limits: Limits,
        tasks: TaskOwner,
        card: ModelCard,
        parts: ServedParts,
        device: torch.device,
        *,
        batches_texts: bool = True,
        shares_prefixes: bool = False,
    ) -> None:
        self.card = card
        self._id = card.id
        self._reading = asyncio.Semaphore(1)  # limits reads of tensors from disk
        self.is_draining = False  # refuses new sessions
        self.promises = Promises()
        self._limits, self._device, self._batches_texts = limits, device, batches_texts
        self.serve_parts(parts)
        self.tuning = TuningHandlers(transport, executor, limits, self, device)
        prefixes = PrefixPolicy(keeps=True, shares=shares_prefixes)
        self.sessions = SessionHandlers(
            transport, executor, limits, tasks, self, prefixes=prefixes, on_dropped=self._free_soon
        )
        self._freed_bytes = 0  # session memory freed since the last return to the system
        self._freeing: asyncio.TimerHandle | None = None
        MODEL_CARD.serve(transport, self._handle_card)
        MODEL_PART.serve(transport, self._handle_part)
        MODEL_STAY.serve(transport, self._handle_stay)

    # ------------------------------------------------------------------ stages

    def serve_parts(self, parts: ServedParts) -> None:
        """Serve these parts in place of the former parts."""
        ranges = self.card.ranges
        self.parts = parts
        self._stages = {
            index: SessionStage(
                index=index,
                module=module,
                computation=Computation(module, self._device, PLAIN, RunningStatistics(module)),
                first_block=ranges[index].start,
                holding=contextlib.nullcontext,
                batches_texts=self._batches_texts,
                max_tokens=self._limits.step_tokens,
            )
            for index, module in parts.stages.items()
        }
        self._tuned: dict[int, TunedStage] = {}  # stage -> its tuning, created by its first call

    async def withdraw(self) -> None:
        """Stop serving all stages. Open sessions continue at other servers."""
        self.serve_parts(self.parts.without_stages())
        self.tuning.forget_all()
        await self.sessions.end_all()

    async def _handle_stay(self, caller: PeerId, request: StayRequest) -> StayReply:
        """Promise another server to keep stages here, or withdraw the promise; see `Promises`."""
        self._check_model(request.model)
        own = () if self.is_draining else self._stages.keys()
        stays = self.promises.give(caller, request.stages, own, now_s=now_s(), for_s=request.for_s)
        return StayReply(stays=stays)

    # ------------------------------------------------------------------ sessions

    def check_client(self, client: PeerId) -> None:
        """Accept any client, because every peer that the gatekeeper admits may generate text."""

    def is_server(self, caller: PeerId) -> bool:
        """Accept any peer: servers come and go unannounced, so a session's secret id authorizes its steps."""
        return True

    def stage_of(self, step: SessionStep | SessionBranch) -> SessionStage:
        """Return the stage of a step, with its adapter; raise if the step cannot be computed here."""
        if (step.generation, step.version, step.weights) != (0, 0, 0):
            raise ProtocolError(
                "a step must name generation, version and weights 0, because a served model's weights never change"
            )
        stage = self._stages.get(step.stage_index)
        if step.number == 1 and self.is_draining:
            raise Busy("this server is about to leave and takes no new texts")
        if stage is None:  # `Busy`, because a server that has just moved is not at fault
            raise Busy(f"stage {step.stage_index} is not served here")
        if step.adapter is None:
            return stage
        adapter, tuned = self.tuning.adapters.get(step.adapter, stage.index), self.tuned_stage(self._id, stage.index)
        return dataclasses.replace(stage, adapter=adapter, layers=tuned.layers)

    def tuned_stage(self, model: str, index: int) -> TunedStage:
        """Return a stage for tuning, which is made at the first call; raise if the stage is not here."""
        self._check_model(model)
        stage = self._stages.get(index)
        if stage is None:
            raise Busy(f"stage {index} is not served here")
        if index not in self._tuned:
            layers = LayersOfStage(list(stage.module.blocks), stage.first_block)
            self._tuned[index] = TunedStage(stage.computation, layers)
        return self._tuned[index]

    def _free_soon(self, num_bytes: int) -> None:
        """Return freed session memory to the system: a large amount at once, and otherwise after a short delay."""
        self._freed_bytes += num_bytes
        is_large = self._freed_bytes > self._limits.session_bytes // 20  # 5 % of the memory for sessions
        if self._freeing is None or is_large:
            if self._freeing is not None:
                self._freeing.cancel()
            self._freeing = asyncio.get_running_loop().call_later(0.0 if is_large else _FREEING_S, self._free)

    def _free(self) -> None:
        self._freeing, self._freed_bytes = None, 0
        asyncio.get_running_loop().run_in_executor(None, release_free_memory)  # takes milliseconds

    # ------------------------------------------------------------------ the model

    async def _handle_card(self, caller: PeerId, request: CardRequest) -> ModelCard:
        return self.card

    def _check_model(self, model: str) -> None:
        if model != self._id:
            raise NotMember(f"this server serves model {self._id}, got a request for model {model}")

    async def _handle_part(self, caller: PeerId, request: PartRequest) -> Message:
        """Send a file or a tensor of the model to another server."""
        self._check_model(request.model)
        try:
            if request.kind == "file":
                return Message(
                    tensors=(torch.frombuffer(bytearray(self.parts.files[request.name]), dtype=torch.uint8),)
                )
            async with self._reading:  # one tensor at a time, because each may be large and is read from a disk
                tensor = await asyncio.to_thread(self.parts.tensor, request.name)
                return Message(tensors=(tensor.detach().cpu().contiguous(),))
        except KeyError as error:
            raise NotMember(f"{request.kind} {request.name!r} of the model is not here") from error
