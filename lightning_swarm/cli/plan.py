"""The command `lightning-swarm plan`: predicts the speed of a swarm of given machines before any machine starts."""

from __future__ import annotations

import argparse
import contextlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from lightning_swarm.cli.arguments import COMPRESSION_NAMES
from lightning_swarm.cli.programs import cli_module, require_jsonargparse
from lightning_swarm.cli.visitors import visiting
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.readable import short_name
from lightning_swarm.core.rebase import written_part
from lightning_swarm.monitor import survey
from lightning_swarm.monitor.swarm_report import summarize
from lightning_swarm.network import PeerId
from lightning_swarm.network.addresses import Address
from lightning_swarm.planner import probe
from lightning_swarm.planner.cost_model import transformer
from lightning_swarm.planner.live import AssumedRates, LiveSwarm, read_swarm
from lightning_swarm.planner.machine_files import NOT_GIVEN, WireSettings, read_compression, read_machines
from lightning_swarm.planner.plan import make_plan, predict
from lightning_swarm.planner.records import Machine, ModelProfile, Plan
from lightning_swarm.planner.report import describe, describe_now, draw
from lightning_swarm.strategy.strategy import SwarmStrategy

_MBIT: Final = 1e6 / 8
_GB: Final = 1e9


@dataclass(frozen=True)
class _Subject:
    """The model to plan for, and its known properties."""

    model: ModelProfile
    measure: Callable[[], float]  # FLOP/s of this machine with the model
    sequence: int = 1024  # tokens of a sample
    width: int | None = None  # features of a token
    wire: WireSettings = NOT_GIVEN  # compression of tensors in the configuration file


def run(arguments: argparse.Namespace) -> int:
    """Make and print a plan; returns the exit status, which is 1 only if no choice of machines can train the model."""
    _check_numbers(arguments)
    if arguments.swarm:
        return _run_live(arguments)
    _check(arguments)
    subject = _of_file(arguments.config, measured=arguments.measure) if arguments.config else _of_numbers(arguments)
    measure = subject.measure if arguments.measure else None
    machines = read_machines(arguments.machines, subject.model.flop, measure)
    # Options take precedence over the file of machines, and this file over the configuration file.
    wire = _wire_options(arguments).filled_from(read_compression(arguments.machines)).filled_from(subject.wire)
    model = replace(subject.model, wire=wire.wire)
    plan = _plan(arguments, model, machines)
    text = json.dumps({**plan.as_json(), **wire.as_json()}) if arguments.json else describe(model, plan)
    print(text)  # noqa: T201 - a command
    if arguments.picture:
        draw(arguments.picture, machines[0], subject.sequence, subject.width)
    return 0 if plan.possible else 1


def _plan(arguments: argparse.Namespace, model: ModelProfile, machines: Sequence[Machine]) -> Plan:
    return make_plan(
        model, machines, target_batch_size=arguments.target_batch_size, largest_batch_size=arguments.largest_batch_size
    )


def _check(arguments: argparse.Namespace) -> None:
    if arguments.machines is None:
        raise ConfigError(
            "`plan` needs machines: a file that lists them, or --swarm HOST:PORT/ID with the address of a peer of a "
            "live swarm; got neither. Name one of the two."
        )
    dimensions = {name: getattr(arguments, name) for name in ("layers", "width", "sequence")}
    given = [name for name, value in dimensions.items() if value is not None]
    if bool(arguments.config) == bool(given) or (given and len(given) < len(dimensions)):
        options = [f"--{name}" for name in [*(["config"] if arguments.config else []), *given]]
        raise ConfigError(
            "`plan` needs one model: --config FILE, or all three of --layers, --width and --sequence; got "
            f"{' and '.join(options) or 'none'}. Describe the model in one of these ways."
        )


def _check_numbers(arguments: argparse.Namespace) -> None:
    for name in ("layers", "width", "sequence", "target_batch_size", "largest_batch_size"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"`--{name.replace('_', '-')}` must be at least 1, got {value}. Raise it.")
    if arguments.vocabulary < 0:
        raise ConfigError(f"`--vocabulary` must be at least 0, got {arguments.vocabulary}. Leave it out for none.")


def _of_numbers(arguments: argparse.Namespace) -> _Subject:
    width, sequence = arguments.width, arguments.sequence
    model = transformer(arguments.layers, width, sequence, arguments.vocabulary, ends=arguments.ends)
    return _Subject(model, lambda: probe.measure_transformer(width, sequence), sequence, width)


