"""The command `http`: answer OpenAI's HTTP protocol for served models."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from lightning_swarm.cli.given_invitation import INVITE_HELP, invitation_file
from lightning_swarm.cli.output import say
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.extras import require_extra
from lightning_swarm.core.process import collecting_rarely
from lightning_swarm.serving.http_access import is_local
from lightning_swarm.serving.http_queue import DEFAULT_LIMITS, QueueLimits

HTTP: Final = """\
Answer OpenAI's HTTP protocol for served models. It serves completions and chats, whole or streamed.

    lightning-swarm http 203.0.113.7:31337/12D3... --port 8000
    lightning-swarm http small=203.0.113.7:31337/12D3... large=203.0.113.8:31337/12D3...
    lightning-swarm http 203.0.113.7:31337/12D3... --adapter poems=adapter/

Clients use the names of models and adapters from the command line; a model's default name is its config's model type.
The page / is for trying the models. /health lets each model write a token, and answers 200 if all of them did. /metrics
is for Prometheus. If other machines reach the port, requests must have an API key as a bearer token.
"""

API_KEY_FILE: Final = "SWARM_API_KEY_FILE"
_MIN_KEY_CHARACTERS: Final = 16
_MAX_KEYS: Final = 1000
_MAX_LIMIT: Final = 10_000  # texts, waiting requests, or seconds of a wait
_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}"


def add_http_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `http`."""
    from lightning_swarm.serving.tool_formats import FORMATS

    parser.add_argument(
        "models",
        nargs="+",
        metavar="[NAME=]ADDRESS",
        help="any server of a model, as HOST:PORT/ID (repeatable, for several models)",
    )
    parser.add_argument("--host", default="127.0.0.1", metavar="IP", help="address to listen on (default: loopback)")
    parser.add_argument("--port", type=int, default=8000, help="(default: %(default)d)")
    parser.add_argument(
        "--api-key",
        metavar="FILE",
        help="file of API keys, one a line; each request must have one of them. Required if other machines reach the "
        f"port (default: the file that {API_KEY_FILE} names)",
    )
    for option, form, meaning in (
        ("--adapter", "NAME=FOLDER", "a LoRA adapter of the model, as peft saves it; requests name it as their model"),
        ("--allow-host", "NAME", "another name that clients may use for this endpoint, such as that of a proxy"),
        ("--allow-origin", "ORIGIN", "another site whose pages may use the endpoint, such as https://chat.example.org"),
    ):
        parser.add_argument(option, action="append", default=[], metavar=form, help=f"{meaning} (repeatable)")
    for option, default, unit, meaning in (
        ("--max-texts", DEFAULT_LIMITS.texts, "N", "texts to write at the same time"),
        (
            "--max-waiting",
            DEFAULT_LIMITS.waiting,
            "N",
            "requests that may wait for other requests to end; more get status 429",
        ),
        ("--max-wait", DEFAULT_LIMITS.wait_s, "SECONDS", "time after which a waiting request gets status 429"),
    ):
        text = f"{meaning} (default: %(default)g)"
        parser.add_argument(option, type=type(default), default=default, metavar=unit, help=text)
    parser.add_argument(
        "--weights",
        type=Path,
        metavar="FOLDER",
        help="folder of the model, if there is one model and it is on this machine",
    )
    parser.add_argument(
        "--tool-parser",
        choices=tuple(FORMATS),
        help="format in which the model calls tools (default: that of its chat template)",
    )
    parser.add_argument("--invite", metavar="INVITATION", help=f"{INVITE_HELP}; if servers answer only invited peers")


def _keys(arguments: argparse.Namespace) -> list[str]:
    """Read the API keys; raises a ConfigError if an endpoint that other machines could reach has none."""
    file = arguments.api_key or os.environ.get(API_KEY_FILE)
    if not file:
        if is_local(arguments.host):
            return []
        raise ConfigError(
            f"an endpoint that other machines reach must have an API key, got none with `--host {arguments.host}`. "
            "Write a key into a file by `openssl rand -hex 32 > FILE`, and name the file by `--api-key FILE`."
        )
    try:
        keys = Path(file).read_text().split("\n")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"`--api-key` must name a file with a key, got {file!r}: {error}.") from error
    keys = [key.strip() for key in keys if key.strip()]
    if not 0 < len(keys) == len({*keys}) <= _MAX_KEYS:
        raise ConfigError(
            f"a file of API keys must have 1 to {_MAX_KEYS} different keys, one a line, got {len(keys)} keys in "
            f"{file!r}, of which {len({*keys})} differ. Make a key by `openssl rand -hex 32`."
        )
    for number, key in enumerate(keys, 1):
        if len(key) < _MIN_KEY_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(
                f"an API key must have at least {_MIN_KEY_CHARACTERS} ASCII characters and no spaces, unlike key "
                f"{number} in {file!r}. Make a key by `openssl rand -hex 32`."
            )
    return keys


