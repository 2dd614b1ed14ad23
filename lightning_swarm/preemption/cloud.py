"""What all providers have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from lightning_swarm.preemption.http import Endpoint


class Cloud(ABC):
    """One provider's notices.

    Args:
        endpoint: Where its metadata service answers.
    """

    name: ClassVar[str]

    def __init__(self, endpoint: Endpoint | None = None) -> None:
        self.endpoint = endpoint or Endpoint()

    @abstractmethod
    async def is_here(self) -> bool:
        """Whether this is a machine of the provider.

        Raises:
            NoAnswer: Nobody says anything.
        """

    @abstractmethod
    async def notice(self) -> str | None:
        """Why this machine will go, in words for people; None while it may stay.

        Raises:
            NoAnswer: The metadata service did not answer, or not as it should.
        """
