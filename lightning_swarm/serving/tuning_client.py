"""Forwards and backwards of a served model's blocks with this client's own adapter, as one operation of autograd.

Servers compute pure functions: the same stage, adapter, inputs and seed give the same values on each server. So a
failed call is repeated on another server, and each gradient is returned exactly once. Hidden states and their gradients
go from server to server. The client sends and receives only the values at both ends, and values that a server could not
fetch from its neighbour.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from lightning_swarm.client.inference.adapters import AdapterPacker, FoundAdapters, PackedAdapter, find_adapters
from lightning_swarm.client.pipeline.microbatches import (
    CallArguments,
    MicrobatchInput,
    concat,
    concat_gradients,
    num_rows,
    split,
    split_gradients,
)
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import (
    AdapterMissing,
    Busy,
    ConfigError,
    GradientMissing,
    GraphGone,
    InputMissing,
    PeerError,
    ProtocolError,
    StageLost,
    SwarmError,
)
from lightning_swarm.core.event_loop import Runtime
from lightning_swarm.core.tasks import gather
from lightning_swarm.model.autocast import capture
from lightning_swarm.model.fidelity.leftovers import split_left
from lightning_swarm.model.partition import CALLS, argument_of, extras_for
from lightning_swarm.model.random.keyed_stream import key_seed
from lightning_swarm.network import Message, PeerId
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.compression import from_message
from lightning_swarm.protocol.messages.calls import ComputeMode
from lightning_swarm.protocol.messages.tuning import SEED_BITS, TuneBackward, TuneForward
from lightning_swarm.protocol.rpc import TUNE_BACKWARD, TUNE_FORWARD
from lightning_swarm.serving.directory import ModelDirectory

_T = TypeVar("_T")
_Value: TypeAlias = tuple[serialization.Tree, Sequence[bool]]
"""A stage's input or output, and a flag for each of its tensors: whether it requires grad."""

_RETRY_S: Final = 0.5  # pause before the next attempt if all servers are being avoided
_AVOIDED_S: Final = 10.0  # seconds for which a failed server is avoided
_MIN_PER_STAGE: Final = 2  # microbatches of a call for each stage
_MAX_PER_STAGE: Final = 4
_MIN_POSITIONS: Final = 128  # tokens in a microbatch if the batch has enough

# Argument of Hugging Face's blocks that has one row for each row of the batch -> its number of dimensions.
_BY_ROW: Final = {"attention_mask": 4, "position_ids": 2, "position_embeddings": 3}


class AdaptedBlocks:
    """Computes calls of a served model's blocks with this client's adapters."""

    def __init__(
        self,
        runtime: Runtime,
        models: ModelDirectory,
        blocks: Sequence[nn.Module],
        names: Sequence[str],
        *,
        device: torch.device,
        timeout: float,
        microbatch_size: int | None,
        rng: random.Random,  # draws servers
    ) -> None:
        self._runtime, self._models = runtime, models
        self._blocks, self._names = blocks, names
        self._device = device
        self._servers = StageServers(models, timeout=timeout, rng=rng)
        self._microbatch_size = microbatch_size
        self._num_calls = 0
        self._packer = AdapterPacker(models.card.id)

    def adapters(self) -> FoundAdapters:
        """Return the current adapters of all stages."""
        return find_adapters(self._blocks, self._models.card.ranges)

    def packed(self, adapters: FoundAdapters) -> list[PackedAdapter | None]:
        """Return each stage's adapter in wire form; None for a stage without an adapter."""
        return [self._packer.packed(index, stage) for index, stage in enumerate(adapters.stages)]

    def __call__(self, hidden: Any, extras: dict[str, Any], adapters: FoundAdapters) -> Any:
        """Compute a forward through which gradients flow to the hidden state and to the adapters."""
        arguments = CallArguments.of((hidden,), {})
        wants_grad = [tensor.requires_grad and torch.is_grad_enabled() for tensor in arguments.tensors]
        parts = self._cut(hidden, extras)
        mode = capture(self._device.type, training=adapters.trains, grad=False, input_grad=False)
        self._num_calls += 1
        plans = self._plan_stages(adapters, mode, any(wants_grad))
        call_key = torch.initial_seed(), self._num_calls
        chains = [Chain(self._servers, plans, (*call_key, index)) for index in range(len(parts))]
        adapter_tensors = [tensor for stage in adapters.stages for tensor in stage.tensors]
        counts = [len(stage.tensors) for stage in adapters.stages]
        call = _Call(self._runtime, chains, parts, arguments.structure, wants_grad, counts)
        outputs = _BlocksFunction.apply(call, *arguments.tensors, *adapter_tensors)  # type: ignore[no-untyped-call]
        return serialization.unflatten(call.output_structure, list(outputs))

    def _plan_stages(self, adapters: FoundAdapters, mode: ComputeMode, hidden_wants_grad: bool) -> list[StagePlan]:
        """Plan a call at each stage. Gradients flow in a stage whose adapter trains, and in all later stages."""
        plans, has_input_grad = [], hidden_wants_grad
        for index, (adapter, packed) in enumerate(zip(adapters.stages, self.packed(adapters), strict=True)):
            trains = adapter.is_trained and torch.is_grad_enabled()
            plans.append(
                StagePlan(
                    index=index,
                    model=self._models.card.id,
                    block_names=[self._names[number] for number in self._models.card.ranges[index]],
                    mode=replace(mode, grad=has_input_grad or trains, input_grad=has_input_grad),
                    adapter=packed,
                    drops=adapter.drops,
                )
            )
            has_input_grad = has_input_grad or trains
        return plans

    def _cut(self, hidden: Any, extras: dict[str, Any]) -> list[MicrobatchInput]:
        """Cut a batch's rows into microbatches, or into one if it is unclear which values belong to which row."""
        with torch.no_grad():
            values = {name: value for name, value in extras.items() if name != CALLS}
            arguments = CallArguments.of((serialization.transform(hidden, _detached),), values)
            rows = next((len(tensor) for tensor in arguments.tensors if tensor.ndim), 1)
            size = self._microbatch_size or microbatch_rows(arguments.tensors, rows, len(self._models.card.stages))
            if _has_known_rows(arguments, rows):
                parts = split(arguments, rows=rows, size=size, shared=())
            else:
                parts = [MicrobatchInput(rows, list(arguments.tensors), values)]
            for part in parts:
                part.kwargs[CALLS] = extras[CALLS]
            return parts


