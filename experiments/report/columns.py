"""Columns of the table of a comparison: the loss of each variant and its costs.

The terminal table and the HTML page use the same columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.progress import duration, known, rounded, size
from experiments.report.virtual import StepSeconds

ALLREDUCE = "AllReduce: fp32 gradients exchanged at every step"

Row = Mapping[str, Any]  # of a variant in compare.json


@dataclasses.dataclass(frozen=True)
class Column:
    """`value` is what a row is sorted by (None: unknown), `text` what is shown."""

    value: Callable[[Row], float | None]
    text: Callable[[Row], str]


def columns(networks: Sequence[str], skipped: bool = False) -> dict[str, Column]:
    """Heading -> column; the columns of one network follow one another.

    Args:
      skipped: whether to show the steps that regions skipped, their gradients not being finite.
    """
    found = {
        "eval loss": Column(lambda row: row["loss"]["mean"], _loss),
        "tokens": _known("tokens", rounded),
        "sent per region": _known("bytes_sent", size),
        "fewer bytes": _known("compression", "{:.3g}x".format),
    }
    for name in networks:
        on = f" on {name}" if len(networks) > 1 else ""
        found |= {
            f"virtual time{on}": _there(name, "seconds", brief),
            f"utili- sation{on}": _there(name, "utilisation", "{:.0%}".format),
            f"faster{on}": _there(name, "speedup", "{:.3g}x".format),
        }
    found["stale- ness"] = _known("staleness", str)
    if skipped:
        found["steps skipped"] = _known("skipped", "{:,}".format)
    return found


def note(networks: Sequence[str], step_seconds: StepSeconds) -> str:
    """A paragraph on what the columns mean.

    Args:
      step_seconds: see `StepSeconds`.
    """
    text = f"{ALLREDUCE}; fewer bytes than that; staleness: the largest, in inner steps."
    if not networks:
        return text
    return (
        f"{text} Virtual time: the run's events replayed on the network, where a region's inner "
        f"step takes {step_seconds_in_words(step_seconds)}; utilisation: the share of it spent "
        "computing; faster: than AllReduce for as many steps on the same clock."
    )


def step_seconds_in_words(step_seconds: StepSeconds) -> str:
    """How long a region's inner step takes on a network."""
    if step_seconds == "network":
        return "the network's compute_s (1 s where none is given)"
    return "as long as the run measured" if step_seconds is None else f"{step_seconds:g} s"


def brief(seconds: float) -> str:
    """A time in words; three digits of seconds below a minute."""
    return f"{seconds:.3g} s" if seconds < 60 else duration(seconds)


def plus_minus(found: Mapping[str, Any], form: str) -> str:
    """`mean ± half`, or `-`."""
    if found["mean"] is None:
        return "-"
    half = "" if found["half"] is None else f" ± {found['half']:{form.lstrip('+')}}"
    return f"{found['mean']:{form}}{half}"


def with_interval(row: Row) -> dict[str, Any]:
    """The loss with its interval over seeds; with one seed, over documents."""
    half = row["loss"]["half"]
    return {**row["loss"], "half": row["document_interval"] if half is None else half}


def _loss(row: Row) -> str:
    return plus_minus(with_interval(row), ".3f").replace(" ", "")  # a table of 80 columns is full


def _known(key: str, form: Callable[[Any], str]) -> Column:
    return Column(lambda row: row[key], lambda row: known(row[key], form))


def _there(network: str, key: str, form: Callable[[Any], str]) -> Column:
    def value(row: Row) -> float | None:
        return row["networks"].get(network, {}).get(key)  # empty if no run is complete

    return Column(value, lambda row: known(value(row), form))
