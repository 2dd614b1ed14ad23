"""What the view shows at one moment, and what it must remember from one moment to the next. Nothing is drawn here."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from lightning_swarm.client.status import PeerStatus, SwarmStatus
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.events import Event
from lightning_swarm.protocol.messages.events import EventKind

State: TypeAlias = Literal["serving", "joining", "failing", "gone"]

_RATE_WINDOW_S: Final = 10.0
_SHOW_GONE_S: Final = 60.0
_MAX_LOSSES: Final = 512


@dataclass(frozen=True)
class PeerRow:
    """One peer of one stage.

    Args:
        peer: As the trainer's router sees it; who is gone, as it was seen last.
        state: ``"joining"``: nothing came through it yet; ``"failing"``: what it was asked for last it did not do.
        trains: It brings samples.
        coordinates: It grants places in steps, and closes them.
    """

    peer: PeerStatus
    state: State
    trains: bool = False
    coordinates: bool = False


@dataclass(frozen=True)
class Scene:
    """What is shown.

    Args:
        name: Of the run.
        phase: What the Trainer does.
        step: Steps taken.
        max_steps: Of how many; None: that is not known.
        epoch: The current one, counted from 0.
        progress: Share of the run that is done, 0 to 1; None: that is not known.
        metrics: What is logged for the progress bar.
        losses: One of them over time, oldest first.
        samples_per_s: Over the last seconds; None: that is not known (yet).
        steps_per_s: Likewise.
        elapsed_s: Since the view began.
        stages: The peers of each stage; empty where there is no swarm.
        events: Oldest first.
    """

    name: str = ""
    phase: str = "training"
    step: int = 0
    max_steps: int | None = None
    epoch: int = 0
    progress: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    losses: Sequence[float] = ()
    samples_per_s: float | None = None
    steps_per_s: float | None = None
    elapsed_s: float = 0.0
    stages: Sequence[Sequence[PeerRow]] = ()
    events: Sequence[Event] = ()


class PeerPresence:
    """Who is there, and for a minute who no longer is."""

    def __init__(self) -> None:
        self._there: dict[tuple[int, PeerId], PeerStatus] = {}
        self._gone: dict[tuple[int, PeerId], tuple[PeerStatus, float]] = {}

    def update(self, status: SwarmStatus, *, now_s: float) -> list[list[PeerRow]]:
        """The rows of each stage."""
        there = {(stage.index, one.peer_id): one for stage in status.stages for one in stage.peers}
        left = self._there.keys() - there.keys()
        self._gone |= {key: (self._there[key], now_s) for key in sorted(left)}
        self._gone = {
            key: (one, since_s)
            for key, (one, since_s) in self._gone.items()
            if key not in there and now_s - since_s < _SHOW_GONE_S
        }
        self._there = there
        rows: list[list[PeerRow]] = [[_row(one, status) for one in stage.peers] for stage in status.stages]
        for (stage, _), (one, _) in self._gone.items():
            if stage < len(rows):
                rows[stage].append(PeerRow(one, "gone"))
        return rows


def _row(peer: PeerStatus, status: SwarmStatus) -> PeerRow:
    state: State = "failing" if peer.num_failures else "serving" if peer.samples_per_s else "joining"
    return PeerRow(peer, state, trains=peer.peer_id in status.trainers, coordinates=peer.peer_id == status.coordinator)


class RateWindow:
    """Steps and samples a second, over the last seconds."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int, int]] = deque()
        self._num_samples = 0
        self._newest: tuple[float, float] | None = None

    def pause(self) -> None:
        """Something else than training begins or ends: what takes it time is no training."""
        self._points.clear()

    def tick(self, now_s: float, step: int, samples_per_step: int) -> None:
        """At this moment so many steps are taken; the newest had so many samples."""
        if self._points:
            self._num_samples += max(step - self._points[-1][1], 0) * samples_per_step
        self._points.append((now_s, step, self._num_samples))
        while len(self._points) > 2 and now_s - self._points[0][0] > _RATE_WINDOW_S:
            self._points.popleft()

    @property
    def now(self) -> tuple[float, float] | None:
        """Both, of before the pause if there was one; None: that takes a second moment."""
        if len(self._points) < 2 or self._points[-1][0] <= self._points[0][0]:
            return self._newest
        (begin_s, first, before), (end_s, last, after) = self._points[0], self._points[-1]
        self._newest = (last - first) / (end_s - begin_s), (after - before) / (end_s - begin_s)
        return self._newest


