"""Computes forwards and backwards for clients' tuning: pure functions of stage, adapter, inputs and seed."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import (
    Busy,
    GradientMissing,
    GraphGone,
    InputMissing,
    ProtocolError,
    SwarmError,
    TicketGone,
)
from lightning_swarm.core.limits import Limits
from lightning_swarm.network import Message, PeerId, Transport
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.compression import from_message, to_message
from lightning_swarm.protocol.messages.calls import ComputeMode, Direction
from lightning_swarm.protocol.messages.reports import SampleCosts
from lightning_swarm.protocol.messages.tuning import AdapterUpload, TuneBackward, TuneFetch, TuneForward, TuneGradients
from lightning_swarm.protocol.rpc import TUNE_ADAPTER, TUNE_BACKWARD, TUNE_FETCH, TUNE_FORWARD, WithTensors
from lightning_swarm.server.compute import Computation, ForwardCall, SavedGraph, check_gradients
from lightning_swarm.server.executor import Executor, Priority
from lightning_swarm.server.handlers import checked_inputs, raising_stage_errors
from lightning_swarm.server.inference.adapters import Adapter, AdapterStore, LayersOfStage, checked
from lightning_swarm.server.out_of_memory import is_out_of_memory

_MAX_KINDS: Final = 64  # kinds of forwards whose costs are kept
_MAX_FETCHED: Final = 8  # fetched values of all clients in memory
_MAX_FETCHED_OF_CLIENT: Final = 2  # one in computation, and the next one in transit
_SMALL_VALUE: Final = 64 << 20  # bytes allowed for a fetched value, even if 1 / `_MAX_FETCHED` of the cache is less


@dataclass(frozen=True, eq=False)
class TunedStage:
    """A stage that computes with clients' adapters."""

    computation: Computation
    layers: LayersOfStage  # layers that adapters may change
    _costs: OrderedDict[Any, SampleCosts | None] = field(default_factory=OrderedDict)  # kind of forward -> costs

    @contextmanager
    def adapting(self, adapter: Adapter | None, *, drops: bool, kind: Any = None) -> Iterator[None]:
        """Let forwards apply an adapter, and backwards return its gradients, on the compute thread within the context.

        A sample costs the same in all forwards of a `kind`, so costs are measured once. Backwards have the kind None.
        """
        computation = self.computation
        computation.train(() if adapter is None else adapter.tensors)
        if kind is not None:
            kind = kind, None if adapter is None else adapter.kind
            computation.costs = self._costs.get(kind)
        try:
            with self.layers.adapted(adapter, drops=drops):
                yield
            if kind is not None:
                self._costs[kind] = computation.costs
                if len(self._costs) > _MAX_KINDS:
                    self._costs.popitem(last=False)
        finally:
            computation.train(())


class TuningHost(Protocol):
    """Finds the stages of clients' calls."""

    def tuned_stage(self, model: str, index: int) -> TunedStage:
        """Return a stage; raise if it is not here."""
        ...


@dataclass(frozen=True, eq=False)
class _Graph:
    """The graph of a forward, kept for its backward."""

    saved: SavedGraph
    adapter: Adapter | None
    mode: ComputeMode
    drops: bool  # whether the adapter's dropout is on
    stage: TunedStage


@dataclass(frozen=True, eq=False)
class _Kept:
    """Results of a call that are needed later."""

    direction: Direction  # direction of the call
    graph: _Graph | None
    value: Message | None  # output or gradients that a neighbouring stage's server fetches
    graph_bytes: int = 0  # bytes of the graph and of the inputs
    since_s: float = field(default_factory=now_s)

    @property
    def num_bytes(self) -> int:
        """Bytes of graph and value, at least 1."""
        return max(1, self.graph_bytes + (0 if self.value is None else self.value.num_tensor_bytes))


_Key = tuple[PeerId, str, int]  # the client, its call, and the stage


