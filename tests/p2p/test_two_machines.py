"""The pages about several machines, followed literally on two network namespaces with the pages' addresses."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from typing_extensions import override

from benchmarks.hosts import DEVICE, Hosts
from tests.docs import my_project
from tests.docs.commands import lines
from tests.docs.pages import ROOT, blocks, shown
from tests.p2p.warm import Server, Zygote, shared_zygote, wait_until

# Cold starts in this file: the process that all commands are forked from, once in each test; in thorough runs 3 more.

pytestmark = pytest.mark.timeout(900)

_MISSING = Hosts.missing()
NUM_TIMES = 5
_FIRST, _SECOND = "203.0.113.7", "203.0.113.8"
WAITS = r"""(?sx) Asking\ for\ a\ run\ by\ this\ peer's\ certificate\ as\ server\.\n
    .*Asking\ \w+\ for\ a\ stage,\ which\ accepts\ the\ certificate\.\n
    .*Downloading\ stage\ \d\ from\ \d\ peers?:\ .*\ of\ \d+\ bytes\.\n
    .*Comparing\ stage\ \d\ with\ the\ run's\.\n.*In\ run\ 'swarm'\ from\ step"""


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

    def type_in(self, words: list[str], **environment: str) -> Server:
        """Start a command."""
        environment = {"HOME": str(self.home), "XDG_CONFIG_HOME": "", "OMP_NUM_THREADS": "1", **environment}
        return self._zygote.type_in(words, self.folder, netns=self._netns, **environment)

    @contextlib.contextmanager
    def unplugged(self) -> Iterator[None]:
        """Cut the machine off: its peers cannot even report that their connections end."""
        device = ["ip", "-n", self._netns, "link", "set", DEVICE]
        subprocess.run([*device, "down"], check=True)
        yield
        subprocess.run([*device, "up"], check=True)

    def run(self, words: list[str], *, code: int | None = None) -> str:
        """Run a command to its end, and return its output; check its exit code, if one is given."""
        begun = self.type_in(words)
        found = self.code_of(begun)
        assert code in (None, found), begun.said
        return begun.said

    def code_of(self, begun: Server) -> int:
        """Wait for the end of a command, and return its exit code."""
        codes: list[int] = []

        def has_ended() -> bool:
            code = self._zygote.status(begun.pid)
            codes.extend([] if code is None else [code])
            return bool(codes)

        wait_until(has_ended, f"{begun.pid} did not end:\n{begun.said}")
        return codes[0]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    if _MISSING:
        pytest.skip(f"two machines are network namespaces, which need {_MISSING}")
    with _Machines([0.0, 0.0]) as hosts, shared_zygote() as zygote:
        yield [Machine(zygote, hosts.namespace(number), tmp_path / f"machine{number + 1}") for number in range(2)]


def commands(page: str, *, after: str = "") -> list[list[str]]:
    """Return the commands of a page, from the first block that contains a text on."""
    found = [block.text for block in blocks(page) if block.kind == "sh"]
    begin = next(index for index, text in enumerate(found) if after in text)
    return [words for text in found[begin:] for words in lines(text)]


def edited(script: str, page: str) -> str:
    """Return the quickstart's script with the changes that a page asks for."""
    strategy = next(block.text for block in blocks(page) if block.kind == "python")
    [call] = re.findall(r"^strategy = (SwarmStrategy\(.*\))$", strategy, re.MULTILINE | re.DOTALL)
    assert script.count("SwarmStrategy(num_stages=2)") == 1
    [length] = re.findall(r"Set `(max_epochs=\d+)`", (ROOT / page).read_text())
    assert script.count("max_epochs=1,") == 1
    return script.replace("SwarmStrategy(num_stages=2)", call).replace("max_epochs=1,", f"{length},")


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
        invite[4:6] = ["--uses", str(devices)] if devices > 1 else []
        invites = shlex.split(wait_for(self.run, "Only peers with an invitation").partition("in private: ")[2])
        assert invites == invite
        self.address = printed[2]
        self.first.run(invites)
        shutil.copy(self.first.folder / "swarm.invite", self.second.folder)
        self.doctor, self.join = (with_address(words, self.address) for words in (doctor, join))
        assert self.join == [*printed[:3], "--listen", "0.0.0.0:31337", *printed[3:]]

    def peers_at(self, host: str, *, number: int) -> set[str]:
        """Return the ids of a host's peers that hold stages, once there are as many."""
        found: set[str] = set()

        def look() -> bool:
            nonlocal found
            said = self.first.run(["lightning-swarm", "status", self.address, "--json"])
            peers = json.loads(said.splitlines()[-1])["peers"]
            found = {one["peer_id"] for one in peers if one["place"].startswith(f"{host}:") and one["stages"]}
            return len(found) == number

        wait_until(look, f"{number} peers of {host} do not serve")
        return found


