"""Sixteen texts of stock clients at once, while one server is killed, another is stopped, and a third moves."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.p2p.agents import SCHEMAS, TOOLS
from tests.p2p.test_agents import Swarm
from tests.p2p.warm import SERVING, WarmRun, wait_until
from tests.parity.test_adapted_texts import save_adapter

# Cold starts of peers in this file: none; all are forked from a process that has imported everything.
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing"),  # caused by peft
]

MOVER = (sys.executable, str(Path(__file__).with_name("fast_mover.py")))
JSON = {"type": "json_schema", "json_schema": {"name": "note", "schema": SCHEMAS["note"], "strict": True}}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 160},
    {"temperature": 1.3, "top_p": 0.9, "max_tokens": 130},
    {"temperature": 1.0, "response_format": JSON},
    {"temperature": 1.0, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
]
AT_FIRST = 15  # texts; one more comes later, with a long prompt


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    made = Swarm(tmp_path)
    try:
        for name in "abcd":
            made.start(name, "--stages", 2, "--weights", tmp_path, "--stay", "--share-prefixes", *made.half)
        options = ("--join", made.address, "--share-prefixes", *made.half)
        made.runs["mover"] = WarmRun("serve", *options, program=MOVER, modules=SERVING)
        made.runs["mover"].wait_for("Others can join")
        made.begin_endpoint("--adapter", f"poems={save_adapter('llama', tmp_path / 'adapter')}")
        yield made
    finally:
        for run in made.runs.values():
            if run.process.poll() is None:
                os.kill(run.process.pid, signal.SIGCONT)
        made.end()


def request_of(number: int) -> dict[str, Any]:
    length = 2000 if number == AT_FIRST else 20 + 37 * number % 300
    content = "".join(itertools.islice(itertools.cycle(f"Text {number}. "), length))
    model = "poems" if number % 3 == 1 else "small"
    return {"model": model, "messages": [{"role": "user", "content": content}], "seed": number, **KINDS[number % 4]}


def test_no_text_changes(swarm: Swarm) -> None:
    client = openai.OpenAI(base_url=f"{swarm.url}/v1", api_key="-", max_retries=10, timeout=600.0)
    create: Any = client.chat.completions.create
    begun, have_begun = set[int](), threading.Event()

    def streamed(number: int) -> tuple[str, str, str]:
        content, arguments, reason = "", "", ""
        for chunk in create(**request_of(number), stream=True):
            (choice,) = chunk.choices
            content += choice.delta.content or ""
            arguments += "".join(call.function.arguments for call in choice.delta.tool_calls or [])
            reason = choice.finish_reason or reason
            begun.add(number)
            if len(begun) == AT_FIRST:  # later ones are refused while a stage has no server, and tried again
                have_begun.set()
        return content, arguments, reason

    def replaced() -> float:
        return swarm.metric("replaced_servers_total")

    # The first server looks for others every few seconds.
    wait_until(lambda: len(swarm.of_stage(0) + swarm.of_stage(1)) == 5, "not all servers were found")
    last = swarm.of_stage(1)
    assert "mover" not in last
    before_ns = {name: swarm.work_ns(name) for name in last}
    with ThreadPoolExecutor(16) as pool:
        texts = [pool.submit(streamed, number) for number in range(AT_FIRST)]
        assert have_begun.wait(300.0)
        killed, stopped = sorted(last, key=lambda name: before_ns[name] - swarm.work_ns(name))
        swarm.kill(killed)
        wait_until(lambda: replaced() > 0, "no text needed the server that was killed")
        before = replaced()
        os.kill(swarm.runs[stopped].process.pid, signal.SIGSTOP)
        swarm.runs["mover"].wait_for("Serving stage 1", 300.0)
        assert swarm.metric("num_requests_running") > 1, "no text was under way while a server moved"
        wait_until(lambda: replaced() > before, "no text needed the server that was stopped")
        texts.append(pool.submit(streamed, AT_FIRST))
        os.kill(swarm.runs[stopped].process.pid, signal.SIGCONT)
        found = [text.result() for text in texts]
    assert swarm.metric("prompt_tokens_total") > 2000
    for number, (content, arguments, reason) in enumerate(found):
        alone = create(**request_of(number), extra_body={"exact": True}).choices[0]
        calls = "".join(call.function.arguments for call in alone.message.tool_calls or [])
        assert (content, arguments, reason) == (alone.message.content or "", calls, alone.finish_reason), number
