"""Notices of cloud providers that they are about to take this machine away.

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
"""The metadata service of all three clouds: link-local, so no packet to it leaves the machine's own network."""

POLL_S: Final = 5.0
"""Seconds between two requests, as AWS recommends. The shortest notices come 30 s before the machine ends."""

_MAX_BYTES: Final = 1 << 20

_AWS_TOKEN_PATH: Final = "/latest/api/token"
_AWS_ACTION_PATH: Final = "/latest/meta-data/spot/instance-action"
_AWS_REBALANCE_PATH: Final = "/latest/meta-data/events/recommendations/rebalance"
_AWS_TOKEN_S: Final = 21_600  # the longest lifetime that AWS grants

_AZURE_NAME_PATH: Final = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_AZURE_EVENTS_PATH: Final = "/metadata/scheduledevents?api-version=2020-07-01"
_AZURE_HEADERS: Final = {"Metadata": "true"}
_AZURE_ENDS: Final = frozenset({"Preempt", "Terminate", "Redeploy", "Reboot"})  # "Freeze" is a pause of seconds
_AZURE_PAST: Final = frozenset({"Completed", "Canceled"})

_GCP_PATH: Final = "/computeMetadata/v1/instance/preempted"
_GCP_HEADERS: Final = {"Metadata-Flavor": "Google"}

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class NoAnswer(Exception):
    """The metadata service did not answer, or not as its provider documents it."""


@dataclass(frozen=True)
class Answer:
    """The answer of a metadata service to one request."""

    status: int
    text: str
    headers: Mapping[str, str]  # lower-case name -> value


