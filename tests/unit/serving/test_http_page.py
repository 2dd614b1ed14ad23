"""The page at the endpoint's root loads nothing, and a browser that shows a hostile text runs none of it."""

from __future__ import annotations

import asyncio
import re
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_swarm.serving import http_server, http_streams
from lightning_swarm.serving.http_page import page
from lightning_swarm.serving.pieces import TextPiece
from lightning_swarm.serving.texts import ServedText
from tests.browser import Browser
from tests.p2p.processes import free_port
from tests.served import bytes_tokenizer, make_model

KEY = "k" * 16
HOSTILE = "<img src=x onerror=\"document.title='x'\"><script>document.title='x'</script> **a** &amp; b\n\n\u202e!"
FORBIDDEN = [
    *(r"https?://", r"\bsrc=", r"@import", r"url\("),
    r"innerHTML|outerHTML|insertAdjacent|document\.write|eval",  # would make markup or code of a text
    r"localStorage|sessionStorage|cookie|indexedDB",  # would keep the key
]


def test_the_page_needs_no_other_file_and_builds_no_markup() -> None:
    text, headers = page()
    assert [one for one in FORBIDDEN if re.search(one, text)] == []
    assert re.findall(r'href="([^"]*)"', text) == ["data:,"]
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy


class Writer:
    """Writes a hostile text as soon as the test lets it."""

    num_prompt, num_cached, may_go = 5, 0, threading.Event()

    def __init__(self, *_: Any, on_end: Callable[[], None], **__: Any) -> None:
        self.num_tokens, self._on_end = 0, on_end

    def abort(self) -> None:
        self._on_end()

    async def pieces(self) -> AsyncIterator[TextPiece]:
        while not self.may_go.is_set():  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.01)
        for sign in HOSTILE:
            self.num_tokens += 1
            yield TextPiece(sign)
            await asyncio.sleep(0.001)
        yield TextPiece("", "length")


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> str:
    """Start an endpoint that requires a key."""
    monkeypatch.setattr(http_server, "TextWriter", Writer)
    monkeypatch.setattr(http_streams, "_KEEP_ALIVE_S", 0.05)
    monkeypatch.setattr(Writer, "may_go", threading.Event())
    template = "{% for one in messages %}{{ one.content }}{% endfor %}"
    served = ServedText("<b>tiny</b>", make_model("llama", vocab_size=264), bytes_tokenizer(template=template))
    port = free_port()
    options = {"host": "127.0.0.1", "port": port, "keys": [KEY]}
    # uvicorn ends by signals, which only the main thread receives
    threading.Thread(target=http_server.run, args=([served],), kwargs=options, daemon=True).start()
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/").close()
            break
        except OSError:
            time.sleep(0.05)
    return f"http://127.0.0.1:{port}/"


@pytest.mark.thorough
@pytest.mark.parametrize(("width", "dark"), [(1000, False), (390, True)], ids=["light", "dark phone"])
def test_a_browser_shows_a_hostile_text_as_text(address: str, tmp_path: Path, width: int, dark: bool) -> None:
    browser = Browser(tmp_path / "profile", width=width, dark=dark)
    try:
        browser.open(address)
        browser.until("document.activeElement.id === 'key'")  # it was refused without a key
        browser.write(KEY)
        browser.press("Tab")
        browser.until("document.getElementById('model').value === '<b>tiny</b>'")
        browser.run("document.getElementById('prompt').focus()")
        browser.write("<i>Go</i>")
        browser.press("Enter")
        browser.until("document.querySelector('footer span')?.textContent === 'waiting'")  # a comment of the stream
        Writer.may_go.set()
        browser.until("document.getElementById('send').textContent === 'Send'")
        assert browser.run("document.querySelector('.assistant .text').textContent") == HOSTILE
        assert browser.run("document.querySelector('.user .text').textContent") == "<i>Go</i>"
        assert browser.run("document.title") == "lightning-swarm chat"
        assert browser.run("document.querySelectorAll('img, i, b, script:not(body > script)').length") == 0
        note = browser.run("document.querySelector('footer span').textContent")
        figures = rf"{len(HOSTILE)} tokens, [\d.]+ tokens/s, first after [\d.]+ s"
        assert re.fullmatch(f"{figures} · cut at the limit of tokens", note)
        assert browser.run("document.documentElement.scrollWidth") <= width
        assert browser.run("getComputedStyle(document.body).backgroundColor") == (
            "rgb(21, 23, 26)" if dark else "rgb(251, 251, 250)"
        )
        caught = "(() => { try { document.body.innerHTML = '<i>x</i>'; return false; } catch { return true; } })()"
        assert browser.run(caught), "the policy lets the page make markup of a text"
        Writer.may_go.clear()
        browser.write("More")
        browser.press("Enter")
        browser.until("document.querySelectorAll('article').length === 4")
        browser.press("Escape")
        browser.until("document.querySelectorAll('footer span')[1].textContent === 'stopped'")
    finally:
        browser.close()
