"""The command `lightning-swarm doctor`."""

from __future__ import annotations

import argparse

from lightning_swarm.cli.visitors import visitor_of
from lightning_swarm.monitor import doctor
from lightning_swarm.network.addresses import Address


def run(arguments: argparse.Namespace) -> int:
    """Examine this machine; returns the exit status."""
    num_wrong = 0
    addresses = [Address.parse(text) for text in arguments.peer]
    # Without a peer or an invitation, no run is examined, so no credentials are read.
    examines_run = addresses or arguments.invite is not None
    visitor = visitor_of(arguments) if examines_run else doctor.ANYONE
    for finding in doctor.examine(host=arguments.host, port=arguments.port, addresses=addresses, visitor=visitor):
        print(finding, flush=True)  # noqa: T201 - a command
        num_wrong += not finding.ok
    print(f"{num_wrong} to mend." if num_wrong else "This machine can be a peer.")  # noqa: T201 - a command
    return 1 if num_wrong else 0
