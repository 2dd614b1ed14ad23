"""The square-cube law, drawn for the machines at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from lightning_swarm.errors import ConfigError
from lightning_swarm.planner.records import Machine
from lightning_swarm.planner.square_cube import WIDTHS, busy_share

_LINES_MBIT: Final = (20, 100, 500, 1000)
_LATENCIES_MS: Final = (0, 50, 200)


def draw(path: Path, machine: Machine, sequence: int, width: int | None) -> None:
    """How busy a machine is with one block, by the block's width: for some lines, and for some latencies.

    Args:
        path: Of the picture; its ending says of which kind it is.
        machine: Whose rate and line it is.
        sequence: Tokens of a sample.
        width: Of the model at hand, to be marked.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            'a picture needs matplotlib, which is not installed. Run: pip install "lightning-swarm[demo]", or '
            "leave out --picture."
        ) from error
    figure = Figure(figsize=(10, 4), layout="constrained", dpi=120)
    lines, delays = figure.subplots(1, 2, sharey=True)
    slower = min(machine.up_bytes_per_s, machine.down_bytes_per_s)
    of_lines = {f"{mbit} Mb/s": (mbit * 1e6 / 8, machine.latency_s) for mbit in _LINES_MBIT}
    of_delays = {f"{delay_ms} ms": (slower, delay_ms / 1e3) for delay_ms in _LATENCIES_MS}
    lines.set_title(f"{machine.name}, by its line's rate")
    delays.set_title(f"{machine.name}, {slower * 8 / 1e6:g} Mb/s, by latency")
    lines.set_ylabel("share of its time that it computes")
    for axes, links in ((lines, of_lines), (delays, of_delays)):
        for label, link in links.items():
            axes.plot(WIDTHS, [busy_share(one, sequence, machine.flop_per_s, *link) for one in WIDTHS], label=label)
        if width is not None:
            axes.axvline(width, color="tab:gray", linestyle="--", label="this model")
        axes.set(xlabel="width of the model", ylim=(0.0, 1.0))
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} must be a picture that can be written: {error}. Choose another name.") from error
