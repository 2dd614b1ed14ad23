"""Sockets and ports of killed peers: a later start removes their files only, and waits for their ports."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from lightning_swarm.network import hivemind
from lightning_swarm.network.addresses import HostPort, listen_error
from lightning_swarm.network.hivemind import daemon


def bind(path: Path, *, age_s: float = 3600.0, listens: bool = True) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    if listens:
        made.listen()
    os.utime(path, (time.time() - age_s,) * 2)
    return made


def test_only_old_sockets_without_a_process_go(tmp_path: Path) -> None:
    with ExitStack() as living:
        for name in ("p2pd-lives", "p2pclient-lives"):
            living.enter_context(bind(tmp_path / f"hivemind-{name}.sock"))
        living.enter_context(bind(tmp_path / "hivemind-p2pd-begins.sock", listens=False))
        for name in ("hivemind-p2pd-dead", "hivemind-p2pclient-dead", "another-dead"):
            bind(tmp_path / f"{name}.sock").close()
        bind(tmp_path / "hivemind-p2pd-new.sock", age_s=1.0).close()
        (tmp_path / "hivemind-p2pd-file.sock").touch()
        os.utime(tmp_path / "hivemind-p2pd-file.sock", (0, 0))
        daemon.remove_dead_sockets(tmp_path)
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {
            *("hivemind-p2pd-lives.sock", "hivemind-p2pclient-lives.sock", "hivemind-p2pd-begins.sock"),
            *("another-dead.sock", "hivemind-p2pd-new.sock", "hivemind-p2pd-file.sock"),
        }


def test_those_of_other_users_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "hivemind-p2pd-dead.sock"
    bind(path).close()
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    daemon.remove_dead_sockets(tmp_path)
    assert stat.S_ISSOCK(path.stat().st_mode)


def test_a_port_is_waited_for_while_a_killed_peers_daemon_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The port is free a moment after its peer was killed, and the same command may start earlier."""
    looks = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        place = HostPort(*listening.getsockname())

        def look(host: str, port: int) -> OSError | OverflowError | None:
            looks.append(getattr(found := listen_error(host, port), "errno", None))
            if len(looks) == 2:
                listening.close()
            return found

        monkeypatch.setattr(hivemind, "listen_error", look)
        asyncio.run(hivemind._check_free(place))
    assert looks == [errno.EADDRINUSE, errno.EADDRINUSE, None]
