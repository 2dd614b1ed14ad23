"""Prompts of other peers that wait for the lead's loop, which continues them between two steps."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from lightning_swarm.core.errors import Busy, NotMember, SwarmError
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.protocol.messages.inference import RunText, RunTextRequest
from lightning_swarm.protocol.rpc import RUN_TEXT

MAX_WAITING: Final = 16


@dataclass(eq=False)
class WaitingPrompt:
    """A prompt of another peer, and its text so far."""

    caller: PeerId
    request: RunTextRequest
    answer: asyncio.Future[RunText]
    tokens: list[int] = field(default_factory=list)  # of the prompt and the text so far; empty: not begun
    num_prompt: int = 0
    steps: list[int] = field(default_factory=list)  # the steps whose weights have written the text so far


class TextRequests:
    """The waiting prompts of one peer. Handlers run on the loop, and the methods in the trainer's thread."""

    def __init__(self, transport: Transport, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post
        self._waiting: dict[WaitingPrompt, None] = {}  # oldest first; both threads change it by single operations
        self.is_open = False  # the trainer's loop answers
        RUN_TEXT.serve(transport, self._handle)

    async def _handle(self, caller: PeerId, request: RunTextRequest) -> RunText:
        if not self.is_open:
            raise NotMember(
                "this peer leads no run that continues prompts of other peers. Give its Trainer the callback "
                "`SampleText(answers=True)`, and wait until it trains."
            )
        waiting = WaitingPrompt(caller, request, asyncio.get_running_loop().create_future())
        self._waiting[waiting] = None
        if len(everyone := list(self._waiting)) > MAX_WAITING:
            number = Counter(one.caller for one in everyone)
            newest = max(reversed(everyone), key=lambda one: number[one.caller])  # of the caller with most
            self.finish(newest, Busy(f"{MAX_WAITING} prompts wait here already. Ask again later."))
        try:
            return await waiting.answer
        finally:
            self._waiting.pop(waiting, None)

    def waiting(self, number: int) -> list[WaitingPrompt]:
        """Return at most `number` prompts: each caller's oldest, then each caller's second, and so on."""
        turns = Counter[PeerId]()
        found = []
        for one in list(self._waiting):
            found.append((turns[one.caller], one))
            turns[one.caller] += 1
        return [one for _, one in sorted(found, key=lambda it: it[0])][:number]

    def finish(self, waiting: WaitingPrompt, result: RunText | SwarmError) -> None:
        """Answer a prompt with its text or an error."""
        self._waiting.pop(waiting, None)  # before the next step, which may come sooner than the answer is sent

        def resolve() -> None:
            if waiting.answer.done():  # its peer hung up
                return
            if isinstance(result, SwarmError):
                waiting.answer.set_exception(result)
            else:
                waiting.answer.set_result(result)

        self._post(resolve)

    def close(self) -> None:
        """Accept no more prompts, and refuse the waiting prompts."""
        self.is_open = False
        for waiting in list(self._waiting):
            self.finish(waiting, Busy("the training ended before this text did. Ask again if it goes on."))
