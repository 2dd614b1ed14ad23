"""The state of a run at one moment, as numbers and lines of text, and the view's memory between moments."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from lightning_swarm.client.status import PeerStatus, SwarmStatus
from lightning_swarm.core.readable import short_name, shorten
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.events import Event
from lightning_swarm.protocol.messages.reports import EventKind

State: TypeAlias = Literal["serving", "joining", "failing", "gone"]

WORDS: Final[Mapping[EventKind, str]] = {  # event -> its text
    "retry": "failed, request repeated",
    "ban": "avoided for a while",
    "replay": "microbatch computed again",
    "out_of_memory": "has no memory for one microbatch of its stage",
    "discard": "gradient sum discarded",
    "strike": "batch taken out of the step",
    "round_repeated": "averaging repeated",
    "convicted": "found to lie about its work",
    "disputed": "cannot be proven right or wrong",
    "gone": "gone",
    "left": "left its stage",
    "refused": "requests refused, for want of a certificate that permits them: see the log",
    "expelled": "banned by the run's owner",
    "unconfirmed": "sent weights that its stage's other servers do not have",
    "moves": "moves to another stage",
    "sheds": "gave its stage up",
    "download": "has loaded its stage",
    "joined": "joined",
    "takeover": "is the coordinator now",
    "pause": "waiting",
    "resume": "going on",
    "went_back": "rolled back",
    "stopped": "ends the run: its code set `should_stop`",
}
NO_SWARM: Final = SwarmStatus(
    0, (), "", peer_id=PeerId(""), coordinator=PeerId(""), trainers=(), num_samples=0, events=()
)
_COLUMNS: Final = 100
_RATE_WINDOW_S: Final = 10.0
_SHOW_GONE_S: Final = 60.0
_MAX_LOSSES: Final = 512  # bound on the values of a `DownsampledSeries`
_SPARKS: Final = "▁▂▃▄▅▆▇█"
# The coordinator's reason for a stage whose server does not answer.
_HOLDER_GONE: Final = re.compile(r"peer (\S+), which holds (.*), is gone \((.*?)\.?\)")


@dataclass(frozen=True)
class PeerRow:
    """One peer of one stage, as the trainer's router knows the peer or, if it is gone, last knew it."""

    peer: PeerStatus
    state: State  # "joining": nothing has come through the peer yet; "failing": its latest request failed


@dataclass(frozen=True)
class Scene:
    """The state of a run at one moment: of its swarm, and of the Trainer. None means not known yet."""

    status: SwarmStatus = NO_SWARM
    stages: Sequence[Sequence[PeerRow]] = ()  # peers of each stage, gone peers included; empty: no swarm
    phase: str = "training"
    step: int = 0
    max_steps: int | None = None
    epoch: int = 0
    progress: float | None = None  # share of the run that is done, 0 to 1
    metrics: Mapping[str, float] = field(default_factory=dict)  # metrics of the progress bar
    losses: Sequence[float] = ()  # the first metric over time
    samples_per_s: float | None = None  # over the last seconds
    steps_per_s: float | None = None
    elapsed_s: float = 0.0


class PeerPresence:
    """The peers of each stage, and the peers that disappeared during the last minute."""

    def __init__(self) -> None:
        self._present: dict[tuple[int, PeerId], PeerStatus] = {}
        self._gone: dict[tuple[int, PeerId], tuple[PeerStatus, float]] = {}

    def update(self, status: SwarmStatus, *, now_s: float) -> list[list[PeerRow]]:
        """Return the rows of each stage, gone peers last; a peer in another stage has moved, and is not gone."""
        present = {(stage.index, peer.peer_id): peer for stage in status.stages for peer in stage.peers}
        left = self._present.keys() - present.keys()
        self._gone |= {key: (self._present[key], now_s) for key in sorted(left)}
        members = {peer for _, peer in present}
        self._gone = {
            key: (peer, since_s)
            for key, (peer, since_s) in self._gone.items()
            if key[1] not in members and now_s - since_s < _SHOW_GONE_S
        }
        self._present = present
        rows = [[PeerRow(peer, _state(peer, status)) for peer in stage.peers] for stage in status.stages]
        for (stage, _), (peer, _) in self._gone.items():
            if stage < len(rows):
                rows[stage].append(PeerRow(peer, "gone"))
        return rows


def _state(peer: PeerStatus, status: SwarmStatus) -> State:
    return "failing" if peer.num_failures else "serving" if peer.samples_per_s or status.is_whole else "joining"


class RateWindow:
    """Steps and samples per second, over the last seconds."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int, int]] = deque()
        self._newest: tuple[float, float] | None = None

    def pause(self) -> None:
        """Clear the window, because the time of a validation, for example, must not count as training."""
        self._points.clear()

    def tick(self, now_s: float, step: int, num_samples: int) -> None:
        """Record the numbers of steps and samples so far."""
        if self._points and num_samples < self._points[-1][2]:
            self._points.clear()  # after a rollback the swarm counts from 0
        self._points.append((now_s, step, num_samples))
        while len(self._points) > 2 and now_s - self._points[0][0] > _RATE_WINDOW_S:
            self._points.popleft()

    @property
    def now(self) -> tuple[float, float] | None:
        """Steps/s and samples/s; after a pause, the earlier rates until two moments are known; None at first."""
        if len(self._points) < 2 or self._points[-1][0] <= self._points[0][0]:
            return self._newest
        (begin_s, first, before), (end_s, last, after) = self._points[0], self._points[-1]
        self._newest = (last - first) / (end_s - begin_s), (after - before) / (end_s - begin_s)
        return self._newest


class DownsampledSeries:
    """A number over a whole run in bounded memory: the longer the run, the coarser."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._every = 1
        self._num_seen = 0

    def add(self, value: float) -> None:
        """Append the next value, if its turn has come."""
        self._num_seen += 1
        if self._num_seen % self._every:
            return
        self.values.append(value)
        if len(self.values) >= _MAX_LOSSES:
            self.values, self._every = self.values[::2], 2 * self._every


