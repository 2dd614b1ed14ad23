"""Credentials of commands that read a run without joining it: from an invitation, or from the owner's key."""

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
    """Yield the credentials for a command. If the run denies access, the error says how to call `command` instead."""
    visitor = visitor_of(arguments)
    try:
        yield visitor
    except AccessDenied as error:
        if isinstance(error, Uncertified):
            why = f"{address} answers only peers with a certificate of its run, and this command has no certificate"
        elif visitor.is_guess:
            why = f"this command used the owner's key of run {arguments.run_id!r}, but {str(error).rstrip('.')}"
        else:
            raise
        raise AccessDenied(
            f"{why}. Name an invitation: `lightning-swarm {command} {address} --invite FILE`, or by {INVITE}. On the "
            "machine that started the run, the command uses the owner's key by itself if `--run-id` is the run's id; "
            f"it is {arguments.run_id!r} here."
        ) from error


def visitor_of(arguments: argparse.Namespace) -> Visitor:
    """Return the credentials for a command: of an invitation, else of the run's owner, else none."""
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
                f"`--owner` must be the file of an owner's key, got {str(path)!r}, which does not exist. Name another "
                "file, or leave the option out."
            )
        return ANYONE
    # Without `--owner` the key is a guess: this user owns a run of this id, but the address may belong to another run,
    # which may admit any peer.
    return Visitor(as_owner(Owner.load(arguments.run_id, path)), is_guess=arguments.owner is None)


def as_owner(owner: Owner) -> Certify:
    """Return the credentials of a command that acts as the owner of a run."""
    return partial(owner_entry(owner).credentials, now_s=time.time())
