"""Whether a program that may train begins a run, or trains in the one that is under way. Exactly one begins it.

Each that would begin a run announces it, then asks all others that did. One that begins already, or has the lower id,
is given way to; of any two at least one has heard of the other. Who gives way waits for the run, and claims it anew
when nothing comes of it.
"""

from __future__ import annotations

import asyncio
from typing import Final

from lightning_swarm import membership
from lightning_swarm.clock import now_s
from lightning_swarm.config import SwarmConfig
from lightning_swarm.errors import ConfigError, DeadlineExceeded, ProtocolError, SwarmError
from lightning_swarm.network import Directory, PeerId, Transport
from lightning_swarm.steps import VIEW
from lightning_swarm.steps.enrolment import check_open
from lightning_swarm.tasks import gather
from lightning_swarm.types.joining import ClaimReply
from lightning_swarm.types.runs import RunView
from lightning_swarm.types.wire import PROTOCOL_VERSION, decode, encode

CLAIM: Final = "run.claim"
_POLL_S: Final = 0.2


async def find_run(directory: Directory, transport: Transport, config: SwarmConfig) -> RunView | None:
    """The run that is under way, as its coordinator shows it."""
    timeout = config.limits.leave_timeout

    async def look(peer: PeerId) -> RunView | None:
        try:
            view = decode(await transport.call(peer, VIEW, b"", timeout=timeout), RunView)
        except SwarmError:  # what is left of an earlier one
            return None
        return view if view.manifest.run_id == config.run_id else None

    found = await gather(map(look, await membership.find_runs(directory, transport, config.run_id)))
    views = [view for view in found if view is not None]
    return max(views, key=lambda view: (view.manifest.generation, view.term, view.version), default=None)


def check(view: RunView, config: SwarmConfig) -> None:
    """Refuse to train in a run that is another one than this program's, as far as its settings say.

    Raises:
        ConfigError: Names the first one that differs.
    """
    manifest = view.manifest
    check_open(manifest)
    for name, mine, theirs in (
        ("protocol_version", PROTOCOL_VERSION, manifest.protocol_version),
        ("target_batch_size", config.target_batch_size, manifest.target_batch_size),
    ):
        if mine != theirs:
            raise ConfigError(
                f"who trains in a run has its settings; `{name}` is {mine} here and {theirs} in run "
                f"{manifest.run_id!r}. Start this program with the run's, or another run with another `run_id`."
            )


class Claim:
    """One program's, on the run that it would begin.

    Args:
        transport: Its network.
        directory: Where others find it.
        config: The user's settings.
    """

    def __init__(self, transport: Transport, directory: Directory, config: SwarmConfig) -> None:
        self._transport = transport
        self._directory = directory
        self._config = config
        self._rivals: set[PeerId] = set()
        self._begins = self._gave_way = False
        transport.handle_call(CLAIM, self._handle_claim)

    async def settle(self) -> RunView | None:
        """The run that is under way, perhaps after a while. None: this program begins it.

        Raises:
            DeadlineExceeded: Another one was to begin it, and did not.
        """
        view = await find_run(self._directory, self._transport, self._config)
        if view is not None:
            return view
        timeout = self._config.limits.start_timeout
        deadline_s = now_s() + timeout
        await membership.claim(self._directory, self._transport, self._config.run_id, timeout=timeout)
        while not await self._wins():
            await asyncio.sleep(_POLL_S)
            view = await find_run(self._directory, self._transport, self._config)
            if view is not None:
                return view
            if now_s() >= deadline_s:
                raise DeadlineExceeded(
                    f"another program was to begin run {self._config.run_id!r} and did not within {timeout:g} s: one "
                    f"of {sorted(self._rivals)}. Look for its error, or raise `Limits.start_timeout`."
                )
        return None

    async def _wins(self) -> bool:
        self._gave_way = False
        self._rivals |= set(await membership.claimed(self._directory, self._transport, self._config.run_id))
        self._rivals.discard(self._transport.peer_id)
        answers = await gather(map(self._gives_way, sorted(self._rivals)))
        # Nothing is awaited from here on: whoever asks next finds this decided.
        self._begins = all(answers) and not self._gave_way
        return self._begins

    async def _gives_way(self, rival: PeerId) -> bool:
        try:
            timeout = self._config.limits.leave_timeout
            return decode(await self._transport.call(rival, CLAIM, b"", timeout=timeout), ClaimReply).gives_way
        except SwarmError:  # it is gone
            return True

    async def _handle_claim(self, caller: PeerId, body: bytes) -> bytes:
        if body:
            raise ProtocolError(f"{CLAIM} takes no arguments, got {len(body)} bytes")
        gives_way = not self._begins and caller < self._transport.peer_id
        self._gave_way |= gives_way
        return encode(ClaimReply(gives_way=gives_way))