def microbatch_rows(tensors: Sequence[Tensor], rows: int, num_stages: int) -> int:
    """Choose the rows of a microbatch: few rows keep all stages busy, and many rows compute faster. Pure."""
    positions = next((tensor.shape[1] for tensor in tensors if tensor.ndim > 1), 1)
    min_rows, max_rows = (-(-rows // (number * num_stages)) for number in (_MAX_PER_STAGE, _MIN_PER_STAGE))
    return min(max_rows, max(min_rows, -(-_MIN_POSITIONS // max(1, positions))))


def _has_known_rows(arguments: CallArguments, rows: int) -> bool:
    """Return whether each tensor is known to have one row for each row of the batch, or to be shared by all rows."""
    # Only known arguments count, because another dimension, such as heads or positions, may have the batch's length.
    for name, (_, tensors) in arguments.keywords.items():
        for tensor in tensors:
            if tensor.ndim and len(tensor) > 1 and _BY_ROW.get(argument_of(name)) != tensor.ndim:
                return False
    try:
        return num_rows(arguments, ()) == rows
    except ConfigError:
        return False


def _detached(leaf: Any) -> Any:
    return leaf.detach()


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """The settings of a call at one stage."""

    index: int
    model: str
    block_names: Sequence[str]
    mode: ComputeMode
    adapter: PackedAdapter | None
    drops: bool  # whether the adapter's dropout is on


class StageServers:
    """Chooses servers of stages, and calls them until one answers."""

    def __init__(self, models: ModelDirectory, *, timeout: float, rng: random.Random) -> None:
        self._models, self._timeout, self._rng = models, timeout, rng
        self._num_calls_at: Counter[PeerId] = Counter()  # server -> calls in progress
        self._avoided_until_s: dict[PeerId, float] = {}

    async def ask(
        self,
        stage: int,
        send: Callable[[PeerId], Coroutine[Any, Any, _T]],
    ) -> tuple[PeerId, _T]:
        """Call servers of a stage until one answers; return this server and its answer.

        If all servers have answered with errors other than `PeerError`, the model is at fault, and the last error is
        raised. After the timeout, `StageLost` is raised.
        """
        deadline_s = now_s() + self._timeout
        problem = "no server is known"
        refused: set[PeerId] = set()
        while True:
            peer = self._choose(stage)
            if peer is not None:
                self._num_calls_at[peer] += 1
                try:
                    return peer, await send(peer)
                except Busy as error:
                    problem = f"{peer}: {error}"
                    self._avoided_until_s[peer] = now_s() + _RETRY_S
                except SwarmError as error:
                    if not isinstance(error, PeerError):
                        refused.add(peer)
                        if refused.issuperset(self._models.serving(stage)):
                            raise
                    problem = f"{peer}: {error}"
                    self._avoided_until_s[peer] = now_s() + _AVOIDED_S
                finally:
                    self._num_calls_at[peer] -= 1
            if now_s() >= deadline_s:
                raise StageLost(
                    f"stage {stage} of the served model was not computed within {self._timeout:g} s: {problem}. Start "
                    "another server: `lightning-swarm serve --join ADDRESS`."
                )
            # Try the next server at once, but wait if it is being avoided, because then all servers are.
            following = self._choose(stage)
            is_free = following is not None and self._avoided_until_s.get(following, 0.0) <= now_s()
            await asyncio.sleep(0.0 if is_free else _RETRY_S)

    def _choose(self, stage: int) -> PeerId | None:
        """Return the server of a stage with the fewest calls in progress; an avoided server only if all are avoided."""
        servers = self._models.serving(stage)
        free = [peer for peer in servers if self._avoided_until_s.get(peer, 0.0) <= now_s()] or servers
        return min(free, key=lambda peer: (self._num_calls_at[peer], self._rng.random()), default=None)

    def avoid(self, peer: PeerId) -> None:
        """Avoid a server for a while, because another server could not fetch a result from it."""
        self._avoided_until_s[peer] = now_s() + _AVOIDED_S

    @property
    def patience_s(self) -> float:
        """Longest wait of a server for another server's result; shorter than the client's own wait for the call."""
        return self._timeout / 2

    async def forward(
        self, peer: PeerId, request: TuneForward, tensors: Sequence[Tensor], adapter: PackedAdapter | None
    ) -> _Value:
        """Send a server a forward, and first the adapter if it lacks it; return the output, or None if it keeps it."""
        transport, uploads = self._models.transport, self._models.uploads

        async def ask() -> _Value:
            body, outputs = await TUNE_FORWARD.ask(transport, peer, request, tensors, timeout=self._timeout)
            if not request.returns:
                return None, []
            tree, flags = from_message(Message(body, outputs))
            if len(flags) != len(outputs):
                raise ProtocolError(f"an output must have {len(outputs)} flags, as many as tensors, got {len(flags)}")
            return tree, flags

        if adapter is None:
            return await ask()
        await uploads.send(peer, adapter, timeout=self._timeout)
        try:
            return await ask()
        except AdapterMissing:
            await uploads.send(peer, adapter, timeout=self._timeout, again=True)
            return await ask()

    async def backward(self, peer: PeerId, request: TuneBackward, tensors: Sequence[Tensor]) -> serialization.Tree:
        """Send a backward to a server; return its gradients."""
        transport, timeout = self._models.transport, self._timeout
        reply, gradients = await TUNE_BACKWARD.ask(transport, peer, request, tensors, timeout=timeout)
        return serialization.unflatten(reply.structure, list(gradients))


def seed_of(microbatch: Sequence[int], stage: int) -> int:
    """Return the seed, of `SEED_BITS` bits, of a stage's random draws for a microbatch."""
    return key_seed(*microbatch, stage) >> (64 - SEED_BITS)


class _NotFetched(Exception):
    """A server could not fetch a result from the server of the stage before or after."""


@dataclass(eq=False)
class Chain:
    """The calls of one microbatch through all stages. Servers fetch results from each other; see `TuneFetch`."""

    servers: StageServers
    plans: Sequence[StagePlan]
    key: tuple[int, ...]  # seeds all random draws of this microbatch
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    peers: dict[int, PeerId] = field(default_factory=dict)  # stage -> server that computed it last
    _extras: Mapping[str, Any] = field(default_factory=dict)
    # Stage -> values that the client holds: the first stage's input, the gradients of the last stage's output, and
    # values that a server could not fetch.
    _inputs: dict[int, _Value] = field(default_factory=dict)
    _gradients: dict[int, Sequence[Tensor | None]] = field(default_factory=dict)
    _adapter_gradients: dict[int, list[Tensor | None]] = field(default_factory=dict)  # stage -> its adapter's gradients
    _flags: Sequence[bool] = ()  # which tensors of the last stage's output require grad

    @property
    def _last(self) -> int:
        return len(self.plans) - 1

    async def forward(self, hidden: serialization.Tree, extras: Mapping[str, Any], wants_grad: Sequence[bool]) -> Any:
        """Compute all stages; return the output's tree."""
        structure, tensors = serialization.flatten(hidden)
        self._inputs[0] = serialization.unflatten(structure, _to_send(tensors)), wants_grad
        self._extras = extras
        for stage in range(self._last):
            await self._compute(stage, returns=False)
        output, self._flags = await self._compute(self._last, returns=True)
        return output

    async def _compute(self, stage: int, *, returns: bool) -> _Value:
        """Have a server compute a stage, and return the output or keep it for the next stage's server."""
        while True:
            try:
                send = partial(self._forward, stage=stage, returns=returns)
                self.peers[stage], output = await self.servers.ask(stage, send)
                return output
            except _NotFetched:
                await self._fetch_input(stage)

    async def _fetch_input(self, stage: int) -> None:
        """Get a stage's input to the client, which can send it to any server."""
        self.servers.avoid(self.peers[stage - 1])
        self._inputs[stage] = await self._compute(stage - 1, returns=True)

    async def _forward(self, peer: PeerId, *, stage: int, returns: bool) -> _Value:
        plan, held_input = self.plans[stage], self._inputs.get(stage)
        extras = extras_for(self._extras, plan.block_names)
        structure, tensors = serialization.flatten(extras if held_input is None else ((held_input[0],), extras))
        request = TuneForward(
            model=plan.model,
            stage=stage,
            call=self.id,
            seed=seed_of(self.key, stage),
            mode=plan.mode,
            wants_grad=[] if held_input is None else list(held_input[1]),
            adapter=None if plan.adapter is None else plan.adapter.name,
            drops=plan.drops,
            structure=structure,
            source=self.peers[stage - 1] if held_input is None else None,
            patience_s=self.servers.patience_s,
            returns=returns,
        )
        try:
            return await self.servers.forward(peer, request, _to_send(tensors), plan.adapter)
        except InputMissing as error:
            if held_input is None:
                raise _NotFetched from error
            raise

    async def backward(
        self, gradients: Sequence[Tensor | None], adapter_counts: Sequence[int]
    ) -> tuple[list[Tensor | None], list[list[Tensor | None]]]:
        """Return the gradients of the input's tensors, and of each stage's adapter."""
        self._gradients[self._last] = [
            gradient if requires_grad else None for gradient, requires_grad in zip(gradients, self._flags, strict=True)
        ]
        self._adapter_gradients = {stage: [None] * count for stage, count in enumerate(adapter_counts)}
        input_gradients: list[Tensor | None] = [None] * len(self._inputs[0][1])
        for stage in reversed(range(len(self.plans))):
            if self.plans[stage].mode.grad:  # true from the first stage with a gradient to the last stage
                is_last = not stage or not self.plans[stage - 1].mode.grad
                gradients = await self._differentiate(stage, returns=is_last)
                input_gradients = input_gradients if stage else gradients
        return input_gradients, [self._adapter_gradients[plan.index] for plan in self.plans]

    async def _differentiate(self, stage: int, *, returns: bool) -> list[Tensor | None]:
        """Have a server compute a stage's backward, preferably the server that has its graph.

        Return the inputs' gradients, or keep them at the server for the stage before.
        """
        has_graph = True
        while True:
            try:
                if has_graph:
                    with contextlib.suppress(SwarmError):
                        return await self._backward(self.peers[stage], stage=stage, returns=returns)
                    has_graph = False  # from now on, the forward is computed again, too
                send = partial(self._forward_and_backward, stage=stage, returns=returns)
                self.peers[stage], gradients = await self.servers.ask(stage, send)
                return gradients
            except _NotFetched as error:
                if isinstance(error.__cause__, GradientMissing):
                    self.servers.avoid(self.peers[stage + 1])
                    self._gradients[stage] = await self._differentiate(stage + 1, returns=True)
                else:
                    await self._fetch_input(stage)

    async def _forward_and_backward(self, peer: PeerId, *, stage: int, returns: bool) -> list[Tensor | None]:
        """Have a server compute a stage's forward again, and then its backward."""
        for _ in range(3):  # other clients' graphs may displace this graph in between
            await self._forward(peer, stage=stage, returns=False)
            try:
                return await self._backward(peer, stage=stage, returns=returns)
            except GraphGone:
                continue
        raise Busy(f"{peer} must keep the graph of a forward until its backward, and dropped it three times")

    async def _backward(self, peer: PeerId, *, stage: int, returns: bool) -> list[Tensor | None]:
        gradients = self._gradients.get(stage)
        structure, tensors = serialization.flatten(gradients)
        request = TuneBackward(
            model=self.plans[stage].model,
            stage=stage,
            call=self.id,
            structure=structure,
            source=self.peers[stage + 1] if gradients is None else None,
            patience_s=self.servers.patience_s,
            returns=returns,
        )
        try:
            tree = await self.servers.backward(peer, request, _to_send(tensors))
        except GradientMissing as error:
            if gradients is None:
                raise _NotFetched from error
            raise
        num_inputs, num_adapter = len(self._inputs[0][1]), len(self._adapter_gradients[stage])
        input_gradients, self._adapter_gradients[stage] = _split_gradient_lists(tree, num_adapter)
        if returns and stage == 0 and len(input_gradients) != num_inputs:
            raise ProtocolError(f"a backward must return {num_inputs} gradients of inputs, got {len(input_gradients)}")
        return input_gradients


def _to_send(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().cpu().contiguous() for tensor in tensors]


def _split_gradient_lists(tree: Any, num_adapter: int) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Return the gradients of inputs and of the adapter's tensors from a server's reply."""
    lists = list(tree) if type(tree) is list and all(type(gradients) is list for gradients in tree) else []
    if (
        len(lists) != 2
        or len(lists[1]) != num_adapter
        or not all(gradient is None or isinstance(gradient, Tensor) for gradient in itertools.chain(*lists))
    ):
        raise ProtocolError(
            f"a backward must return a list of gradients of inputs, and one of {num_adapter} gradients of the adapter"
        )
    return lists[0], lists[1]


@dataclass(eq=False)
class _Call:
    """A forward of the blocks, and its backward."""

    runtime: Runtime
    chains: Sequence[Chain]
    parts: Sequence[MicrobatchInput]
    structure: serialization.Structure  # structure of the inputs
    wants_grad: Sequence[bool]  # whether each tensor of the inputs needs a gradient
    adapter_counts: Sequence[int]  # number of tensors in each stage's adapter
    output_structure: serialization.Structure = None
    sizes: Sequence[int] = ()  # rows of each microbatch

    def forward(self) -> list[Tensor]:
        """Compute all microbatches."""

        async def through(chain: Chain, part: MicrobatchInput) -> Any:
            (hidden,) = serialization.unflatten(self.structure, list(part.tensors))
            return await chain.forward(hidden, part.kwargs, self.wants_grad)

        async def all_parts() -> list[Any]:
            return await gather(through(*pair) for pair in zip(self.chains, self.parts, strict=True))

        outputs = []
        for tree in self.runtime.run(all_parts()):
            output, left = split_left(tree)
            if left:
                raise ConfigError(
                    "blocks of a served model must store no values on modules while an adapter trains, got "
                    f"{[*left.differentiable, *left.others, *left.refused][:3]}. Switch this off in the model's "
                    "config, for example by `output_router_logits=False`."
                )
            outputs.append(output)
        self.sizes = [part.num_rows for part in self.parts]
        self.output_structure, tensors = concat(outputs, self.sizes)
        return tensors

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the inputs' tensors and of all adapters' tensors."""
        pieces = split_gradients(gradients, self.sizes)

        async def all_parts() -> list[Any]:
            return await gather(
                chain.backward(piece, self.adapter_counts) for chain, piece in zip(self.chains, pieces, strict=True)
            )

        results = self.runtime.run(all_parts())
        inputs = concat_gradients([input_gradients for input_gradients, _ in results], self.sizes)
        by_microbatch = [list(itertools.chain(*adapter_gradients)) for _, adapter_gradients in results]
        return [*inputs, *map(_sum, zip(*by_microbatch, strict=True))]


def _sum(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return the sum of the microbatches' gradients of one tensor; None if all of them are None."""
    gradients = [gradient for gradient in parts if gradient is not None]
    if not gradients:
        return None
    total = gradients[0].clone()
    for gradient in gradients[1:]:
        total += gradient
    return total


class _BlocksFunction(torch.autograd.Function):
    """The blocks as one operation of autograd."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Compute the outputs' tensors."""
        ctx.call, ctx.like = call, [(tensor.dtype, tensor.device) for tensor in tensors]
        ctx.set_materialize_grads(False)
        device = tensors[0].device
        return tuple(tensor.to(device) for tensor in call.forward())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of all tensors."""
        if torch.is_grad_enabled():
            raise ConfigError(
                "the blocks of a served model have first derivatives only, got `create_graph=True`. Leave it out."
            )
        call: _Call | None = ctx.call
        if call is None:
            raise ConfigError(
                "the blocks of a served model allow one backward for each forward, got a second. Leave out "
                "`retain_graph`."
            )
        ctx.call = None
        wanted = [
            None if gradient is None or not is_wanted else gradient.to(device=device, dtype=dtype)
            for gradient, (dtype, device), is_wanted in zip(
                call.backward(gradients), ctx.like, ctx.needs_input_grad[1:], strict=True
            )
        ]
        return None, *wanted
