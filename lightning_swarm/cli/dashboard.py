"""The command `dashboard`: show a live run, or a served model, on a page for a browser."""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Final

from lightning_swarm.cli.arguments import add_address, add_visitor_arguments
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.extras import require_extra
from lightning_swarm.core.process import leaving_on_signals
from lightning_swarm.network.addresses import Address, HostPort
from lightning_swarm.serving.http_access import is_local

DASHBOARD: Final = """\
Show a live run, or a served model, on a page for a browser: stages, peers, rates over time, events. Changes nothing.

    lightning-swarm dashboard 203.0.113.7:31337/12D3...                 then open http://127.0.0.1:8080/
    lightning-swarm dashboard 203.0.113.7:31337/12D3... --host 0.0.0.0  for other machines, with a token

ADDRESS is that of any peer. If it dies, the dashboard asks another peer. /api/state has the page's numbers as JSON, and
/metrics has them for Prometheus. If other machines reach the port, requests need the token that the command prints.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dashboard`."""
    add_address(parser)
    parser.add_argument("--host", default="127.0.0.1", metavar="IP", help="address to listen on (default: loopback)")
    parser.add_argument("--port", type=int, default=8080, help="0 for any (default: %(default)d)")
    for option, default, meaning in (
        ("--every", 1.0, "time between two surveys"),
        ("--timeout", 5.0, "timeout for each peer"),
    ):
        help_text = f"{meaning} (default: %(default)g)"
        parser.add_argument(option, type=float, default=default, metavar="SECONDS", help=help_text)
    # For the callback `Dashboard`: a socket that listens already, and the process with which this one ends.
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    add_visitor_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run `dashboard`; returns the exit status."""
    address = Address.parse(arguments.address)
    for name, seconds in (("--every", arguments.every), ("--timeout", arguments.timeout)):
        if not 0.1 <= seconds <= threading.TIMEOUT_MAX:
            raise ConfigError(f"`{name}` must be a number of seconds from 0.1 on, got {seconds:g}. Correct it.")
    require_extra("dashboard", "the dashboard")
    inherited = socket.socket(fileno=arguments.fd) if arguments.fd is not None else None
    with closing(inherited or _listen(arguments.host, arguments.port)) as listening:
        return _serve(arguments, address, listening)


def _serve(arguments: argparse.Namespace, address: Address, listening: socket.socket) -> int:
    from lightning_swarm.cli.visitors import visiting
    from lightning_swarm.dashboard.overview import Overview
    from lightning_swarm.dashboard.server import DashboardServer, OverviewFeed
    from lightning_swarm.dashboard.watch import watch
    from lightning_swarm.monitor.survey import watch_reports

    host, port = arguments.host, listening.getsockname()[1]
    token = None if is_local(host) else secrets.token_urlsafe(32)
    feed, stopped, is_ready = OverviewFeed(), threading.Event(), threading.Event()
    server = DashboardServer(feed, token=token, host=host)

    def publish(overview: Overview) -> None:
        feed.publish(overview)
        is_ready.set()

    def end(_: object) -> None:
        server.should_exit = True
        is_ready.set()

    if arguments.parent is not None:
        threading.Thread(target=_end_with, args=(arguments.parent, end), daemon=True).start()
    # uvicorn stops at a signal, and then raises it again.
    with (
        leaving_on_signals(end),
        visiting(arguments, "dashboard", str(address)) as visitor,
        ThreadPoolExecutor(1) as pool,
    ):
        open_reports = partial(watch_reports, every_s=0.0, timeout=arguments.timeout, visitor=visitor)
        surveys = pool.submit(watch, address, open_reports, publish, stopped, every_s=arguments.every)
        surveys.add_done_callback(end)
        try:
            is_ready.wait()  # a wrong address is an error before anything is served
            if not surveys.done() and not server.should_exit:
                query = f"?token={token}" if token is not None else ""
                print(f"Dashboard of {address}: http://{_shown(host, port)}/{query}", flush=True)  # noqa: T201
                server.run(sockets=[listening])
        finally:
            stopped.set()
        surveys.result()
    return 0


def _end_with(parent: int, end: Callable[[object], None]) -> None:
    """Call `end` once the parent process is gone, even if it was killed."""
    while os.getppid() == parent:
        time.sleep(1.0)
    end(None)


def _shown(host: str, port: int) -> str:
    """Return the host and port of the page's address."""
    return str(HostPort(socket.gethostname() if host in ("0.0.0.0", "::") else host, port))


def _listen(host: str, port: int) -> socket.socket:
    try:
        if not 0 <= port < 1 << 16:
            raise OSError("ports are numbers up to 65535")
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(
            f"`--host` and `--port` must be an address of this machine and a free port, got {host!r} and {port}: "
            f"{error}. Choose others."
        ) from error