class DownsampledSeries:
    """A number over a whole run, in bounded memory: the longer, the coarser."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._every = 1
        self._num_seen = 0

    def add(self, value: float) -> None:
        """The next one."""
        self._num_seen += 1
        if self._num_seen % self._every:
            return
        self.values.append(value)
        if len(self.values) >= _MAX_LOSSES:
            self.values, self._every = self.values[::2], 2 * self._every


def newer_than(last: Event | None, events: Sequence[Event]) -> Sequence[Event]:
    """Those that came after `last`, which may have been dropped meanwhile."""
    known = next((i for i in reversed(range(len(events))) if events[i] is last), -1)
    return events[known + 1 :]


WORDS: Final[Mapping[EventKind, str]] = {
    "retry": "asked again",
    "ban": "avoided for a while",
    "replay": "computed again",
    "discard": "sum given up",
    "strike": "batch struck",
    "round_repeated": "averaging repeated",
    "gone": "gone",
    "left": "left the run",
    "moves": "moves",
    "sheds": "gave the stage up",
    "download": "has its stage's state",
    "joined": "joined",
    "takeover": "coordinates now",
    "pause": "waiting",
    "resume": "going on",
    "went_back": "went back",
}
_SHOWN: Final = 6
_SPARKS: Final = "▁▂▃▄▅▆▇█"
_LONG_ID: Final = re.compile(r"\b(?:12D3KooW|Qm)[1-9A-HJ-NP-Za-km-z]{20,}")


def short(peer: str) -> str:
    """A peer's identity. All begin alike; their ends tell them apart."""
    return peer if len(peer) <= _SHOWN + 2 else peer[-_SHOWN:]


def time_of_day(event: Event) -> str:
    """When it was noted."""
    return time.strftime("%H:%M:%S", time.localtime(event.unix_time_s))


def where(event: Event) -> str:
    """Which stage and step, as far as it belongs to any."""
    parts = [f"stage {event.stage}"] if event.stage is not None else []
    parts += [f"step {event.step}"] if event.step is not None else []
    return ", ".join(parts)


def why(event: Event) -> str:
    """The reason, in one line, with short identities."""
    return _LONG_ID.sub(lambda found: short(found[0]), " ".join(event.reason.split()))


def event_line(event: Event) -> str:
    """All of it."""
    parts = [WORDS[event.kind], where(event), why(event)]
    who = f"peer {short(event.peer)} " if event.peer is not None else ""
    return f"{time_of_day(event)}  {who}{': '.join(part for part in parts if part)}"


def duration(seconds: float) -> str:
    """Minutes and seconds, with hours if there are any."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def steps(scene: Scene) -> str:
    """Where the run is."""
    return f"step {scene.step}/{scene.max_steps}" if scene.max_steps else f"step {scene.step}, epoch {scene.epoch}"


def rates(scene: Scene) -> str:
    """How fast it goes, as far as that is known."""
    if scene.samples_per_s is not None:
        return f"{scene.samples_per_s:.0f} samples/s"
    return f"{scene.steps_per_s:.3g} steps/s" if scene.steps_per_s else ""


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve in one line of text, the means of as many spans as there are places."""
    finite = [value for value in values if value - value == 0.0]
    if len(finite) < 2 or width < 2:
        return ""
    num = min(width, len(finite))
    spans = [finite[i * len(finite) // num : (i + 1) * len(finite) // num] for i in range(num)]
    means = [sum(span) / len(span) for span in spans]
    low, high = min(means), max(means)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((mean - low) * scale)] for mean in means)


def plain_line(scene: Scene) -> str:
    """Everything but the events, in one line."""
    metrics = [f"{name} {value:.4g}" for name, value in scene.metrics.items()]
    stages = [
        f"stage {index}: {', '.join(map(_plain_peer, rows)) or 'nobody'}" for index, rows in enumerate(scene.stages)
    ]
    head = "  ".join([steps(scene), *metrics, rates(scene)])
    return "   ".join([head.rstrip(), *stages])


def _plain_peer(row: PeerRow) -> str:
    peer = row.peer
    if row.state == "gone":
        return f"{short(peer.peer_id)} gone"
    state = "" if row.state == "serving" else f" {row.state}"
    return f"{short(peer.peer_id)} {peer.samples_per_s:.0f}/s q{peer.queued} n{peer.num_microbatches}{state}"
