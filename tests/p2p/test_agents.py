"""Agents of 20 turns with tools, by OpenAI's client and `lightning-swarm http`, while servers and endpoints end."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from lightning_swarm.serving import http_server
from lightning_swarm.serving.http_fields import Chat, converted
from lightning_swarm.serving.texts import ServedText
from lightning_swarm.serving.tool_calls import tool_use
from tests.p2p.agents import GREEDY, NUM_TURNS, SAMPLED, Agent, Turn, agent_tokenizer, make_agent_model
from tests.p2p.processes import free_port
from tests.p2p.test_serving import TEXTS, Servers
from tests.p2p.warm import wait_until

# Cold starts of peers in this file: none; all are forked from a process that has imported everything.
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(1800),  # a loop of agents takes minutes on a busy machine
]

KILL_TURN, KILL_PIECE = 7, 20  # a turn that is streamed, and whose call has more than 60 tokens


class Swarm(Servers):
    """Two servers of each of two stages, and an endpoint, each in a process."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        model = make_agent_model()
        model.save_pretrained(folder)
        agent_tokenizer().save_pretrained(folder)
        num_bytes = sum(one.nbytes for one in model.model.layers.parameters())
        self.half = ("--memory", num_bytes // 2 + 1024 + TEXTS, "--texts", TEXTS)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def begin(self) -> None:
        for name in "abcd":
            self.start(name, "--stages", 2, "--weights", self.folder, "--stay", *self.half)
        self.begin_endpoint()
        # The first server looks for others every few seconds.
        wait_until(lambda: len(self.of_stage(0) + self.of_stage(1)) == 4, "not all servers were found")

    def begin_endpoint(self, *options: object) -> None:
        endpoint = self.command("http", "http", f"small={self.address}", "--port", self.port, *options)
        endpoint.wait_for("Answering at")
        until_up(self.url)

    def of_stage(self, stage: int) -> list[str]:
        """Return the names of the servers of a stage."""
        status = self.command("status", "status", self.address, "--json")
        assert status.wait() == 0, "".join(status.output)
        shown = json.loads(status.output[-1])
        return [self.names.get(one["peer_id"], "mover") for one in shown["servers"] if stage in one["stages"]]

    def metric(self, name: str) -> float:
        """Return the sum of the endpoint's metric over all models."""
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=60.0).read().decode()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return sum(sample.value for sample in samples if sample.name == f"lightning_swarm:{name}")

    def work_ns(self, name: str) -> int:
        """Return the processor time of a server."""
        tasks = Path(f"/proc/{self.runs[name].process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)

    def kill(self, name: str) -> None:
        """Kill a process, and wait for its end."""
        os.kill(self.runs[name].process.pid, signal.SIGKILL)
        assert self.runs[name].wait() == -signal.SIGKILL


def until_up(url: str) -> None:
    """Wait until an endpoint answers."""
    while True:
        try:
            assert json.loads(urllib.request.urlopen(f"{url}/v1/models", timeout=60.0).read())["data"]
        except OSError:
            threading.Event().wait(0.1)
        else:
            return


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    made = Swarm(tmp_path)
    try:
        made.begin()
        yield made
    finally:
        made.end()


@pytest.fixture(scope="module")
def plain() -> Callable[..., list[Turn]]:
    """Return a function that writes an agent's turns by transformers alone, in this process."""
    port = free_port()
    served = ServedText("small", make_agent_model(), agent_tokenizer())
    options = {"host": "127.0.0.1", "port": port}
    threading.Thread(target=http_server.run, args=([served],), kwargs=options, daemon=True).start()
    url = f"http://127.0.0.1:{port}"
    until_up(url)

    def turns(sampling: Mapping[str, Any], num_turns: int = NUM_TURNS, **options: Any) -> list[Turn]:
        agent = Agent(url, sampling, **options)
        found = agent.run(num_turns)
        if sampling == GREEDY and not options:
            for request, turn in zip(agent.requests, found, strict=True):
                assert_greedy(served, request, turn)
        return found

    return turns


def assert_greedy(served: ServedText, request: dict[str, Any], turn: Turn) -> None:
    """Check by one forward that each token is the most probable one that the turn's grammar admits."""
    asked = converted(request, Chat)
    tokenizer, messages = served.tokenizer, json.loads(json.dumps(request["messages"]))
    for call in [call for message in messages for call in message.get("tool_calls") or []]:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    messages = [{**message, "content": message["content"] or ""} for message in messages]
    prompt = tokenizer.apply_chat_template(messages, tools=request["tools"], tokenize=False, add_generation_prompt=True)
    use = tool_use(served, asked, prompt, None)
    assert use is not None
    assert use.grammar is not None
    mask = served.grammars.compile(use.grammar)()
    calls = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in turn.calls
    ]
    text = (turn.content or "").rstrip("\N{REPLACEMENT CHARACTER}") + "\n".join(calls)
    given, written = tokenizer(prompt).input_ids, tokenizer(text).input_ids
    assert len(given) == turn.usage[0]
    assert len(written) > 10
    with torch.no_grad():
        rows = served.model(torch.tensor([given + written])).logits[0, len(given) - 1 : -1]
    for row, token in zip(rows, written, strict=True):
        mask.restrict(row)
        for biased, bias in request.get("logit_bias", {}).items():
            row[int(biased)] += bias
        assert int(row.argmax()) == token
        mask.add(token)


