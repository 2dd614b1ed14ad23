"""The view in words: events, and the lines of an output that is no terminal."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Final

from lightning_swarm.events import Event
from lightning_swarm.types.events import EventKind
from lightning_swarm.view.scene import PeerRow, Scene

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