class TuningHandlers:
    """Handles forwards and backwards of clients' tuning.

    While there is room, a graph is kept for its backward, and a result until the next stage's server fetches it. If
    either is gone, the client repeats the call at any server, and gets the same numbers.
    """

    def __init__(
        self, transport: Transport, executor: Executor, limits: Limits, host: TuningHost, device: torch.device
    ) -> None:
        self._executor, self._limits, self._host, self._device = executor, limits, host, device
        self._transport = transport
        self.adapters = AdapterStore(limits.adapter_bytes)
        self._kept: OrderedDict[_Key, _Kept] = OrderedDict()  # oldest first
        self._kept_bytes = 0
        self._aging: asyncio.TimerHandle | None = None  # drops old graphs
        self._turns = FairTurns()
        self._checking = asyncio.Semaphore(1)
        self._slots = FetchSlots()
        TUNE_ADAPTER.serve(transport, self._handle_adapter, max_bytes=limits.adapter_bytes)
        TUNE_FORWARD.serve(transport, self._handle_forward, max_bytes=limits.max_message_bytes)
        TUNE_BACKWARD.serve(transport, self._handle_backward, max_bytes=limits.max_message_bytes)
        TUNE_FETCH.serve(transport, self._handle_fetch)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the kept graphs and results."""
        return self._kept_bytes

    def forget_all(self) -> None:
        """Drop all graphs and results, because the stages are gone."""
        self._kept.clear()
        self._kept_bytes = 0

    async def _handle_adapter(self, caller: PeerId, upload: AdapterUpload, message: Message) -> None:
        stage = self._host.tuned_stage(upload.model, upload.stage)
        async with self._checking:  # one at a time, on another thread, because adapters may be large
            adapter = await asyncio.to_thread(checked, upload, message.tensors, stage.layers, self._device)
        self.adapters.add(upload.digest, adapter)

    async def _handle_forward(self, caller: PeerId, request: TuneForward, message: Message) -> WithTensors[bytes]:
        """Compute a forward, and keep its graph for a backward."""
        async with self._slot(caller, request):
            return await self._forward(caller, request, message)

    async def _forward(self, caller: PeerId, request: TuneForward, message: Message) -> WithTensors[bytes]:
        stage = self._host.tuned_stage(request.model, request.stage)
        adapter = None if request.adapter is None else self.adapters.get(request.adapter, request.stage)
        tree, wants_grad = serialization.unflatten(request.structure, message.tensors), request.wants_grad
        if request.source is not None:
            output, wants_grad = await self._fetch(caller, request, request.stage - 1, "forward")
            tree = (output,), tree  # inputs and extras; the message has only the extras
        inputs, extras = checked_inputs(tree, None)
        leaves = serialization.leaves((inputs, extras))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if len(tensors) < len(leaves):
            raise ProtocolError("a forward's tensors must not be encoded, got encoded tensors")
        call = ForwardCall(inputs, extras, wants_grad, request.mode, request.seed)

        def compute() -> Any:
            kind = (str(request.mode), tuple(wants_grad), request.drops, tuple(tensor.shape for tensor in tensors))
            with stage.adapting(adapter, drops=request.drops, kind=kind):
                return stage.computation.forward(call)

        result = await self._compute(caller, request.stage, compute)
        if self._host.tuned_stage(request.model, request.stage) is not stage:
            raise Busy("this server has moved to other stages during the call")
        graph = None
        if result.graph is not None:
            graph = _Graph(result.graph, adapter, request.mode, request.drops, stage)
        value, key = to_message(result.output, result.requires_grad), (caller, request.call, request.stage)
        num_bytes = 0 if graph is None else result.graph_bytes + sum(tensor.nbytes for tensor in tensors)
        self._drop(key)
        if graph is not None or not request.returns:
            self._keep(key, _Kept("forward", graph, None if request.returns else value, num_bytes))
        return (value.body, value.tensors) if request.returns else (b"", ())

    async def _handle_backward(
        self, caller: PeerId, request: TuneBackward, message: Message
    ) -> WithTensors[TuneGradients]:
        """Compute a backward; return the adapter's gradients, and the inputs' unless they are kept here."""
        async with self._slot(caller, request):
            return await self._backward(caller, request, message)

    async def _backward(self, caller: PeerId, request: TuneBackward, message: Message) -> WithTensors[TuneGradients]:
        self._host.tuned_stage(request.model, request.stage)
        key = (caller, request.call, request.stage)
        kept = self._kept.get(key)
        gradients = serialization.unflatten(request.structure, message.tensors)
        graph = None if kept is None else kept.graph
        if request.source is not None and graph is not None:
            gradients, _ = await self._fetch(caller, request, request.stage + 1, "backward")
        if graph is None or self._kept.get(key) is not kept:  # dropped during the fetch
            raise GraphGone("this server has no graph for this backward, or has dropped it")
        check_gradients(graph.saved.outputs, gradients)

        def compute() -> Any:
            with graph.stage.adapting(graph.adapter, drops=graph.drops):
                return graph.stage.computation.backward(graph.saved, gradients, graph.mode)

        self._drop(key)  # even if the backward fails, because torch frees the graph in any case
        inputs, adapter = map(list, await self._compute(caller, request.stage, compute))
        if not request.returns:
            self._keep(key, _Kept("backward", None, to_message(inputs)))
            inputs = []
        structure, tensors = serialization.flatten([inputs, adapter])
        return TuneGradients(structure=structure), tensors

    # ------------------------------------------------------------------ values from neighbouring stages

    def _slot(
        self, client: PeerId, request: TuneForward | TuneBackward
    ) -> AbstractAsyncContextManager[None, bool | None]:
        """Return a context that holds a slot for the value that the call fetches, if it fetches one."""
        return nullcontext() if request.source is None else self._slots.held(client)

    async def _fetch(
        self, client: PeerId, request: TuneForward | TuneBackward, stage: int, direction: Direction
    ) -> tuple[serialization.Tree, list[bool]]:
        """Fetch a neighbouring stage's result from the request's source; return it with its flags."""
        assert request.source is not None
        wanted = TuneFetch(client=client, call=request.call, stage=stage, direction=direction)
        timeout = min(request.patience_s, self._limits.call_timeout)
        try:
            if request.source == self._transport.peer_id:
                return from_message(await self._handle_fetch(client, wanted))
            max_bytes = min(self._limits.max_message_bytes, max(_SMALL_VALUE, self._limits.cache_bytes // _MAX_FETCHED))
            answer = await TUNE_FETCH.ask(self._transport, request.source, wanted, timeout=timeout, max_bytes=max_bytes)
            return from_message(Message(*answer))
        except SwarmError as error:
            missing = InputMissing if direction == "forward" else GradientMissing
            raise missing(f"{request.source} did not send stage {stage}'s result: {error}") from error

    async def _handle_fetch(self, caller: PeerId, request: TuneFetch) -> Message:
        """Send a kept value, and drop it unless its graph is still needed: usually each value is fetched once."""
        key = (request.client, request.call, request.stage)
        kept = self._kept.get(key)
        if kept is None or kept.value is None or kept.direction != request.direction:
            raise TicketGone("this server has no such result, or has dropped it")
        if kept.graph is None:
            self._drop(key)
        return kept.value

    async def _compute(self, client: PeerId, stage: int, work: Callable[[], Any]) -> Any:
        """Compute in a client's turn, and charge the client for the time."""
        future = self._executor.submit(self._turns.priority(client), work)
        with raising_stage_errors(stage, self._transport.peer_id):
            try:
                result, busy_s = await future
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                raise Busy(f"this server lacks memory for this call: {error}") from error
        self._turns.charge(client, busy_s)
        return result

    # ------------------------------------------------------------------ kept graphs

    def _keep(self, key: _Key, kept: _Kept) -> None:
        self._drop(key)  # the results of an earlier request for the same call
        self._kept[key] = kept
        self._kept_bytes += kept.num_bytes
        while self._kept_bytes > self._limits.cache_bytes and len(self._kept) > 1:  # a single graph may be larger
            self._drop(next(iter(self._kept)))
        if self._aging is None:
            self._age()

    def _age(self) -> None:
        """Drop graphs that are too old, because their clients are gone."""
        idle_s = self._limits.session_idle
        while self._kept and next(iter(self._kept.values())).since_s <= now_s() - idle_s:
            self._drop(next(iter(self._kept)))
        loop = asyncio.get_running_loop()
        self._aging = loop.call_later(idle_s / 4, self._age) if self._kept else None

    def _drop(self, key: _Key) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._kept_bytes -= kept.num_bytes


