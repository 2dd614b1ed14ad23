"""The commands `serve --weights` and `generate`: serve a finished model, and write texts with it."""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from lightning_swarm.cli.arguments import Command, add_identity
from lightning_swarm.cli.given_invitation import INVITE_HELP, invitation_file
from lightning_swarm.cli.output import say
from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.core.limits import Limits
from lightning_swarm.core.process import collecting_rarely, leaving_on_signals
from lightning_swarm.network.access import Role
from lightning_swarm.network.addresses import Address, HostPort, most_reachable
from lightning_swarm.peer.config import DEFAULT_LISTEN, DEFAULT_RUN_ID, SwarmConfig
from lightning_swarm.peer.entry import Entry, entry_of
from lightning_swarm.peer.process import owners_folder, with_kept_identity
from lightning_swarm.protocol.settings import RunSettings
from lightning_swarm.trust.invitation_text import to_text
from lightning_swarm.trust.owner import Owner

SERVED_OPTIONS: Final = ("--weights", "--memory", "--join")
"""Options that only `serve` for a finished model has."""

_SERVE: Final = """\
Serve a finished model: hold some of its blocks, and compute texts for clients.

    lightning-swarm serve --weights my-llama/ --listen 0.0.0.0:31337    the first machine: prints how others join
    lightning-swarm serve --join ADDRESS                                another machine: gets weights from servers
    lightning-swarm serve --join ADDRESS --memory 4GB                   with less memory than is free

FOLDER is a model as `save_pretrained` of Hugging Face writes it; `lightning-swarm export` makes one from a checkpoint.
A server holds as many neighbouring blocks as fit into its memory, and chooses the blocks that are served worst.
The weights of each block must have the SHA-256 of the weights that the first server read.

On Ctrl-C or SIGTERM it accepts no new texts, and leaves when the texts in progress are done. A second signal ends it at
once, and other servers continue these texts.
"""

GENERATE: Final = """\
Write a text, token by token, with a served model, or with the model of a training run between two of its steps.

    lightning-swarm generate 203.0.113.7:31337/12D3... --prompt "Once upon a time"
    lightning-swarm generate 203.0.113.7:31337/12D3... --prompt "Hi" --sample --temperature 0.8 --max-new-tokens 200
    lightning-swarm generate 203.0.113.7:31337/12D3... --prompt "Hi" --version pin     of a run that trains

With `--version pin`, one step's weights write the whole text, and training waits meanwhile. With `--version follow`,
each step's weights write up to 16 more tokens, and training continues in between. The run must allow this by
`SampleText(answers=True)`.

The servers see hidden states, from which a prompt can be reconstructed.
"""

_INVITATION_S: Final = 7 * 86400.0  # validity of the printed invitations; `lightning-swarm invite` has the same default

_UNITS: Final = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
}


