"""Addresses in the form that users write."""

from __future__ import annotations

import pytest

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.network.addresses import Address, HostPort, host_of, most_reachable

ID = "12D3KooWBTrNL8qKG3SxDRQNAcaUb5nNNixuFBXcKeMfexuaGUUR"


@pytest.mark.parametrize(
    ("text", "short", "maddr"),
    [
        (f"203.0.113.7:31337/{ID}", None, f"/ip4/203.0.113.7/tcp/31337/p2p/{ID}"),
        (f"[2001:db8::7]:80/{ID}", None, f"/ip6/2001:db8::7/tcp/80/p2p/{ID}"),
        (f"swarm.example.org:1/{ID}", None, f"/dns/swarm.example.org/tcp/1/p2p/{ID}"),
        (f"/ip4/127.0.0.1/tcp/5/p2p/{ID}", f"127.0.0.1:5/{ID}", f"/ip4/127.0.0.1/tcp/5/p2p/{ID}"),
        (f"/ip6/::1/tcp/65535/p2p/{ID}", f"[::1]:65535/{ID}", f"/ip6/::1/tcp/65535/p2p/{ID}"),
        (f"/dns4/localhost/tcp/5/p2p/{ID}", f"localhost:5/{ID}", f"/dns/localhost/tcp/5/p2p/{ID}"),
    ],
)
def test_an_address_is_written_in_two_ways(text: str, short: str | None, maddr: str) -> None:
    address = Address.parse(text)
    assert str(address) == (short or text)
    assert address.maddr == maddr
    assert Address.parse(address.maddr) == Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "203.0.113.7:31337",
        "203.0.113.7:31337/",
        f"203.0.113.7/{ID}",
        f"203.0.113.7:0/{ID}",
        f"203.0.113.7:65536/{ID}",
        f"203.0.113.7:31337/{ID[:20]}...",
        f"203.0.113.7:31337/{ID[:-1]}0",
        f"2001:db8::7:80/{ID}",
        f"/ip4/127.0.0.1/udp/5/p2p/{ID}",
        f" 203.0.113.7:31337/{ID}",
        "train.py",
    ],
)
def test_what_is_no_address_is_refused_with_the_form_of_one(text: str) -> None:
    with pytest.raises(ConfigError, match="must be host:port/id") as refusal:
        Address.parse(text)
    assert repr(text) in str(refusal.value)
    assert "Copy the whole address" in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("127.0.0.1", HostPort("127.0.0.1", 0)),
        ("0.0.0.0:31337", HostPort("0.0.0.0", 31337)),
        ("::", HostPort("::", 0)),
        ("[::1]", HostPort("::1", 0)),
        ("[::]:80", HostPort("::", 80)),
    ],
)
def test_where_to_listen(text: str, place: HostPort) -> None:
    assert HostPort.to_listen(text) == place


@pytest.mark.parametrize("text", ["", "localhost", "example.org:80", "1.2.3.4:", "1.2.3.4:65536", ":31337", "31337"])
def test_what_cannot_be_listened_on_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"`listen` must be an IP address.*0\.0\.0\.0:31337") as refusal:
        HostPort.to_listen(text)
    assert repr(text) in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "maddr"),
    [("203.0.113.7:31337", "/ip4/203.0.113.7/tcp/31337"), ("example.org:80", "/dns/example.org/tcp/80")],
)
def test_what_to_announce(text: str, maddr: str) -> None:
    assert HostPort.to_announce(text).maddr == maddr
    assert str(HostPort.to_announce(text)) == text


@pytest.mark.parametrize("text", ["", "203.0.113.7", "203.0.113.7:0", f"203.0.113.7:80/{ID}"])
def test_what_cannot_be_announced_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"`announce` must be .*203\.0\.113\.7:31337") as refusal:
        HostPort.to_announce(text)
    assert repr(text) in str(refusal.value)


def test_further_peers_of_a_machine_take_the_ports_that_follow() -> None:
    assert HostPort("0.0.0.0", 31337).for_rank(2) == HostPort("0.0.0.0", 31339)
    assert HostPort("0.0.0.0", 0).for_rank(2) == HostPort("0.0.0.0", 0)


def test_the_address_that_other_machines_can_use_comes_first() -> None:
    own, outer = Address.parse(f"127.0.0.1:5/{ID}"), Address.parse(f"192.0.2.1:5/{ID}")
    assert most_reachable([own, outer]) == outer
    assert most_reachable([own]) == own


@pytest.mark.parametrize(
    ("maddrs", "host"),
    [
        (["/ip4/127.0.0.1/tcp/1/p2p/a", "/ip4/10.0.0.2/tcp/1/p2p/a"], "10.0.0.2"),
        (["/ip6/::1/tcp/1/p2p/a"], "::1"),
        (["/dns/peer.example/tcp/1/p2p/a"], "peer.example"),
        (["nowhere"], ""),
        ([], ""),
    ],
)
def test_a_host_is_what_other_machines_call_it(maddrs: list[str], host: str) -> None:
    assert host_of(maddrs) == host
