"""Confirms a stage's state that a server sent by proofs from other servers, in runs with untrusted servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from lightning_swarm.core.errors import Unconfirmed
from lightning_swarm.core.tasks import cancel_and_wait
from lightning_swarm.model.state_proof import StateDigests, StatePart
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.protocol.events import EventLog
from lightning_swarm.protocol.messages.state import ProofRequest, StateRequest
from lightning_swarm.protocol.messages.wire import draw_challenge
from lightning_swarm.protocol.queries import ask_each
from lightning_swarm.protocol.rpc import PROVE
from lightning_swarm.protocol.run_state import RunState


@dataclass(frozen=True)
class Confirmation:
    """Requests proofs from a stage's other servers that they have the same state as the sender."""

    transport: Transport
    run: RunState
    timeout: float  # seconds per request
    events: EventLog | None = None

    @property
    def is_needed(self) -> bool:
        """Return whether state must be confirmed in this run."""
        return self.run.electorate.has_strangers

    async def check(self, sender: PeerId, request: StateRequest, parts: Callable[[], Sequence[StatePart]]) -> None:
        """Raise `Unconfirmed`, and record it, if other servers do not have the state that `sender` sent on request.

        `parts` returns the parts of the received state, and is called in a thread.
        """
        own, trusted = self.transport.peer_id, self.run.trusted
        others = [server.peer_id for server in self.run.rosters[request.stage_index] if server.peer_id != sender]
        if not self.is_needed or sender in (own, *trusted) or not others:
            return
        kind, challenge = request.kind, draw_challenge()  # drawn only after the state has arrived
        proof_request = ProofRequest(
            stage_index=request.stage_index,
            version=request.version,
            generation=request.generation,
            kind=kind,
            challenge=challenge,
        )
        # A server with the received state returns the same proof.
        expected = await asyncio.to_thread(lambda: StateDigests(parts()).proof(challenge, [kind]))
        # The proof of the coordinator's server decides if it holds the stage, or else the proof of another keeper's
        # server. If neither does, the majority of the servers that answer decides. Servers that do not answer are not
        # counted, because a stage whose other server has died must be readable. So a malicious majority of the rest is
        # accepted, and so is a stage's only server.
        proofs: dict[PeerId, bytes] = {}
        for arbiter in (peer for peer in trusted if peer in others):
            proofs = proofs or await self._request([arbiter], proof_request)
        proofs = proofs or {**await self._request(others, proof_request, expected), sender: expected}
        agreeing = [peer for peer, proof in proofs.items() if proof == expected]
        if 2 * len(agreeing) > len(proofs):
            return
        differing = sorted(proofs.keys() - set(agreeing))
        reason = f"{kind} of stage {request.stage_index} at version {request.version} differ at {differing}"
        self.note(sender, request.stage_index, request.version, reason)
        raise Unconfirmed(
            f"a server's state must equal the state of a keeper's server, or else of most servers of its stage; "
            f"{sender} sent a different state: {reason}. It is requested from another server. If none is left, start "
            "a keeper's server of the stage."
        )

    async def _request(
        self, peers: Collection[PeerId], request: ProofRequest, expected: bytes | None = None
    ) -> dict[PeerId, bytes]:
        """Request proofs until all servers have answered, or a majority of the stage has sent the `expected` proof."""
        proofs = dict[PeerId, bytes]()

        async def ask(peer: PeerId) -> None:
            answers = await ask_each(self.transport, [peer], PROVE, request, timeout=self.timeout, tries=2)
            proofs.update({peer: answer.proof for peer, answer in answers.items()})

        running = tasks = {asyncio.ensure_future(ask(peer)) for peer in peers}
        try:
            # The sender counts as a server that has the state. Slow servers need not answer once the majority has.
            while running and 2 * (1 + sum(proof == expected for proof in proofs.values())) <= len(peers) + 1:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            await cancel_and_wait(tasks)
        return proofs

    def note(self, peer: PeerId, stage_index: int, step: int, reason: str) -> None:
        """Record that a server sent state that other servers do not have."""
        if self.events is not None:
            self.events.note("unconfirmed", peer=peer, stage=stage_index, step=step, reason=reason)
