"""`join` and `serve`: run the same program as the run's starter, as another peer of the run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, get_args

from lightning_swarm.cli.trainer import run_trainer
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.network.addresses import Address, HostPort
from lightning_swarm.peer import _bootstrap
from lightning_swarm.peer.config import Preemption
from lightning_swarm.peer.process import IDENTITY, JOIN, LISTEN, PREEMPTION, ROLE
from lightning_swarm.strategy.launcher import SwarmLauncher

COMMANDS: Final[Mapping[str, str]] = {
    "join": "Join a run that another machine started. Needs no data.",
    "serve": "Hold stages, and nothing else, for a run that is or will be started elsewhere.",
}
_OPTIONS: Final = ("--listen", "--identity", "--preemption")

_ADDRESS: Final = "203.0.113.7:31337/12D3..."

_DESCRIPTIONS: Final = {
    "join": f"""\
{{what}} Takes what the run's starter prints: its address, and the program that it runs.

    lightning-swarm join {_ADDRESS} train.py
    lightning-swarm join {_ADDRESS} --listen 0.0.0.0:31337 train.py --width 512
    lightning-swarm join {_ADDRESS} -m my_project.train
    lightning-swarm join {_ADDRESS} --config run.yaml
    lightning-swarm join {_ADDRESS} --model my_project.Net

The program must build the same model as the starter's. Its first `fit` serves until the run is over and then ends the
process with exit status 0. If it has data, and the process that leads the run dies, it may come to lead: then `fit`
trains, and the program goes on behind it. If its strategy's `role` is "both" or "trainer" it trains beside the lead at
once, with data of its own, where the run takes trainers.

Ctrl-C or SIGTERM has it leave the run: it serves until the next record that can spare it, and ends with exit status 0;
a second one ends it at once. With --preemption it heeds the notice of a cloud that takes the machine away, too.
""",
    "serve": f"""\
{{what}}

    lightning-swarm serve {_ADDRESS} train.py    for a run that is there
    lightning-swarm serve --listen 0.0.0.0:31337 train.py       for one that will be: prints how to start it
    lightning-swarm serve --listen 0.0.0.0:31337 --config run.yaml

As `join`, but whatever `role` the program's strategy has, it reads no data and trains nothing; and it may come first.
""",
}


def run(name: str, arguments: Sequence[str]) -> int:
    """Run `join` or `serve`; returns the exit status, unless the program ends the process with one of its own.

    Raises a ConfigError if the program cannot be found, or trains on no swarm.
    """
    own, program = _split(arguments, address_first=name == "join")
    parser = _parser(name)
    environment = _environment(name, parser.parse_args(own))
    if not program:
        parser.error("say what to run, as the starter prints it: a script, -m MODULE, --config FILE or --model CLASS")
    os.environ.update(environment)
    if program[0].startswith("-") and program[0] != "-m":
        sys.argv[1:] = ["fit", *program]
        run_trainer()
    else:
        if program[0] != "-m" and not Path(program[0]).is_file():
            raise ConfigError(
                f"`{name}` must be told what to run: a script, -m MODULE, --config FILE or --model CLASS. "
                f"{program[0]!r} is no file here. Check the path; what is an option of {name} comes before it."
            )
        _bootstrap.run(program)
    if not SwarmLauncher.launched:
        raise ConfigError(
            f"what is to {name} a run must train with `strategy=SwarmStrategy(...)`: {program[0]} ended, and no such "
            "Trainer was asked to `fit`. Give it the strategy that the starter has."
        )
    return 0


def _split(arguments: Sequence[str], *, address_first: bool) -> tuple[list[str], list[str]]:
    """Split the command line into this command's own arguments, and the program with its arguments."""
    own: list[str] = []
    program = list(arguments)
    has_address = False
    while program:
        if program[0] in _OPTIONS:
            own += program[:2]
            del program[:2]
        elif program[0].startswith(tuple(f"{option}=" for option in _OPTIONS)) or program[0] in ("-h", "--help"):
            own.append(program.pop(0))
        elif not has_address and not program[0].startswith("-") and (address_first or _looks_like_address(program[0])):
            has_address = True
            own.append(program.pop(0))
        else:
            break
    return own, program


def _looks_like_address(text: str) -> bool:
    return (":" in text or text.startswith(("/ip4/", "/ip6/", "/dns"))) and not Path(text).exists()


def _parser(name: str) -> argparse.ArgumentParser:
    address, optional = ("ADDRESS", None) if name == "join" else ("[ADDRESS]", "?")
    parser = argparse.ArgumentParser(
        prog=f"lightning-swarm {name}",
        usage=f"lightning-swarm {name} {address} [options] PROGRAM [its arguments]",
        description=_DESCRIPTIONS[name].format(what=COMMANDS[name]),
        epilog="PROGRAM: a script, -m MODULE, or --config FILE or --model CLASS with options of `lightning-swarm fit`.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("address", nargs=optional, metavar="ADDRESS", help="of any peer of the run, as HOST:PORT/ID")
    parser.add_argument(
        "--listen",
        metavar="IP[:PORT]",
        help="where this peer listens; 0.0.0.0 for all networks (default: the program's)",
    )
    parser.add_argument("--identity", metavar="FILE", help="of this peer's key, made if missing: keeps its id")
    parser.add_argument(
        "--preemption",
        choices=get_args(Preemption),
        help="whose notice to heed that this machine is to go; auto: whichever answers (default: the program's)",
    )
    return parser


def _environment(name: str, chosen: argparse.Namespace) -> dict[str, str]:
    """The environment variables that make the program join."""
    variables = {}
    if chosen.address:
        variables[JOIN] = str(Address.parse(chosen.address))
    if chosen.listen:
        variables[LISTEN] = str(HostPort.to_listen(chosen.listen))
    if chosen.identity:
        variables[IDENTITY] = chosen.identity
    if chosen.preemption:
        variables[PREEMPTION] = chosen.preemption
    if name == "serve":
        variables[ROLE] = "server"
    return variables