def newer_than(last: Event | None, events: Sequence[Event]) -> Sequence[Event]:
    """Return the events after `last`, or all of them if it has been dropped meanwhile."""
    known = next((i for i in reversed(range(len(events))) if events[i] is last), -1)
    return events[known + 1 :]


def time_of_day(event: Event) -> str:
    """Return the local time of an event."""
    return time.strftime("%H:%M:%S", time.localtime(event.unix_time_s))


def where(event: Event) -> str:
    """Return the stage and the step of an event, if it has any."""
    parts = [f"stage {event.stage}"] if event.stage is not None else []
    parts += [f"step {event.step}"] if event.step is not None else []
    return ", ".join(parts)


def why(event: Event) -> str:
    """Return the reason of an event in one short line, which does not name the event's own peer again."""
    reason = shorten(event.reason)
    if event.peer is None:
        return reason
    name = short_name(event.peer)
    found = _HOLDER_GONE.fullmatch(reason)
    if found is not None and found[1] == name:
        return f"it held {found[2]} ({found[3]})"
    return reason.removeprefix(f"The connection to {name} broke: ")


def event_line(event: Event) -> str:
    """Format an event in one line."""
    name = f"peer {short_name(event.peer)} " if event.peer is not None else ""
    place = f" ({where(event)})" if where(event) else ""
    reason = f": {why(event)}" if event.reason else ""
    return _clip(f"{time_of_day(event)}  {name}{WORDS[event.kind]}{place}{reason}")


def duration(seconds: float) -> str:
    """Format seconds as minutes and seconds, with hours if there are any."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def steps(scene: Scene) -> str:
    """Return the number of steps taken, with the maximum or the epoch."""
    return f"step {scene.step}/{scene.max_steps}" if scene.max_steps else f"step {scene.step}, epoch {scene.epoch}"


def rates(scene: Scene) -> str:
    """Return the speed of the run, if it is known."""
    if scene.samples_per_s is not None:
        return f"{scene.samples_per_s:.0f} samples/s"
    return f"{scene.steps_per_s:.3g} steps/s" if scene.steps_per_s else ""


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw a curve in one line of text: each character is the mean of an equal span of `values`."""
    finite = [value for value in values if value - value == 0.0]  # neither infinite nor NaN
    if len(finite) < 2 or width < 2:
        return ""
    num = min(width, len(finite))
    spans = [finite[i * len(finite) // num : (i + 1) * len(finite) // num] for i in range(num)]
    means = [sum(span) / len(span) for span in spans]
    low, high = min(means), max(means)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((mean - low) * scale)] for mean in means)


def plain_line(scene: Scene) -> str:
    """Format a scene without its events in one line of at most 100 columns, with the fullest text that fits."""
    metrics = [f"{name} {value:.4g}" for name, value in scene.metrics.items()]
    head = "  ".join(part for part in (steps(scene), *metrics, rates(scene)) if part)
    lines = [f"{head}   {swarm}" for swarm in _swarm_texts(scene)] or [head]
    return next((line for line in lines if len(line) <= _COLUMNS), _clip(lines[-1]))


def stage_name(scene: Scene, index: int) -> str:
    """Return the name of a stage."""
    return "model" if scene.status.is_whole else f"stage {index}"


def _swarm_texts(scene: Scene) -> Iterator[str]:
    """Yield texts about the peers of a swarm, from the fullest to the shortest."""
    stages = scene.stages
    if not stages:
        return
    present = [[row for row in rows if row.state != "gone"] for rows in stages]
    num_gone = len({row.peer.peer_id for rows in stages for row in rows if row.state == "gone"})
    gone = f", {num_gone} gone" if num_gone else ""
    yield "   ".join(
        f"{stage_name(scene, index)}: {', '.join(map(_plain_peer, rows)) or 'nobody'}"
        for index, rows in enumerate(stages)
    )
    if not scene.status.is_whole:
        yield f"peers per stage: {' + '.join(str(len(rows)) for rows in present)}{gone}"
    num_peers = len({row.peer.peer_id for rows in present for row in rows})
    num_empty = sum(not rows for rows in present)
    empty = f", {num_empty} of them empty" if num_empty else ""
    yield f"{num_peers} peers{'' if scene.status.is_whole else f' in {len(stages)} stages'}{empty}{gone}"


def _plain_peer(row: PeerRow) -> str:
    name = short_name(row.peer.peer_id)
    if row.state != "serving":
        return f"{name} {row.state}"
    return f"{name} {row.peer.samples_per_s:.0f}/s" if row.peer.samples_per_s else name


def _clip(line: str) -> str:
    return line if len(line) <= _COLUMNS else f"{line[: _COLUMNS - 1]}…"
