"""Settings that cannot work are refused by rule, value and remedy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.limits import Limits
from lightning_swarm.network.addresses import Address, HostPort
from lightning_swarm.peer.config import Rebalancing, SwarmConfig, Trust
from lightning_swarm.protocol.settings import Compression, RunSettings

FIELDS = [field.name for field in dataclasses.fields(Limits)]
WHOLE = [name for name in FIELDS if name.startswith("max_") or name.endswith(("_bytes", "_tokens"))]


def config(**changes: Any) -> SwarmConfig:
    settings: dict[str, Any] = {
        "num_stages": None,
        "pipeline": None,
        "split": "parameters",
        "boundary": None,
        "microbatch_size": None,
        "shared": (),
        "target_batch_size": None,
        "role": "auto",
        "run_id": "swarm",
        "initial_peers": (),
        "listen": HostPort("127.0.0.1", 0),
        "announce": (),
        "identity_path": None,
        "gather_on_end": True,
        "rebalancing": "gain",
        "rebalance_interval": 300.0,
        "preemption": None,
        "limits": Limits(),
    }
    arguments = {**settings, **changes}
    shared = {name: arguments.pop(name) for name in RunSettings.__struct_fields__ if name in arguments}
    return SwarmConfig(settings=RunSettings(**shared), **arguments)


def limits(name: str, value: Any) -> Limits:
    return Limits(**{name: value})


def test_defaults_and_ordinary_values_pass() -> None:
    config()
    config(num_stages=3, microbatch_size=1, target_batch_size=4096, role="trainer", split=("a",), run_id="übung 1")
    config(split="time")
    Limits(cache_bytes=0, call_timeout=1, max_in_flight=1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(
            ({name: value}, [name, "positive whole number or None", repr(value), "Leave it out"])
            for name in ("num_stages", "microbatch_size", "target_batch_size")
            for value in (0, -1, 1.5, True, "2", math.nan)
        ),
        ({"role": "serve"}, ["role", "'auto'", "'trainer'", "'server'", "got 'serve'", "Choose"]),
        ({"role": None}, ["role", "got None", "Choose"]),
        ({"preemption": "google"}, ["preemption", "'aws', 'gcp', 'azure', 'auto'", "got 'google'", "Choose"]),
        ({"boundary": 4}, ["boundary", "a `Bottleneck`, a `Maxout` or None", "got 4", "Bottleneck(ratio=4)"]),
        ({"deterministic": "warn"}, ["deterministic", "True or False", "got 'warn'", "`Trainer(deterministic=...)`"]),
        ({"split": "size"}, ["split", "'parameters', 'time' or a list", "got 'size'", "Leave it out"]),
        ({"trust": "me"}, ["trust", "'invited'", "'open'", "got 'me'", "Choose"]),
        ({"trust": "open", "invite": "a.invite"}, ["invite", "got trust 'open'", "'a.invite'. Leave one"]),
        ({"invite": "swarm-invite-1.abc"}, ["invite", "got an invitation itself", "Write it to a file"]),
        ({"run_id": ""}, ["run_id", "1..100 printable", "got ''", "Choose another"]),
        ({"run_id": "a\nb"}, ["run_id", "got 'a\\nb'", "Choose another"]),
        ({"run_id": "x" * 101}, ["run_id", "1..100", "Choose another"]),
    ],
)
def test_a_setting_that_cannot_work_is_refused(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**changes)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"microbatch_size": None}, ["microbatch_size", "got None", "Set the number of samples"]),
        ({"role": "both"}, ["one process may train", "got role 'both'", "Use role 'auto'"]),
        ({"split": "time"}, ["cut the model alike", "got split 'time'", "Leave `split` out"]),
        *(
            (
                {"compression": Compression(averaging=name)},
                ["sums of gradients must travel as they are", f"got averaging '{name}'", "activations=..."],
            )
            for name in ("float16", "8bit", "powersgd")
        ),
    ],
)
def test_what_makes_weights_depend_on_who_takes_part_is_refused(changes: dict[str, Any], words: list[str]) -> None:
    fit: dict[str, Any] = {"deterministic": True, "microbatch_size": 4}
    config(**fit)
    config(**fit, compression=Compression(activations="8bit", gradients="4bit"))
    config(**changes)
    with pytest.raises(ConfigError) as caught:
        config(**{**fit, **changes})
    for word in ["deterministic=True", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "is_invited"),
    [
        ({}, False),
        ({"listen": HostPort("::1", 31337), "announce": (HostPort("localhost", 5),)}, False),
        ({"listen": HostPort("0.0.0.0", 31337)}, True),
        ({"announce": (HostPort("203.0.113.7", 31337),)}, True),
        ({"listen": HostPort("0.0.0.0", 31337), "trust": "open"}, False),
        ({"trust": "invited"}, True),
        ({"invite": "a.invite"}, True),
    ],
)
def test_where_other_machines_come_only_invited_peers_do(changes: dict[str, Any], is_invited: bool) -> None:
    assert config(**changes).is_invited is is_invited


@pytest.mark.parametrize("changes", [{"trust": "invited"}, {"trust": "open"}, {"invite": "a.invite"}])
def test_who_says_whom_to_trust_wants_a_swarm(changes: dict[str, Any]) -> None:
    plain = {"listen": HostPort.to_listen("127.0.0.1"), "rebalancing": "gain"}
    assert config(**plain).needs_no_swarm(1)
    assert not config(**plain, **changes).needs_no_swarm(1)


def test_who_joins_only_serves_unless_told_otherwise() -> None:
    somebody = (Address.parse("203.0.113.7:31337/12D3KooWBTrNL8qKG3SxDRQNAcaUb5nNNixuFBXcKeMfexuaGUUR"),)
    assert not config().only_serves
    assert config(initial_peers=somebody).only_serves
    assert config(role="server").only_serves
    assert not config(role="both", initial_peers=somebody).only_serves
    assert not config(role="trainer", initial_peers=somebody).only_serves


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "5", None, True])
def test_a_limit_that_is_none_is_refused(name: str, value: Any) -> None:
    if name == "snapshot_interval" and value is None:
        assert limits(name, value).snapshot_interval is None, "there are none then"
        return
    with pytest.raises(ConfigError) as caught:
        limits(name, value)
    for word in (f"`Limits.{name}`", "at least", repr(value), "Leave it out"):
        assert word in str(caught.value)


@pytest.mark.parametrize("name", FIELDS)
def test_counts_are_whole_and_times_may_be_fractions(name: str) -> None:
    if name in WHOLE:
        with pytest.raises(ConfigError, match="whole number"):
            limits(name, 2.5)
    else:
        assert getattr(limits(name, 2.5), name) == 2.5


@pytest.mark.parametrize("record", [Limits(), config()])
def test_settings_do_not_change(record: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, dataclasses.fields(record)[0].name, 1)


def test_compression_of_all_or_of_each_kind_apart() -> None:
    assert Compression.parse("8bit") == Compression(activations="8bit", gradients="8bit", averaging="8bit")
    assert Compression.parse({"averaging": "4bit"}) == Compression(averaging="4bit")
    assert Compression(averaging="4bit").error_feedback is False
    assert Compression(averaging="powersgd").error_feedback is True
    assert Compression(averaging="powersgd", error_feedback=False).error_feedback is False


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("2bit", ["none, float16, bfloat16, 8bit, 6bit, 4bit", "got '2bit'", "Choose one"]),
        ("powersgd", ["got 'powersgd' for activations", "Choose `Compression(averaging='powersgd')`"]),
        ({"gradients": "powersgd"}, ["got 'powersgd' for gradients"]),
        ({"averaging": "low rank"}, ["4bit, powersgd", "got 'low rank' for averaging"]),
        ({"averages": "8bit"}, ["activations, gradients, averaging, rank, error_feedback", "got ['averages']"]),
        *(
            ({"averaging": "powersgd", "rank": rank}, ["rank", "1..1024", f"got {rank!r}"])
            for rank in (0, 1025, True, 2.0, None)
        ),
        ({"error_feedback": True}, ["only where `averaging` has a codec", "True with 'none'"]),
        ({"averaging": "4bit", "error_feedback": "yes"}, ["True or False", "got 'yes'"]),
    ],
)
def test_compression_that_cannot_be_is_refused(given: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Compression.parse(given)
    for word in words:
        assert word in str(caught.value)


def test_trust_and_rebalancing_are_a_word_or_a_record() -> None:
    assert Trust.parse("audited") == Trust.parse({"level": "audited"}) == Trust("audited")
    assert (Trust().share, Trust("audited").share, Trust("audited", 0.0).share) == (None, 1 / 16, 0.0)
    assert Rebalancing.parse("none") == Rebalancing("none", interval=300.0)
    assert Rebalancing.parse(Rebalancing(interval=5.0), interval=None) == Rebalancing("gain", interval=5.0)


def test_deprecated_arguments_are_fields() -> None:
    assert Trust.parse("audited", audit_share=0.5, on_conviction=None) == Trust("audited", audit_share=0.5)
    assert Rebalancing.parse("paper", interval=5.0) == Rebalancing("paper", interval=5.0)


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lambda: Trust.parse({"share": 0.5}), ["`trust` has level, audit_share", "got ['share']"]),
        (
            lambda: Trust.parse(Trust("audited"), audit_share=0.5),
            ["the field `audit_share`", "Leave the deprecated argument out"],
        ),
        (
            lambda: Rebalancing.parse({"rule": "none"}, interval=5.0),
            ["the field `interval`", "Leave the deprecated argument out"],
        ),
    ],
)
def test_records_that_cannot_be_are_refused(read: Callable[[], object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read()
    for word in words:
        assert word in str(caught.value)
