"""Metrics of an overview for Prometheus. Text of peers is in labels of logged numbers only."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from lightning_swarm.dashboard.overview import NUMBERS, Overview

_PREFIX: Final = "lightning_swarm:"


def metrics_text(now: Overview) -> bytes:
    """Return gauges in Prometheus' text format. Unknown numbers are left out."""
    registry = CollectorRegistry()
    rate, load = ("samples", "queued jobs") if now.kind == "run" else ("tokens", "open texts")
    for name, text, value in (
        *((name, NUMBERS[name], value) for name, value in now.numbers.items()),
        ("survey_time_seconds", "Unix time of the last survey that worked.", now.at_s),
        ("survey_failed", "1 if the latest survey failed, otherwise 0.", now.problem is not None),
    ):
        if value is not None:
            Gauge(_PREFIX + name, text, registry=registry).set(value)
    for name, text, field in (
        ("peers", "Answering peers that hold a stage.", "num_peers"),
        (f"{rate}_per_second", f"{rate.capitalize()} per second through a stage.", "rate"),
        (load.replace(" ", "_"), f"{load.capitalize()} of a stage.", "load"),
    ):
        gauge = Gauge(f"{_PREFIX}stage_{name}", text, ["stage"], registry=registry)
        for index, stage in enumerate(now.stages):
            if (value := getattr(stage, field)) is not None:
                gauge.labels(str(index)).set(value)
    # A dashboard's curves have a bounded number of names, which a lead could change in each of its reports.
    logged = [one for one in getattr(now.report, "logged", ()) if one.name in now.logged.series]
    for field, text in (("value", "Newest number that the lead logged."), ("step", "Step of a logged number.")):
        gauge = Gauge(f"{_PREFIX}logged_{field}", text, ["name"], registry=registry)
        for number in logged:
            gauge.labels(number.name).set(getattr(number, field))
    return generate_latest(registry)
