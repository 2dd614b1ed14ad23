"""Puts adversaries' lies in place of the true values, in the real objects of a server that produce these.

A sum is replaced when it is frozen, and an output before it is sent. So the server's later hashes and answers agree
with its lies. Its computations to check other servers stay true, but its reports about them may be lies.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from lightning_swarm.model.fidelity.leftovers import join, split_inputs, split_left
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.memory import MemoryTransport
from lightning_swarm.network.transport import BaseTransport
from lightning_swarm.peer.peer import Peer
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.compression import Codec, decoded, encoded, on_cpu
from lightning_swarm.protocol.messages.audits import AuditFinding, FindingsReply, FindingsRequest
from lightning_swarm.protocol.messages.calls import CallKey, ComputeMode, unpack
from lightning_swarm.protocol.messages.state import StateRequest
from lightning_swarm.protocol.messages.step import FreezeRequest
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.rpc import FINDINGS, STATE
from lightning_swarm.protocol.serialization import Tree
from lightning_swarm.server.audit.kept_work import sketch_of, sum_digest
from lightning_swarm.server.audit.work_log import AuditedWorkLog
from lightning_swarm.server.averaging.averager import Averager
from lightning_swarm.server.compute import ForwardCall, ForwardResult, SavedGraph
from lightning_swarm.server.executor import Priority
from lightning_swarm.server.gradients import GradientSums
from lightning_swarm.server.server import Server
from lightning_swarm.server.stage import Stage
from lightning_swarm.testing.wrapping import on_new_server, wrap
from tests.adversaries.adversary import Adversary
from tests.adversaries.attacks import SeenFinding, SeenSums, WeightedSum
from tests.adversaries.lying_averager import LyingAverager, floats_of, open_reductions, with_floats

_T = TypeVar("_T")


@dataclass(eq=False)
class Collusion:
    """The adversaries of one swarm, and the servers of their process, whose sums they all see."""

    adversaries: Sequence[Adversary] = ()
    servers: dict[PeerId, Server] = field(default_factory=dict)  # name as in `Adversary.peer` -> server
    names: dict[PeerId, PeerId] = field(default_factory=dict)  # peer id -> name

    def watch(self, peer: Peer, name: PeerId) -> None:
        """Make a peer's server lie as planned once it has started; call this once for each peer of the process."""
        transport = peer.transport
        assert isinstance(transport, BaseTransport)

        def lie(server: Server) -> None:
            self.servers[name], self.names[transport.peer_id] = server, name
            for adversary in self.adversaries:
                if adversary.peer == name:
                    _Liar(adversary, server, transport, self)

        def die(own: Callable[[], None]) -> None:
            own()
            self._forget(transport.peer_id)

        on_new_server(peer, lie)
        if isinstance(transport, MemoryTransport):
            wrap(transport, "die", die)

    def _forget(self, peer: PeerId) -> None:
        """Forget a killed peer, whose process would be gone."""
        self.servers.pop(self.names.pop(peer, peer), None)

    def roster(self, server: Server, stage: int) -> list[PeerId]:
        """Return the names of a stage's servers in this process, by the roster that `server` knows."""
        found = (self.names.get(member.peer_id) for member in server.membership.run.rosters[stage])
        return [name for name in found if name is not None]

    def lies(self, name: PeerId, step: int) -> bool:
        """Return whether a peer lies in a step."""
        return any(adversary.peer == name and adversary.lies_in(step) for adversary in self.adversaries)


_Place: TypeAlias = tuple[int, int, int]  # generation, step, stage


@dataclass(frozen=True, eq=False)
class _FrozenSum:
    """A frozen sum of an adversary: the true vector, and the reported one."""

    true: Tensor
    said: Tensor


