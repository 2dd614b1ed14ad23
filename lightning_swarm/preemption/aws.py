"""Amazon EC2: spot instances are told two minutes before, or earlier that their risk has risen."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec
from typing_extensions import override

from lightning_swarm.clock import now_s
from lightning_swarm.preemption.cloud import Cloud
from lightning_swarm.preemption.http import Answer, Endpoint, NoAnswer

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
        return await self.endpoint.ask("GET", path, {"X-aws-ec2-metadata-token": self._token})

    async def _renew(self) -> None:
        answer = await self.endpoint.ask("PUT", _TOKEN_PATH, {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)})
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
