"""Preemption notices of the three clouds, by their documented protocols, from a server on this machine."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing
from typing import Any, TypeVar

import pytest

from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.peer import preemption
from lightning_swarm.peer.config import Preemption
from lightning_swarm.peer.preemption import AWS, GCP, METADATA_ADDRESS, Azure, Cloud, Endpoint, NoAnswer
from tests.contract.metadata import ACTION, EVENTS, NAME, PREEMPTED, REASONS, REBALANCE, TOKEN, Metadata, let_go

T = TypeVar("T")


@pytest.fixture
def service() -> Iterator[Metadata]:
    with closing(Metadata()) as one:
        yield one


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run on a virtual clock with inline threads, so that a look takes no time."""
    with closing(VirtualLoop()) as loop:
        return loop.run_until_complete(work)


CLOUDS: dict[str, type[Cloud]] = {"aws": AWS, "gcp": GCP, "azure": Azure}


@pytest.mark.parametrize("name", CLOUDS)
def test_a_machine_stays_until_its_cloud_says_otherwise(service: Metadata, name: str) -> None:
    getattr(service, f"be_{name}")()
    cloud = CLOUDS[name](service.endpoint)

    async def go() -> None:
        assert await cloud.is_here()
        assert await cloud.notice() is None
        let_go(service, name)
        assert await cloud.notice() == REASONS[name]

    run(go())


def test_aws_recommends_to_leave_before_it_interrupts(service: Metadata) -> None:
    service.be_aws()
    service.pages[REBALANCE] = '{"noticeTime": "2026-10-27T08:22:00Z"}'
    assert run(AWS(service.endpoint).notice()) == (
        "AWS recommends leaving this spot instance, which is likely to be interrupted (notice of 2026-10-27T08:22:00Z)"
    )


@pytest.mark.parametrize("action", ["stop", "hibernate"])
def test_aws_says_what_it_will_do(service: Metadata, action: str) -> None:
    service.be_aws()
    service.pages[ACTION] = json.dumps({"action": action})
    assert run(AWS(service.endpoint).notice()) == f"AWS will {action} this spot instance at any moment"


def test_a_token_of_aws_is_asked_for_once_and_again_when_it_is_refused(service: Metadata) -> None:
    service.be_aws()
    cloud = AWS(service.endpoint)

    async def go() -> None:
        for _ in range(3):
            assert await cloud.notice() is None
        assert service.asked.count(("PUT", TOKEN)) == 1
        service.tokens, service.pages[TOKEN] = ["token 2"], "token 2"
        assert await cloud.notice() is None
        assert service.asked.count(("PUT", TOKEN)) == 2
        await asyncio.sleep(21_600.0)  # no token lives longer
        assert await cloud.notice() is None
        assert service.asked.count(("PUT", TOKEN)) == 3

    run(go())


@pytest.mark.parametrize(
    ("kind", "resources", "status", "ends"),
    [
        ("Preempt", ["worker_3"], "Started", True),
        ("Terminate", ["worker_3"], "Scheduled", True),
        ("Reboot", ["worker_3"], "Scheduled", True),
        ("Redeploy", ["worker_3"], "Scheduled", True),
        ("Freeze", ["worker_3"], "Scheduled", False),
        ("Preempt", ["worker_2"], "Scheduled", False),
        ("Preempt", ["worker_3"], "Canceled", False),
    ],
)
def test_azure_tells_of_other_machines_and_of_pauses_too(
    service: Metadata, kind: str, resources: list[str], status: str, ends: bool
) -> None:
    service.be_azure()
    service.schedule(kind, *resources, status=status)
    assert (run(Azure(service.endpoint).notice()) is not None) == ends


@pytest.mark.parametrize(
    ("name", "path", "said"),
    [
        ("aws", TOKEN, ""),
        ("aws", TOKEN, "two\nlines"),
        ("aws", ACTION, "<html>"),
        ("aws", ACTION, "[]"),
        ("aws", REBALANCE, '{"noticeTime": 3}'),
        ("gcp", PREEMPTED, "MAYBE"),
        ("azure", EVENTS, "null"),
        ("azure", EVENTS, '{"Events": [{"Resources": ["worker_3"]}]}'),
        ("azure", NAME, " "),
    ],
)
def test_what_is_no_notice_is_none(service: Metadata, name: str, path: str, said: str) -> None:
    """A page that cannot be parsed makes no peer leave."""
    getattr(service, f"be_{name}")()
    service.pages[path] = said
    with pytest.raises(NoAnswer):
        run(CLOUDS[name](service.endpoint).notice())
    assert any(asked == path for _, asked in service.asked)


@pytest.mark.parametrize("name", CLOUDS)
def test_a_service_that_is_gone_or_silent_is_no_notice(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        cloud = CLOUDS[name](Endpoint("127.0.0.1", port, timeout=0.05))
        with pytest.raises(NoAnswer, match="in time"):
            run(cloud.notice())
    with pytest.raises(NoAnswer, match="refused"):
        run(cloud.notice())


# ---------------------------------------------------------------------- watching


def watched(service: Metadata, name: Preemption, *, until: float, at: dict[float, Callable[[], None]]) -> Any:
    """Return the reported reasons and their times within `until` seconds, and whether the watch has ended by then."""
    told: list[tuple[float, str]] = []

    async def go() -> bool:
        loop = asyncio.get_running_loop()
        for when, what in at.items():
            loop.call_at(when, what)
        known = preemption.clouds(service.endpoint)
        task = asyncio.create_task(
            preemption.watch(name, lambda reason: told.append((loop.time(), reason)), known=known, every_s=5.0)
        )
        await asyncio.wait({task}, timeout=until)
        over = task.done()
        task.cancel()
        await asyncio.wait({task})
        return over

    return told, run(go())


@pytest.mark.parametrize("name", CLOUDS)
@pytest.mark.parametrize("auto", [False, True])
def test_a_notice_is_told_once_and_soon(service: Metadata, name: Any, auto: bool) -> None:
    getattr(service, f"be_{name}")()
    at = {12.0: lambda: let_go(service, name)}
    told, over = watched(service, "auto" if auto else name, until=60.0, at=at)
    assert told == [(15.0, REASONS[name])]
    assert over


def test_whose_machine_it_is_is_found_out_once(service: Metadata) -> None:
    service.be_gcp()
    watched(service, "auto", until=21.0, at={})
    assert service.asked.count(("PUT", TOKEN)) == 1
    assert service.asked.count(("GET", NAME)) == 1
    assert service.asked.count(("GET", PREEMPTED)) == 1 + 5


def test_nobody_is_asked_again_where_no_cloud_answers(service: Metadata) -> None:
    told, over = watched(service, "auto", until=60.0, at={})
    assert (told, over) == ([], True)
    assert len(service.asked) == 3


def test_asking_goes_on_while_there_is_no_answer(service: Metadata, caplog: pytest.LogCaptureFixture) -> None:
    """The failure is logged once."""

    def repair() -> None:
        service.be_gcp()
        let_go(service, "gcp")

    told, over = watched(service, "gcp", until=60.0, at={22.0: repair})
    assert told == [(25.0, REASONS["gcp"])]
    assert over
    assert caplog.text.count("gcp does not answer whether it will take this machine away") == 1


def test_by_itself_a_cloud_is_asked_at_the_address_that_all_of_them_have() -> None:
    assert {cloud.endpoint for cloud in preemption.clouds().values()} == {Endpoint(METADATA_ADDRESS, 80)}
