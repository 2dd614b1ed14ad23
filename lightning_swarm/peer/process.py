"""How the processes of peers are started: the settings of a process, and the commands by which other machines join.

A process receives settings in environment variables, from the first peer of its machine or from the command line.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Final, cast

from lightning_swarm.core import program
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.network.addresses import Address, HostPort, most_reachable
from lightning_swarm.peer.config import DEFAULT_RUN_ID, PeerRole, Preemption, SwarmConfig
from lightning_swarm.peer.entry import Entry, further_identity
from lightning_swarm.peer.kept_identity import PeerStart, keep_identity

# Options of `fit` that are for this peer alone, so the command for other peers leaves them out.
_OWN_OPTIONS: Final = (
    "--trainer.devices",
    *(f"--trainer.strategy.{name}" for name in ("role", "initial_peers", "announce", "identity_path", "invite")),
)
_EXAMPLE_INVITE: Final = "swarm.invite"
_ANY_SCRIPT: Final = "SCRIPT.py"
_BOOTSTRAP: Final = Path(__file__).with_name("_bootstrap.py")

# Environment variables. Each overrides the script's own setting.
JOIN: Final = "SWARM_JOIN"  # addresses of peers, a space between them
LISTEN: Final = "SWARM_LISTEN"
ANNOUNCE: Final = "SWARM_ANNOUNCE"  # addresses, a space between them; empty: the addresses that this peer listens on
IDENTITY: Final = "SWARM_IDENTITY"  # key file of the machine's first peer; empty: the key kept for this user and run
ROLE: Final = "SWARM_ROLE"
INVITE: Final = "SWARM_INVITE_FILE"
PREEMPTION: Final = "SWARM_PREEMPTION"
# 0: peers of one machine connect as if they were on different machines, to emulate a network on one machine.
NEIGHBOURS: Final = "SWARM_NEIGHBOURS"
_RUN: Final = "SWARM_RUN_ID"
_RANK: Final = "SWARM_LOCAL_RANK"
_TRAINS: Final = "SWARM_TRAINS"  # not empty: this process, a child of the first peer, also reads data
_LAUNCH: Final = "SWARM_LAUNCH_ID"


def how_to_join(config: SwarmConfig, addresses: Sequence[Address], entry: Entry | None, *, num_peers: int = 1) -> str:
    """Return instructions for other peers to join, or to start the run that this server waits for."""
    # `num_peers` is the number of peers that a machine starts when it runs this program.
    address = most_reachable(addresses)
    only_here = "of this machine only (others: set `listen`, say to 0.0.0.0:31337) "
    where = only_here if address.host_port.is_loopback else ""
    if _is_command():
        words = shlex.join(_for_others(sys.argv[2:]))  # the command's own arguments
    elif _spec() is None and not hasattr(sys.modules["__main__"], "__file__"):  # a notebook or a prompt has no script
        words = _ANY_SCRIPT
    elif _spec() is not None:
        words = shlex.join(["-m", _program_name(), *program.module_arguments(_program_name())])
    else:
        words = shlex.join([_program_name(), *program.own_arguments(_main_file())])
    join = f"{address} {words}" if entry is None else f"{address} --invite {_EXAMPLE_INVITE} {words}"
    waits = config.only_serves and not config.initial_peers
    if waits:
        text = (
            f"This server waits for its run. A peer {where}starts it with {_start_command(address, words, entry)}\n"
            f"More servers: lightning-swarm serve {join}"
        )
    elif config.only_serves:
        text = (
            f"This peer asks to join run {config.run_id!r}. On Ctrl-C or SIGTERM it leaves between two steps. "
            f"Peers {where}can join here, too: lightning-swarm join {join}"
        )
    else:
        text = f"Peers {where}can join this run: lightning-swarm join {join}"
    if words == _ANY_SCRIPT:
        text = f"{text} ({_ANY_SCRIPT}: a script that builds the same module and calls `fit`)"
    if entry is None:
        return text
    return f"{text}\n{_how_to_invite(config, entry, 'trainer' if waits else 'server', num_peers)}"


def _start_command(address: Address, words: str, entry: Entry | None) -> str:
    if _is_command():
        invite = "" if entry is None else f" --trainer.strategy.invite {_EXAMPLE_INVITE}"
        options = f"--trainer.strategy.role both --trainer.strategy.initial_peers {address}"
        return f"lightning-swarm fit {words} {options}{invite}"
    invite = "" if entry is None else f", invite={_EXAMPLE_INVITE!r}"
    return f"SwarmStrategy(role='both', initial_peers='{address}'{invite})"


def _how_to_invite(config: SwarmConfig, entry: Entry, role: str, num_peers: int) -> str:
    run = "" if config.run_id == DEFAULT_RUN_ID else f" --run-id {shlex.quote(config.run_id)}"
    uses = f" --uses {num_peers}" if num_peers > 1 else ""
    command = f"lightning-swarm invite --role {role}{uses}{run} --out {_EXAMPLE_INVITE}"
    how = (
        "Make the file on this machine, and send it in private" if entry.is_owner else "The run's owner makes the file"
    )
    return f"Only peers with an invitation are admitted. {how}: {command}"


def _is_command() -> bool:
    """Return whether the program is `lightning-swarm`, and not a script of the user's."""
    return _program_name() in ("lightning_swarm", "lightning-swarm")


