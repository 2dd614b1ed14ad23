"""The command `generate --version`: let a run that trains write a text."""

from __future__ import annotations

import argparse
import secrets
from typing import Final

from lightning_swarm.cli.output import say
from lightning_swarm.cli.visitors import visiting
from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.core.readable import printable_lines
from lightning_swarm.monitor import members
from lightning_swarm.network.addresses import Address
from lightning_swarm.peer.config import DEFAULT_RUN_ID
from lightning_swarm.protocol.messages.inference import RunTextRequest
from lightning_swarm.protocol.messages.wire import decode, encode

_CALL_TIMEOUT_S: Final = 10.0  # timeout of each question about the run
_TEXT_TIMEOUT_S: Final = 3600.0  # timeout of a text, which waits for the ends of steps


def write_with_run(arguments: argparse.Namespace) -> int:
    """Ask the lead of a run that trains to continue the prompt; returns the exit status."""
    for option, value in (("--weights", arguments.weights), ("--adapter", arguments.adapter)):
        if value is not None:
            raise ConfigError(f"`{option}` is for served models, and `--version` for runs that train. Leave one out.")
    address, seed = Address.parse(arguments.address), arguments.seed
    if arguments.sample and seed is None:
        seed = secrets.randbits(62)
    try:
        request = RunTextRequest(
            prompt=arguments.prompt,
            max_new_tokens=arguments.max_new_tokens,
            follows=arguments.version == "follow",
            seed=seed if arguments.sample else None,
            temperature=arguments.temperature,
        )
        request = decode(encode(request), RunTextRequest)  # checks the ranges
    except ProtocolError as error:
        raise ConfigError(f"options of a text must be within their ranges: {error.__cause__}. Correct them.") from error
    credentials = argparse.Namespace(invite=arguments.invite, run_id=DEFAULT_RUN_ID, owner=None)
    with (
        visiting(credentials, "generate", str(address)) as visitor,
        members.asking(address, timeout=_CALL_TIMEOUT_S, visitor=visitor) as run,
    ):
        say("Waiting until a step of the run ends.")
        answer = run.ask_lead(request, timeout=_TEXT_TIMEOUT_S)
    print(arguments.prompt + printable_lines(answer.text), flush=True)  # noqa: T201 - a command
    steps = f"step {answer.steps[0]}" if len(answer.steps) == 1 else f"steps {answer.steps[0]} to {answer.steps[-1]}"
    say(f"{answer.num_tokens} tokens, written with the weights of {steps}")
    return 0
