"""Decides from examined facts whether a machine can be a peer, and names the remedies. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from packaging.specifiers import SpecifierSet

from lightning_swarm.core.readable import printable

SUPPORTED_PYTHON: Final = ">=3.11"
# Repeats the package's requirements, because pip does not enforce them on packages that are installed later.
SUPPORTED: Final[Mapping[str, str]] = {
    "lightning": ">=2.5,!=2.6.2,!=2.6.3,<2.7",
    "torch": ">=2.4",
    "hivemind": ">=1.1.12,<1.2",
    "numpy": "<2.4",
}
_MALWARE: Final = {"lightning": ("2.6.2", "2.6.3")}
MIN_FREE_BYTES: Final = 1 << 30
MAX_SKEW_S: Final = 3.0  # hivemind's DHT refuses peers whose clocks differ by more: announcements expire by wall clock
SET_CLOCK: Final = (
    "Set the clock that is wrong, here or there. Run: sudo timedatectl set-ntp true (on macOS: sudo sntp -sS "
    "pool.ntp.org)"
)
_ROUNDING: Final = ("torch", "CPU")  # versions that determine how sums are rounded


@dataclass(frozen=True)
class Finding:
    """The outcome of one check."""

    check: str  # name of the check
    found: str  # the facts, in words
    remedy: str | None = None  # None: nothing is wrong
    consequence: str | None = None  # effect of an allowed difference, which may be unwanted

    @property
    def ok(self) -> bool:
        """True if nothing is wrong."""
        return self.remedy is None

    def __str__(self) -> str:
        """Return the lines for people: the verdict and, if there is one, the remedy or the consequence."""
        verdict = "WRONG" if self.remedy else "WARN " if self.consequence else "ok   "
        advice = self.remedy or self.consequence
        line = printable(f"{verdict}  {self.check}: {self.found}")  # other peers sent some of the text
        return f"{line}\n       -> {advice}" if advice else line


def check_python(version: str) -> Finding:
    """Check that the interpreter is new enough."""
    fits = SpecifierSet(SUPPORTED_PYTHON).contains(version, prereleases=True)
    remedy = None if fits else f"Use a Python {SUPPORTED_PYTHON}."
    return Finding("Python", version, remedy)


def check_version(package: str, version: str | None) -> Finding:
    """Check that a package of `SUPPORTED` is installed, in a version that the swarm works with."""
    supported = SUPPORTED[package]
    install = f'Run: pip install "{package}{supported}"'
    if version is None:
        return Finding(package, "not installed", install)
    if version in _MALWARE.get(package, ()):
        return Finding(
            package, f"{version}, which steals credentials", f"{install}. Then change all passwords and keys used here."
        )
    if not SpecifierSet(supported).contains(version, prereleases=True):
        return Finding(package, f"{version}, but {supported} is needed", install)
    return Finding(package, version)


def check_binary(path: str | None, *, executable: bool) -> Finding:
    """Check that libp2p's daemon, which carries all connections, exists and can be run."""
    reinstall = f'Run: pip install --force-reinstall --no-deps "hivemind{SUPPORTED["hivemind"]}"'
    if path is None:
        return Finding("daemon's file", "hivemind was installed without its program p2pd", reinstall)
    if not executable:
        return Finding("daemon's file", f"{path} is not executable", f"Run: chmod +x {path}")
    return Finding("daemon's file", path)


def check_port(host: str, port: int, problem: Exception | str | None) -> Finding:
    """Check that this machine can listen on an address and a port (0 for any)."""
    where = f"{host}, {f'port {port}' if port else 'any port'}"
    if problem is None:
        return Finding("port", f"{where}: free")
    if not 0 <= port < 1 << 16:
        return Finding("port", f"{where}: {problem}", "Use a port from 1 to 65535, or 0 for any.")
    remedy = (
        f"End the program that listens there (`ss -ltnp 'sport = :{port}'` names it), or use another port."
        if port
        else "Use an address of this machine: 127.0.0.1 for itself only, 0.0.0.0 for all of its networks."
    )
    return Finding("port", f"{where}: {problem}", remedy)


def check_daemon(problem: str | None, start_s: float) -> Finding:
    """Check that the daemon starts."""
    if problem is None:
        return Finding("daemon", f"starts in {start_s:.1f} s")
    remedy = "Correct the faults above first. If there are none, a firewall or a container may block the daemon."
    return Finding("daemon", f"does not start: {problem}", remedy)


def check_folder(path: str, purpose: str, problem: str | None, free_bytes: int) -> Finding:
    """Check that the folder for `purpose` can be written to and has room."""
    check = f"folder for {purpose}"
    if problem is not None:
        return Finding(check, f"{path}: {problem}", f"Make {path} a folder that this user may write to.")
    free = f"{path}, {free_bytes / (1 << 30):.1f} GiB free"
    if free_bytes < MIN_FREE_BYTES:
        return Finding(check, free, f"Make room on the disk of {path}: at least {MIN_FREE_BYTES >> 30} GiB.")
    return Finding(check, free)