def _program_name() -> str:
    spec = _spec()
    return spec.name.removesuffix(".__main__") if spec is not None else Path(sys.argv[0]).name


def _for_others(arguments: Sequence[str]) -> list[str]:
    """Return the options of `fit` without those in `_OWN_OPTIONS`."""
    kept: list[str] = []
    rest = list(arguments)
    while rest:
        option, has_value, _ = rest[0].partition("=")
        if option.replace(".init_args.", ".") in _OWN_OPTIONS:  # LightningCLI accepts both spellings
            del rest[: 1 if has_value else 2]
        else:
            kept.append(rest.pop(0))
    return kept


def _spec() -> ModuleSpec | None:
    """Return the spec of the program's main module; None for a script. Not cached, because `runpy` may replace it."""
    return getattr(sys.modules["__main__"], "__spec__", None)


def _main_file() -> str:
    return getattr(sys.modules["__main__"], "__file__", None) or sys.argv[0]


def child_command() -> list[str]:
    """Return the command line that runs this script or module again in a child process, with the same arguments."""
    # -P: modules in the folder of the bootstrap, this package, must not shadow those of the standard library.
    python = [sys.executable, "-P", str(_BOOTSTRAP)]
    if _spec() is not None:
        return [*python, "-m", _program_name(), *program.module_arguments(_program_name())]
    name = _main_file()
    script = program.start_folder() / name
    if not script.is_file():
        raise ConfigError(
            f"`devices` above 1 starts this script again for every peer, but {name!r} is no file. "
            "Put the code into a script, or use `devices=1`."
        )
    return [*python, str(script.resolve()), *program.own_arguments(str(script))]


def local_rank() -> int:
    """Return the index of this process among the peers of its machine."""
    return int(os.environ.get(_RANK, "0"))


def is_trainer() -> bool:
    """Return whether the first peer of this machine started this process to train, too."""
    return bool(os.environ.get(_TRAINS))


def talks_to_neighbours() -> bool:
    """Return whether this peer connects to other peers of its machine directly, not through their libp2p daemons."""
    value = os.environ.get(NEIGHBOURS, "1")
    if value not in ("0", "1"):
        raise ConfigError(f"the variable {NEIGHBOURS} must be 0 or 1, got {value!r}. Leave it out for 1.")
    return value == "1"


def environment_tunes_malloc() -> bool:
    """Return whether the environment sets how glibc handles freed memory; the swarm must not override that."""
    return any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)


def launch_id() -> str:
    """Return the id of the launch that started this process; empty in the first peer of a launch."""
    return os.environ.get(_LAUNCH, "")


