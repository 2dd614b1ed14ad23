"""The command `lightning-swarm`: its list of commands, and what each does."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final

from lightning_swarm import __version__
from lightning_swarm.cli import invite as invite_module
from lightning_swarm.cli import members as members_module
from lightning_swarm.cli import plan as plan_module
from lightning_swarm.cli import programs, serving
from lightning_swarm.core.errors import ConfigError, SwarmError
from lightning_swarm.core.process import LOG, follow_environment
from lightning_swarm.model.export import export_file, export_folder, export_safetensors
from lightning_swarm.monitor import doctor, survey
from lightning_swarm.network.addresses import Address
from lightning_swarm.planner import report
from lightning_swarm.planner.simulator import microbatches
from lightning_swarm.planner.simulator.fluid import Span, simulate
from lightning_swarm.planner.simulator.scenario import ScenarioRuns
from lightning_swarm.protocol.settings import Rebalancing

_DESCRIPTION: Final = """\
Train one large PyTorch Lightning model on a swarm of slow, unequal machines.

    lightning-swarm doctor                                          is this machine fit to be a peer?
    lightning-swarm fit --model my_project.Net --data my_project.Data --trainer.devices 4
    lightning-swarm join 203.0.113.7:31337/12D3... train.py         help a run that another machine started
    lightning-swarm invite --role server --out anna.invite          let another machine join your run
    lightning-swarm ban 203.0.113.7:31337/12D3... 12D3...           and expel a peer from it
    lightning-swarm status 203.0.113.7:31337/12D3...                who holds which stage, how fast it goes
    lightning-swarm plan machines.yaml --config run.yaml            is it worth it, and with how many stages?
    lightning-swarm plan --swarm 203.0.113.7:31337/12D3...          would it do better with other settings?
    lightning-swarm simulate scenario.yaml                          what a swarm would do, without one
    lightning-swarm serve --weights my-llama/                       serve a finished model with others
    lightning-swarm generate 203.0.113.7:31337/12D3... --prompt Hi  and have it write

With -v before the command, stderr says more of what happens; with -vv, all.
"""

_DOCTOR: Final = """\
{what} Exit status 1 if something is wrong.

    lightning-swarm doctor                                          this machine
    lightning-swarm doctor --host 0.0.0.0 --port 31337              and the port that it is to listen on
    lightning-swarm doctor --peer 203.0.113.7:31337/12D3...         and the way to a running peer
"""

_STATUS: Final = """\
{what} Asks any peer for the others, and all of them what they do. Changes nothing.

    lightning-swarm status 203.0.113.7:31337/12D3...                who holds which stage, how fast it goes
    lightning-swarm status 203.0.113.7:31337/12D3... --watch 10     again every ten seconds, until Ctrl-C
    lightning-swarm status 203.0.113.7:31337/12D3... --json         for programs: one object a line

Rates are averages since a peer began or, with --watch, since the look before. The object has `run_id`, `step` (null if
no coordinator answers), `steps_per_minute`, `stages` (for each a list of peer ids), `trainers_stage` (the one of them
that is what stands around the pipeline, which the trainers compute; where it is the only one, it is a model that is not
cut; or null) and `peers`. Each of these has `peer_id`, `place`, `problem` (why it did not answer, or null), `stages`,
`lead`, `coordinator`, `step` (null while it waits for a run), `samples_per_s` (forward through each of its stages but
the trainers'), `queued` (jobs), `sent_gb_per_hour`, `received_gb_per_hour`, `age_s`, `role` (of its certificate; null
in a run that takes any peer), `refused` (requests of peers whose certificates do not permit them) and `peak_gb`.
"""

_EXPORT: Final = """\
{what} Nothing in the checkpoint is executed; OUT is overwritten.

    lightning-swarm export lightning_logs/version_0/checkpoints/last.ckpt model.safetensors
    lightning-swarm export sharded/last.ckpt whole.ckpt             a folder as one file, for a plain Trainer
    lightning-swarm export last.ckpt my-llama/                      a model of Hugging Face, to be served

The second one has all of the model and of the optimizer's state in memory meanwhile. The third one needs the model's
config.json in the folder, as `model.config.save_pretrained("my-llama/")` writes it.
"""

_SIMULATE: Final = """\
{what}
Starts nothing, needs no network. Of 10,000 peers on 100 stages a day takes minutes for each rule and seed.

    lightning-swarm simulate scenario.yaml                          a table
    lightning-swarm simulate scenario.yaml --picture swarm.png      and curves over time