class FetchSlots:
    """Bounds the fetched values in memory, for each client and for all clients together.

    The transport already bounds the tensors that requests contain. A request that names a source must also fetch a
    value from there, so it waits for a slot first.
    """

    def __init__(self) -> None:
        self._all = asyncio.Semaphore(_MAX_FETCHED)
        self._of_client: dict[PeerId, asyncio.Semaphore] = {}
        self._num_calls: Counter[PeerId] = Counter()  # client -> calls that hold a slot or wait for a slot

    @asynccontextmanager
    async def held(self, client: PeerId) -> AsyncIterator[None]:
        """Wait for a slot, and hold it within the context."""
        client_slots = self._of_client.setdefault(client, asyncio.Semaphore(_MAX_FETCHED_OF_CLIENT))
        self._num_calls[client] += 1
        try:
            async with client_slots, self._all:
                yield
        finally:
            self._num_calls[client] -= 1
            if not self._num_calls[client]:
                del self._num_calls[client], self._of_client[client]


class FairTurns:
    """Gives the compute thread to the client that has used it least. A new client counts as the least served."""

    def __init__(self) -> None:
        self._served_s: dict[PeerId, float] = {}  # client -> seconds of the compute thread
        self._seen_s: dict[PeerId, float] = {}  # client -> time of its newest call; forgotten after a minute

    def priority(self, client: PeerId) -> Priority:
        """Return the priority of a client's next call, which is below that of sessions' steps."""
        at_s = now_s()
        self._seen_s = {other: seen_s for other, seen_s in self._seen_s.items() if seen_s > at_s - 60.0}
        self._served_s = {other: self._served_s[other] for other in self._seen_s}
        least_s = min(self._served_s.values(), default=0.0)
        self._served_s.setdefault(client, least_s)
        self._seen_s[client] = at_s
        return 1, int(1e6 * self._served_s[client])

    def charge(self, client: PeerId, busy_s: float) -> None:
        """Charge a client for seconds of the compute thread."""
        if client in self._served_s:
            self._served_s[client] += busy_s