@dataclass(frozen=True)
class Endpoint:
    """The address of a metadata service."""

    host: str = METADATA_ADDRESS
    port: int = 80
    timeout: float = field(default=2.0, kw_only=True)  # seconds; a service that exists answers within milliseconds

    async def request(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        """Send one request and return the answer, or raise `NoAnswer` with the reason."""
        try:
            async with asyncio.timeout(2 * self.timeout):  # the socket's timeout bounds each part of the answer
                return await asyncio.to_thread(self._ask, method, path, headers)
        except TimeoutError:  # the socket's or asyncio's
            raise NoAnswer(f"{self.host}:{self.port} did not answer {path} in time") from None
        except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
            raise NoAnswer(f"{self.host}:{self.port} did not answer {path}: {error}") from error

    def _ask(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)
        try:
            connection.request(method, path, headers=dict(headers))
            response = connection.getresponse()
            text = response.read(_MAX_BYTES).decode()
            return Answer(response.status, text, {name.lower(): value for name, value in response.getheaders()})
        finally:
            connection.close()


class Cloud(ABC):
    """The notices of one provider."""

    name: ClassVar[str]

    def __init__(self, endpoint: Endpoint | None = None) -> None:
        self.endpoint = endpoint or Endpoint()

    @abstractmethod
    async def is_here(self) -> bool:
        """Return whether this is a machine of the provider, or raise `NoAnswer`."""

    @abstractmethod
    async def notice(self) -> str | None:
        """Return why the machine will be taken away, in words, or raise `NoAnswer`; None while it may stay."""

    async def _get(self, path: str, headers: Mapping[str, str], *, accept: Sequence[int] = (200,)) -> Answer:
        answer = await self.endpoint.request("GET", path, headers)
        if answer.status not in accept:
            raise NoAnswer(f"{type(self).__name__} answered {path} with status {answer.status}")
        return answer

    def _decoded(self, answer: Answer, notice_type: type[_T], path: str) -> _T:
        try:
            return msgspec.json.decode(answer.text, type=notice_type)
        except msgspec.DecodeError as error:
            raise NoAnswer(
                f"{type(self).__name__} answered {path} with something that is no notice: {error}"
            ) from error


class _Action(msgspec.Struct):
    action: str = "terminate"
    time: str = ""


class _Rebalance(msgspec.Struct):
    noticeTime: str = ""  # noqa: N815 - AWS's name


# Source: Amazon EC2 User Guide, "Spot Instance interruption notices" and "EC2 instance rebalance recommendations".
class AWS(Cloud):
    """AWS, by version 2 of its instance metadata, which requires a token in every request."""

    name = "aws"

    def __init__(self, endpoint: Endpoint | None = None) -> None:
        super().__init__(endpoint)
        self._token = ""
        self._renew_s = 0.0  # when to renew the token, on the loop's clock

    @override
    async def is_here(self) -> bool:
        await self._renew()
        return True

    @override
    async def notice(self) -> str | None:
        action = await self._find(_AWS_ACTION_PATH, _Action)
        if action is not None:
            return f"AWS will {action.action} this spot instance at {action.time or 'any moment'}"
        rebalance = await self._find(_AWS_REBALANCE_PATH, _Rebalance)
        if rebalance is not None:
            at = rebalance.noticeTime
            return f"AWS recommends leaving this spot instance, which is likely to be interrupted (notice of {at})"
        return None

    async def _find(self, path: str, notice_type: type[_T]) -> _T | None:
        """Return the notice under `path`; None if AWS answers with status 404."""
        if not self._token or now_s() >= self._renew_s:
            await self._renew()
        answer = await self._get(path, {"X-aws-ec2-metadata-token": self._token}, accept=(200, 401, 404))
        if answer.status == 401:  # the instance may have been stopped meanwhile, which ends its tokens
            await self._renew()
            answer = await self._get(path, {"X-aws-ec2-metadata-token": self._token}, accept=(200, 404))
        return None if answer.status == 404 else self._decoded(answer, notice_type, path)

    async def _renew(self) -> None:
        """Request a new token; raise `NoAnswer` if the service gives none."""
        answer = await self.endpoint.request(
            "PUT", _AWS_TOKEN_PATH, {"X-aws-ec2-metadata-token-ttl-seconds": str(_AWS_TOKEN_S)}
        )
        token = answer.text.strip()
        if answer.status != 200 or not token.isascii() or not token.isprintable() or not token:
            raise NoAnswer(f"AWS answered {_AWS_TOKEN_PATH} with status {answer.status} and no token")
        self._token = token
        self._renew_s = now_s() + _AWS_TOKEN_S / 2


class _Event(msgspec.Struct, rename="pascal"):
    event_type: str
    resources: list[str] = []
    event_status: str = "Scheduled"
    not_before: str = ""


class _Events(msgspec.Struct, rename="pascal"):
    events: list[_Event] = []


# Source: Microsoft, "Azure Metadata Service: Scheduled Events for Linux VMs".
class Azure(Cloud):
    """Azure, by its scheduled events. These include events of other machines, of the whole availability set."""

    name = "azure"

    def __init__(self, endpoint: Endpoint | None = None) -> None:
        super().__init__(endpoint)
        self._name = ""

    @override
    async def is_here(self) -> bool:
        self._name = (await self._get(_AZURE_NAME_PATH, _AZURE_HEADERS)).text.strip()
        return bool(self._name)

    @override
    async def notice(self) -> str | None:
        if not self._name and not await self.is_here():
            raise NoAnswer(f"Azure answered {_AZURE_NAME_PATH} with no name")
        answer = await self._get(_AZURE_EVENTS_PATH, _AZURE_HEADERS)
        for event in self._decoded(answer, _Events, _AZURE_EVENTS_PATH).events:
            is_open = event.event_type in _AZURE_ENDS and event.event_status not in _AZURE_PAST
            if is_open and self._name in event.resources:
                return f"Azure has scheduled a {event.event_type} of this machine, {event.not_before or 'at once'}"
        return None


# Source: Google Cloud, "Create and use Spot VMs", section "Handle preemption".
class GCP(Cloud):
    """GCP, by its metadata server's ``instance/preempted``."""

    name = "gcp"

    @override
    async def is_here(self) -> bool:
        await self._ask()
        return True

    @override
    async def notice(self) -> str | None:
        answer = await self._ask()
        text = answer.text.strip()
        if text not in ("TRUE", "FALSE"):
            raise NoAnswer(f"GCP answers {_GCP_PATH} with TRUE or FALSE, got {text[:100]!r}")
        return "GCP preempts this machine within 30 s" if text == "TRUE" else None

    async def _ask(self) -> Answer:
        answer = await self._get(_GCP_PATH, _GCP_HEADERS)
        # Other services answer at this address, too, but not with this header.
        if answer.headers.get("metadata-flavor") != _GCP_HEADERS["Metadata-Flavor"]:
            raise NoAnswer(f"GCP answered {_GCP_PATH} without its header Metadata-Flavor")
        return answer


def clouds(endpoint: Endpoint | None = None) -> Mapping[str, Cloud]:
    """Return all known clouds, by their names in the argument `preemption`."""
    return {cloud.name: cloud(endpoint) for cloud in (AWS, GCP, Azure)}


async def watch(
    name: Preemption,  # "auto": the cloud that this machine belongs to, if there is one
    on_notice: Callable[[str], None],  # called on the loop, once, with the reason
    *,
    known: Mapping[str, Cloud] | None = None,  # clouds by name; None: all
    every_s: float = POLL_S,
) -> None:
    """Poll a cloud until it announces that it will take this machine away."""
    known = clouds() if known is None else known
    cloud = await _cloud_here(list(known.values())) if name == "auto" else known[name]
    if cloud is None:
        _log.info("No cloud's metadata service answers here, so no notice will precede a preemption.")
        return
    _log.info("Asking %s every %g s whether it will take this machine away.", cloud.name, every_s)
    answered = True
    while True:
        try:
            reason = await cloud.notice()
        except NoAnswer as error:
            if answered:
                _log.warning("%s does not answer whether it will take this machine away: %s", cloud.name, error)
            answered = False
        else:
            answered = True
            if reason is not None:
                on_notice(reason)
                return
        await asyncio.sleep(every_s)


async def _cloud_here(candidates: Sequence[Cloud]) -> Cloud | None:
    """Return the cloud that this machine belongs to; None if none of them answers."""

    async def is_here(cloud: Cloud) -> bool:
        try:
            return await cloud.is_here()
        except NoAnswer:
            return False

    are_here = await gather(is_here(cloud) for cloud in candidates)
    return next((cloud for cloud, here in zip(candidates, are_here, strict=True) if here), None)
