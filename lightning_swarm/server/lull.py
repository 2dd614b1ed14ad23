"""When averaging that has time takes a server's line: after the forwards of the batch that is computed meanwhile.

All microbatches of a batch go forward before the first one goes back, so that is when lines are busiest: what the sums
take of them then, the batch lacks.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from lightning_swarm.clock import now_s
from lightning_swarm.server.under_way import UnderWay

_MOST_OF_A_STEP: Final = 0.5
"""Averaging that takes longer than that has no time, and none is waited longer for."""
_LULL_OF_A_STEP: Final = 0.1
"""If nothing has come for so long, nothing comes."""
_MOST_OF_A_TIMEOUT: Final = 0.25
"""Of those who wait for this server's part."""


class Lull:
    """A server's.

    Args:
        under_way: Its calls.
        timeout: Seconds that others wait for its part of a round.
    """

    def __init__(self, under_way: UnderWay, *, timeout: float) -> None:
        self._under_way = under_way
        self._timeout = timeout
        self._asked_s: float | None = None
        self._took_s = 0.0

    def note(self, took_s: float) -> None:
        """The newest averaging took so many seconds."""
        self._took_s = took_s

    async def wait(self) -> None:
        """Return when forwards are through, or if it is too late to wait for that. Once a step."""
        before_s, self._asked_s = self._asked_s, now_s()
        if before_s is None:
            return
        step_s = self._asked_s - before_s
        most_s = _MOST_OF_A_STEP * step_s
        if self._took_s > most_s:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(most_s, _MOST_OF_A_TIMEOUT * self._timeout)):
                await self._until_back(_LULL_OF_A_STEP * step_s)

    async def _until_back(self, lull_s: float) -> None:
        """Until a backward comes, or nothing does."""
        while not self._under_way.of("backward"):
            forwards = self._under_way.of("forward")
            if forwards:
                await asyncio.wait(forwards)
            elif not await self._under_way.begins(within_s=lull_s):
                return
