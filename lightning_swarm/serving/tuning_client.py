"""Forwards and backwards of a served model's blocks with this client's own adapter, as one call of autograd.

Servers are pure functions: the same stage, adapter, inputs and seed give the same values on each of them. So a failed
call is repeated on another server, and each gradient comes back once, as a return value. Hidden states and their
gradients go from server to server. The client sends and receives those at both ends, and others if they got lost.
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
"""A stage's input or output, and which of its tensors require grad."""

_AGAIN_S: Final = 0.5  # pause before the next attempt, if no server is free
_AVOIDED_S: Final = 10.0  # time for which a server that failed is avoided
_LEAST_PER_STAGE: Final = 2  # microbatches of a call, for each stage
_MOST_PER_STAGE: Final = 4
_LEAST_POSITIONS: Final = 128  # tokens in a microbatch, if the batch has enough

# Arguments of Hugging Face's blocks with one row for each row of the batch -> their number of dimensions.
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

    def packed(self, found: FoundAdapters) -> list[PackedAdapter | None]:
        """Return each stage's adapter in wire form, or None."""
        return [self._packer.packed(index, stage) for index, stage in enumerate(found.stages)]

    def __call__(self, hidden: Any, extras: dict[str, Any], adapters: FoundAdapters) -> Any:
        """Compute a forward through which gradients flow to the hidden state and to the adapters."""
        arguments = CallArguments.of((hidden,), {})
        wants = [tensor.requires_grad and torch.is_grad_enabled() for tensor in arguments.tensors]
        parts = self._cut(hidden, extras)
        mode = capture(self._device.type, training=adapters.trains, grad=False, input_grad=False)
        self._num_calls += 1
        plans = self._plans(adapters, mode, any(wants))
        call_key = torch.initial_seed(), self._num_calls
        chains = [Chain(self._servers, plans, (*call_key, index)) for index in range(len(parts))]
        own = [tensor for stage in adapters.stages for tensor in stage.tensors]
        counts = [len(stage.tensors) for stage in adapters.stages]
        call = _Call(self._runtime, chains, parts, arguments.structure, wants, counts)
        found = _Tuned.apply(call, *arguments.tensors, *own)  # type: ignore[no-untyped-call]
        return serialization.unflatten(call.output_structure, list(found))

    def _plans(self, adapters: FoundAdapters, mode: ComputeMode, hidden_wants: bool) -> list[StagePlan]:
        """Plan a call at each stage. Gradients flow in a stage whose adapter trains, and in all later stages."""
        plans, flows = [], hidden_wants
        for index, (adapter, packed) in enumerate(zip(adapters.stages, self.packed(adapters), strict=True)):
            trains = adapter.is_trained and torch.is_grad_enabled()
            plans.append(
                StagePlan(
                    index=index,
                    model=self._models.card.id,
                    block_names=[self._names[number] for number in self._models.card.ranges[index]],
                    mode=replace(mode, grad=flows or trains, input_grad=flows),
                    adapter=packed,
                    drops=adapter.drops,
                )
            )
            flows = flows or trains
        return plans

    def _cut(self, hidden: Any, extras: dict[str, Any]) -> list[MicrobatchInput]:
        """Cut a batch's rows into microbatches, if it is clear which values belong to which row; else make one."""
        with torch.no_grad():
            values = {name: value for name, value in extras.items() if name != CALLS}
            arguments = CallArguments.of((serialization.transform(hidden, _detached),), values)
            rows = next((len(tensor) for tensor in arguments.tensors if tensor.ndim), 1)
            size = self._microbatch_size or microbatch_rows(arguments.tensors, rows, len(self._models.card.stages))
            if _is_clear(arguments, rows):
                parts = split(arguments, rows=rows, size=size, shared=())
            else:
                parts = [MicrobatchInput(rows, list(arguments.tensors), values)]
            for one in parts:
                one.kwargs[CALLS] = extras[CALLS]
            return parts


