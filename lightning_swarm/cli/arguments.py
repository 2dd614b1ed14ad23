"""The class `Command`, and texts and options of commands that import torch, which `--help` must not wait for."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, get_args

from lightning_swarm.cli.given_invitation import INVITE_HELP
from lightning_swarm.monitor.swarm_report import JSON_HELP
from lightning_swarm.peer.config import DEFAULT_RUN_ID
from lightning_swarm.peer.process import INVITE
from lightning_swarm.planner.records import LARGEST_BATCH
from lightning_swarm.protocol.settings import CodecName, Compression
from lightning_swarm.trust.certificates import MAX_REASON


@dataclass(frozen=True)
class Command:
    """A command parsed by argparse, whose code is imported only when it runs."""

    name: str
    description: str  # the text of `--help`; its first sentence is also in the list of commands
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: str = ""  # ``module:function`` of this package: takes the parsed arguments, returns the exit status
    usage: str | None = None
    epilog: str | None = None

    @property
    def line(self) -> str:
        """The command's line in the list of commands."""
        return f"{self.description.partition('.')[0]}."

    def parser(self, make: Callable[..., argparse.ArgumentParser] = argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Make the command's parser, whose namespace contains `run`."""
        parser = make(
            prog=f"lightning-swarm {self.name}",
            usage=self.usage,
            description=self.description,
            epilog=self.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_arguments(parser)
        parser.set_defaults(run=self.run)
        return parser


DOCTOR: Final = """\
Check whether this machine can be a peer: what is wrong, and what to do. Exit status 1 if something is wrong.

    lightning-swarm doctor                                          this machine
    lightning-swarm doctor --host 0.0.0.0 --port 31337              and the port that it would listen on
    lightning-swarm doctor --peer 203.0.113.7:31337/12D3...         and the connection to a running peer
"""

STATUS: Final = f"""\
Show a live swarm: stages, peers, step, rates. Asks one peer for the other peers, and all peers for reports. Changes \
nothing. For a served model, it shows stages, servers, memory and tokens/s, as the asked server knows them.

    lightning-swarm status 203.0.113.7:31337/12D3...                the stages, their peers and their speed
    lightning-swarm status 203.0.113.7:31337/12D3... --watch 10     again every ten seconds, until Ctrl-C
    lightning-swarm status 203.0.113.7:31337/12D3... --json         for programs: one object a line

{JSON_HELP}"""

MEMBERS: Final = """\
Show which peers joined a run, by which invitations, and which are banned. Asks any peer of the run. Changes nothing.

    lightning-swarm members 203.0.113.7:31337/12D3...                       where the run was started
    lightning-swarm members 203.0.113.7:31337/12D3... --invite look.invite  elsewhere

The table lists all peers that ever joined, with the role of their certificate, the beginning of their invitation's
number, how many of its uses are taken, and their part in the run. With --json, one object a line.
"""

BAN: Final = """\
Ban a peer, or all peers of an invitation, from a run. Call it where the run was started, because the owner's key is \
there.

    lightning-swarm ban 203.0.113.7:31337/12D3... 12D3KooW... --reason "sends nonsense"
    lightning-swarm ban 203.0.113.7:31337/12D3... 12D3KooW... --invitation      and all peers of its invitation
    lightning-swarm ban 203.0.113.7:31337/12D3... anna.invite                   an invitation, used or not

All peers that can be reached receive the ban at once, and then neither answer nor call the banned peer. The run's next
record announces the ban to all others, and removes the peer from the run. The ban outlasts rollbacks and checkpoints.
`lightning-swarm members` shows the ids of peers.
"""

UNBAN: Final = """\
Lift a ban. Call it where the run was started, because the owner's key is there.

    lightning-swarm unban 203.0.113.7:31337/12D3... 12D3KooW...
    lightning-swarm unban 203.0.113.7:31337/12D3... 12D3KooW... --invitation    and its invitation
    lightning-swarm unban 203.0.113.7:31337/12D3... anna.invite

The peer does not come back by itself: it joins again.
"""

PLAN: Final = """\
Predict how fast a swarm of given machines would train a model, and whether a swarm pays. Starts nothing, and asks \
other machines only with --swarm.

    lightning-swarm plan machines.yaml --layers 24 --width 2048 --sequence 1024 --vocabulary 50257
    lightning-swarm plan machines.yaml --config run.yaml            the model of that file, as `fit` takes it
    lightning-swarm plan machines.yaml --config run.yaml --measure  for machines whose rate is `here`
    lightning-swarm plan machines.yaml --layers 24 --width 2048 --sequence 1024 --picture law.png
    lightning-swarm plan --swarm 203.0.113.7:31337/12D3...          for a live swarm: would other settings be faster?

The file lists the machines. The first one starts the run: it trains, and holds a stage.

    machines:
      - name: desk               # only a rate, the memory and the link are required
        tflops: 20               # measured; or `samples_per_s: 3`, of the whole model; or `tflops: here`
        memory_gb: 24            # of the computing device
        up_mbit: 40              # its link
        down_mbit: 100
        latency_ms: 15           # to another machine, one way
        count: 3                 # number of such machines
        processor: accelerator   # or cpu, which also spends computing time on sending and receiving
        host_memory_gb: 64       # this and the next are for training alone with offloading
        bus_gb_per_s: 12
    compression: 8bit            # how tensors travel, as in SwarmStrategy; may be left out

Predictions are computed from counted work; docs/planning.md shows how accurate they were.
"""

EXPORT: Final = """\
Write a checkpoint's weights to a safetensors file or a Hugging Face folder, or as a single file. With torch 2.10 or \
newer nothing in the checkpoint is executed. OUT is overwritten.

    lightning-swarm export lightning_logs/version_0/checkpoints/last.ckpt model.safetensors
    lightning-swarm export sharded/last.ckpt whole.ckpt             a folder as one file, for a plain Trainer
    lightning-swarm export last.ckpt my-llama/                      a model of Hugging Face, to be served

The second command holds the whole model and the optimizer's state in memory. The third command needs the model's
config.json in the folder, as `model.config.save_pretrained("my-llama/")` writes it.
"""

SIMULATE: Final = """\
Simulate the throughput of a swarm whose peers come and go, under different rebalancing rules.
Starts nothing, needs no network. A day of 10,000 peers on 100 stages takes minutes for each rule and seed.

    lightning-swarm simulate scenario.yaml                          a table
    lightning-swarm simulate scenario.yaml --picture swarm.png      and curves over time

The file describes the swarm, for example:

    stages: 8              # of the pipeline
    hours: 24
    peers:
      number: 60
      samples_per_s: [1, 10]   # the slowest and the fastest, forward and backward through a stage; or one number
      stay_hours: 4            # mean stay of a peer; 0: to the end
      back_minutes: 10         # mean time until another peer replaces it
    rules: [none, paper, gain] # no moves; the SWARM paper's rule; moves that gain more than they cost
    interval_s: 300        # longest time between two decisions about moves
    move_s: 30             # a peer that moves computes nothing for this time, because it downloads and starts
    join_s: 30             # a peer that joins computes nothing for this time
    seeds: 3               # number of simulations, each with other random numbers

With `microbatches`, each microbatch is simulated by the code of real swarms, which is feasible for hundreds of peers
and for minutes. Then a peer that moves or joins downloads its stage, and `move_s` and `join_s` have no effect.

    microbatches:
      per_step: 256
      size: 1                # samples in a microbatch
      boundary_mb: 0.5       # size of a sample that travels from a stage to the next
      stage_mb: 2            # size of a stage's weights; its optimizer state has twice that size
      mbit: [20, 200]        # slowest and fastest link, each way; or one number; 0: no limit
      latency_ms: 10         # latency of each link

Instead of `peers`, `trace: file.csv` names a file with lines `seconds,peer,samples_per_s`: the peer has this rate from
then on. A rate of 0 means that it is gone. The table's percentages are relative to the best assignment of the peers
alive at each moment. Numbers are means over the seeds.
"""

COMPLETION: Final = """\
Print a script that completes commands and options in a shell. Save it where the shell looks for such scripts:

    lightning-swarm completion bash > ~/.local/share/bash-completion/completions/lightning-swarm
    lightning-swarm completion zsh > ~/.zfunc/_lightning-swarm

bash needs the package bash-completion for that. zsh needs these two lines in ~/.zshrc:

    fpath+=~/.zfunc
    autoload -Uz compinit && compinit

The script has the options of this version, so save it again after an update. It completes only the most common options
of `fit`, `validate`, `test` and `predict`.
"""

COMPRESSION_NAMES: Final = [field.name for field in fields(Compression)]
"""The fields of a `Compression`; each has an option of its own."""


def add_address(parser: argparse.ArgumentParser, **options: Any) -> None:
    """Add the address of a peer."""
    parser.add_argument("address", metavar="ADDRESS", help="address of any peer of the run, as HOST:PORT/ID", **options)


def add_identity(parser: argparse.ArgumentParser) -> None:
    """Add the file of a peer's key."""
    parser.add_argument(
        "--identity",
        metavar="FILE",
        help="file of this peer's key, created if missing (default: one key for each run and user if the run has "
        "invitations, otherwise a new key each time)",
    )


def add_owner_arguments(parser: argparse._ActionsContainer) -> None:
    """Add the options by which a command acts as a run's owner."""
    parser.add_argument("--run-id", default=DEFAULT_RUN_ID, metavar="ID", help="id of the run (default: %(default)s)")
    parser.add_argument("--owner", type=Path, metavar="FILE", help="file of the owner's key (default: this user's)")


def add_visitor_arguments(group: argparse._ActionsContainer) -> None:
    """Add the options by which a command looks at a run that answers only invited peers."""
    group.add_argument(
        "--invite",
        metavar="INVITATION",
        help=f"{INVITE_HELP}; needed if the run answers only invited peers (default: {INVITE}, or the owner's key)",
    )
    add_owner_arguments(group)


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `doctor`."""
    parser.add_argument("--host", default="127.0.0.1", help="IP address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="TCP port to listen on (default: any)")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="HOST:PORT/ID",
        help="address of a running peer: check that it answers, and that clocks and versions agree (repeatable)",
    )
    add_visitor_arguments(parser)


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `status`."""
    add_address(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--watch", type=float, metavar="SECONDS", help="repeat at this interval, until Ctrl-C")
    parser.add_argument(
        "--timeout", type=float, default=10.0, metavar="SECONDS", help="timeout for each peer (default: %(default)g)"
    )
    add_visitor_arguments(parser)


def add_members_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `members`."""
    add_address(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    add_visitor_arguments(parser)


def add_ban_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `ban` and `unban`."""
    add_address(parser)
    add_owner_arguments(parser)
    parser.add_argument("subject", metavar="WHO", help="a peer's id, 12D3..., or a file that `invite` wrote")
    parser.add_argument("--invitation", action="store_true", help="also ban or unban the peer's invitation")
    parser.add_argument("--reason", default="", help=f"a reason to display, at most {MAX_REASON} characters")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `plan`."""
    parser.add_argument(
        "machines", type=Path, nargs="?", metavar="MACHINES.yaml", help="the list of machines, as above"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="a configuration file of `fit`, with the model")
    numbers = parser.add_argument_group("or the dimensions of a transformer")
    numbers.add_argument("--layers", type=int, help="number of blocks")
    numbers.add_argument("--width", type=int, help="features per token")
    numbers.add_argument("--sequence", type=int, help="tokens per sample")
    numbers.add_argument("--vocabulary", type=int, default=0, help="size of embeddings and head (default: none)")
    numbers.add_argument(
        "--ends",
        choices=("stages", "trainer"),
        default="stages",
        help="where embeddings, head and loss are: in the first and last stage, or on the trainer (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--target-batch-size",
        type=int,
        help="samples per step (default: the smallest number that is nearly as fast as any)",
    )
    parser.add_argument(
        "--largest-batch-size",
        type=int,
        default=LARGEST_BATCH,
        help="largest number of samples per step to compare (default: %(default)s)",
    )
    parser.add_argument("--measure", action="store_true", help="measure this machine, for rates that are `here`")
    parser.add_argument("--picture", type=Path, metavar="PATH", help="draw the square-cube law for the first machine")
    _add_machine_arguments(parser)
    _add_live_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of sentences")


def _add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how tensors travel, instead of the settings of MACHINES.yaml, FILE or the swarm")
    codecs = ", ".join(get_args(CodecName))
    group.add_argument("--compression", metavar="CODEC", help=f"one codec for all tensors: {codecs}")
    for name in COMPRESSION_NAMES:
        group.add_argument(f"--compression.{name}", metavar="VALUE", help=f"only `{name}`, as in `Compression`")
    group.add_argument("--boundary-ratio", type=int, metavar="K", help="put `Bottleneck(ratio=K)` between stages")


def _add_live_arguments(parser: argparse.ArgumentParser) -> None:
    live = parser.add_argument_group("or a live swarm, instead of machines and model")
    live.add_argument("--swarm", metavar="HOST:PORT/ID", help="address of any peer of the swarm")
    add_visitor_arguments(live)
    for option, default, unit, meaning in (
        ("--over", 10.0, "SECONDS", "time over which the swarm's rates are measured"),
        ("--line-mbit", 100.0, "MBIT", "assumed Mb/s, each way, of links that were not measured"),
        ("--bus-gb-per-s", 12.0, "GB", "bandwidth between a GPU and its host, for training alone with offloading"),
        ("--timeout", 10.0, "SECONDS", "timeout for each peer"),
    ):
        live.add_argument(option, type=float, default=default, metavar=unit, help=f"{meaning} (default: %(default)g)")


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `export`."""
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="a file that Lightning saved, or a sharded checkpoint"
    )
    parser.add_argument(
        "out", type=Path, metavar="OUT", help="the file to write, *.safetensors or *.ckpt, or a folder with config.json"
    )


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `simulate`."""
    parser.add_argument("scenario", type=Path, metavar="SCENARIO.yaml", help="the swarm, and its changes over time")
    parser.add_argument("--picture", type=Path, metavar="OUT.png", help="draw throughput, peers per stage and moves")


def add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `completion`."""
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell that reads the script")
