"""`plan --swarm`: what a live swarm would do with other settings, from what it has measured itself."""

from __future__ import annotations

import argparse
import contextlib
import json
import threading
from dataclasses import asdict, replace

import msgspec

from lightning_swarm.cli import travelling, watching
from lightning_swarm.config import Compression
from lightning_swarm.errors import ConfigError
from lightning_swarm.network import PeerId
from lightning_swarm.network.addresses import Address
from lightning_swarm.planner.choice import make_plan, predict
from lightning_swarm.planner.live import Assumed, Live, Pace, read
from lightning_swarm.planner.records import Model, Now
from lightning_swarm.planner.travel import Travel
from lightning_swarm.planner.words import describe, describe_now
from lightning_swarm.survey.policy import picture, short_name

_MBIT, _GB = 1e6 / 8, 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `plan` can be told of a live swarm."""
    live = parser.add_argument_group("or a swarm that runs, instead of machines and model")
    live.add_argument("--swarm", metavar="HOST:PORT/ID", help="of any of its peers")
    live.add_argument(
        "--over", type=float, default=10.0, metavar="SECONDS", help="time to see its rates in (default: %(default)g)"
    )
    live.add_argument(
        "--line-mbit",
        type=float,
        default=100.0,
        metavar="MBIT",
        help="Mb/s, each way, of peers whose lines were not measured (default: %(default)g)",
    )
    live.add_argument(
        "--bus-gb-per-s",
        type=float,
        default=12.0,
        metavar="GB",
        help="between a GPU and its host, for training alone with offloading (default: %(default)g)",
    )
    live.add_argument(
        "--timeout", type=float, default=10.0, metavar="SECONDS", help="for each peer (default: %(default)g)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Look at the swarm twice, plan, and print it. Returns the exit status, as `planning.run`.

    Raises:
        ConfigError: What was given cannot be.
        Unreachable: The peer does not answer.
        SwarmError: Too little is measured yet.
    """
    _check(arguments)
    line_bytes_per_s = arguments.line_mbit * _MBIT
    assumed = Assumed(line_bytes_per_s=line_bytes_per_s, bus_bytes_per_s=arguments.bus_gb_per_s * _GB)
    said = travelling.of_command(arguments)
    live = _look(arguments, assumed)
    has = Travel(Compression(**msgspec.structs.asdict(live.encoding)))
    travel = said.or_else(has)
    model = replace(live.model, wire=travel.wire)
    plan = make_plan(
        model,
        live.machines,
        target_batch_size=arguments.target_batch_size,
        largest_batch_size=arguments.largest_batch_size,
    )
    now = _now(live, replace(live.model, wire=has.wire))
    if arguments.json:
        print(json.dumps({**plan.as_json(), **travel.as_json(), "now": asdict(now)}))  # noqa: T201 - a command
    else:
        print(f"{describe(model, plan)}\n\n{describe_now(plan, now, line_bytes_per_s)}")  # noqa: T201 - a command
    return 0 if plan.possible else 1


def _check(arguments: argparse.Namespace) -> None:
    given = {
        "MACHINES.yaml": arguments.machines,
        "--config": arguments.config,
        "--layers": arguments.layers,
        "--width": arguments.width,
        "--sequence": arguments.sequence,
        "--measure": arguments.measure,
        "--picture": arguments.picture,
        "--boundary-ratio": arguments.boundary_ratio,  # a stage's costs are those with the layers that it has
    }
    both = [name for name, value in given.items() if value]
    if both:
        raise ConfigError(
            "`plan` takes machines and model from a file and a description, or both from a live swarm by --swarm, got "
            f"--swarm and {' and '.join(both)}. Leave out the one or the others."
        )
    for name in ("over", "line_mbit", "bus_gb_per_s", "timeout"):
        value = getattr(arguments, name)
        if not 0 < value <= threading.TIMEOUT_MAX:
            raise ConfigError(f"`--{name.replace('_', '-')}` must be a number above 0, got {value}. Raise it.")


def _look(arguments: argparse.Namespace, assumed: Assumed) -> Live:
    address = Address.parse(arguments.swarm)
    with contextlib.closing(watching.looks(address, every_s=arguments.over, timeout=arguments.timeout)) as looks:
        before, now = next(looks), next(looks)
    seen = {PeerId(one.peer_id): one for one in picture(now, before).peers}
    reports = {one.peer_id: one.report for one in now if one.report is not None}
    paces = {peer: Pace(seen[peer].samples_per_s, seen[peer].sent_gb_per_hour * _GB / 3600) for peer in reports}
    return read(reports, paces, assumed, str if arguments.json else short_name)


def _now(live: Live, model: Model) -> Now:
    setting = live.setting
    return Now(
        setting=setting,
        samples_per_s=live.samples_per_s,
        sent_bytes_per_s=live.sent_bytes_per_s,
        predicted_samples_per_s=predict(model, live.machines, setting) if setting is not None else None,
        unmeasured=live.unmeasured,
        assumed_lines=live.assumed_lines,
    )