def ignore(turn: int, piece: int) -> None:
    """Let a piece pass."""


class Killer:
    """Kills the server of a stage that works for a turn, in the middle of the turn's stream."""

    def __init__(self, swarm: Swarm, stage: int) -> None:
        self._swarm, self._servers = swarm, swarm.of_stage(stage)
        self._before: dict[str, int] = {}
        self.killed = ""

    def __call__(self, turn: int, piece: int) -> None:
        if turn != KILL_TURN:
            return
        if piece == 0:
            self.num_replaced = self._swarm.metric("replaced_servers_total")
            self._before = {name: self._swarm.work_ns(name) for name in self._servers}
        if piece == KILL_PIECE:
            self.killed = max(self._servers, key=lambda name: self._swarm.work_ns(name) - self._before[name])
            self._swarm.kill(self.killed)


def test_a_server_that_is_killed_in_a_turn_changes_no_turn(swarm: Swarm, plain: Callable[..., list[Turn]]) -> None:
    """A greedy agent and a sampled one at once; then each alone, while a server of either stage is killed."""
    samplings, killers = [GREEDY, SAMPLED], [Killer(swarm, stage) for stage in range(2)]
    with ThreadPoolExecutor(2) as pool:
        agents = [Agent(swarm.url, sampling, salt=f"calm {number}") for number, sampling in enumerate(samplings)]
        calm = [*pool.map(Agent.run, agents)]
    assert calm == [plain(sampling) for sampling in samplings]
    assert {turn.finish_reason for turns in calm for turn in turns} == {"tool_calls", "length"}
    assert max(len(turn.calls) for turns in calm for turn in turns) > 1, "calls in parallel"
    for killer, sampling, wanted in zip(killers, samplings, calm, strict=True):
        agent = Agent(swarm.url, sampling, salt=f"killed {sampling}", on_piece=killer)
        assert agent.run() == wanted
        assert killer.killed, "the fault is due"
        assert wanted[KILL_TURN].usage[1] > 3 * KILL_PIECE
        assert swarm.metric("replaced_servers_total") > killer.num_replaced, "the text did not need the server"
        assert agent.cached[0] == 0
        assert min(agent.cached[1:]) > 100, "a turn began without the turns before"


def test_what_agents_do(swarm: Swarm, plain: Callable[..., list[Turn]]) -> None:
    """Eight agents at once forget, or hang up, while a server leaves, another comes, and the endpoint is killed."""
    kinds: list[dict[str, Any]] = [{}, {"forgets": True}, {"hangs_up": True}, {"forgets": True, "hangs_up": True}]
    asked = [({**SAMPLED, "seed": number}, kinds[number % 4]) for number in range(8)]
    num_turns, events, is_back = 6, {1: "leaves", 3: "ends"}, threading.Event()

    def act(turn: int, piece: int) -> None:
        if piece != 5 or turn not in events:
            return
        assert swarm.metric("num_requests_running") > 1
        if events.pop(turn) == "leaves":
            swarm.runs["b"].process.send_signal(signal.SIGTERM)
            swarm.start("e", *swarm.half)
        else:
            swarm.kill("http")
            swarm.begin_endpoint()
            is_back.set()

    def until_back() -> None:
        assert is_back.wait(300.0)

    with ThreadPoolExecutor(len(asked)) as pool:
        agents = [
            Agent(
                swarm.url, sampling, salt=str(number), until_up=until_back, on_piece=ignore if number else act, **kind
            )
            for number, (sampling, kind) in enumerate(asked)
        ]
        found = [*pool.map(lambda agent: agent.run(num_turns), agents)]
    assert not events, "the faults are due"
    assert swarm.runs["b"].wait() == 0
    assert sum(agent.num_repeated for agent in agents) > 1
    for turns, (sampling, kind) in zip(found, asked, strict=True):
        assert turns == plain(sampling, num_turns, **kind)