def _limits(arguments: argparse.Namespace) -> QueueLimits:
    for option, value, least in (
        ("--max-texts", arguments.max_texts, 1),
        ("--max-waiting", arguments.max_waiting, 0),
        ("--max-wait", arguments.max_wait, 0.1),
    ):
        if not least <= value <= _MAX_LIMIT:
            raise ConfigError(f"`{option}` must be {least:g} to {_MAX_LIMIT}, got {value:g}. Correct it.")
    return QueueLimits(texts=arguments.max_texts, waiting=arguments.max_waiting, wait_s=arguments.max_wait)


def _named(option: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    """Split texts of the form NAME=VALUE; raises a ConfigError for a malformed name."""
    pairs = [(name, value) if equals else ("", text) for text in texts for name, equals, value in [text.partition("=")]]
    for name, value in pairs:
        if name and not re.fullmatch(_NAME, name):
            raise ConfigError(
                f"a name in `{option}` must have up to 128 letters, digits and signs . _ : / -, and begin with a "
                f"letter or digit, got {name[:100]!r} for {value!r}. Choose another name."
            )
    return pairs


def _check_adapters(adapters: Sequence[tuple[str, str]]) -> None:
    """Refuse adapters without a name, and folders that have none, before anything starts."""
    for name, folder in adapters:
        if not name:
            raise ConfigError(f"`--adapter` must have the form NAME=FOLDER, got {folder!r}. Give the adapter a name.")
        if not Path(folder, "adapter_config.json").is_file():
            raise ConfigError(
                f"`--adapter {name}=FOLDER` must name a folder that peft's `save_pretrained` has written, got "
                f"{folder!r} without adapter_config.json. Correct it."
            )


def _check_names(names: Sequence[str]) -> None:
    if twice := {name for name in names if name and names.count(name) > 1}:
        raise ConfigError(
            f"each model and adapter must have a name of its own, got {min(twice)!r} twice. Write NAME=ADDRESS, or "
            "--adapter NAME=FOLDER."
        )


def run_http(arguments: argparse.Namespace) -> int:
    """Run `http`; returns the exit status."""
    for_one = {"--weights": arguments.weights, "--tool-parser": arguments.tool_parser, "--adapter": arguments.adapter}
    for option, value in for_one.items():
        if value and len(arguments.models) > 1:
            raise ConfigError(f"`{option}` is for one model, got {len(arguments.models)} models. Leave it out.")
    keys, limits = _keys(arguments), _limits(arguments)
    models, adapters = _named("NAME=ADDRESS", arguments.models), _named("--adapter", arguments.adapter)
    _check_adapters(adapters)
    _check_names([name for name, _ in (*models, *adapters)])
    say("Importing torch and transformers.")
    with collecting_rarely():
        from lightning_swarm.serving import http_server
        from lightning_swarm.serving.remote_model import remote_model
        from lightning_swarm.serving.texts import ServedText

    require_extra("http", "the HTTP endpoint")
    served: list[ServedText] = []
    with contextlib.ExitStack() as closing:
        invite = closing.enter_context(invitation_file(arguments.invite))
        for chosen_name, address in models:
            say(f"Connecting to {address}.")
            model = remote_model(address, invite=invite, weights=arguments.weights)
            closing.callback(model.swarm.close)
            name = chosen_name or model.config.model_type
            served.append(ServedText(name, model, model.swarm.tokenizer(), arguments.tool_parser))
            _check_names([*(text.name for text in served), *(name for name, _ in adapters)])
        base = served[0]
        served += [
            replace(base, name=name, model=base.model.swarm.with_lora(folder), parent=base.name)
            for name, folder in adapters
        ]
        names = ", ".join(text.name for text in served)
        url = f"http://{arguments.host}:{arguments.port}"
        print(f"Answering at {url}/v1 for {names}. A page to try them: {url}/", flush=True)  # noqa: T201
        http_server.run(
            served,
            host=arguments.host,
            port=arguments.port,
            limits=limits,
            keys=keys,
            allowed_hosts=arguments.allow_host,
            allowed_origins=arguments.allow_origin,
        )
    return 0
