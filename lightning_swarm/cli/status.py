"""The command `lightning-swarm status`."""

from __future__ import annotations

import argparse
import json
import threading
from contextlib import closing, suppress
from dataclasses import asdict

from lightning_swarm.cli.visitors import visiting
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.monitor import survey, swarm_report
from lightning_swarm.monitor.model_report import ModelReport, model_table
from lightning_swarm.network.addresses import Address


def run(arguments: argparse.Namespace) -> int:
    """Show a live swarm or a served model; returns the exit status."""
    address = Address.parse(arguments.address)
    for name, seconds in (("--watch", arguments.watch), ("--timeout", arguments.timeout)):
        if seconds is not None and not 0 < seconds <= threading.TIMEOUT_MAX:
            raise ConfigError(
                f"`{name}` must be a number of seconds above 0, got {seconds}. Leave it out, or raise it."
            )
    with visiting(arguments, "status", str(address)) as visitor:
        reports = survey.watch_reports(address, every_s=arguments.watch, timeout=arguments.timeout, visitor=visitor)
        with closing(reports), suppress(KeyboardInterrupt):  # Ctrl-C is the usual end of `--watch`
            for report in reports:
                table = model_table(report) if isinstance(report, ModelReport) else swarm_report.table(report)
                print(json.dumps(asdict(report)) if arguments.json else table, flush=True)  # noqa: T201 - a command
    return 0