class _Liar:
    """Applies an adversary's lies to one server."""

    def __init__(self, adversary: Adversary, server: Server, transport: BaseTransport, collusion: Collusion) -> None:
        self._adversary, self._attack = adversary, adversary.attack
        self._server, self._collusion = server, collusion
        self._sums = server.steps.sums
        open_reductions()
        self._frozen: dict[_Place, _FrozenSum] = {}
        self._earlier: defaultdict[int, dict[int, WeightedSum]] = defaultdict(dict)  # stage -> step -> true sum
        wrap(self._sums, "_freeze_stage", self._freeze)
        wrap(self._sums, "add", self._add)
        wrap(server.calls, "_compute", self._compute)
        wrap(server.steps.rounds, "_averager", self._averager)
        wrap(server.donor, "_compute", self._copy)
        read, max_bytes, admit = transport._stream_handlers[STATE.name]
        transport._stream_handlers[STATE.name] = (partial(self._read, read), max_bytes, admit)
        transport._call_handlers[FINDINGS.name] = partial(self._find, transport._call_handlers[FINDINGS.name])

    # ------------------------------------------------------------------ sums

    def _freeze(self, honest: Callable[..., list[str]], stage: Stage, named: Any, request: FreezeRequest) -> list[str]:
        """Freeze the true sum, so that its content is checked as usual; then put the lie in its place."""
        place = (request.generation, request.step, stage.index)
        self._take_back(stage, place)
        stale = honest(stage, named, request)
        if self._sums.ledgers[stage.index].final:
            self._lie_about_sum(stage, place)
        return stale

    def _add(self, honest: Callable[..., bool], stage: Stage, key: CallKey, *arguments: Any) -> bool:
        """Add to the true sum; if nothing is added, as for a repeated gradient, put the lie back."""
        place = (key.generation, key.step, stage.index)
        told, had = self._take_back(stage, place), self._sums.holds(stage.index, key)
        try:
            return honest(stage, key, *arguments)
        finally:
            if told is not None and self._sums.holds(stage.index, key) == had:
                self._frozen[place] = told
                stage.sum_of(key.step).values = told.said

    def _take_back(self, stage: Stage, place: _Place) -> _FrozenSum | None:
        """Restore the true vector of a sum that may change again; returns the frozen sum."""
        told = self._frozen.pop(place, None)
        if told is None or place[1] != stage.version or stage.next_sum.values is not told.said:
            return None
        stage.next_sum.values = told.true
        return told

    def _lie_about_sum(self, stage: Stage, place: _Place) -> None:
        step, index = stage.version, stage.index
        own, sum_ = _weighted(self._sums, stage), stage.next_sum
        self._frozen = {other: told for other, told in self._frozen.items() if other[:2] == place[:2]}
        earlier = self._earlier[index]
        if self._attack.memory:
            earlier[step] = replace(own, values=own.values.clone())
            earlier.pop(step - self._attack.memory - 1, None)
        if not own.weight or not self._adversary.lies_in(step):
            return
        roster = self._collusion.roster(self._server, index)
        liars = [name for name in roster if self._collusion.lies(name, step)]
        honest = [self._sum_of(name, step, index) for name in roster if name not in liars]
        seen = SeenSums(
            own=own,
            honest=[one for one in honest if one is not None],
            num_servers=len(roster),
            num_liars=len(liars),
            earlier={step - other: one for other, one in earlier.items() if other < step},
            generator=self._adversary.generator(step, index),
        )
        said = self._attack.sum(seen)
        if self._adversary.tell(step, [own.values], [said]):
            self._frozen[place] = told = _FrozenSum(sum_.values, with_floats(sum_.values, said))
            sum_.values = told.said

    def _sum_of(self, name: PeerId, step: int, index: int) -> WeightedSum | None:
        """Return the sum of another server of the stage; None if it is empty, or the server is not at the step."""
        sums = self._collusion.servers[name].steps.sums
        found = _weighted(sums, sums.stages[index]) if sums.version == step and index in sums.stages else None
        return found if found is not None and found.weight else None

    # ------------------------------------------------------------------ microbatches

    def _compute(self, honest: Callable[..., _T], stage: Stage, priority: Priority, run: Callable[[], Any]) -> _T:
        """Run a trainer's call with a lying forward and backward; the server's other computations stay true."""
        step = priority[1]

        def lying() -> Any:
            forward, backward = partial(self._forward, step, stage), partial(self._backward, step, stage)
            computation = stage.computation
            with _wrapped(computation, "forward", forward), _wrapped(computation, "backward", backward):
                return run()

        return honest(stage, priority, lying if self._adversary.lies_in(step) else run)

    def _forward(
        self, step: int, stage: Stage, honest: Callable[[ForwardCall], ForwardResult], call: ForwardCall
    ) -> ForwardResult:
        result = honest(call)
        if not call.mode.grad or call.is_probe:
            return result
        codec, generator = stage.codecs.activations, self._adversary.generator(call.seed, 0)
        inputs = serialization.flatten(decoded(split_inputs(call.inputs)[0], codec, stage.device))[1]
        output, left = split_left(result.output)
        said = self._tell(step, stage, codec, output, lambda true: self._attack.output(true, inputs, generator))
        return result if said is output else replace(result, output=join(said, left))

    def _backward(
        self,
        step: int,
        stage: Stage,
        honest: Callable[..., tuple[Tree, list[Tensor | None]]],
        graph: SavedGraph,
        gradients: Tree,
        mode: ComputeMode,
    ) -> tuple[Tree, list[Tensor | None]]:
        codec, generator = stage.codecs.gradients, self._adversary.generator(graph.call.seed, 1)
        outputs = (output for output, one in zip(graph.outputs, gradients, strict=True) if one is not None)
        lie = self._attack.output_gradient
        received = self._tell(step, stage, codec, gradients, lambda true: lie(true, next(outputs)))
        found, own = honest(graph, received, mode)
        own = self._tell(step, stage, None, own, self._attack.parameter_gradient)
        said = self._tell(step, stage, codec, found, lambda true: self._attack.input_gradient(true, generator))
        return said, own

    def _tell(self, step: int, stage: Stage, codec: Codec | None, tree: Tree, lie: Callable[[Tensor], Tensor]) -> Tree:
        """Return an encoded tree with lies in place of its float tensors, or the tree itself if nothing differs."""
        structure, true = serialization.flatten(decoded(tree, codec, stage.device))
        said = [lie(one) if one.is_floating_point() else one for one in true]
        if not self._adversary.tell(step, true, said):
            return tree
        found = encoded(serialization.unflatten(structure, said), codec)
        return found if codec is None else on_cpu(found)

    # ------------------------------------------------------------------ averaging

    def _averager(self, honest: Callable[[Stage], Averager], stage: Stage) -> Averager:
        averager = honest(stage)
        return LyingAverager(averager, self._adversary, stage) if self._adversary.lies_in(stage.version) else averager

    # ------------------------------------------------------------------ a stage's state

    def _copy(self, honest: Callable[[Callable[[], Any]], _T], run: Callable[[], Any]) -> _T:
        """Replace the stages' weights while they are copied for a joiner, so that the copy's hash matches the lie."""
        step = self._server.steps.version
        return honest(partial(self._copy_poisoned, step, run) if self._adversary.lies_in(step) else run)

    def _copy_poisoned(self, step: int, run: Callable[[], _T]) -> _T:
        generator = self._adversary.generator(step, 3)
        held = [one for stage in self._sums.stages.values() for one in stage.module.named_stage_tensors().values()]
        own = [one for one in held if one.is_floating_point()]
        true = [one.data for one in own]
        said = [self._attack.downloaded_weight(one, generator) for one in true]
        if not self._adversary.tell(step, true, said):
            return run()
        try:
            for one, lie in zip(own, said, strict=True):
                one.data = lie
            return run()
        finally:
            for one, truth in zip(own, true, strict=True):
                one.data = truth

    async def _read(
        self, honest: Callable[[PeerId, Message], Awaitable[Message]], caller: PeerId, message: Message
    ) -> Message:
        answer, request = await honest(caller, message), decode(message.body, StateRequest)
        if request.optimizer or not self._adversary.lies_in(request.version):
            return answer
        generator = self._adversary.generator(request.version, 4)
        said = [self._attack.read_weight(one, generator) if one.is_floating_point() else one for one in answer.tensors]
        return (
            Message(answer.body, tuple(said)) if self._adversary.tell(request.version, answer.tensors, said) else answer
        )

    # ------------------------------------------------------------------ audits

    async def _find(self, honest: Callable[[PeerId, bytes], Awaitable[bytes]], caller: PeerId, body: bytes) -> bytes:
        answer, request = await honest(caller, body), decode(body, FindingsRequest)
        if not self._adversary.lies_in(request.step):
            return answer
        true = decode(answer, FindingsReply).findings
        said = [self._attack.finding(self._seen(one, request)) for one in true]
        if said == true:
            return answer
        self._adversary.count(request.step)
        return encode(FindingsReply(findings=said))

    def _seen(self, finding: AuditFinding, request: FindingsRequest) -> SeenFinding:
        """Add a colluding server's claims to the finding about it, also about its sum."""
        name, index = self._collusion.names.get(finding.audited), finding.stage_index
        if name is None or not self._collusion.lies(name, request.step):
            return SeenFinding(finding)
        log = self._collusion.servers[name].membership.oversight.work
        assert isinstance(log, AuditedWorkLog)
        receipts = sorted(unpack(finding.receipts))
        claims = b"".join(log.kept_work(request.step, index, receipt).claim for receipt in receipts)
        values = self._collusion.servers[name].steps.sums.stage(index).sum_of(request.step).values
        sketch = sketch_of(index, values, request.seed, exact=not values.is_floating_point())
        return SeenFinding(finding, claims, sketch, sum_digest(values))


def _weighted(sums: GradientSums, stage: Stage) -> WeightedSum:
    """Return a server's present sum of the step whose record is next."""
    ledger = sums.ledgers[stage.index]
    weight = sum(ledger.origins[first].weight for first, _, _ in ledger.held)
    return WeightedSum(floats_of(stage.next_sum.values), weight)


@contextlib.contextmanager
def _wrapped(target: object, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """Wrap a function as `wrap` does, until the context ends."""
    own, before = vars(target), vars(target).get(name)
    wrap(target, name, around)
    try:
        yield
    finally:
        del own[name]
        if before is not None:
            own[name] = before