def microbatch_rows(tensors: Sequence[Tensor], rows: int, num_stages: int) -> int:
    """Choose the rows of a microbatch: small microbatches keep stages busy, and large ones compute faster. Pure."""
    positions = next((tensor.shape[1] for tensor in tensors if tensor.ndim > 1), 1)
    least, most = (-(-rows // (number * num_stages)) for number in (_MOST_PER_STAGE, _LEAST_PER_STAGE))
    return min(most, max(least, -(-_LEAST_POSITIONS // max(1, positions))))


def _is_clear(arguments: CallArguments, rows: int) -> bool:
    """Return whether each tensor is known to have one row for each row of the batch, or to be shared by all rows."""
    # Another dimension may have the batch's length by chance, such as the heads of a bias, or positions.
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
    drops: bool  # the adapter's dropout is on


class StageServers:
    """Calls servers of a stage until one answers."""

    def __init__(self, models: ModelDirectory, *, timeout: float, rng: random.Random) -> None:
        self._models, self._timeout, self._rng = models, timeout, rng
        self._under_way: Counter[PeerId] = Counter()  # calls
        self._avoided_until_s: dict[PeerId, float] = {}

    async def ask(
        self,
        stage: int,
        send: Callable[[PeerId], Coroutine[Any, Any, _T]],
    ) -> tuple[PeerId, _T]:
        """Call servers of a stage until one answers; return it and its answer.

        If all of them have answered with an error that is no `PeerError`, the model is at fault, and the last error is
        raised. After the timeout, `StageLost` is raised.
        """
        deadline_s = now_s() + self._timeout
        problem = "none is known"
        refused: set[PeerId] = set()
        while True:
            peer = self._choose(stage)
            if peer is not None:
                self._under_way[peer] += 1
                try:
                    return peer, await send(peer)
                except Busy as error:
                    problem = f"{peer}: {error}"
                    self._avoided_until_s[peer] = now_s() + _AGAIN_S
                except SwarmError as error:
                    if not isinstance(error, PeerError):
                        refused.add(peer)
                        if refused.issuperset(self._models.serving(stage)):
                            raise
                    problem = f"{peer}: {error}"
                    self._avoided_until_s[peer] = now_s() + _AVOIDED_S
                finally:
                    self._under_way[peer] -= 1
            if now_s() >= deadline_s:
                raise StageLost(
                    f"stage {stage} of the served model was not computed within {self._timeout:g} s: {problem}. Start "
                    "another server: `lightning-swarm serve --join ADDRESS`."
                )
            # Try the next server at once, unless all are being avoided.
            following = self._choose(stage)
            is_free = following is not None and self._avoided_until_s.get(following, 0.0) <= now_s()
            await asyncio.sleep(0.0 if is_free else _AGAIN_S)

    def _choose(self, stage: int) -> PeerId | None:
        """Return the server of a stage with the fewest calls under way, if possible one that is not avoided."""
        here = self._models.serving(stage)
        free = [peer for peer in here if self._avoided_until_s.get(peer, 0.0) <= now_s()] or here
        return min(free, key=lambda peer: (self._under_way[peer], self._rng.random()), default=None)

    def avoid(self, peer: PeerId) -> None:
        """Avoid a server for a while, because another one could not fetch from it."""
        self._avoided_until_s[peer] = now_s() + _AVOIDED_S

    @property
    def patience_s(self) -> float:
        """Longest wait of a server for another one's result, so that a call fails before the client gives it up."""
        return self._timeout / 2

    async def forward(
        self, peer: PeerId, request: TuneForward, tensors: Sequence[Tensor], adapter: PackedAdapter | None
    ) -> _Value:
        """Send a forward to a server, and before it the adapter if the server lacks it; return what it returns."""

        async def ask() -> _Value:
            body, found = await TUNE_FORWARD.ask(self._models.transport, peer, request, tensors, timeout=self._timeout)
            if not request.returns:
                return None, []
            tree, flags = from_message(Message(body, found))
            if len(flags) != len(found):
                raise ProtocolError("an output has a flag for each of its tensors, got others")
            return tree, flags

        if adapter is None:
            return await ask()
        uploads = self._models.uploads
        await uploads.send(peer, adapter, timeout=self._timeout)
        try:
            return await ask()
        except AdapterMissing:
            await uploads.send(peer, adapter, timeout=self._timeout, again=True)
            return await ask()

    async def backward(self, peer: PeerId, request: TuneBackward, tensors: Sequence[Tensor]) -> serialization.Tree:
        """Send a backward to a server; return its gradients."""
        said, found = await TUNE_BACKWARD.ask(self._models.transport, peer, request, tensors, timeout=self._timeout)
        return serialization.unflatten(said.structure, list(found))


def seed_of(microbatch: Sequence[int], stage: int) -> int:
    """Return the seed of a stage's random draws for a microbatch, cut to `SEED_BITS`."""
    return key_seed(*microbatch, stage) >> (64 - SEED_BITS)


class _NotFetched(Exception):
    """A server could not fetch a result from the server of a neighbouring stage."""


@dataclass(eq=False)
class Chain:
    """The calls of one microbatch through all stages. Results go from server to server; see `TuneFetch`."""

    servers: StageServers
    plans: Sequence[StagePlan]
    key: tuple[int, ...]  # seeds all random draws of this microbatch
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    peers: dict[int, PeerId] = field(default_factory=dict)  # stage -> server that computed it
    _extras: Mapping[str, Any] = field(default_factory=dict)
    # Stage -> values that are here: the first stage's input, the gradients of the last one's output, and values that
    # could not be fetched.
    _inputs: dict[int, _Value] = field(default_factory=dict)
    _gradients: dict[int, Sequence[Tensor | None]] = field(default_factory=dict)
    _own: dict[int, list[Tensor | None]] = field(default_factory=dict)  # stage -> gradients of its adapter
    _flags: Sequence[bool] = ()  # which tensors of the last stage's output require grad

    @property
    def _last(self) -> int:
        return len(self.plans) - 1

    async def forward(self, hidden: serialization.Tree, extras: Mapping[str, Any], wants: Sequence[bool]) -> Any:
        """Compute all stages; return the output's tree."""
        structure, tensors = serialization.flatten(hidden)
        self._inputs[0] = serialization.unflatten(structure, _to_send(tensors)), wants
        self._extras = extras
        for stage in range(self._last):
            await self._computed(stage, returns=False)
        output, self._flags = await self._computed(self._last, returns=True)
        return output

    async def _computed(self, stage: int, *, returns: bool) -> _Value:
        """Have a server compute a stage, and return the output or hold it for the next stage's server."""
        while True:
            try:
                send = partial(self._forward, stage=stage, returns=returns)
                self.peers[stage], found = await self.servers.ask(stage, send)
                return found
            except _NotFetched:
                await self._bring_input(stage)

    async def _bring_input(self, stage: int) -> None:
        """Get a stage's input here, from where it can be sent to any server."""
        self.servers.avoid(self.peers[stage - 1])
        self._inputs[stage] = await self._computed(stage - 1, returns=True)

    async def _forward(self, peer: PeerId, *, stage: int, returns: bool) -> _Value:
        plan, own = self.plans[stage], self._inputs.get(stage)
        extras = extras_for(self._extras, plan.block_names)
        structure, tensors = serialization.flatten(extras if own is None else ((own[0],), extras))
        request = TuneForward(
            model=plan.model,
            stage=stage,
            call=self.id,
            seed=seed_of(self.key, stage),
            mode=plan.mode,
            wants_grad=[] if own is None else list(own[1]),
            adapter=None if plan.adapter is None else plan.adapter.name,
            drops=plan.drops,
            structure=structure,
            source=self.peers[stage - 1] if own is None else None,
            patience_s=self.servers.patience_s,
            returns=returns,
        )
        try:
            return await self.servers.forward(peer, request, _to_send(tensors), plan.adapter)
        except InputMissing as error:
            if own is None:
                raise _NotFetched from error
            raise

    async def backward(
        self, gradients: Sequence[Tensor | None], own_counts: Sequence[int]
    ) -> tuple[list[Tensor | None], list[list[Tensor | None]]]:
        """Return the gradients of the input's tensors, and of each stage's adapter."""
        self._gradients[self._last] = [
            one if wants else None for one, wants in zip(gradients, self._flags, strict=True)
        ]
        self._own = {stage: [None] * count for stage, count in enumerate(own_counts)}
        found: list[Tensor | None] = [None] * len(self._inputs[0][1])
        for stage in reversed(range(len(self.plans))):
            if self.plans[stage].mode.grad:  # in all stages from the first one with a gradient on
                ends = not stage or not self.plans[stage - 1].mode.grad
                gradients = await self._differentiated(stage, returns=ends)
                found = found if stage else gradients
        return found, [self._own[plan.index] for plan in self.plans]

    async def _differentiated(self, stage: int, *, returns: bool) -> list[Tensor | None]:
        """Have a server compute a stage's backward, at first the server that has its graph.

        Return the inputs' gradients, or hold them for the server of the stage before.
        """
        has_graph = True
        while True:
            try:
                if has_graph:
                    with contextlib.suppress(SwarmError):
                        return await self._backward(self.peers[stage], stage=stage, returns=returns)
                    has_graph = False  # so another server computes both
                both = partial(self._both, stage=stage, returns=returns)
                self.peers[stage], found = await self.servers.ask(stage, both)
                return found
            except _NotFetched as error:
                if isinstance(error.__cause__, GradientMissing):
                    self.servers.avoid(self.peers[stage + 1])
                    self._gradients[stage] = await self._differentiated(stage + 1, returns=True)
                else:
                    await self._bring_input(stage)

    async def _both(self, peer: PeerId, *, stage: int, returns: bool) -> list[Tensor | None]:
        """Have a server compute a stage's forward again, and then its backward."""
        for _ in range(3):  # other clients' graphs may displace this one in between
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
        found, self._own[stage] = _gradients_of(tree, len(self._own[stage]))
        if returns and stage == 0 and len(found) != len(self._inputs[0][1]):
            raise ProtocolError(f"a backward gives gradients of {len(self._inputs[0][1])} inputs, got {len(found)}")
        return found


def _to_send(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().cpu().contiguous() for tensor in tensors]


def _gradients_of(tree: Any, num_own: int) -> tuple[list[Tensor | None], list[Tensor | None]]:
    lists = list(tree) if type(tree) is list and all(type(one) is list for one in tree) else []
    if (
        len(lists) != 2
        or len(lists[1]) != num_own
        or not all(one is None or isinstance(one, Tensor) for one in itertools.chain(*lists))
    ):
        raise ProtocolError(f"a backward gives gradients of inputs and of {num_own} tensors, got others")
    return lists[0], lists[1]


@dataclass(eq=False)
class _Call:
    """A forward of the blocks, and its backward."""

    runtime: Runtime
    chains: Sequence[Chain]
    parts: Sequence[MicrobatchInput]
    structure: serialization.Structure  # structure of the inputs
    wants: Sequence[bool]
    own_counts: Sequence[int]  # tensors in each stage's adapter
    output_structure: serialization.Structure = None
    sizes: Sequence[int] = ()

    def forward(self) -> list[Tensor]:
        """Compute all microbatches."""

        async def through(chain: Chain, given: MicrobatchInput) -> Any:
            (hidden,) = serialization.unflatten(self.structure, list(given.tensors))
            return await chain.forward(hidden, given.kwargs, self.wants)

        async def all_parts() -> list[Any]:
            return await gather(through(*pair) for pair in zip(self.chains, self.parts, strict=True))

        outputs = []
        for tree in self.runtime.run(all_parts()):
            output, left = split_left(tree)
            if left:
                raise ConfigError(
                    "blocks of a served model must only return their output while an adapter trains: some left "
                    f"values on modules, {[*left.differentiable, *left.others, *left.refused][:3]}. Switch that off in "
                    "the model's config, as `output_router_logits=False`."
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
                chain.backward(piece, self.own_counts) for chain, piece in zip(self.chains, pieces, strict=True)
            )

        found = self.runtime.run(all_parts())
        inputs = concat_gradients([one for one, _ in found], self.sizes)
        own = [_summed(parts) for parts in zip(*([t for stage in one for t in stage] for _, one in found), strict=True)]
        return [*inputs, *own]


def _summed(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return the sum of the microbatches' gradients of one tensor; None if all of them are None."""
    found = [one for one in parts if one is not None]
    if not found:
        return None
    total = found[0].clone()
    for one in found[1:]:
        total += one
    return total


class _Tuned(torch.autograd.Function):
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
                "the blocks of a served model give first derivatives only, got `create_graph=True`. Leave it out."
            )
        call: _Call | None = ctx.call
        if call is None:
            raise ConfigError("a backward goes through the blocks of a served model once. Leave out `retain_graph`.")
        ctx.call = None
        found = [
            None if gradient is None or not wanted else gradient.to(device=device, dtype=dtype)
            for gradient, (dtype, device), wanted in zip(
                call.backward(gradients), ctx.like, ctx.needs_input_grad[1:], strict=True
            )
        ]
        return None, *found
