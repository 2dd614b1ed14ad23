"""Microsoft Azure: scheduled events tell at least 30 seconds before what will happen to a machine."""

from __future__ import annotations

from typing import Final

import msgspec
from typing_extensions import override

from lightning_swarm.preemption.cloud import Cloud
from lightning_swarm.preemption.http import Answer, Endpoint, NoAnswer

_NAME_PATH: Final = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_EVENTS_PATH: Final = "/metadata/scheduledevents?api-version=2020-07-01"
_HEADERS: Final = {"Metadata": "true"}

_ENDS: Final = frozenset({"Preempt", "Terminate", "Redeploy", "Reboot"})
"""What no process survives. *Freeze* is a pause of a few seconds."""

_PAST: Final = frozenset({"Completed", "Canceled"})


class _Event(msgspec.Struct, rename="pascal"):
    event_type: str
    resources: list[str] = []
    event_status: str = "Scheduled"
    not_before: str = ""


class _Events(msgspec.Struct, rename="pascal"):
    events: list[_Event] = []


class Azure(Cloud):
    """The scheduled events of this machine. A machine hears of those of its availability set, too.

    Source: Microsoft, "Azure Metadata Service: Scheduled Events for Linux VMs".
    """

    name = "azure"

    def __init__(self, endpoint: Endpoint | None = None) -> None:
        super().__init__(endpoint)
        self._name = ""

    @override
    async def is_here(self) -> bool:
        self._name = (await self._ask(_NAME_PATH)).text.strip()
        return bool(self._name)

    @override
    async def notice(self) -> str | None:
        if not self._name and not await self.is_here():
            raise NoAnswer(f"Azure answered {_NAME_PATH} with no name")
        answer = await self._ask(_EVENTS_PATH)
        try:
            events = msgspec.json.decode(answer.text, type=_Events).events
        except msgspec.DecodeError as error:
            raise NoAnswer(f"Azure answered {_EVENTS_PATH} with what is no list of events: {error}") from error
        for event in events:
            if event.event_type in _ENDS and event.event_status not in _PAST and self._name in event.resources:
                return f"Azure has scheduled a {event.event_type} of this machine, {event.not_before or 'at once'}"
        return None

    async def _ask(self, path: str) -> Answer:
        answer = await self.endpoint.ask("GET", path, _HEADERS)
        if answer.status != 200:
            raise NoAnswer(f"Azure answered {path} with status {answer.status}")
        return answer
