"""The commands `lightning-swarm members`, `ban` and `unban`: list a run's members, ban peers, and lift bans."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from lightning_swarm.cli.invite import owner_path
from lightning_swarm.cli.output import say
from lightning_swarm.cli.visitors import as_owner, visiting
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.private_file import can_see_file
from lightning_swarm.core.readable import short_name
from lightning_swarm.monitor import members
from lightning_swarm.monitor.doctor import Visitor
from lightning_swarm.network import PeerId
from lightning_swarm.network.addresses import Address
from lightning_swarm.network.identity import public_key
from lightning_swarm.peer.entry import invitation_in
from lightning_swarm.protocol.bans import MAX_BANS
from lightning_swarm.trust.certificates import MAX_REASON, encode
from lightning_swarm.trust.owner import Owner

_TIMEOUT_S: Final = 10.0  # timeout of each call to a peer


def show_members(arguments: argparse.Namespace) -> int:
    """Show all peers that ever joined a run, and all bans; returns the exit status."""
    address = Address.parse(arguments.address)
    with (
        visiting(arguments, "members", str(address)) as visitor,
        members.asking(address, timeout=_TIMEOUT_S, visitor=visitor) as run,
    ):
        rows = run.members()
    if arguments.json:
        for row in rows:
            print(json.dumps(asdict(row)))  # noqa: T201 - a command
    else:
        print(members.table(arguments.run_id, rows))  # noqa: T201 - a command
    return 0


def ban(arguments: argparse.Namespace) -> int:
    """Ban a peer or an invitation; returns the exit status."""
    return _ban(arguments, is_lifted=False)


def unban(arguments: argparse.Namespace) -> int:
    """Lift a ban of a peer or an invitation; returns the exit status."""
    return _ban(arguments, is_lifted=True)


def _ban(arguments: argparse.Namespace, *, is_lifted: bool) -> int:
    address = Address.parse(arguments.address)
    _check(arguments)
    path = owner_path(arguments)
    if not can_see_file(path):
        raise ConfigError(
            f"only the owner of run {arguments.run_id!r} can ban from it, and the owner's key is not at {path}. Call "
            "this where the run was started, and name the run by `--run-id`, or the key's file by `--owner`."
        )
    owner = Owner.load(arguments.run_id, path)
    with members.asking(address, timeout=_TIMEOUT_S, visitor=Visitor(as_owner(owner))) as run:
        subjects = _subjects(arguments, run)
        results = [
            run.send_ban(encode(owner.ban(subject, arguments.reason, is_lifted=is_lifted, now_ns=time.time_ns())))
            for subject in subjects
        ]
        status = _report(subjects, results, is_lifted=is_lifted)
        still_banned = run.banned_invitations_of(PeerId(subjects[0])) if is_lifted and not arguments.invitation else []
    for number in still_banned:
        say(f"The peer's invitation {number[:8]} is still banned: call `unban` with `--invitation`, too.")
    return status


def _check(arguments: argparse.Namespace) -> None:
    if len(arguments.reason) > MAX_REASON or not arguments.reason.isprintable():
        raise ConfigError(
            f"`--reason` must be at most {MAX_REASON} printable characters, got {len(arguments.reason)}. Shorten it."
        )
    if public_key(arguments.subject) is None and not Path(arguments.subject).is_file():
        raise ConfigError(
            "the subject of a ban must be a peer's id, like 12D3KooW..., or a file that `lightning-swarm invite` "
            f"wrote, got {arguments.subject!r}. `lightning-swarm members` shows the ids."
        )


def _subjects(arguments: argparse.Namespace, run: members.Members) -> list[str]:
    """Return the subjects of the ban: a peer's id first, then the numbers of its invitations."""
    if public_key(arguments.subject) is None:
        return [invitation_in(arguments.subject, run_id=arguments.run_id).number.hex()]
    if not arguments.invitation:
        if not run.has_seen(PeerId(arguments.subject)):
            say(
                f"The run has never seen {arguments.subject}. If the id is mistyped, call again with an id that "
                f"`lightning-swarm members` shows. A run keeps at most {MAX_BANS} bans, and a lifted ban still counts."
            )
        return [arguments.subject]
    numbers = run.invitations_of(PeerId(arguments.subject))
    if not numbers:
        raise ConfigError(
            f"{arguments.subject} never joined the run, so the run does not know its invitation. Name the invitation's "
            "file, or leave out `--invitation`."
        )
    return [arguments.subject, *numbers]


def _report(subjects: Sequence[str], results: Sequence[Mapping[PeerId, str | None]], *, is_lifted: bool) -> int:
    """Print which peers accepted a ban; returns the exit status. `results`: for each subject, peer -> error or None."""
    names = " and ".join(
        short_name(subject) if public_key(subject) is not None else f"the invitation {subject[:8]}"
        for subject in subjects
    )
    # A peer accepts the ban only if it accepts the ban of each subject.
    errors = {peer: next((each[peer] for each in results if each[peer] is not None), None) for peer in results[0]}
    num_accepted = sum(error is None for error in errors.values())
    for peer, error in errors.items():
        if error is not None:
            say(f"{short_name(peer)} did not accept it: {error}")
    if not num_accepted:
        say("No peer of the run accepted it, so nothing has changed. Name the address of another peer.")
        return 1
    effect = "may take part again" if is_lifted else "is banned" if len(subjects) == 1 else "are banned"
    rest = "" if num_accepted == len(errors) else " The other peers receive it from there, or with the next record."
    say(f"{names} {effect}: {num_accepted} of {len(errors)} peers accepted it.{rest}")
    return 0
