"""The command `lightning-swarm status`."""

from __future__ import annotations

import argparse
import json
from contextlib import closing, suppress
from dataclasses import asdict

from lightning_swarm.cli.visitors import looking
from lightning_swarm.monitor import survey, swarm_report
from lightning_swarm.network.addresses import Address


def run(arguments: argparse.Namespace) -> int:
    """Show a live swarm; returns the exit status."""
    address = Address.parse(arguments.address)
    with looking(arguments, "status", str(address)) as visitor:
        reports = survey.watch(address, every_s=arguments.watch, timeout=arguments.timeout, visitor=visitor)
        with closing(reports), suppress(KeyboardInterrupt):  # how --watch ends
            for look in reports:
                print(json.dumps(asdict(look)) if arguments.json else swarm_report.table(look), flush=True)  # noqa: T201 - a command
    return 0
