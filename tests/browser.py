"""A page in headless Chromium, driven by the DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest


class Browser:
    """One page; closed by `close`. A test is skipped if there is no Chromium."""

    def __init__(self, folder: Path, *, width: int = 1000, height: int = 800, dark: bool = False) -> None:
        program = shutil.which("chromium") or shutil.which("google-chrome")
        if program is None:
            pytest.skip("Chromium is not installed")
        (read_here, write_there), (read_there, write_here) = os.pipe(), os.pipe()
        # Chromium reads commands from descriptor 3, and writes answers to 4.
        shell = f'exec 3<&{read_there} 4>&{write_there}; exec "$@"'
        options = [
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"),
            *("--hide-scrollbars", f"--user-data-dir={folder}"),
        ]
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", program, *options],
            pass_fds=[read_there, write_there],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_there)
        os.close(write_there)
        self._read, self._write = os.fdopen(read_here, "rb"), os.fdopen(write_here, "wb")
        self._held, self._numbers = b"", itertools.count(1)
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")
        self.call("Runtime.enable")
        self.call("Log.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def call(self, method: str, **options: Any) -> Any:
        """Call a method of the protocol, and return its result; events that come meanwhile are kept."""
        number = next(self._numbers)
        sent = {"id": number, "method": method, "params": options}
        if self._session is not None:
            sent["sessionId"] = self._session
        self._write.write(json.dumps(sent).encode() + b"\0")
        self._write.flush()
        while True:
            found = self._receive()
            if found.get("id") == number:
                assert "error" not in found, found["error"]
                return found["result"]
            self.events.append(found)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            part = os.read(self._read.fileno(), 1 << 16)
            assert part, "Chromium has ended"
            self._held += part
        message, _, self._held = self._held.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def open(self, url: str) -> None:
        """Open an address, and wait until the page has loaded."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(one.get("method") == "Page.loadEventFired" for one in self.events):
            self.events.append(self._receive())

    def run(self, script: str) -> Any:
        """Return the value of an expression, awaited if it is a promise."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until an expression is true."""
        look = f"if ({condition}) resolve(); else setTimeout(look, 20);"
        self.run(f"new Promise((resolve) => {{ const look = () => {{ {look} }}; look(); }})")

    def press(self, key: str, **options: Any) -> None:
        """Press a key."""
        text = "\r" if key == "Enter" else ""
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, text=text, **options)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, **options)

    def write(self, text: str) -> None:
        """Write text into the field that has the focus."""
        self.call("Input.insertText", text=text)

    def picture(self, path: Path) -> None:
        """Write a picture of the page."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        """End Chromium."""
        self._process.kill()
        self._process.wait()
        self._read.close()
        self._write.close()
