"""The command `lightning-swarm`: its list of commands. The code of each is imported when it runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from lightning_swarm import __version__
from lightning_swarm.cli import arguments, invite, programs, serving
from lightning_swarm.core.errors import ConfigError, SwarmError
from lightning_swarm.core.import_hook import import_path
from lightning_swarm.core.process import LOG, collecting_rarely, follow_environment

_DESCRIPTION: Final = """\
Train one large PyTorch Lightning model on a swarm of slow, unequal machines.

    lightning-swarm doctor                                          is this machine fit to be a peer?
    lightning-swarm fit --model my_project.Net --data my_project.Data --trainer.devices 4
    lightning-swarm join 203.0.113.7:31337/12D3... train.py         help a run that another machine started
    lightning-swarm invite --role server --out anna.invite          let another machine join your run
    lightning-swarm ban 203.0.113.7:31337/12D3... 12D3...           and expel a peer from it
    lightning-swarm status 203.0.113.7:31337/12D3...                the stages, their peers and their speed
    lightning-swarm plan machines.yaml --config run.yaml            is it worth it, and with how many stages?
    lightning-swarm plan --swarm 203.0.113.7:31337/12D3...          would it do better with other settings?
    lightning-swarm simulate scenario.yaml                          what a swarm would do, without one
    lightning-swarm serve --weights my-llama/                       serve a finished model with others
    lightning-swarm generate 203.0.113.7:31337/12D3... --prompt Hi  and let it write a text

With -v before the command, stderr says more of what happens; with -vv, all.
"""

_LEVELS: Final = {"-v": "info", "--verbose": "info", "-vv": "debug"}


@dataclass(frozen=True)
class _Command:
    """A command that argparse parses; its code is imported when it runs."""

    line: str  # one line for the list of commands, and first in the command's own help
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: str  # ``module:function``, which takes the parsed arguments and returns the exit status


_COMMANDS: Final = {
    "doctor": _Command(
        "Check whether this machine can be a peer: what is wrong, and what to do.",
        arguments.DOCTOR,
        arguments.add_doctor_arguments,
        "lightning_swarm.cli.doctor:run",
    ),
    "status": _Command(
        "Show a live swarm: stages, peers, step, rates.",
        arguments.STATUS,
        arguments.add_status_arguments,
        "lightning_swarm.cli.status:run",
    ),
    "invite": _Command(
        "Write an invitation to a run that this machine started.",
        invite.DESCRIPTION,
        invite.add_arguments,
        "lightning_swarm.cli.invite:run",
    ),
    "members": _Command(
        "Show who came to a run, by which invitation, and who was banned.",
        arguments.MEMBERS,
        arguments.add_members_arguments,
        "lightning_swarm.cli.members:show_members",
    ),
    "ban": _Command(
        "Ban a peer, or all that came by an invitation, from a run.",
        arguments.BAN,
        arguments.add_ban_arguments,
        "lightning_swarm.cli.members:ban",
    ),
    "unban": _Command("Lift a ban.", arguments.UNBAN, arguments.add_ban_arguments, "lightning_swarm.cli.members:ban"),
    "plan": _Command(
        "Say what a swarm of some machines would do with a model, and whether it pays.",
        arguments.PLAN,
        arguments.add_plan_arguments,
        "lightning_swarm.cli.plan:run",
    ),
    "export": _Command(
        "Write a checkpoint's weights to a safetensors file or a Hugging Face folder, or as a single file.",
        arguments.EXPORT,
        arguments.add_export_arguments,
        "lightning_swarm.cli.export:run",
    ),
    "generate": _Command(
        "Write a text with a served model, as it comes.",
        serving.GENERATE,
        serving.add_generate_arguments,
        "lightning_swarm.cli.serving:run_generate",
    ),
    "http": _Command(
        "Answer OpenAI's HTTP protocol for served models.",
        serving.HTTP,
        serving.add_http_arguments,
        "lightning_swarm.cli.serving:run_http",
    ),
    "simulate": _Command(
        "Simulate a swarm whose peers come and go: how fast it would be, by which rule.",
        arguments.SIMULATE,
        arguments.add_simulate_arguments,
        "lightning_swarm.cli.simulate:run",
    ),
}


def main() -> int:
    """Run the command line; returns the exit status."""
    try:
        if sys.argv[1:] and sys.argv[1] in _LEVELS:
            os.environ[LOG] = _LEVELS[sys.argv.pop(1)]
        follow_environment()
        return _command(sys.argv[1:] or ["--help"])()
    except SwarmError as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        print(f"lightning-swarm: error: {text}", file=sys.stderr)  # noqa: T201 - a command
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130  # the status that shells report for Ctrl-C


def _command(words: Sequence[str]) -> Callable[[], int]:
    name = words[0] if words else ""
    # Lightning's own parsers of these commands take seconds to build, and need jsonargparse.
    if name in programs.TRAINER_COMMANDS or name in ("-c", "--config"):
        return collecting_rarely()(programs.run_trainer)  # ends when `fit` begins
    if name in programs.PEER_COMMANDS:
        return partial(programs.run_peer, name, words[1:])
    return partial(_run, _parser().parse_args(words))


def _run(parsed: argparse.Namespace) -> int:
    with collecting_rarely():
        run = import_path(_COMMANDS[parsed.command].run)
    status: int = run(parsed)
    return status


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="lightning-swarm",
        usage="lightning-swarm COMMAND ...",
        description=_DESCRIPTION,
        epilog="lightning-swarm COMMAND --help says more.",
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    listed = parser.add_subparsers(
        title="commands", prog="lightning-swarm", dest="command", metavar="COMMAND", required=True
    )
    for name, line in {**programs.TRAINER_COMMANDS, **programs.PEER_COMMANDS}.items():
        listed.add_parser(name, help=line, add_help=False)  # they are parsed elsewhere
    for name, command in _COMMANDS.items():
        description = command.description.format(what=command.line)
        command.add_arguments(listed.add_parser(name, help=command.line, description=description, formatter_class=raw))
    return parser
