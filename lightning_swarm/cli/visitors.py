"""Credentials of commands that only look at a run: by an invitation, or as the run's owner."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from lightning_swarm.cli.given_invitation import invitation_file
from lightning_swarm.cli.invite import owner_path
from lightning_swarm.core.errors import AccessDenied, ConfigError, Uncertified
from lightning_swarm.core.private_file import can_see_file
from lightning_swarm.monitor.doctor import ANYONE, Visitor
from lightning_swarm.network.access import Certify
from lightning_swarm.peer.entry import owner_entry, visitor_entry
from lightning_swarm.peer.process import INVITE
from lightning_swarm.trust.owner import Owner


@contextmanager
def visiting(arguments: argparse.Namespace, command: str, address: str) -> Iterator[Visitor]:
    """Yield the visitor with which a command looks at a run. A denial of access names the options of `command`."""
    visitor = visitor_of(arguments)
    try:
        yield visitor
    except AccessDenied as error:
        if isinstance(error, Uncertified):
            why = f"{address} answers only peers with a certificate of its run, and this command has none to show"
        elif visitor.is_guess:
            why = f"it was shown what the owner's key of run {arguments.run_id!r} permits, and {str(error).rstrip('.')}"
        else:
            raise
        raise AccessDenied(
            f"{why}. Show an invitation: `lightning-swarm {command} {address} --invite FILE`, or set {INVITE}. Where "
            f"the run was started its owner's key is shown, if `--run-id` is the run's: it is {arguments.run_id!r}."
        ) from error


def visitor_of(arguments: argparse.Namespace) -> Visitor:
    """Make the visitor that looks at a run: by an invitation, else as the run's owner, else as any peer."""
    now_s = time.time()
    with invitation_file(arguments.invite or os.environ.get(INVITE)) as source:
        if source:
            return Visitor(partial(visitor_entry(source, now_s=now_s).credentials, now_s=now_s))
    try:
        path = owner_path(arguments)
    except ConfigError:  # without a folder for keys, this user owns no run
        return ANYONE
    if not can_see_file(path):
        if arguments.owner is not None:
            raise ConfigError(
                f"`--owner` must be the file of an owner's key, got {str(path)!r}, which is not there. Name another "
                "one, or leave it out."
            )
        return ANYONE
    # A guess without `--owner`: this user owns a run of this name, but the address may belong to another run, which may
    # admit any peer.
    return Visitor(as_owner(Owner.load(arguments.run_id, path)), is_guess=arguments.owner is None)


def as_owner(owner: Owner) -> Certify:
    """Make the credentials of a command that acts as the owner of a run."""
    return partial(owner_entry(owner).credentials, now_s=time.time())