def addresses_for_children(config: SwarmConfig, announced: Sequence[str]) -> list[str]:
    """Return addresses at which the other peers of this machine reach the first peer, whose settings are `config`."""
    if not config.announce or not config.listen.port:
        return [*announced]
    # Many routers cannot route from the inside to their own outside address.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.listen.host, config.listen.host)
    return [str(Address(host, config.listen.port, Address.parse(announced[0]).peer_id)), *announced]


def child_environment(
    rank: int, addresses: Sequence[str], config: SwarmConfig, *, launch: str, trains: bool
) -> dict[str, str]:
    """Return the environment of a further peer of this machine, which joins the first peer at `addresses`."""
    return {
        **os.environ,
        IDENTITY: str(Path(config.identity_path).absolute()) if config.identity_path else "",
        JOIN: " ".join(addresses),
        _RUN: config.run_id,
        _RANK: str(rank),
        _LAUNCH: launch,
        "LOCAL_RANK": str(rank),  # keeps Lightning's own rank-zero messages to one process
        _TRAINS: "1" if trains else "",
    }


def owners_folder() -> Path:
    """Return the folder with the keys of this user's runs; raise `ConfigError` if the user has no place for it."""
    config_home = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    try:
        return (config_home if config_home.is_absolute() else Path.home() / ".config") / "lightning-swarm"
    except RuntimeError as error:  # a container's user may have no home directory
        raise ConfigError(
            "the owner's key needs a folder, but this user has no home directory. Set XDG_CONFIG_HOME to a folder that "
            "lasts, or name an invitation to the run by `invite`."
        ) from error


@contextmanager
def handed_over(invitation: str | None) -> Iterator[tuple[dict[str, str], tuple[int, ...]]]:
    """Write an invitation into an unnamed file; yield the environment variable for it, and its descriptor."""
    if invitation is None:
        yield {}, ()
        return
    with tempfile.TemporaryFile() as file:
        file.write(invitation.encode())
        file.flush()
        yield {INVITE: f"/dev/fd/{file.fileno()}"}, (file.fileno(),)


def with_kept_identity(config: SwarmConfig) -> SwarmConfig:
    """Replace an empty `identity_path` by the file of the key that this user keeps for the run."""
    if config.identity_path != "":
        return config
    # Only uses of invitations are counted by id, so without invitations each start may have a new id.
    path = keep_identity(owners_folder, config.run_id, PeerStart.of(config)) if config.is_invited else None
    return replace(config, identity_path=path)


def apply_environment(config: SwarmConfig, local_rank: int) -> SwarmConfig:
    """Return a script's settings, overridden by the variables in this process's environment."""
    peers = tuple(map(Address.parse, os.environ.get(JOIN, "").split()))
    listen = os.environ.get(LISTEN)
    announce = os.environ.get(ANNOUNCE)
    config = replace(
        config,
        initial_peers=peers or config.initial_peers,
        run_id=os.environ.get(_RUN, config.run_id),
        role=cast(PeerRole, os.environ.get(ROLE, config.role)),
        listen=HostPort.to_listen(listen) if listen else config.listen,
        announce=config.announce if announce is None else tuple(map(HostPort.to_announce, announce.split())),
        identity_path=os.environ.get(IDENTITY, config.identity_path),
        invite=os.environ.get(INVITE) or config.invite,
        preemption=cast(Preemption | None, os.environ.get(PREEMPTION, config.preemption)),
    )
    if local_rank == 0:
        return with_kept_identity(config)
    # The first peer occupies the port and the key. Each further peer has its own key file beside the first peer's, so
    # that it has the same id after a restart.
    identity_path = further_identity(config.identity_path, local_rank) if config.identity_path else None
    return replace(
        config,
        role="both" if is_trainer() else "server",
        listen=config.listen.for_rank(local_rank),
        announce=tuple(address.for_rank(local_rank) for address in config.announce),
        identity_path=identity_path,
    )