def num_bytes(option: str, text: str) -> int:
    """Read a number of bytes such as ``4GB`` or ``512MiB``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigError(f"`{option}` must be a number of bytes like 4GB or 512MiB, got {text!r}. Correct it.")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def serve_parser() -> argparse.ArgumentParser:
    """Return the parser of `serve` for a finished model."""
    return Command("serve", _SERVE, _add_serve_arguments).parser()


def run_serve(arguments: Sequence[str]) -> int:
    """Run `serve --weights`; return the exit status."""
    return _serve(serve_parser().parse_args(arguments))


def _serve(chosen: argparse.Namespace) -> int:
    """Serve stages of a finished model until a signal; return the exit status."""
    say("Importing torch.")
    with collecting_rarely():
        from lightning_swarm.model.pretrained import PretrainedFolder, device_of
        from lightning_swarm.peer.network import start_network
        from lightning_swarm.server.executor import ThreadExecutor
        from lightning_swarm.serving.host import ModelHost, ServeOptions
        from lightning_swarm.serving.memory import shares
        from lightning_swarm.serving.placement import MovePolicy

    device = device_of(chosen.device)
    if chosen.weights is not None:
        PretrainedFolder(chosen.weights)  # checks the folder before anything starts
    elif not chosen.join:
        raise ConfigError("the first server of a model needs the model's files. Name their folder by `--weights`.")
    hosts = tuple(map(Address.parse, chosen.join))
    memory = None if chosen.memory == "auto" else num_bytes("--memory", chosen.memory)
    for_texts = None if chosen.texts is None else num_bytes("--texts", chosen.texts)
    weight_bytes, text_bytes = shares(memory, for_texts, device, _print_result)
    limits = Limits(session_bytes=text_bytes, step_tokens=chosen.step_tokens)
    with invitation_file(chosen.invite) as invitation:
        config = with_kept_identity(_config(chosen, hosts, limits, invitation))
        entry = entry_of(config, owners_folder, now_s=time.time())
    options = ServeOptions(
        weights=chosen.weights,
        hosts=[host.peer_id for host in hosts],
        weight_bytes=weight_bytes,
        num_stages=chosen.stages,
        dtype=chosen.dtype,
        quantize=chosen.quantize,
        blocks=chosen.blocks,
        device=chosen.device,
        batches_texts=not chosen.exact,
        shares_prefixes=chosen.share_prefixes,
        moves=None if chosen.stay else MovePolicy(),
    )
    runtime, transport, directory = start_network(config, entry, keeps_memory=False)
    host = ModelHost(transport, directory, ThreadExecutor, config.limits, options)
    with contextlib.ExitStack() as closing:  # closes each, even if another one raises
        closing.callback(runtime.close)
        closing.callback(lambda: runtime.run(transport.close()))
        closing.callback(lambda: runtime.run(directory.close()))
        closing.callback(lambda: runtime.run(host.close()))
        closing.enter_context(leaving_on_signals(lambda _: runtime.post(host.leave)))
        runtime.run(host.open(_print_result))
        address = most_reachable([Address.parse(text) for text in runtime.run(transport.addresses())])
        _say_how_to_join(config, entry, address)
        runtime.run(host.until_left(_print_result))
    return 0


def _say_how_to_join(config: SwarmConfig, entry: Entry | None, address: Address) -> None:
    """Print the commands by which further servers and clients take part, with invitations if this is the owner."""
    owner = None if entry is None else entry.proof
    if owner is not None and not isinstance(owner, Owner):
        _print_result(f"Others can join here, too, by invitations from the model's owner: --join {address}")
        return
    options = [] if config.is_local else ["--listen", config.listen.listen_option_elsewhere]
    options += ["--trust", "open"] if config.trust == "open" else []
    options += ["--run-id", config.run_id] if config.run_id != DEFAULT_RUN_ID else []
    for_server: list[str] = []
    for_client: list[str] = []
    expires_at_s = time.time() + _INVITATION_S
    if owner is not None:
        # Uses count only if the owner also trains a run of this id; then each line admits one peer to that run.
        invite = partial(owner.invite, uses=1, expires_at_s=expires_at_s)
        for_server, for_client = (["--invite", to_text(invite(role))] for role in (Role.SERVER, Role.TRAINER))
    join = shlex.join(["lightning-swarm", "serve", *options, *for_server, "--join", str(address)])
    write = shlex.join(["lightning-swarm", "generate", *for_client, str(address), "--prompt", "Once upon a time"])
    _print_result(f"Others can join: {join}")
    _print_result(f"To write a text: {write}")
    say("For clients of OpenAI's protocol, replace `generate` by `http`, and leave out the prompt.")
    if for_server:
        until = f"{datetime.fromtimestamp(expires_at_s, UTC):%Y-%m-%d %H:%M} UTC"
        say(f"Both lines contain secrets, which admit anyone who has them until {until}. Send them in private.")


def _config(
    chosen: argparse.Namespace, hosts: tuple[Address, ...], limits: Limits, invitation: str | None
) -> SwarmConfig:
    """Return the config of the server's network, in which the settings of training have no effect."""
    return SwarmConfig(
        num_stages=None,
        pipeline=None,
        split="parameters",
        boundary=None,
        shared=(),
        role="server",
        run_id=chosen.run_id,
        initial_peers=hosts,
        listen=HostPort.to_listen(chosen.listen),
        announce=tuple(map(HostPort.to_announce, chosen.announce)),
        identity_path=chosen.identity or "",
        trust=chosen.trust,
        invite=invitation,
        gather_on_end=False,
        preemption=None,
        settings=RunSettings(target_batch_size=None),
        limits=limits,
    )


