"""Stock clients of OpenAI's protocol, each in a process, with an endpoint whose server is killed during a text.

Until another server goes on, the stream is kept alive by comments, which each client must ignore.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lightning_swarm import remote_model
from lightning_swarm.network import PeerId
from lightning_swarm.serving import http_server, http_streams
from lightning_swarm.serving.texts import ServedText, TextWriter
from tests.p2p.processes import Run, free_port
from tests.p2p.test_serving import PROMPT, Servers, save
from tests.p2p.warm import PATIENCE_S

# Cold starts of peers in this file: none; clients are processes of their own.
pytestmark = pytest.mark.thorough

CLIENTS = Path(__file__).parent / "clients"
PYTHON = {
    "openai_sync.py": "openai",
    "openai_async.py": "openai",
    "langchain_chat.py": "langchain_openai",
    "litellm_chat.py": "litellm",
}
NUM_NEW = 48
KILL_AT = 4  # pieces
HELD_AT = 8  # tokens, after which a text waits for the kill: a client may read its pieces late


class Endpoint:
    """A live endpoint in this process, so that the test knows which server has a text."""

    def __init__(self, servers: Servers, patch: pytest.MonkeyPatch) -> None:
        self.servers = servers
        self.sent: list[str] = []  # comments and events, and the moments at which a server was killed
        self.has_killed = threading.Event()
        kept_alive, add = http_server.kept_alive, TextWriter.add

        async def recorded(*args: Any) -> AsyncGenerator[str]:
            async with aclosing(kept_alive(*args)) as events:
                async for one in events:
                    self.sent.append(one)
                    yield one

        def held(writer: TextWriter, token: int, logits: Any) -> None:
            if writer.num_tokens == HELD_AT:
                assert self.has_killed.wait(PATIENCE_S)
            add(writer, token, logits)

        patch.setattr(TextWriter, "add", held)
        patch.setattr(http_server, "kept_alive", recorded)
        patch.setattr(http_streams, "_KEEP_ALIVE_S", 0.005)
        self.model = remote_model(servers.address)
        port = free_port()
        served = ServedText("small", self.model, self.model.swarm.tokenizer())
        options = {"host": "127.0.0.1", "port": port, "keys": [], "allowed_hosts": [], "allowed_origins": []}
        self.thread = threading.Thread(target=http_server.run, args=([served],), kwargs=options, daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{port}/v1"
        while not self._answers(port):
            assert self.thread.is_alive()
            threading.Event().wait(0.05)

    def _answers(self, port: int) -> bool:
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", port)) == 0

    def kill(self) -> PeerId:
        """Kill the server with the first stage of the current text; return its id."""
        (session,) = self.model.swarm.served.forwards._sessions._open.values()
        peer = session._route[0]
        os.kill(self.servers.runs[self.servers.names[peer]].process.pid, signal.SIGKILL)
        self.sent.append("killed")
        self.has_killed.set()
        return PeerId(peer)

    def is_avoided(self, peer: PeerId) -> bool:
        """Return whether the endpoint noticed that a server is gone."""
        return peer in self.model.swarm.routes._ejected


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    folder = tmp_path_factory.mktemp("model")
    save(folder)
    servers = Servers(folder)
    try:
        for name in "abcdef":
            servers.start(name, "--weights", folder, "--stay")
        with pytest.MonkeyPatch.context() as patch:
            made = Endpoint(servers, patch)
            with closing(made.model.swarm):
                yield made
    finally:
        servers.end()


def node(folder: Path, client: str, *packages: str) -> list[str]:
    """Return the command of a client for Node.js; skip without Node.js or a registry."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("Node.js is not installed")
    shutil.copy(CLIENTS / client, folder)
    install = [npm, "install", "--no-audit", "--no-fund", "openai@6", *packages]
    installed = subprocess.run(install, check=False, cwd=folder, capture_output=True, text=True, timeout=300.0)
    if installed.returncode:
        pytest.skip(f"npm could not install the clients: {installed.stderr[-300:]}")
    return ["node", str(folder / client)]


@pytest.mark.parametrize("client", [*PYTHON, "openai_node.mjs"])
def test_a_text_is_streamed_on_although_its_server_is_killed(endpoint: Endpoint, tmp_path: Path, client: str) -> None:
    if client in PYTHON and importlib.util.find_spec(PYTHON[client]) is None:
        pytest.skip(f"{PYTHON[client]} is not installed")
    command = [sys.executable, str(CLIENTS / client)] if client in PYTHON else node(tmp_path, client)
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # otherwise LiteLLM would download it at each import
    endpoint.has_killed.clear()
    running = Run(endpoint.url, PROMPT, NUM_NEW, program=command, environment=offline)
    try:
        pieces, killed = [], None
        for line in pieces_of(running):
            pieces.append(line)
            if len(pieces) == KILL_AT:
                killed = endpoint.kill()
        assert running.wait() == 0, "".join(running.output)
    finally:
        running.end()
    assert killed is not None, "the fault is due"
    assert endpoint.is_avoided(killed), "the text was written before the server died"
    after = "".join(endpoint.sent[endpoint.sent.index("killed") :])
    assert 5 * ": waiting\n\n" in after, "nothing kept the stream alive while the server was dead"
    endpoint.sent.clear()
    assert "".join(pieces) == expected_text(endpoint)


def pieces_of(running: Run) -> Iterator[str]:
    while True:
        line = running._lines.get(timeout=120.0)
        if line is None:
            return
        if line.startswith('"') and (piece := json.loads(line)):
            yield piece


def expected_text(endpoint: Endpoint) -> str:
    """Return the text that the model generates in this process."""
    folder = endpoint.servers.folder
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    given = tokenizer(PROMPT, return_tensors="pt")
    found = model.generate(**given, max_new_tokens=NUM_NEW, do_sample=False)[0, given["input_ids"].shape[1] :]
    return f" {tokenizer.decode(found, skip_special_tokens=True)}"