The file says what there is, for example:

    stages: 8              # of the pipeline
    hours: 24
    peers:
      number: 60
      samples_per_s: [1, 10]   # the slowest and the fastest, forward and backward through a stage; or one number
      stay_hours: 4            # each on the average; 0: for good
      back_minutes: 10         # until another takes its place
    rules: [none, paper, gain] # nobody moves; the SWARM paper's rule; what pays
    interval_s: 300        # between two looks, at the latest
    move_s: 30             # for how long who moves computes nothing: download and start
    join_s: 30             # likewise for who comes
    seeds: 3               # how often, each time by other chances

With `microbatches` they are simulated one by one, by the code of real swarms: for hundreds of peers and minutes. Who
moves or comes then downloads its stage, and `move_s` and `join_s` mean nothing.

    microbatches:
      per_step: 256
      size: 1                # samples of each
      boundary_mb: 0.5       # of a sample, from a stage to the next
      stage_mb: 2            # of a stage's weights; its optimizer has twice as many
      mbit: [20, 200]        # of the slowest link and the fastest, each way; or one number; 0: no limit
      latency_ms: 10         # of each link

Instead of `peers`, `trace: file.csv` has what happened, in lines of `seconds,peer,samples_per_s`: from then on a peer
does so much, and 0 is one that is gone. The table's percentages are of what the best assignment of the peers alive at
each moment would do. Numbers are means over the seeds.
"""

_LEVELS: Final = {"-v": "info", "--verbose": "info", "-vv": "debug"}


def main() -> int:
    """Run the command line; returns the exit status."""
    try:
        if sys.argv[1:] and sys.argv[1] in _LEVELS:
            os.environ[LOG] = _LEVELS[sys.argv.pop(1)]
        follow_environment()
        return _command(sys.argv[1:] or ["--help"])()
    except SwarmError as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        print(f"lightning-swarm: error: {text}", file=sys.stderr)  # noqa: T201 - a command
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130  # as shells report Ctrl-C


def _command(arguments: Sequence[str]) -> Callable[[], int]:
    name = arguments[0] if arguments else ""
    # Lightning's own parsers of these commands take seconds to build, and need jsonargparse.
    if name in programs.TRAINER_COMMANDS or name in ("-c", "--config"):
        return programs.run_trainer
    if name in programs.PEER_COMMANDS:
        return partial(programs.run_peer, name, arguments[1:])
    return partial(_run, _parser().parse_args(arguments))


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="lightning-swarm",
        usage="lightning-swarm COMMAND ...",
        description=_DESCRIPTION,
        epilog="lightning-swarm COMMAND --help says more.",
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(
        title="commands", prog="lightning-swarm", dest="command", metavar="COMMAND", required=True
    )
    for name, line in {**programs.TRAINER_COMMANDS, **programs.PEER_COMMANDS}.items():
        commands.add_parser(name, help=line, add_help=False)  # to be listed; they are parsed elsewhere

    def add(name: str, what: str, description: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=what, description=description.format(what=what), formatter_class=raw)

    check = add("doctor", "Check whether this machine can be a peer: what is wrong, and what to do.", _DOCTOR)
    check.add_argument("--host", default="127.0.0.1", help="IP address to listen on (default: %(default)s)")
    check.add_argument("--port", type=int, default=0, help="TCP port to listen on (default: any)")
    check.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="HOST:PORT/ID",
        help="a running peer, as it prints its address: can it be reached, do clocks and versions agree (repeatable)",
    )

    invite_module.add_visitor_arguments(check)

    status = add("status", "Show a live swarm: stages, peers, step, rates.", _STATUS)
    status.add_argument("address", metavar="ADDRESS", help="of any peer of the run, as HOST:PORT/ID")
    status.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    status.add_argument("--watch", type=float, metavar="SECONDS", help="look again and again")
    status.add_argument(
        "--timeout", type=float, default=10.0, metavar="SECONDS", help="for each peer (default: %(default)g)"
    )

    invite_module.add_visitor_arguments(status)

    invitation = add("invite", "Write an invitation to a run that this machine started.", invite_module.DESCRIPTION)
    invite_module.add_arguments(invitation)

    membership = add(
        "members", "Show who came to a run, by which invitation, and who was banned.", members_module.MEMBERS
    )
    members_module.add_members_arguments(membership)
    for name, line, text in (
        ("ban", "Ban a peer, or all that came by an invitation, from a run.", members_module.BAN),
        ("unban", "Lift a ban.", members_module.UNBAN),
    ):
        members_module.add_ban_arguments(add(name, line, text))

    plan = add(
        "plan", "Say what a swarm of some machines would do with a model, and whether it pays.", plan_module.DESCRIPTION
    )
    plan_module.add_arguments(plan)

    export = add(
        "export",
        "Write a checkpoint's weights to a safetensors file or a Hugging Face folder, or as a single file.",
        _EXPORT,
    )
    export.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="a file that Lightning saved, or a sharded checkpoint"
    )
    export.add_argument(
        "out", type=Path, metavar="OUT", help="the file to write, *.safetensors or *.ckpt, or a folder with config.json"
    )

    generating = add("generate", "Write a text with a served model, as it comes.", serving.GENERATE)
    serving.add_generate_arguments(generating)

    endpoint = add("http", "Answer OpenAI's HTTP protocol for served models.", serving.HTTP)
    serving.add_http_arguments(endpoint)

    simulation = add(
        "simulate", "Simulate a swarm whose peers come and go: how fast it would be, by which rule.", _SIMULATE
    )
    simulation.add_argument("scenario", type=Path, metavar="SCENARIO.yaml", help="what there is, and what happens")
    simulation.add_argument(
        "--picture", type=Path, metavar="OUT.png", help="draw throughput, peers per stage and moves"
    )
    return parser


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "export":
        to_folder = arguments.out.is_dir() or not arguments.out.suffix
        export = export_folder if to_folder else export_file if arguments.out.suffix == ".ckpt" else export_safetensors
        num_tensors = export(arguments.checkpoint, arguments.out)
        print(f"{arguments.out}: {num_tensors} tensors")  # noqa: T201 - a command
        return 0
    if arguments.command == "invite":
        return invite_module.run(arguments)
    if arguments.command == "generate":
        return serving.run_generate(arguments)
    if arguments.command == "http":
        return serving.run_http(arguments)
    if arguments.command == "members":
        return members_module.show_members(arguments)
    if arguments.command in ("ban", "unban"):
        return members_module.ban(arguments)
    if arguments.command == "plan":
        return plan_module.run(arguments)
    if arguments.command == "status":
        return _show_status(arguments)
    if arguments.command == "simulate":
        return _simulate(arguments)
    num_wrong = 0
    addresses = [Address.parse(text) for text in arguments.peer]
    looks = addresses or arguments.invite is not None
    visitor = invite_module.visitor_of(arguments) if looks else doctor.ANYONE
    for finding in doctor.examine(host=arguments.host, port=arguments.port, addresses=addresses, visitor=visitor):
        print(finding, flush=True)  # noqa: T201 - a command
        num_wrong += not finding.ok
    print(f"{num_wrong} to mend." if num_wrong else "This machine can be a peer.")  # noqa: T201 - a command
    return 1 if num_wrong else 0


def _show_status(arguments: argparse.Namespace) -> int:
    address = Address.parse(arguments.address)
    with invite_module.looking(arguments, str(address)) as visitor:
        reports = survey.watch(address, every_s=arguments.watch, timeout=arguments.timeout, visitor=visitor)
        with closing(reports), suppress(KeyboardInterrupt):  # how --watch ends
            for look in reports:
                print(json.dumps(asdict(look)) if arguments.json else survey.table(look), flush=True)  # noqa: T201 - a command
    return 0


def _simulate(arguments: argparse.Namespace) -> int:
    found = simulated(ScenarioRuns(arguments.scenario))
    print(report.span_table(found))  # noqa: T201 - a command
    if arguments.picture is not None:
        report.draw_spans(found, arguments.picture)
        print(f"{arguments.picture}: drawn, of the first seed")  # noqa: T201 - a command
    return 0


def simulated(runs: ScenarioRuns) -> dict[Rebalancing, list[Sequence[Span]]]:
    """Simulate all seeds by each rule."""
    found: dict[Rebalancing, list[Sequence[Span]]] = {rule: [] for rule in runs.file.rules}
    for seed in range(runs.file.seeds):
        work = runs.work(seed)
        for rule, scenario in runs.scenarios(seed):
            found[rule].append(simulate(scenario) if work is None else microbatches.simulate(scenario, work, seed=seed))
    return found
