"""Small questions to a metadata service: plain HTTP to a fixed address, never by a proxy, with a short deadline."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

METADATA_ADDRESS: Final = "169.254.169.254"
"""Link-local, and the same in all three clouds: no packet to it leaves the machine's own network."""

_MAX_BYTES: Final = 1 << 20


class NoAnswer(Exception):
    """The metadata service did not answer, or not as its provider says it does."""


@dataclass(frozen=True)
class Answer:
    """To one question."""

    status: int
    text: str
    headers: Mapping[str, str]  # by names in lower case


@dataclass(frozen=True)
class Endpoint:
    """Where a metadata service answers.

    Args:
        host: Its address.
        port: Its port.
        timeout: Seconds for one question. What is there answers within milliseconds.
    """

    host: str = METADATA_ADDRESS
    port: int = 80
    timeout: float = field(default=2.0, kw_only=True)

    async def ask(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        """Ask once.

        Raises:
            NoAnswer: Says why.
        """
        try:
            async with asyncio.timeout(2 * self.timeout):  # the socket's own deadline is for each part of the answer
                return await asyncio.to_thread(self._ask, method, path, headers)
        except TimeoutError:  # of either kind
            raise NoAnswer(f"{self.host}:{self.port} did not answer {path} in time") from None
        except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
            raise NoAnswer(f"{self.host}:{self.port} did not answer {path}: {error}") from error

    def _ask(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)
        try:
            connection.request(method, path, headers=dict(headers))
            response = connection.getresponse()
            body = response.read(_MAX_BYTES)
            return Answer(
                response.status, body.decode(), {name.lower(): value for name, value in response.getheaders()}
            )
        finally:
            connection.close()
