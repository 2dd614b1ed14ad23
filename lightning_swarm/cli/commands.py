"""The list of commands of `lightning-swarm`. The code of each command is imported when the command runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from lightning_swarm import __version__
from lightning_swarm.cli import arguments, dashboard, http, invite, programs, serving
from lightning_swarm.cli.arguments import Command
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
    lightning-swarm dashboard 203.0.113.7:31337/12D3...             the same on a page, with curves and events
    lightning-swarm plan machines.yaml --config run.yaml            is a swarm worth it, and with how many stages?
    lightning-swarm plan --swarm 203.0.113.7:31337/12D3...          would other settings make a live swarm faster?
    lightning-swarm simulate scenario.yaml                          how a swarm behaves while peers come and go
    lightning-swarm serve --weights my-llama/                       serve a finished model together with others
    lightning-swarm generate 203.0.113.7:31337/12D3... --prompt Hi  and write a text with it

With -v before the command, stderr shows more of its progress; with -vv, everything.
"""

_LEVELS: Final = {"-v": "info", "--verbose": "info", "-vv": "debug"}

_COMMANDS: Final = (
    Command("doctor", arguments.DOCTOR, arguments.add_doctor_arguments, "doctor:run"),
    Command("status", arguments.STATUS, arguments.add_status_arguments, "status:run"),
    Command("dashboard", dashboard.DASHBOARD, dashboard.add_arguments, "dashboard:run"),
    Command("invite", invite.DESCRIPTION, invite.add_arguments, "invite:run"),
    Command("members", arguments.MEMBERS, arguments.add_members_arguments, "members:show_members"),
    Command("ban", arguments.BAN, arguments.add_ban_arguments, "members:ban"),
    Command("unban", arguments.UNBAN, arguments.add_ban_arguments, "members:unban"),
    Command("plan", arguments.PLAN, arguments.add_plan_arguments, "plan:run"),
    Command("export", arguments.EXPORT, arguments.add_export_arguments, "export:run"),
    Command("generate", serving.GENERATE, serving.add_generate_arguments, "serving:run_generate"),
    Command("http", http.HTTP, http.add_http_arguments, "http:run_http"),
    Command("simulate", arguments.SIMULATE, arguments.add_simulate_arguments, "simulate:run"),
    Command("completion", arguments.COMPLETION, arguments.add_completion_arguments, "completion:run"),
)


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
    """Parse the words of a command line; return the function that runs its command and returns the exit status."""
    name = words[0] if words else ""
    # Lightning's parsers of these commands take seconds to build, and need jsonargparse.
    if name in programs.TRAINER_COMMANDS or name in ("-c", "--config"):
        return collecting_rarely()(programs.run_trainer)  # the launcher restores usual collection when `fit` begins
    if name in programs.PEER_COMMANDS:
        return partial(programs.run_peer, name, words[1:])
    return partial(_run, command_parser().parse_args(words))


def _run(parsed: argparse.Namespace) -> int:
    with collecting_rarely():
        run = import_path(f"lightning_swarm.cli.{parsed.run}")
    status: int = run(parsed)
    return status


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. Of the commands in `programs`, it has only the names and help lines."""
    parser = argparse.ArgumentParser(
        prog="lightning-swarm",
        usage="lightning-swarm COMMAND ...",
        description=_DESCRIPTION,
        epilog="For the options of a command: lightning-swarm COMMAND --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    listed = parser.add_subparsers(
        title="commands", prog="lightning-swarm", dest="command", metavar="COMMAND", required=True
    )
    peers = {name: command.line for name, command in programs.PEER_COMMANDS.items()}
    for name, line in {**programs.TRAINER_COMMANDS, **peers}.items():
        listed.add_parser(name, help=line, add_help=False)  # `programs` parses them
    for command in _COMMANDS:
        command.parser(partial(listed.add_parser, command.name, help=command.line))
    return parser
