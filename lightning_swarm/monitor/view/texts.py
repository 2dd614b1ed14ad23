"""Texts that the view shows about a run's state and its events. Pure functions, except for the time zone."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from lightning_swarm.core.readable import short_name, shorten
from lightning_swarm.monitor.view.scene import PeerRow, Scene
from lightning_swarm.protocol.events import Event
from lightning_swarm.protocol.messages.reports import EventKind

WORDS: Final[Mapping[EventKind, str]] = {
    "retry": "failed, request repeated",
    "ban": "avoided for a while",
    "replay": "microbatch computed again",
    "out_of_memory": "has no memory for one microbatch of its stage",
    "discard": "gradient sum discarded",
    "strike": "batch taken out of the step",
    "round_repeated": "averaging repeated",
    "convicted": "convicted of false work",
    "disputed": "cannot be proven right or wrong",
    "gone": "gone",
    "left": "left its stage",
    "refused": "requests refused, because certificates do not permit them: see the log",
    "expelled": "banned by the run's owner",
    "unconfirmed": "sent weights that differ from those of its stage's other servers",
    "moves": "moves to another stage",
    "sheds": "gave its stage up",
    "download": "has loaded its stage",
    "joined": "joined",
    "takeover": "is the coordinator now",
    "pause": "waiting",
    "resume": "continuing",
    "went_back": "rolled back",
    "stopped": "ends the run: its code set `should_stop`",
}
_COLUMNS: Final = 100
_SPARKS: Final = "▁▂▃▄▅▆▇█"
# The coordinator's reason for a stage whose server does not answer.
_HOLDER_GONE: Final = re.compile(r"peer (\S+), which holds (.*), is gone \((.*?)\.?\)")


def time_of_day(event: Event) -> str:
    """Return the local time of an event."""
    return time.strftime("%H:%M:%S", time.localtime(event.unix_time_s))


def location_text(event: Event) -> str:
    """Return the stage and the step of an event, if it has any."""
    parts = [f"stage {event.stage}"] if event.stage is not None else []
    parts += [f"step {event.step}"] if event.step is not None else []
    return ", ".join(parts)


def reason_text(event: Event) -> str:
    """Return the reason of an event in one short line, without the name of the event's own peer."""
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
    location = f" ({location_text(event)})" if location_text(event) else ""
    reason = f": {reason_text(event)}" if event.reason else ""
    return _clip(f"{time_of_day(event)}  {name}{WORDS[event.kind]}{location}{reason}")


def duration_text(seconds: float) -> str:
    """Format seconds as minutes and seconds, with hours if there are any."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def steps_text(scene: Scene) -> str:
    """Return the number of steps taken, with the maximum or the epoch."""
    return f"step {scene.step}/{scene.max_steps}" if scene.max_steps else f"step {scene.step}, epoch {scene.epoch}"


def rates_text(scene: Scene) -> str:
    """Return the speed of the run, if it is known."""
    if scene.samples_per_s is not None:
        return f"{scene.samples_per_s:.0f} samples/s"
    return f"{scene.steps_per_s:.3g} steps/s" if scene.steps_per_s else ""


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Draw a curve in one line of text: each character is the mean of an equal span of `values`."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if len(finite) < 2 or width < 2:
        return ""
    num = min(width, len(finite))
    spans = [finite[i * len(finite) // num : (i + 1) * len(finite) // num] for i in range(num)]
    means = [sum(span) / len(span) for span in spans]
    low, high = min(means), max(means)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((mean - low) * scale)] for mean in means)


def plain_line(scene: Scene) -> str:
    """Format a scene without its events in one line of at most 100 columns, with the longest text that fits."""
    metrics = [f"{name} {value:.4g}" for name, value in scene.metrics.items()]
    head = "  ".join(part for part in (steps_text(scene), *metrics, rates_text(scene)) if part)
    lines = [f"{head}   {swarm}" for swarm in _swarm_texts(scene)] or [head]
    return next((line for line in lines if len(line) <= _COLUMNS), _clip(lines[-1]))


def stage_name(scene: Scene, index: int) -> str:
    """Return the name of a stage."""
    return "model" if scene.status.is_whole else f"stage {index}"


def _swarm_texts(scene: Scene) -> Iterator[str]:
    """Yield texts about the peers of a swarm, from the longest to the shortest."""
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
    empty = f" ({num_empty} empty)" if num_empty else ""
    yield f"{num_peers} peers{'' if scene.status.is_whole else f' in {len(stages)} stages'}{empty}{gone}"


def _plain_peer(row: PeerRow) -> str:
    name = short_name(row.peer.peer_id)
    if row.state != "serving":
        return f"{name} {row.state}"
    return f"{name} {row.peer.samples_per_s:.0f}/s" if row.peer.samples_per_s else name


def _clip(line: str) -> str:
    return line if len(line) <= _COLUMNS else f"{line[: _COLUMNS - 1]}…"
