"""The pages about several machines, followed to the letter on two: network namespaces with the pages' addresses."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from typing_extensions import override

from benchmarks.hosts import Hosts
from tests.docs.commands import lines
from tests.docs.pages import blocks, shown
from tests.p2p.warm import Server, Zygote, wait_until

# Cold starts in this file: 1, the process that all commands are forked from, and 6 further peers of `devices=2`.

pytestmark = pytest.mark.timeout(900)

_MISSING = Hosts.missing()
NUM_TIMES = 5
_PRINTED = "12D3KooW..."
_FIRST, _SECOND = "203.0.113.7", "203.0.113.8"


class _Machines(Hosts):
    """Two hosts that have the addresses of the pages."""

    @staticmethod
    @override
    def address(number: int) -> str:
        return (_FIRST, _SECOND)[number]


class Machine:
    """A machine of the pages: a namespace, with a home and a working folder of its own."""

    def __init__(self, zygote: Zygote, netns: str, folder: Path) -> None:
        self._zygote, self._netns = zygote, netns
        self.folder, self.home = folder / "work", folder / "home"
        self.folder.mkdir(parents=True)
        self.home.mkdir()
        self.begun: list[Server] = []

    def type_in(self, words: list[str]) -> Server:
        """Begin a command."""
        home = {"HOME": str(self.home), "XDG_CONFIG_HOME": "", "OMP_NUM_THREADS": "1"}
        self.begun.append(self._zygote.type_in(words, self.folder, netns=self._netns, **home))
        return self.begun[-1]

    def run(self, words: list[str]) -> str:
        """Run a command to its end, and return its output."""
        begun = self.type_in(words)
        wait_until(lambda: not begun.alive, f"{words} did not end:\n{begun.said}")
        return begun.said


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    if _MISSING:
        pytest.skip(f"two machines are network namespaces, which need {_MISSING}")
    zygote = Zygote(tmp_path)
    with _Machines([0.0, 0.0]) as hosts:
        found = [Machine(zygote, hosts.namespace(number), tmp_path / f"machine{number + 1}") for number in range(2)]
        try:
            yield found
        finally:
            zygote.close()


def commands(page: str, *, after: str = "") -> list[list[str]]:
    """The commands of a page, from the first block that contains a text on."""
    found = [block.text for block in blocks(page) if block.kind == "sh"]
    begin = next(index for index, text in enumerate(found) if after in text)
    return [words for text in found[begin:] for words in lines(text)]


def edited(script: str, page: str) -> str:
    """The quickstart's script with the changes that a page asks for."""
    strategy = next(block.text for block in blocks(page) if block.kind == "python")
    [call] = re.findall(r"^strategy = (SwarmStrategy\(.*\))$", strategy, re.MULTILINE)
    assert script.count("SwarmStrategy(num_stages=2)") == 1
    assert script.count("max_steps=20)") == 1
    return script.replace("SwarmStrategy(num_stages=2)", call).replace("max_steps=20)", "max_steps=20000)")


def wait_for(server: Server, text: str, *, times: int = 1) -> str:
    """Wait until as many lines of a command's output have a text, and return the last one."""

    def found() -> list[str]:
        return [line for line in server.said.splitlines() if text in line]

    with contextlib.suppress(AssertionError):
        wait_until(lambda: len(found()) >= times or not server.alive, "")
    assert len(found()) >= times, f"{text!r} was printed {len(found())} times, not {times}:\n{server.said}"
    return found()[-1]


def kill(server: Server) -> None:
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not server.alive, f"{server.pid} outlives kill -9")


class Pair:
    """The page `two_machines.md` up to the point where the second machine joins."""

    def __init__(self, machines: list[Machine], *, devices: int) -> None:
        page = "docs/two_machines.md"
        self.first, self.second = machines
        script = edited(shown(page)["train.py"], page).replace("devices=4", f"devices={devices}")
        for machine in machines:
            (machine.folder / "train.py").write_text(script)
        typed = [words for words in commands(page) if words[0] in ("python", "lightning-swarm")]
        train, invite, doctor, join = typed
        self.run = self.first.type_in(train)
        printed = shlex.split(wait_for(self.run, "can join this run: ").partition("can join this run: ")[2])
        invite[3:5] = ["server", "--uses", str(devices)] if devices > 1 else ["server"]
        invites = shlex.split(wait_for(self.run, "Only peers with an invitation").partition("in private: ")[2])
        self.address = printed[2]
        self.first.run(invites)
        shutil.copy(self.first.folder / "swarm.invite", self.second.folder)
        self.doctor, self.join = (
            [word.replace(f"{_FIRST}:31337/{_PRINTED}", self.address) for word in words] for words in (doctor, join)
        )
        assert self.join == [*printed[:3], "--listen", "0.0.0.0:31337", *printed[3:]]


def test_the_second_machine_joins_as_printed_and_comes_back_after_each_kill(machines: list[Machine]) -> None:
    pair = Pair(machines, devices=1)
    report = pair.second.run(pair.doctor)
    assert "WRONG" not in report, report
    assert "WARN" not in report, report
    for _ in range(NUM_TIMES):
        joined = pair.second.type_in(pair.join)
        wait_for(joined, "In run 'swarm' from step")
        kill(joined)
    assert pair.run.alive, pair.run.said


def test_unnoticed(machines: list[Machine]) -> None:
    pair = Pair(machines, devices=1)
    for _ in range(3):
        joined = pair.second.type_in(pair.join)
        wait_for(joined, "In run 'swarm' from step")
        import subprocess

        ns = pair.second._netns
        subprocess.run(f"ip -n {ns} link set uplink down".split(), check=True)
        kill(joined)
        import time

        time.sleep(1)
        subprocess.run(f"ip -n {ns} link set uplink up".split(), check=True)
    joined = pair.second.type_in(pair.join)
    try:
        wait_for(joined, "In run 'swarm' from step")
    finally:
        print(joined.said, pair.run.said)
    assert pair.run.alive, pair.run.said


def peers_at(host: str, machine: Machine, address: str, *, number: int) -> set[str]:
    """The ids of a host's peers that hold stages, once there are as many."""
    found: set[str] = set()

    def look() -> bool:
        nonlocal found
        said = machine.run(["lightning-swarm", "status", address, "--json"])
        peers = json.loads(said.splitlines()[-1])["peers"]
        print([(p["peer_id"][-4:], p["place"], p["stages"], p["step"], p["problem"]) for p in peers])
        found = {one["peer_id"] for one in peers if one["place"].startswith(f"{host}:") and one["stages"]}
        return len(found) == number

    wait_until(look, f"{number} peers of {host} do not serve")
    return found
