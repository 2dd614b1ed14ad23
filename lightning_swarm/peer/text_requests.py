"""Prompts from other peers that wait for the lead's loop, which continues them between two steps."""

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
    """A prompt from another peer, and its text so far."""

    caller: PeerId
    request: RunTextRequest
    answer: asyncio.Future[RunText]
    tokens: list[int] = field(default_factory=list)  # tokens of the prompt and the text so far; empty: not begun
    num_prompt: int = 0  # the prompt's number of tokens
    steps: list[int] = field(default_factory=list)  # the steps whose weights have written the text so far


class TextRequests:
    """The prompts that wait at one peer. Handlers run on the event loop, and public methods in the trainer's thread."""

    def __init__(self, transport: Transport, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post
        self._waiting: dict[WaitingPrompt, None] = {}  # oldest first; both threads change it by single operations
        self.is_open = False  # the trainer's loop answers
        RUN_TEXT.serve(transport, self._handle)

    async def _handle(self, caller: PeerId, request: RunTextRequest) -> RunText:
        if not self.is_open:
            raise NotMember(
                "this peer leads no run that continues prompts from other peers. Give its Trainer the callback "
                "`SampleText(answers=True)`, and wait until it trains."
            )
        waiting = WaitingPrompt(caller, request, asyncio.get_running_loop().create_future())
        self._waiting[waiting] = None
        if len(prompts := list(self._waiting)) > MAX_WAITING:
            num_by_caller = Counter(prompt.caller for prompt in prompts)
            # The newest prompt of the caller that has most prompts here.
            refused = max(reversed(prompts), key=lambda prompt: num_by_caller[prompt.caller])
            self.finish(refused, Busy(f"{MAX_WAITING} prompts wait here already. Ask again later."))
        try:
            return await waiting.answer
        finally:
            self._waiting.pop(waiting, None)

    def waiting(self, number: int) -> list[WaitingPrompt]:
        """Return at most `number` prompts: each caller's oldest, then each caller's second, and so on."""
        num_by_caller = Counter[PeerId]()
        turns: dict[WaitingPrompt, int] = {}
        for prompt in list(self._waiting):
            turns[prompt] = num_by_caller[prompt.caller]
            num_by_caller[prompt.caller] += 1
        return sorted(turns, key=turns.__getitem__)[:number]

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
            self.finish(waiting, Busy("the training ended before this text was complete. Ask again if it continues."))