def _print_result(text: str) -> None:
    """Print a line of the result to standard output; `say` prints remarks to standard error."""
    print(text, flush=True)  # noqa: T201 - a command


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", type=Path, metavar="FOLDER", help="folder of the model, as Hugging Face saves it")
    parser.add_argument(
        "--join", action="append", default=[], metavar="ADDRESS", help="a server of the model (repeatable)"
    )
    parser.add_argument(
        "--memory",
        default="auto",
        metavar="BYTES",
        help="memory for weights and texts, as 4GB; auto: four fifths of the device's free memory (default: "
        "%(default)s)",
    )
    parser.add_argument("--texts", metavar="BYTES", help="part of --memory for texts, like 1GB (default: a quarter)")
    parser.add_argument(
        "--step-tokens",
        type=int,
        default=Limits().step_tokens,
        metavar="N",
        help="maximum tokens that one step of a text computes, all rows together (default: %(default)d)",
    )
    parser.add_argument(
        "--stages",
        type=int,
        metavar="N",
        help="number of stages, which the first server sets (default: the number of blocks, up to 16)",
    )
    parser.add_argument(
        "--dtype", help="dtype of the weights, like bfloat16; the first server sets it (default: as saved)"
    )
    parser.add_argument(
        "--quantize",
        choices=("nf4", "int8"),
        help="quantise the weights by bitsandbytes; the first server sets it (default: as saved)",
    )
    parser.add_argument("--blocks", metavar="NAME", help="name of the list of blocks in the model (default: detected)")
    parser.add_argument("--device", default="cpu", help="device that computes (default: %(default)s)")
    parser.add_argument(
        "--exact",
        action="store_true",
        help="compute each text alone, so that other texts do not change its rounding (slower than together)",
    )
    parser.add_argument(
        "--share-prefixes",
        action="store_true",
        help="compute a common beginning of several clients' prompts only once; the time of an answer then reveals "
        "whether another client sent it (default: share between texts of one client only)",
    )
    parser.add_argument("--stay", action="store_true", help="never move to stages that are served worse")
    parser.add_argument(
        "--listen", default=DEFAULT_LISTEN, metavar="IP[:PORT]", help="address to listen on (default: loopback)"
    )
    parser.add_argument(
        "--announce",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="address at which others reach this server (repeatable)",
    )
    add_identity(parser)
    parser.add_argument(
        "--trust",
        choices=("open", "invited"),
        help="which peers to answer (default: invited if other machines reach this server, else open)",
    )
    parser.add_argument("--invite", metavar="INVITATION", help=INVITE_HELP)
    parser.add_argument(
        "--run-id",
        default=DEFAULT_RUN_ID,
        metavar="ID",
        help="id of the run that the invitations are for (default: %(default)s)",
    )


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `generate`."""
    parser.add_argument("address", metavar="ADDRESS", help="any server of the model, as HOST:PORT/ID")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="beginning of the text")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="(default: %(default)d)")
    parser.add_argument("--sample", action="store_true", help="draw tokens (default: the likeliest)")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="for --sample (default: 1)")
    parser.add_argument("--seed", type=int, metavar="N", help="for --sample (default: another text each time)")
    parser.add_argument(
        "--version",
        choices=("pin", "follow"),
        help="in a training run: write the whole text with one step's weights, or each piece with the newest",
    )
    parser.add_argument("--weights", type=Path, metavar="FOLDER", help="folder of the model, if it is on this machine")
    parser.add_argument("--adapter", type=Path, metavar="FOLDER", help="an adapter of the model, as peft saves it")
    parser.add_argument("--invite", metavar="INVITATION", help=f"{INVITE_HELP}; if servers answer only invited peers")


def run_generate(arguments: argparse.Namespace) -> int:
    """Run `generate`; returns the exit status."""
    if arguments.max_new_tokens < 1 or not arguments.prompt or arguments.temperature <= 0:
        raise ConfigError(
            "`generate` needs a prompt that is not empty, at least 1 new token and a temperature above 0, got "
            f"{arguments.prompt!r}, {arguments.max_new_tokens} and {arguments.temperature:g}. Correct the options."
        )
    if arguments.version is not None:
        with collecting_rarely():
            from lightning_swarm.cli.run_text import write_with_run
        return write_with_run(arguments)
    say("Importing torch and transformers.")
    with collecting_rarely():
        import torch
        import transformers

        from lightning_swarm.serving.remote_model import prefill_options, remote_model

    say(f"Connecting to {arguments.address}.")
    try:
        with invitation_file(arguments.invite) as invite:
            model = remote_model(arguments.address, invite=invite, weights=arguments.weights, adapter=arguments.adapter)
    except ProtocolError as error:  # the peer has no such method
        raise ConfigError(
            f"`generate` needs a server of a finished model, but {arguments.address} is none: {error} If it is in a "
            "run that trains, add `--version pin`."
        ) from error
    try:
        tokenizer = model.swarm.tokenizer()
        if arguments.seed is not None:
            torch.manual_seed(arguments.seed)
        options: dict[str, Any] = (
            {"do_sample": True, "temperature": arguments.temperature} if arguments.sample else {"do_sample": False}
        )
        begin_s, prompt = time.perf_counter(), tokenizer(arguments.prompt, return_tensors="pt")
        streamer = transformers.TextStreamer(tokenizer, skip_prompt=False, skip_special_tokens=True)
        num_prompt = prompt["input_ids"].shape[1]
        say(f"Computing the prompt's {num_prompt} tokens.")
        options |= prefill_options(model, num_prompt)
        tokens = model.generate(**prompt, max_new_tokens=arguments.max_new_tokens, streamer=streamer, **options)
        num_new = tokens.shape[1] - num_prompt
        took_s = time.perf_counter() - begin_s
        say(f"{num_new} tokens, {num_new / took_s:.1f} a second")
    finally:
        model.swarm.close()
    return 0
