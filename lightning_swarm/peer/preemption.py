"""Word from the cloud that it is about to take this machine away, as far as it says so beforehand.

A `Cloud` asks the metadata service of one provider, which answers on every machine of that provider and nowhere else.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, TypeVar

import msgspec
from typing_extensions import override

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.tasks import gather
from lightning_swarm.peer.config import Preemption

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

    async def request(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
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


_T = TypeVar("_T")

_TOKEN_PATH: Final = "/latest/api/token"
_ACTION_PATH: Final = "/latest/meta-data/spot/instance-action"
_REBALANCE_PATH: Final = "/latest/meta-data/events/recommendations/rebalance"
_TOKEN_S: Final = 21_600  # the longest that there is


class _Action(msgspec.Struct):
    action: str = "terminate"
    time: str = ""


class _Rebalance(msgspec.Struct):
    noticeTime: str = ""  # noqa: N815 - its name there


class AWS(Cloud):
    """Instance metadata, version 2 of its protocol: every question carries a token that was asked for first.

    Source: Amazon EC2 User Guide, "Spot Instance interruption notices" and "EC2 instance rebalance recommendations".
    """

    name = "aws"

    def __init__(self, endpoint: Endpoint | None = None) -> None:
        super().__init__(endpoint)
        self._token = ""
        self._renew_s = 0.0  # on the loop's clock

    @override
    async def is_here(self) -> bool:
        await self._renew()
        return True

    @override
    async def notice(self) -> str | None:
        answer = await self._get(_ACTION_PATH)
        if answer is not None:
            action = _decoded(answer, _Action, _ACTION_PATH)
            return f"AWS will {action.action} this spot instance at {action.time or 'any moment'}"
        answer = await self._get(_REBALANCE_PATH)
        if answer is not None:
            at = _decoded(answer, _Rebalance, _REBALANCE_PATH).noticeTime
            return f"AWS recommends to leave this spot instance, which is likely to be interrupted (said at {at})"
        return None

    async def _get(self, path: str) -> Answer | None:
        """What there is under `path`; None: nothing, which is how "no notice" is said."""
        if not self._token or now_s() >= self._renew_s:
            await self._renew()
        answer = await self._with_token(path)
        if answer.status == 401:  # the instance may have been stopped meanwhile, and its tokens with it
            await self._renew()
            answer = await self._with_token(path)
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise NoAnswer(f"AWS answered {path} with status {answer.status}")
        return answer

    async def _with_token(self, path: str) -> Answer:
        return await self.endpoint.request("GET", path, {"X-aws-ec2-metadata-token": self._token})

    async def _renew(self) -> None:
        answer = await self.endpoint.request(
            "PUT", _TOKEN_PATH, {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
        )
        token = answer.text.strip()
        if answer.status != 200 or not token.isascii() or not token.isprintable() or not token:
            raise NoAnswer(f"AWS answered {_TOKEN_PATH} with status {answer.status} and no token")
        self._token = token
        self._renew_s = now_s() + _TOKEN_S / 2


def _decoded(answer: Answer, kind: type[_T], path: str) -> _T:
    try:
        return msgspec.json.decode(answer.text, type=kind)
    except msgspec.DecodeError as error:
        raise NoAnswer(f"AWS answered {path} with what is no notice: {error}") from error


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
        answer = await self.endpoint.request("GET", path, _HEADERS)
        if answer.status != 200:
            raise NoAnswer(f"Azure answered {path} with status {answer.status}")
        return answer


_PATH: Final = "/computeMetadata/v1/instance/preempted"
_FLAVOR: Final = {"Metadata-Flavor": "Google"}


class GCP(Cloud):
    """The metadata server's ``instance/preempted``.

    Source: Google Cloud, "Create and use Spot VMs", section "Handle preemption".
    """

    name = "gcp"

    @override
    async def is_here(self) -> bool:
        await self._ask()
        return True

    @override
    async def notice(self) -> str | None:
        answer = await self._ask()
        said = answer.text.strip()
        if said not in ("TRUE", "FALSE"):
            raise NoAnswer(f"GCP answers {_PATH} with TRUE or FALSE, got {said[:100]!r}")
        return "GCP preempts this machine within 30 s" if said == "TRUE" else None

    async def _ask(self) -> Answer:
        answer = await self.endpoint.request("GET", _PATH, _FLAVOR)
        # Others answer at this address, too, but not with this header.
        if answer.status != 200 or answer.headers.get("metadata-flavor") != _FLAVOR["Metadata-Flavor"]:
            raise NoAnswer(f"GCP answered {_PATH} with status {answer.status}")
        return answer


_log = logging.getLogger(__name__)

POLL_S: Final = 5.0
"""How often a cloud is asked. AWS recommends it, and the shortest notices come 30 s before the end."""


def clouds(endpoint: Endpoint | None = None) -> Mapping[str, Cloud]:
    """All there are, by the name that users write."""
    return {kind.name: kind(endpoint) for kind in (AWS, GCP, Azure)}


async def watch(
    name: Preemption,
    on_notice: Callable[[str], None],
    *,
    known: Mapping[str, Cloud] | None = None,
    every_s: float = POLL_S,
) -> None:
    """Ask again and again whether this machine will go, and say so once.

    Args:
        name: Whom to ask. With ``"auto"`` whoever answers at once is asked; nobody: this returns.
        on_notice: Called on the loop, once, with the reason.
        known: Providers by name; None: those that there are.
        every_s: Seconds between two looks.
    """
    known = clouds() if known is None else known
    cloud = await _here(list(known.values())) if name == "auto" else known[name]
    if cloud is None:
        _log.info("No cloud's metadata service answers here: nobody will say that this machine is to go.")
        return
    _log.info("Asking %s every %g s whether this machine is to go.", cloud.name, every_s)
    answered = True
    while True:
        try:
            reason = await cloud.notice()
        except NoAnswer as error:
            if answered:
                _log.warning("No word from %s whether this machine is to go; asking on. %s", cloud.name, error)
            answered = False
        else:
            answered = True
            if reason is not None:
                on_notice(reason)
                return
        await asyncio.sleep(every_s)


async def _here(among: Sequence[Cloud]) -> Cloud | None:
    async def is_here(cloud: Cloud) -> bool:
        try:
            return await cloud.is_here()
        except NoAnswer:
            return False

    found = await gather(is_here(cloud) for cloud in among)
    return next((cloud for cloud, here in zip(among, found, strict=True) if here), None)
