"""The program that this process runs: how it is run again for this machine's other peers, and by whoever joins."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Final

from lightning_swarm.config import SwarmConfig
from lightning_swarm.errors import ConfigError
from lightning_swarm.network.addresses import Address, widest

_OWN_OPTIONS: Final = (
    "--trainer.devices",
    *(f"--trainer.strategy.{name}" for name in ("role", "initial_peers", "announce", "identity_path")),
)
_BOOTSTRAP: Final = Path(__file__).with_name("_bootstrap.py")


def invitation(config: SwarmConfig, addresses: Sequence[Address]) -> str:
    """The line that lets others join, or start the run that this server waits for."""
    address = widest(addresses)
    only_here = "of this machine only (others: set `listen`, say to 0.0.0.0:31337) "
    where = only_here if address.place.is_loopback else ""
    program = shlex.join(_program())
    if not config.only_serves:
        return f"Peers {where}can join this run: lightning-swarm join {address} {program}"
    if config.initial_peers:
        return (
            f"This peer asks for a place in run {config.run_id!r}. Ctrl-C or SIGTERM has it leave between two steps. "
            f"Peers {where}can join here, too: lightning-swarm join {address} {program}"
        )
    start = (
        f"lightning-swarm fit {program} --trainer.strategy.role both --trainer.strategy.initial_peers {address}"
        if _is_command()
        else f"SwarmStrategy(role='both', initial_peers='{address}')"
    )
    return (
        f"This server waits for its run. A peer {where}starts it with {start}\n"
        f"More servers: lightning-swarm serve {address} {program}"
    )


def _program() -> list[str]:
    """What this process runs, as a person would write it."""
    if _is_command():
        return _for_others(sys.argv[2:])  # the command's own arguments
    return [*(["-m"] if _spec() is not None else []), _program_name(), *sys.argv[1:]]


def _is_command() -> bool:
    """Whether it is `lightning-swarm`, and not a script of the user's."""
    return _program_name() in ("lightning_swarm", "lightning-swarm")


def _program_name() -> str:
    spec = _spec()
    return spec.name.removesuffix(".__main__") if spec is not None else Path(sys.argv[0]).name


def _for_others(arguments: Sequence[str]) -> list[str]:
    """Options of `fit` without those that are this peer's own."""
    kept: list[str] = []
    rest = list(arguments)
    while rest:
        option, has_value, _ = rest[0].partition("=")
        if option.replace(".init_args.", ".") in _OWN_OPTIONS:
            del rest[: 1 if has_value else 2]
        else:
            kept.append(rest.pop(0))
    return kept


def _spec() -> ModuleSpec | None:
    """Of the module that runs as ``__main__``; None for a script. It may have changed since this one was imported."""
    return getattr(sys.modules["__main__"], "__spec__", None)


def of_child() -> list[str]:
    """This script or module again, with the same arguments."""
    # -P: the bootstrap's own folder, this package, must not shadow the standard library's modules.
    python = [sys.executable, "-P", str(_BOOTSTRAP)]
    spec = _spec()
    if spec is not None:
        name = spec.name.removesuffix(".__main__") if spec.name.endswith(".__main__") else spec.name
        return [*python, "-m", name, *sys.argv[1:]]
    script = Path(sys.argv[0])
    if not script.is_file():
        raise ConfigError(
            f"`devices` above 1 starts this script again for every peer, and {sys.argv[0]!r} is no file. "
            "Put the code into a script, or use `devices=1`."
        )
    return [*python, str(script.resolve()), *sys.argv[1:]]
