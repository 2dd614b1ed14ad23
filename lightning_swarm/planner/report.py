"""Formats plans and simulations for people: numbers, tables, pictures, sentences."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.readable import table_lines
from lightning_swarm.planner.cost_model import block
from lightning_swarm.planner.records import SAME, Machine, ModelProfile, Now, Plan, Prediction, Setting, Uncut
from lightning_swarm.planner.simulator.fluid import Span, share_of_best
from lightning_swarm.protocol.settings import RebalancingRule

HOUR_S: Final = 3600.0
_COLUMNS: Final = 110
_MANY: Final = 100  # number of trainers from which averaging in groups may be better


def format_bytes(num_bytes: float) -> str:
    """Write a number of bytes with a suitable unit."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes:.0f} bytes"


def _gb_per_hour(bytes_per_s: float) -> str:
    return f"{bytes_per_s * HOUR_S / 1e9:,.4g} GB an hour"


def _wrapped(text: str) -> str:
    """Wrap long lines, and indent their continuations equally."""
    lines = []
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()))
        lines.append(textwrap.fill(line, _COLUMNS, subsequent_indent=indent) if len(line) > _COLUMNS else line)
    return "\n".join(lines)


def new_figure(size_inches: tuple[float, float], **options: Any) -> Any:
    """Make an empty matplotlib figure, or raise `ConfigError` if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            'a picture needs matplotlib, which is not installed. Run: pip install "lightning-swarm[demo]", or '
            "leave out --picture."
        ) from error
    return Figure(figsize=size_inches, dpi=120, **options)


def save_figure(figure: Any, path: Path, **options: Any) -> None:
    """Write a picture in the format that the suffix of `path` names, or raise `ConfigError`."""
    try:
        figure.savefig(path, **options)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"a picture must be a writable file of a known format, got {path}: {error}. Name another, such as out.png."
        ) from error


# ---------------------------------------------------------------------- the square-cube law

WIDTHS: Final = tuple(2**power for power in range(7, 15))  # features of a token, from 128 to 16384
_LINKS_MBIT: Final = (20, 100, 500, 1000)
_LATENCIES_MS: Final = (0, 50, 200)


# Computing grows with the square of a model's width, traffic with the width. For n by n matrices: n^3 against n^2.
# Source: SWARM, arXiv:2301.11913, section 3.1, the square-cube law.
def busy_share(width: int, sequence: int, flop_per_s: float, line_bytes_per_s: float, latency_s: float) -> float:
    """Return the share of time in which a machine with a stage of one block computes, one sample at a time."""
    costs = block(width, sequence)
    computing_s = costs.flop / flop_per_s
    # Tensors arrive while other tensors leave, but not while the machine computes. Latency counts in full, although
    # a swarm with many microbatches under way hides it.
    return computing_s / (computing_s + 2 * (costs.output_bytes / line_bytes_per_s + latency_s))


def draw(path: Path, machine: Machine, sequence: int, width: int | None) -> None:
    """Draw a machine's busy share by the width of a block, for some links and latencies; mark the model's `width`."""
    figure = new_figure((10, 4), layout="constrained")
    rates, delays = figure.subplots(1, 2, sharey=True)
    slower = min(machine.up_bytes_per_s, machine.down_bytes_per_s)
    by_rate = {f"{mbit} Mb/s": (mbit * 1e6 / 8, machine.latency_s) for mbit in _LINKS_MBIT}
    by_delay = {f"{delay_ms} ms": (slower, delay_ms / 1e3) for delay_ms in _LATENCIES_MS}
    rates.set_title(f"{machine.name}, by its link's rate")
    delays.set_title(f"{machine.name}, {slower * 8 / 1e6:g} Mb/s, by latency")
    rates.set_ylabel("share of time spent computing")
    for axes, curves_by_label in ((rates, by_rate), (delays, by_delay)):
        for label, link in curves_by_label.items():
            axes.plot(WIDTHS, [busy_share(size, sequence, machine.flop_per_s, *link) for size in WIDTHS], label=label)
        if width is not None:
            axes.axvline(width, color="tab:gray", linestyle="--", label="this model")
        axes.set(xlabel="width of the model", ylim=(0.0, 1.0))
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend()
    save_figure(figure, path)


# ---------------------------------------------------------------------- a live swarm


def describe_now(plan: Plan, now: Now, line_bytes_per_s: float) -> str:
    """Compare a live swarm with the plan for it; `line_bytes_per_s` is the assumed rate of unmeasured links."""
    measured, predicted = now.samples_per_s, now.predicted_samples_per_s
    if now.setting is None:
        parts = ["Now", "  no step has been decided yet"]
    else:
        parts = ["Now", *_setting_lines(now.setting, "   samples of the newest step")]
    rows = [
        ("samples/s", f"{measured:.3g}, measured"),
        ("all machines send", f"{_gb_per_hour(now.sent_bytes_per_s)}, measured"),
    ]
    parts += table_lines(rows, indent="  ")
    if predicted is not None and measured > 0.0:
        parts.append(
            f"  for these settings the planner predicts {predicted:.3g} samples/s, {predicted / measured:.2f} times "
            "the measured rate; its error for other settings may be as large"
        )
    if plan.samples_per_s is not None and measured > 0.0:
        parts.append(f"  the plan is {plan.samples_per_s / measured:.2f} times as fast")
    remarks = []
    if now.unmeasured:
        remarks.append(f"Not in the plan, because too few measurements exist: {', '.join(now.unmeasured)}.")
    if now.assumed_lines:
        remarks.append(
            f"No transfer was long enough to measure the links of {', '.join(now.assumed_lines)}; "
            f"{line_bytes_per_s * 8 / 1e6:.4g} Mb/s is assumed. Set another rate with --line-mbit."
        )
    return _wrapped("\n".join([*parts, *(["", *remarks] if remarks else [])]))


def _setting_lines(setting: Setting, target_note: str = "") -> list[str]:
    rows = [
        ("num_stages", f"{setting.num_stages}"),
        ("microbatch_size", f"{setting.microbatch_size}"),
        ("target_batch_size", f"{setting.target_batch_size}{target_note}"),
        ("batch_size", f"{setting.batch_size}   of the DataLoader"),
    ]
    return table_lines(rows, indent="  ")


# ---------------------------------------------------------------------- a plan


def describe(model: ModelProfile, plan: Plan) -> str:
    """Describe a plan: whether a swarm pays, the settings to choose, the figures to expect, and the reasons."""
    best = plan.best
    parts = [f"{model.parameters / 1e6:.1f}M parameters, {model.flop / 1e9:.3g} GFLOP for each sample.", _verdict(plan)]
    if plan.uncut is not None and plan.stays_whole:
        parts += _without_a_cut(model, plan.uncut, best)
    elif best is None:
        largest = max(block.parameters for block in model.blocks)
        parts.append(
            "Each machine must hold a stage, and the machine that starts the run also trains. The smallest stage is "
            f"one block, of up to {largest / 1e6:.1f}M parameters. Use machines with more memory, more of them, "
            "or a model of smaller blocks."
        )
    else:
        parts += [_settings(best), _expected(model, best), _reasons(model, plan, best)]
    return _wrapped("\n\n".join(parts))


def _verdict(plan: Plan) -> str:
    alone = plan.alone
    by_itself = ""
    if alone is not None:
        how = ", with weights and optimizer in its host's memory," if alone.offloads else ""
        by_itself = f"{alone.name} alone{how} reaches {alone.samples_per_s:.3g} samples/s with the plain Trainer"
    if plan.samples_per_s is None:
        return (
            f"No swarm of these machines can train it. {by_itself + '.' if by_itself else 'Nor can any of them alone.'}"
        )
    if plan.gain is None:
        return "Worth it: no machine of the list holds the model by itself, and together they train it."
    times = f"the swarm {plan.samples_per_s:.3g}: {plan.gain:.2f} times as much"
    if plan.worth_it:
        return f"Worth it: {by_itself}, {times}."
    why = "too little to make up for faults and for the error of predictions"
    return f"Not worth it: {by_itself}, {times}" + (f", {why}." if plan.gain >= 1.0 else ".")


def _without_a_cut(model: ModelProfile, uncut: Uncut, cut: Prediction | None) -> list[str]:
    """Describe a plan without a cut: the settings to choose, the figures to expect, and the reasons."""
    rows = [
        ("num_stages", "1   without a cut: each machine computes the whole model"),
        ("role", "both"),
        ("target_batch_size", f"{uncut.target_batch_size}"),
    ]
    chosen = ["Choose", *table_lines(rows, indent="  "), "", f"  trainers: {_counted_names(uncut.trainers)}"]
    chosen += _unused_lines(uncut, "the model")
    sent_bytes_per_s = uncut.sent_bytes * len(uncut.trainers) / uncut.step_s
    rows = [
        ("samples/s", f"{uncut.samples_per_s:.3g}, a step in {uncut.step_s:.3g} s"),
        *([("bits of a number", f"averaging {code.bits:.4g}")] if (code := model.wire.averaging) else []),
        ("each sends in a step", format_bytes(uncut.sent_bytes)),
        ("all machines send", _gb_per_hour(sent_bytes_per_s)),
        ("a trainer's memory", f"{format_bytes(uncut.state_bytes)} and activations"),
    ]
    return ["\n".join(chosen), "\n".join(["Expect", *table_lines(rows, indent="  ")]), _why_uncut(model, uncut, cut)]


def _why_uncut(model: ModelProfile, uncut: Uncut, cut: Prediction | None) -> str:
    parts = (uncut.computing_s, uncut.averaging_s, uncut.closing_s)
    computing, averaging, closing = (f"{100 * seconds / uncut.step_s:.0f} %" for seconds in parts)
    spent = f"{averaging} goes into averaging gradients and into the optimizer, {closing} into agreeing on it"
    lines = ["Why", f"  {computing} of a step is computing, {spent}. More samples a step reduce the last two."]
    lines += _uncounted(model)
    if cut is not None:
        stages = "one stage" if cut.setting.num_stages == 1 else f"{cut.setting.num_stages} stages"
        lines.append(f"  With one trainer, and {stages} on servers, it would be {cut.samples_per_s:.3g} samples/s.")
    ddp = f"  DDP, with equal shares of a step, and unencoded gradients: {uncut.ddp_samples_per_s:.3g}"
    simpler = uncut.ddp_samples_per_s >= SAME * uncut.samples_per_s
    lines.append(f"{ddp}{'. If no machine comes or goes, choose it: it is simpler' if simpler else ''}.")
    if len(uncut.trainers) >= _MANY:
        lines.append(
            "  Here all trainers average together in each step. `hivemind.Optimizer` averages in groups, for "
            "hundreds of trainers, and its steps are not exact."
        )
    return "\n".join(lines)


def _unused_lines(plan: Prediction | Uncut, what: str) -> list[str]:
    lines = []
    if plan.left_out:
        lines.append(f"  left out, because they cannot hold {what}: {_counted_names(plan.left_out)}")
    if plan.spared:
        lines.append(f"  not needed, because the swarm is faster without: {_counted_names(plan.spared)}")
    return lines


def _settings(best: Prediction) -> str:
    lines = ["Choose", *_setting_lines(best.setting), ""]
    lines += [f"  stage {index}: {_counted_names(names)}" for index, names in enumerate(best.stages)]
    return "\n".join([*lines, *_unused_lines(best, "a stage")])


def _counted_names(names: Sequence[str]) -> str:
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in Counter(names).items())


def _expected(model: ModelProfile, best: Prediction) -> str:
    million_gb = best.sent_bytes_per_s / best.samples_per_s * 1e6 / 1e9
    wire = model.wire
    codes = {"activations": wire.activations, "gradients": wire.gradients, "averaging": wire.averaging}
    encoded = ", ".join(f"{name} {code.bits:.4g}" for name, code in codes.items() if code is not None)
    rows = [
        ("samples/s", f"{best.samples_per_s:.3g}, a step in {best.times.step_s:.3g} s"),
        ("machines compute", f"{100 * best.utilisation:.0f} % of what they could"),
        ("a microbatch at a boundary", _boundary_text(best)),
        *([("bits of a number", encoded)] if encoded else []),
        *((f"{name} sends in a step", format_bytes(num_bytes)) for name, num_bytes in best.step_bytes.items()),
        ("all machines send", f"{_gb_per_hour(best.sent_bytes_per_s)}, {million_gb:,.0f} GB for a million samples"),
        ("a stage's memory", f"{format_bytes(best.state_bytes)} and activations"),
    ]
    return "\n".join(["Expect", *table_lines(rows, indent="  ")])


def _boundary_text(best: Prediction) -> str:
    if not best.boundary_bytes:
        return "there is no boundary"
    forward, back = max(best.boundary_bytes), max(best.boundary_gradient_bytes)
    return f"{format_bytes(forward)} forward, {'as much' if forward == back else format_bytes(back)} back"


def _reasons(model: ModelProfile, plan: Plan, best: Prediction) -> str:
    times = best.times

    def share(seconds: float) -> str:
        return f"{100 * seconds / times.step_s:.0f} % of a step"

    advice = "Faster links would help most, or a wider model."
    if best.line_share <= 0.5:
        advice = "More machines would help most, or faster ones."
    lines = [
        "Why",
        f"  {share(times.forward_s + times.backward_s)} is spent at the pace of the slowest machine: {best.slowest}.",
        f"  {100 * best.line_share:.0f} % of this time it waits for its link, and computes in the rest. {advice}",
    ]
    if len(best.stages) > 1:
        lines.append(
            f"  {share(times.fill_s)} is waiting for the first microbatch to come through the other stages, and for "
            "the last to come back. More microbatches in a batch reduce this share."
        )
    if times.around_s:
        lines.append(f"  {share(times.around_s)} is the trainer's work on embeddings and head, while all stages wait.")
    lines.append(
        f"  {share(times.averaging_s)} goes into averaging gradients within the stages and into the optimizer, "
        f"{share(times.closing_s)} into agreeing on it. More samples a step reduce both."
    )
    return "\n".join(lines + _remarks(model, plan, best))


def _uncounted(model: ModelProfile) -> list[str]:
    names = model.wire.uncounted
    return [f"  The size of tensors encoded by {name} is unknown; they count as unencoded." for name in names]


def _remarks(model: ModelProfile, plan: Plan, best: Prediction) -> list[str]:
    remarks = _uncounted(model)
    if best.recomputed > 0.0:
        remarks.append(
            f"  Activations of {100 * best.recomputed:.0f} % of the samples do not fit into the memory of some machine "
            "or into `Limits.cache_bytes`: these forwards are computed twice."
        )
    if len(plan.by_stages) > 1:
        fastest = sorted(plan.by_stages, key=lambda pair: -pair[1])[:5]
        rates = ", ".join(f"{rate:.3g} with {num_stages}" for num_stages, rate in sorted(fastest))
        remarks.append(f"  Samples/s by number of stages, with batches of that size: {rates}.")
    if plan.uncut is not None:
        remarks.append(f"  Without a cut, on the machines that hold the model: {plan.uncut.samples_per_s:.3g}.")
    return remarks


# ---------------------------------------------------------------------- simulated swarms

_POINTS: Final = 400  # points of a curve, each an average
_SPAN_COLUMNS: Final[Mapping[str, tuple[int, Callable[[Sequence[Span]], float]]]] = {  # name -> decimal places, value
    "samples/s": (2, lambda spans: _num_samples(spans) / _length_s(spans)),
    "% of best": (1, lambda spans: 100.0 * share_of_best(spans)),
    "first hour": (1, lambda spans: 100.0 * share_of_best(spans, spans[0].begin_s, spans[0].begin_s + HOUR_S)),
    "last hour": (1, lambda spans: 100.0 * share_of_best(spans, spans[-1].end_s - HOUR_S, spans[-1].end_s)),
    "moves/hour": (1, lambda spans: HOUR_S * sum(span.num_moves for span in spans) / _length_s(spans)),
    "hours below half of best": (
        2,
        lambda spans: sum(span.length_s for span in spans if span.samples_per_s < 0.5 * span.best) / HOUR_S,
    ),
}
_MICROBATCH_HEAD: Final = ("queued", "MB a sample")
_MICROBATCH_CURVES: Final = {"queued": "jobs that wait\nat a peer", "sent_mb_per_s": "MB/s sent"}  # field -> label


def span_table(results: Mapping[RebalancingRule, Sequence[Sequence[Span]]]) -> str:
    """Format a table of means over the seeds, with a line for each rule; `results` has the spans of each seed."""
    rows: list[tuple[str, ...]] = [("rule", *_SPAN_COLUMNS)]
    rows += [(rule, *(_mean(runs, *column) for column in _SPAN_COLUMNS.values())) for rule, runs in results.items()]
    if all(span.sent_bytes is not None for runs in results.values() for spans in runs for span in spans):
        added = [_MICROBATCH_HEAD, *map(_microbatch_cells, results.values())]
        rows = [row + cells for row, cells in zip(rows, added, strict=True)]
    return "\n".join(table_lines(rows, numbers=True))


def _microbatch_cells(runs: Sequence[Sequence[Span]]) -> tuple[str, ...]:
    spans = [span for spans in runs for span in spans]
    queued = statistics.fmean(span.queued or 0.0 for span in spans)
    return f"{queued:.1f}", f"{sum(span.sent_bytes or 0 for span in spans) / _num_samples(spans) / 1e6:.3g}"


def _mean(runs: Sequence[Sequence[Span]], digits: int, value_of: Callable[[Sequence[Span]], float]) -> str:
    # A run's value is NaN for a time in which no assignment could compute samples.
    known = [value for value in map(value_of, runs) if not math.isnan(value)]
    return f"{statistics.fmean(known):.{digits}f}" if known else "-"


def _num_samples(spans: Sequence[Span]) -> float:
    return sum(span.length_s * span.samples_per_s for span in spans)


def _length_s(spans: Sequence[Span]) -> float:
    return spans[-1].end_s - spans[0].begin_s


def draw_spans(results: Mapping[RebalancingRule, Sequence[Sequence[Span]]], path: Path) -> None:
    """Draw samples/s beside the best, peers per stage, and moves, over the hours of the first seed."""
    drawn = [curves(runs[0]) for runs in results.values()]
    names = [name for name in _MICROBATCH_CURVES if all(name in lines for _, lines in drawn)]
    figure = new_figure((6 * len(results), 7 + 2 * len(names)))
    panels = figure.subplots(3 + len(names), len(results), sharex=True, sharey="row", squeeze=False)
    for rule, (hours, lines), (rate, peers, moves, *curve_axes) in zip(results, drawn, panels.T, strict=True):
        rate.set_title(f"rule: {rule}")
        rate.plot(hours, lines["best"], color="tab:gray", label="best assignment")
        rate.plot(hours, lines["samples_per_s"], color="tab:blue", label="swarm")
        peers.fill_between(hours, lines["fewest"], lines["most"], step="mid", color="tab:blue", alpha=0.4)
        moves.plot(hours, lines["moves"], color="tab:blue")
        for axes, name in zip(curve_axes, names, strict=True):
            axes.plot(hours, lines[name], color="tab:blue")
        panels[-1, 0].set_xlabel("hours")
    labels = [
        "samples/s",
        "peers a stage,\nfewest to most",
        "moves so far",
        *(_MICROBATCH_CURVES[name] for name in names),
    ]
    for axes, label in zip(panels[:, 0], labels, strict=True):
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0.0)
    panels[0, 0].legend(loc="lower left")
    save_figure(figure, path, bbox_inches="tight")


def curves(spans: Sequence[Span]) -> tuple[list[float], dict[str, list[float]]]:
    """Average spans over equal parts of the time, and count the moves up to the end of each part."""
    names = ["best", "samples_per_s", "fewest", "most"]
    if spans[0].sent_bytes is not None:
        names += _MICROBATCH_CURVES
    begins_s = [span.begin_s for span in spans]
    edges_s, part_s = np.linspace(begins_s[0], spans[-1].end_s, _POINTS + 1, retstep=True)

    def means(name: str) -> list[float]:
        sums = np.cumsum([0.0, *(span.length_s * getattr(span, name) for span in spans)])  # up to the end of each span
        found: list[float] = (np.diff(np.interp(edges_s, [*begins_s, spans[-1].end_s], sums)) / part_s).tolist()
        return found

    so_far = np.cumsum([0, *(span.num_moves for span in spans)])[np.searchsorted(begins_s, edges_s[1:])]
    hours = (edges_s[1:] - begins_s[0] - part_s / 2) / HOUR_S
    return hours.tolist(), {**{name: means(name) for name in names}, "moves": so_far.tolist()}
