"""The dashboard over HTTP on loopback: its token, its headers, its events, and the page in a real browser."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lightning_swarm.dashboard.overview import MAX_BOXES
from lightning_swarm.dashboard.server import MAX_STREAMS, DashboardServer, OverviewFeed
from lightning_swarm.dashboard.watch import Board
from tests.browser import Browser
from tests.unit.dashboard.example import ADDRESS, PROBLEM, START_S, logged, model_report, overview, peer, report

TOKEN = "t" * 43
HOSTILE = "<img src=x onerror=\"document.title='x'\"><script>document.title='x'</script>\u202e&amp;"
PACKAGE = Path(__file__).parents[3] / "lightning_swarm" / "dashboard"


class Site:
    """A dashboard whose overviews the test publishes."""

    def __init__(self, token: str | None = None) -> None:
        self.feed = OverviewFeed()
        self.feed.publish(overview())
        self._server = DashboardServer(self.feed, token=token, host="127.0.0.1")
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listening]})
        self._thread.start()
        self._answers: list[Any] = []

    def get(self, path: str, **headers: str) -> HTTPResponse:
        """Return the answer to a request; redirects are not followed."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        asked = urllib.request.Request(self.url + path, headers=named)
        try:
            self._answers.append(urllib.request.build_opener(_Unmoved).open(asked))
        except urllib.error.HTTPError as error:
            self._answers.append(error)
        return self._answers[-1]  # type: ignore[no-any-return]

    def close(self) -> None:
        for answer in self._answers:
            answer.close()
        self._server.should_exit = True
        self._thread.join(30.0)
        self._listening.close()
        assert not self._thread.is_alive()