def test_the_second_machine_joins_as_printed_and_comes_back_after_each_kill(machines: list[Machine]) -> None:
    """It returns as the same peer each time, because the invitation has one use."""
    pair = Pair(machines, devices=1)
    report = pair.second.run(pair.doctor)
    assert "WRONG" not in report, report
    assert "WARN" not in report, report
    for _ in range(NUM_TIMES):
        joined = pair.second.type_in(pair.join)
        wait_for(joined, "In run 'swarm' from step")
        assert re.search(WAITS, joined.said), joined.said
        kill(joined)
    assert pair.run.alive, pair.run.said


def test_an_agent_follows_its_page(machines: list[Machine]) -> None:
    """The page `agents.md`, command by command: the usual lines come in the page's order, and the codes are its."""
    page = "docs/agents.md"
    pair = Pair(machines, devices=1)
    *doctors, join, status = (with_address(words, pair.address) for words in commands(page))
    for words in doctors:
        assert pair.second.run(words, code=0).count("WRONG") == 0
    assert join[join.index(">") :] == [">", "join.log", "2>&1"]
    joined = pair.second.type_in(join[: join.index(">")])
    wait_for(joined, "In run 'swarm' from step")
    report = json.loads(pair.second.run(status, code=0).splitlines()[-1])
    assert [bool(one["stages"]) for one in report["peers"] if one["place"] == f"{_SECOND}:31337"] == [True]
    os.kill(joined.pid, signal.SIGTERM)
    assert pair.second.code_of(joined) == 0, joined.said
    table = (ROOT / page).read_text().partition("| line | action |")[2].partition("\n\n")[0]
    usual = [
        re.escape(text).replace(r"\.\.\.", "[^\n]*") for text in re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    ]
    assert len(usual) == 10
    assert re.search(".*\n.*".join(usual), joined.said, re.DOTALL), joined.said
    # An address at which nobody is, with its code.
    silent = [word.replace(":31337/", ":31338/") for word in join[: join.index(">")]]
    assert "a peer to join must answer at the address" in pair.second.run(silent, code=1)


@pytest.mark.thorough
@pytest.mark.exhaustive
def test_each_process_of_a_machine_comes_back_as_itself(machines: list[Machine]) -> None:
    """This also works if the run has not detected its death: its network is cut before it is killed."""
    pair = Pair(machines, devices=2)
    found = []
    for _ in range(2):
        joined = pair.second.type_in(pair.join)
        wait_for(joined, "In run 'swarm' from step")
        found.append(pair.peers_at(_SECOND, number=2))
        with pair.second.unplugged():
            kill(joined)
    assert found[0] == found[1]
    assert pair.run.alive, pair.run.said


