"""The command `lightning-swarm invite`."""

from __future__ import annotations

import argparse
import re
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from lightning_swarm.cli.arguments import add_owner_arguments
from lightning_swarm.cli.output import say
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.private_file import can_see_file, write_new
from lightning_swarm.network import PeerId
from lightning_swarm.network.access import Role
from lightning_swarm.network.identity import public_key
from lightning_swarm.peer.process import owners_folder
from lightning_swarm.trust.certificates import MAX_USES, Invitation
from lightning_swarm.trust.invitation_text import AnyInvitation, to_text
from lightning_swarm.trust.owner import OWN_STAY_S, Owner, owner_file

DESCRIPTION: Final = """\
Write an invitation to a run that this machine started. Call it where the run was started, because the owner's key is \
there.

    lightning-swarm invite --role server --out anna.invite              for one peer that serves
    lightning-swarm invite --role trainer --uses 4 --out team.invite    for four that may also train, and lead
    lightning-swarm invite --role server --peer 12D3... --out spot.invite

Each holder of the file can join until it expires (--expires), and may then stay for some time (--for). So send it in
private; an invitation for a single peer (--peer) is no secret. The other peer joins with `lightning-swarm join ADDRESS
--invite FILE PROGRAM`. The permissions of the roles, each with those above it:

    observer    look at the run
    server      and compute, average, vote and coordinate
    trainer     and read data, start the run, and lead it if the peer that started it dies
    keeper      the same; in an audited run (`trust="audited"`) only keepers vote, coordinate, start and lead it
"""

_UNITS: Final = {"m": 60, "h": 3600, "d": 86400, "w": 604800}
_STAYS: Final = ((86400, "day"), (3600, "hour"), (60, "minute"))  # seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `invite`."""
    parser.add_argument("--role", choices=[str(role) for role in Role], default="server", help="(default: %(default)s)")
    parser.add_argument(
        "--uses", type=int, default=1, metavar="N", help="the number of peers that may join with it (default: 1)"
    )
    parser.add_argument(
        "--expires",
        default="7d",
        metavar="TIME",
        help="the time from now in which peers may join with it: 30m, 12h, 7d or 4w (default: 7d)",
    )
    parser.add_argument(
        "--for", dest="stay", default="90d", metavar="TIME", help="the time for which each may then stay (default: 90d)"
    )
    parser.add_argument("--peer", metavar="ID", help="admit only the peer with this id, 12D3...")
    add_owner_arguments(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="the new file to write (default: standard output)")


def run(arguments: argparse.Namespace) -> int:
    """Write an invitation; returns the exit status."""
    now_s = time.time()
    times = {
        "expires_at_s": now_s + _seconds("--expires", arguments.expires),
        "stay_s": _seconds("--for", arguments.stay),
    }
    _check(arguments)
    path = owner_path(arguments)
    is_new = not can_see_file(path)
    owner = Owner.load(arguments.run_id, path)
    if is_new:
        say(f"Made the owner's key of run {arguments.run_id!r}: {path}. The run must be started with this key.")
    role = Role(arguments.role)
    proof: AnyInvitation
    if arguments.peer is not None:
        proof = owner.certify(PeerId(arguments.peer), role, now_s=now_s, **times)
    else:
        proof = owner.invite(role, uses=arguments.uses, **times)
    _write(f"{to_text(proof)}\n", arguments.out)
    say(_summary(proof.invitation, arguments.peer))
    return 0


def owner_path(arguments: argparse.Namespace) -> Path:
    """Return the path of the owner's key, which may not exist."""
    path: Path = arguments.owner or owner_file(owners_folder(), arguments.run_id)
    return path


def _check(arguments: argparse.Namespace) -> None:
    if not 1 <= arguments.uses <= MAX_USES:
        raise ConfigError(f"`--uses` must be 1..{MAX_USES}, got {arguments.uses}. Leave it out for 1.")
    if not arguments.run_id or not arguments.run_id.isprintable() or len(arguments.run_id) > 100:
        raise ConfigError(f"`--run-id` must be 1..100 printable characters, got {arguments.run_id!r}. Copy the run's.")
    if arguments.peer is None:
        return
    if public_key(arguments.peer) is None:
        raise ConfigError(
            f"`--peer` must be a peer's id, like 12D3KooW..., got {arguments.peer!r}. The peer prints its id behind "
            "the slash of its address; with `identity_path` the id stays the same."
        )
    if arguments.uses != 1:
        raise ConfigError(
            f"`--uses` must be 1 with `--peer`, which admits one peer, got {arguments.uses}. Leave one of them out."
        )


def _seconds(name: str, text: str) -> float:
    """Return the seconds of a time such as ``12h``, the value of the option `name`."""
    match = re.fullmatch(r"([1-9]\d{0,8})([mhdw])", text, re.ASCII)
    seconds = int(match[1]) * _UNITS[match[2]] if match is not None else 0
    if not 0 < seconds <= OWN_STAY_S:
        raise ConfigError(
            f"`{name}` must be a time of up to {OWN_STAY_S / 86400:.0f} days, like 30m, 12h, 7d or 4w, got {text!r}. "
            "Correct it."
        )
    return float(seconds)


def _write(line: str, out: Path | None) -> None:
    if out is None:
        sys.stdout.write(line)
        sys.stdout.flush()
        return
    try:
        write_new(out, line.encode())
    except FileExistsError as error:
        raise ConfigError(
            f"`--out` must be a new file, got {str(out)!r}, which exists. Name another file, or remove this one."
        ) from error
    except OSError as error:
        raise ConfigError(
            f"`--out` must be a new file in a writable folder, got {str(out)!r}: {error.strerror}. Name another file."
        ) from error


def _summary(invitation: Invitation, peer: str | None) -> str:
    """Describe an invitation in words; `peer` is the only peer that may use it, if there is one."""
    until = f"{datetime.fromtimestamp(invitation.expires_at_s, UTC):%Y-%m-%d %H:%M} UTC"
    size_s, unit = next((size, name) for size, name in _STAYS if invitation.stay_s % size == 0)
    number = invitation.stay_s // size_s
    stay = f"for {number} {unit}{'s' if number != 1 else ''}"
    role, run_id, uses = invitation.role, invitation.run_id, invitation.uses
    times = f"to join until {until}, and to stay {stay}"
    if peer is not None:
        return f"Invited {peer} to run {run_id!r} as {role}: {times} from now. The file is no secret."
    peers = f"{uses} peer{'s' if uses != 1 else ''}"
    secret = "Each holder of the file can join, so send it in private."
    return f"Invited {peers} to run {run_id!r} as {role}: {times}. {secret}"