def check_threads(num_threads: int, num_cores: int) -> Finding:
    """Check that torch's threads do not outnumber the cores that this process may use."""
    found = f"{num_threads} on {num_cores} core{'s' if num_cores > 1 else ''}"
    if num_threads <= num_cores:
        return Finding("torch's threads", found)
    remedy = f"Run: export OMP_NUM_THREADS={num_cores} (divided by the number of peers on this machine)"
    return Finding("torch's threads", f"{found}: they wait for each other", remedy)


class Obstacle(Enum):
    """A reason why a peer cannot be reached, and its remedy."""

    NAME = ("its name does not resolve", "Check the spelling, or give its IP address.")
    REFUSED = (
        "its machine refuses the connection",
        "Check that the peer still runs, and its port. Without `listen` only its own machine can reach it.",
    )
    SILENCE = (
        "it does not answer",
        "Check that the peer still runs, and that the firewalls on the way (a cloud's too) let its port through.",
    )
    ROUTE = ("no route leads to it", "Check the address, and this machine's network.")
    PROTOCOL = ("the program that listens there is not a peer", "Check the port: another program uses it.")
    IDENTITY = (
        "another peer listens at that address",
        "Copy the address again: a restarted peer has another id, unless it has an `identity_path`.",
    )
    STRANGER = (
        "it is a libp2p peer, but not of a compatible version of lightning_swarm",
        "Install the same version of lightning_swarm on both machines.",
    )
    DENIED = (
        "it rejects the invitation",
        "Ask the run's owner for another one: `lightning-swarm invite`.",
    )
    CLOCK = ("its clock and this machine's differ, so it rejects every invitation", SET_CLOCK)

    def __init__(self, text: str, remedy: str) -> None:
        self.text = text
        self.remedy = remedy


@dataclass(frozen=True)
class DialResult:
    """The outcome of an attempt to reach a peer."""

    address: str  # host and port
    obstacle: Obstacle | None = None
    detail: str = ""  # the system's error message


def check_reach(dialed: DialResult, round_trip_s: float | None = None) -> Finding:
    """Check that a peer can be reached. Without a daemon or a certificate here, the round trip is unknown."""
    check = f"peer {dialed.address}"
    if dialed.obstacle is not None:
        detail = f" ({' '.join(dialed.detail.split())})" if dialed.detail else ""
        return Finding(check, f"{dialed.obstacle.text}{detail}", dialed.obstacle.remedy)
    if round_trip_s is None:
        return Finding(check, dialed.detail or "libp2p answers there; only a daemon here could identify the peer")
    return Finding(check, f"reachable, round trip {round_trip_s * 1e3:.1f} ms")


def check_clock(address: str, ahead_s: float, round_trip_s: float) -> Finding:
    """Check that a peer's clock agrees with this machine's, to within half a round trip."""
    relation = "ahead of" if ahead_s > 0 else "behind"
    found = f"{address} is {abs(ahead_s):.2f} s {relation} this machine"
    if abs(ahead_s) <= MAX_SKEW_S + round_trip_s / 2:
        return Finding("clock", found)
    return Finding("clock", f"{found}, at most {MAX_SKEW_S:g} s are allowed", SET_CLOCK)


def check_protocol(address: str, here: int, there: int) -> Finding:
    """Check that a peer uses the same version of the protocol."""
    if here == there:
        return Finding("protocol", f"version {here} here and at {address}")
    remedy = "Install the same version of lightning_swarm on both machines."
    return Finding("protocol", f"version {here} here, {there} at {address}", remedy)


def compare_versions(address: str, here: Mapping[str, str], there: Mapping[str, str]) -> Finding:
    """Compare versions. All may differ, but machines with another torch or CPU are of different kinds."""
    names = [*here, *(name for name in there if name not in here)]
    differences = [
        f"{name} {here.get(name, 'none')} here, {there.get(name, 'none')} there"
        for name in names
        if here.get(name) != there.get(name)
    ]
    if any(here.get(name) != there.get(name) for name in _ROUNDING if name in here and name in there):
        consequence = (
            "This works. Where both machines hold one stage, portable arithmetic gives them the same weights, and the "
            "stage's optimizer step takes about three times as long. A run with `deterministic=True`, or an optimizer "
            "without portable arithmetic, gives this machine a stage of its own kind, or refuses it with a reason. See "
            "docs/join.md."
        )
        return Finding(f"versions at {address}", f"differ: {'; '.join(differences)}", consequence=consequence)
    same = ", ".join(f"{name} {version}" for name, version in here.items())
    found = f"differ, which works: {'; '.join(differences)}" if differences else f"{same}, as here"
    return Finding(f"versions at {address}", found)