def _of_file(path: Path, *, measured: bool) -> _Subject:
    """Build the model of a file that `fit` takes. This also builds the file's Trainer and data, which are not used."""
    require_jsonargparse("plan --config")
    options = ["--config", str(path)]
    tree = cli_module(options, [])
    try:
        cli = tree.SwarmCLI(run=False, save_config_callback=None, args=options, parser_kwargs={"exit_on_error": False})
    except (argparse.ArgumentError, OSError) as error:
        raise ConfigError(f"{path} must be a file that `lightning-swarm fit --config` takes: {error}") from error
    module, strategy = cli.model, cli.trainer.strategy
    swarm = strategy.config if isinstance(strategy, written_part(SwarmStrategy)) else None
    pipeline = swarm.pipeline if swarm else None
    boundary = swarm.boundary if swarm else None
    wire = WireSettings(swarm.settings.compression if swarm else None, boundary.ratio if boundary else None)
    example = module.example_input_array
    module.configure_model()
    # Measure first, because counting removes the weights.
    blocks_s = probe.measure_blocks(module, pipeline, example) if measured and example is not None else 0.0
    model = probe.count(module, pipeline, example)
    return _Subject(model, lambda: (model.flop - model.around.flop) / blocks_s, wire=wire)


def _wire_options(arguments: argparse.Namespace) -> WireSettings:
    """Read the options about the compression of tensors; raises a ConfigError if they are invalid."""
    # `--compression` is for all tensors; `--compression.NAME` then replaces its value for some tensors.
    for_all = arguments.compression
    options = {name: getattr(arguments, f"compression.{name}") for name in COMPRESSION_NAMES}
    chosen = {name: _value(text) for name, text in options.items() if text is not None}
    if chosen and for_all is not None:
        chosen = {**dict.fromkeys(("activations", "gradients", "averaging"), for_all), **chosen}
    return WireSettings.parse(chosen or for_all, arguments.boundary_ratio)


def _value(text: str) -> object:
    """Return an option's text as a number or a truth value, if it is one."""
    if text.isdigit():
        return int(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def _run_live(arguments: argparse.Namespace) -> int:
    """Survey a live swarm twice, make and print a plan; returns the exit status, as `run`."""
    _check_live(arguments)
    line_bytes_per_s = arguments.line_mbit * _MBIT
    assumed = AssumedRates(line_bytes_per_s=line_bytes_per_s, bus_bytes_per_s=arguments.bus_gb_per_s * _GB)
    chosen = _wire_options(arguments)
    live = _survey_twice(arguments, assumed)
    current, now = WireSettings(live.compression), live.now
    wire = chosen.filled_from(current)
    model = replace(live.model, wire=wire.wire)
    plan = _plan(arguments, model, live.machines)
    if now.setting is not None:
        predicted = predict(replace(live.model, wire=current.wire), live.machines, now.setting)
        now = replace(now, predicted_samples_per_s=predicted)
    if arguments.json:
        print(json.dumps({**plan.as_json(), **wire.as_json(), "now": asdict(now)}))  # noqa: T201 - a command
    else:
        print(f"{describe(model, plan)}\n\n{describe_now(plan, now, line_bytes_per_s)}")  # noqa: T201 - a command
    return 0 if plan.possible else 1


def _check_live(arguments: argparse.Namespace) -> None:
    values = {
        "MACHINES.yaml": arguments.machines,
        "--config": arguments.config,
        "--layers": arguments.layers,
        "--width": arguments.width,
        "--sequence": arguments.sequence,
        "--measure": arguments.measure,
        "--picture": arguments.picture,
        "--boundary-ratio": arguments.boundary_ratio,  # the measured costs of a stage include its boundary layers
    }
    conflicting = [name for name, value in values.items() if value]
    if conflicting:
        raise ConfigError(
            "with --swarm, `plan` takes the machines and the model from a live swarm, so no other option may describe "
            f"them; got --swarm and {' and '.join(conflicting)}. Leave one side out."
        )
    for name in ("over", "line_mbit", "bus_gb_per_s", "timeout"):
        value = getattr(arguments, name)
        if not 0 < value <= threading.TIMEOUT_MAX:
            raise ConfigError(f"`--{name.replace('_', '-')}` must be a number above 0, got {value}. Raise it.")


def _survey_twice(arguments: argparse.Namespace, assumed: AssumedRates) -> LiveSwarm:
    """Survey the swarm twice, `--over` seconds apart, and return its measured rates."""
    address = Address.parse(arguments.swarm)
    with visiting(arguments, "plan --swarm", str(address)) as visitor:
        sightings = survey.watch_sightings(address, every_s=arguments.over, timeout=arguments.timeout, visitor=visitor)
        with contextlib.closing(sightings):
            before, now = next(sightings), next(sightings)
    reports = {sighting.peer_id: sighting.report for sighting in now if sighting.report is not None}
    observed = {PeerId(peer.peer_id): peer for peer in summarize(now, before).peers}
    return read_swarm(reports, observed, assumed, str if arguments.json else short_name)