class _Unmoved(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.close()


@pytest.fixture
def guarded() -> Iterator[Site]:
    made = Site(TOKEN)
    yield made
    made.close()


def next_event(stream: HTTPResponse) -> Any:
    line = next(line for line in stream if line.startswith(b"data: "))
    return json.loads(line.removeprefix(b"data: "))


def test_a_token_is_needed_once_and_then_a_cookie_has_it(guarded: Site) -> None:
    paths = "/", "/page.js", "/api/state", "/api/events", "/metrics"
    cookie = f"swarm-dashboard-{guarded.url.rpartition(':')[2]}"
    wrong: tuple[tuple[str, dict[str, str]], ...] = (
        ("", {}),
        ("?token=" + "u" * 43, {}),
        ("?token=%C3%A9%FF", {}),
        ("", {"authorization": "Bearer " + "u" * 43}),
        ("", {"authorization": f"Basic {TOKEN}"}),
        ("", {"cookie": f"{cookie}=u"}),
        ("", {"cookie": f"another={TOKEN}"}),
    )
    for path in paths:
        for query, headers in wrong:
            answer = guarded.get(path + query, **headers)
            assert answer.status == 401, (path, query, headers)
            assert b"tiny-gpt" not in answer.read()
        assert guarded.get(path, authorization=f"Bearer {TOKEN}").status == 200
        assert guarded.get(path, cookie=f"{cookie}={TOKEN}").status == 200
    moved = guarded.get(f"//evil.example/?token={TOKEN}")
    assert (moved.status, moved.headers["location"]) == (303, "/")
    assert moved.headers["set-cookie"] == f"{cookie}={TOKEN}; HttpOnly; Path=/; SameSite=lax"


def test_every_answer_has_the_headers_that_restrict_the_page(site: Site, guarded: Site) -> None:
    refused = [guarded.get("/"), site.get("/", host="evil.example"), site.get("/", origin="http://evil.example")]
    assert [answer.status for answer in refused] == [401, 400, 403]
    for answer in (*refused, *map(site.get, ("/", "/page.js", "/api/state", "/api/events", "/metrics", "/none"))):
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
        assert "unsafe" not in policy
        assert {*answer.headers.get_all("cache-control")} == {"no-store"}
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        answer.close()
    assert site.get("/none").status == 404


def test_the_page_loads_its_own_files_alone_and_builds_no_markup(site: Site) -> None:
    total = 0
    for path in ("/", "/page.js", "/page.css", "/api/state"):
        answer = site.get(path, accept_encoding="gzip")
        total += len(answer.read())
        assert answer.headers["content-encoding"] == "gzip"
    assert total < 30_000
    text = "".join((PACKAGE / name).read_text() for name in ("page.html", "page.js", "page.css"))
    assert not re.findall(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|@import|url\(| style=| on\w+=", text
    )
    assert set(re.findall(r'https?://[^"]*', text)) == {"http://www.w3.org/2000/svg"}


def test_a_stream_begins_with_the_newest_overview_and_receives_the_next(site: Site) -> None:
    with site.get("/api/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert next_event(stream)["name"] == "tiny-gpt"
        board = Board(ADDRESS)
        site.feed.publish(board.add(report([peer(0, role=HOSTILE)], step=7), START_S))
        found = next_event(stream)
        assert (found["numbers"]["step"], found["report"]["peers"][0]["role"]) == (7, HOSTILE)
    state = json.loads(site.get("/api/state").read())
    assert state["report"].pop("stages") == [[peer(0).peer_id], [], [], []]
    assert found["report"].pop("stages") == []  # the page groups the peers itself
    assert state == found


def test_streams_are_bounded_and_a_closed_stream_makes_room(site: Site) -> None:
    with ExitStack() as opened:
        streams = [opened.enter_context(site.get("/api/events")) for _ in range(MAX_STREAMS)]
        assert {stream.status for stream in streams} == {200}
        refused = site.get("/api/events")
        assert (refused.status, refused.read()) == (503, b"at most 32 pages are open at once. Close one.")
    while (again := site.get("/api/events")).status == 503:  # the server notices the end of the connections soon
        again.close()
    assert again.status == 200
    again.close()


def test_a_slow_reader_receives_the_newest_overview_only() -> None:
    async def read() -> list[str]:
        feed = OverviewFeed()
        first, *following = (Board(ADDRESS).add(report([peer(0)], step=step), START_S) for step in range(5))
        feed.publish(first)
        async with feed.opened(None):
            stream = feed.events(first)
            coming = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)  # it waits for an overview now
            feed.publish(following[0])
            texts = [await coming]
            for overview in following[1:]:  # the reader is busy
                feed.publish(overview)
            texts.append(await anext(stream))
            feed.close()
            return texts + [text async for text in stream]

    steps = [json.loads(text.removeprefix("data: "))["numbers"]["step"] for text in asyncio.run(read())]
    assert steps == [1, 4]


@pytest.mark.parametrize("kind", ["run", "model"])
def test_metrics_are_prometheus_and_have_text_of_peers_as_labels_of_logged_numbers_alone(site: Site, kind: str) -> None:
    board = Board(ADDRESS)
    loss, validated = logged(1203)
    named = HOSTILE + '"} 7\n\\'
    run = report([peer(0, role=HOSTILE), peer(1)], logged=(loss, replace(validated, name=named)))
    found = board.add(run if kind == "run" else model_report(), START_S)
    site.feed.publish(found)
    text = site.get("/metrics").read().decode()
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    for name, value in found.numbers.items():
        assert values.get((f"lightning_swarm:{name}",)) == value
    assert values["lightning_swarm:stage_peers", "1"] == 1
    rate = "samples" if kind == "run" else "tokens"
    assert values[f"lightning_swarm:stage_{rate}_per_second", "0"] == found.stages[0].rate
    assert (("lightning_swarm:step",) in values) == (kind == "run")
    for number in run.logged if kind == "run" else ():
        assert values["lightning_swarm:logged_value", number.name] == number.value
        assert values["lightning_swarm:logged_step", number.name] == number.step
    assert text.count("img") == (2 if kind == "run" else 0)
    assert peer(0).peer_id not in text


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)], ids=["light", "dark phone"])
def test_a_browser_shows_stages_curves_events_and_hostile_text_as_text(
    site: Site, tmp_path: Path, width: int, dark: bool
) -> None:
    browser = Browser(tmp_path / "profile", width=width, dark=dark)
    try:
        browser.open(f"{site.url}/")
        browser.until("document.querySelectorAll('.peer').length === 9")
        titles = browser.run("[...document.querySelectorAll('.stage h3')].map((one) => one.textContent)")
        assert titles == [f"Stage {index}" for index in range(4)]
        assert browser.run("document.querySelectorAll('.peer.bad').length") == 1
        assert browser.run("document.querySelector('.peer.bad').textContent").count(PROBLEM) == 1
        assert browser.run("document.querySelectorAll('#events li').length") == 5
        assert "a new step within" in browser.run("document.querySelector('#events li.silent').textContent")
        for curve in ("samples_per_second", "steps_per_minute", "answering_peers", "sent_gigabytes_per_hour"):
            drawn = browser.run(f"document.querySelector('[data-curve={curve}] .curve').getAttribute('d')")
            assert 100 < drawn.count("L") < 240
        titles = browser.run("[...document.querySelectorAll('#logged figcaption span')].map((one) => one.textContent)")
        assert titles == ["train_loss", "val_loss"]
        assert browser.run("document.querySelector('[data-curve=train_loss] .axis').textContent").startswith(
            "step 1,200"
        )
        steps = browser.run("document.querySelector('[data-curve=train_loss] .curve').getAttribute('d')")
        assert steps.count("L") > 50
        assert (steps.count("M"), "NaN" in steps) == (1, False)
        browser.run("document.getElementById('by-time').focus()")
        browser.press("Enter")
        browser.until("document.getElementById('by-time').ariaPressed === 'true'")
        assert browser.run("document.querySelector('[data-curve=train_loss] .axis').textContent").startswith(
            "7 min ago"
        )
        times = browser.run("document.querySelector('[data-curve=train_loss] .curve').getAttribute('d')")
        assert times != steps  # the run stood still for a while
        assert (times.count("L"), "NaN" in times) == (steps.count("L"), False)
        browser.run("document.querySelector('[data-curve=samples_per_second] svg').focus()")
        browser.press("ArrowLeft")
        assert " at " in browser.run("document.querySelector('[data-curve=samples_per_second] output').textContent")
        browser.run("document.querySelector('.peer summary').focus()")
        browser.press("Enter")
        browser.until("document.querySelector('.peer details[open] dd')")  # it was opened by the key
        assert "203.0.113." in browser.run("document.querySelector('.peer details dl').textContent")
        assert browser.run("document.documentElement.scrollWidth") <= width
        colour = browser.run("getComputedStyle(document.body).backgroundColor")
        assert colour == ("rgb(18, 20, 23)" if dark else "rgb(244, 245, 247)")

        board = Board(ADDRESS)
        hostile = {"role": HOSTILE, "place": HOSTILE, "arithmetic": HOSTILE, "peer_id": HOSTILE + "x" * 300}
        crowd = [peer(number, stages=(number % 2,)) for number in range(10_000)]
        board.add(report(crowd, num_stages=3), START_S)
        extremes = [replace(logged(at)[0], name=HOSTILE, value=1.7e308 * sign) for at, sign in ((7, -1), (8, 1))]
        board.add(report([*crowd[1:], peer(0, **hostile)], num_stages=3, logged=(extremes[0],)), START_S + 1)
        hostile_run = report([*crowd[1:], peer(0, **hostile)], num_stages=3, logged=(extremes[1],))
        site.feed.publish(board.add(hostile_run, START_S + 2))
        browser.until("document.querySelectorAll('.stage').length === 3")
        assert browser.run("document.querySelectorAll('.peer').length") <= 3 * MAX_BOXES
        assert browser.run("document.querySelector('.more').textContent") == f"and {5000 - MAX_BOXES:,} more"
        assert browser.run("document.querySelector('.empty .note').textContent") == "no answering peer holds it"
        shown = browser.run("document.querySelector('.tag').textContent")
        assert shown == HOSTILE.replace("\u202e", "?")
        assert browser.run("document.querySelector('#logged figcaption').textContent").startswith(shown)
        assert browser.run("document.querySelector('#logged .curve').getAttribute('d')").count("L") == 2
        assert browser.run("document.querySelectorAll('img, main script').length") == 0
        assert browser.run("document.title") == "tiny-gpt – lightning-swarm"
        assert browser.run("document.documentElement.scrollWidth") <= width
        twins = [peer(3, peer_id=f"{first * 40}sAmeEn", problem=PROBLEM, stages=()) for first in "ab"]
        board = Board(ADDRESS)
        for second, peers in enumerate(([peer(0), *twins], [peer(0)], [peer(0)])):
            site.feed.publish(board.add(report(peers, step=second), START_S + second))
            browser.until(f"document.querySelector('#facts dd').textContent === '{second}'")
        gone = browser.run("[...document.querySelectorAll('#events li span')].map((one) => one.textContent)")
        assert gone == ["sAmeEn is no longer listed"] * 2  # equal texts are two events, and none is left behind
        site.feed.publish(Board(ADDRESS).add(model_report(), START_S))
        browser.until("document.getElementById('kind').textContent === 'model'")
        assert browser.run("document.querySelectorAll('.peer').length") == 5  # two of three servers hold two stages
        bad = [one for one in browser.events if one["method"] in ("Log.entryAdded", "Runtime.exceptionThrown")]
        assert bad == []
        assert not any(one["method"] == "Runtime.consoleAPICalled" for one in browser.events)
    finally:
        browser.close()