@pytest.mark.thorough
def test_servers_wait_and_a_run_from_a_file_is_joined(machines: list[Machine]) -> None:
    """The page `join.md`: `serve` on both machines, then `join` with a file."""
    page = "docs/join.md"
    first, second = machines
    typed = [words for words in commands(page) if words[0] == "lightning-swarm"]
    serve_first, serve_second = (words for words in typed if words[1] == "serve")
    [join] = (words for words in typed if words[1] == "join" and "--config" in words)
    for machine in machines:
        (machine.folder / "train.py").write_text(shown(page)["train.py"].replace("devices=4", "devices=1"))
        (machine.folder / "run.yaml").write_text(shown(page)["run.yaml"])
        shutil.copy(my_project.__file__, machine.folder)
    waiting = first.type_in(serve_first)
    address = re.findall(rf"{_FIRST}:31337/\w+", wait_for(waiting, "More servers: "))[0]
    invite(first, second, "lightning-swarm invite --role server --out swarm.invite")
    guest = second.type_in(with_address(serve_second, address), SWARM_INVITE_FILE="swarm.invite")
    wait_for(guest, "asks to join run 'swarm'")
    kill(guest)
    kill(waiting)

    run = first.type_in(
        shlex.split("lightning-swarm fit --config run.yaml --trainer.accelerator cpu --trainer.devices 1")
    )
    address = re.findall(rf"{_FIRST}:31337/\w+", wait_for(run, "can join this run: "))[0]
    joined = second.type_in(with_address(join, address), SWARM_INVITE_FILE="swarm.invite")
    wait_for(joined, "In run 'swarm' from step")
    kill(joined)
    kill(run)


@pytest.mark.thorough
def test_a_model_is_served_and_tuned(machines: list[Machine]) -> None:
    """The pages `serving.md` and `finetune.md`, with a model whose tokens are letters."""
    from tests.p2p.test_serving import save  # imports transformers

    first, second = machines
    for machine in machines:
        save(machine.folder / "my-llama")
    typed = [words for words in commands("docs/serving.md") if words[0] == "lightning-swarm"]
    serve_first, serve_second = [words for words in typed if words[1] == "serve"][:2]
    generate = next(words for words in typed if words[1] == "generate")
    serving = first.type_in(serve_first)
    joining = shlex.split(wait_for(serving, "Others can join: ").partition(": ")[2])
    writing = shlex.split(wait_for(serving, "To write a text: ").partition(": ")[2])
    address = joining[-1]
    assert with_invitation(joining, serve_second) == with_address(serve_second, address)
    assert with_invitation(writing, generate) == with_address(generate, address)
    guest = second.type_in(joining)
    wait_for(guest, "Others can join ")
    wait_for(serving, "came with stages 0 to 3")  # the first server looks for others every few seconds
    said = second.run([*writing[:-1], "a b c"])
    assert re.search(r"\d+ tokens, ", said), said
    said = first.run(["lightning-swarm", "status", address])
    assert said.count("0-3") == 2, said
    for words in typed:
        if words[1] == "invite":
            invite(first, second, shlex.join(words))

    script = (ROOT / "examples" / "tuning" / "tune.py").read_text()
    invited = script.replace("AttachStrategy(address)", 'AttachStrategy(address, invite="writer.invite")')
    assert invited != script
    (second.folder / "tune.py").write_text(invited)
    (second.folder / "text").write_text("a b c d e f g h " * 40)
    said = second.run(["python", "tune.py", address, "text", "my-adapter"])
    assert "It writes: a b c d e f g h a b c d" in said, said
    adapted = next(words for words in commands("docs/finetune.md") if "--adapter" in words)
    said = second.run([*with_address(adapted, address), "--invite", "writer.invite"])
    assert re.search(r"\d+ tokens, ", said), said
    for server in (guest, serving):
        assert server.alive, server.said
        kill(server)


def invite(first: Machine, second: Machine, command: str) -> None:
    """Write an invitation on the first machine, and copy it to the second."""
    words = shlex.split(command)
    first.run(words)
    shutil.copy(first.folder / words[-1], second.folder)


def with_invitation(printed: list[str], typed: list[str]) -> list[str]:
    """Return a printed command with the page's invitation in place of its own."""
    place = printed.index("--invite") + 1
    assert len(printed[place]) > 300
    return [*printed[:place], typed[place], *printed[place + 1 :]]


def with_address(words: list[str], address: str) -> list[str]:
    """Return a page's command with a printed address in place of the page's."""
    return [re.sub(rf"{_FIRST}:31337/12D3\w*\.\.\.", address, word) for word in words]
