"""Show a view in a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from experiments.progress import duration, known, rounded, size
from experiments.watch.view import BOTH, LANDED, SENT, STEP, UNCOUNTED, UNDER_WAY, nothing_sent

_LETTERS = {
    STEP: ("·", "dim"),
    SENT: (">", "green"),
    UNDER_WAY: ("=", "green"),
    LANDED: ("|", "bold"),
    BOTH: ("#", "bold green"),
    UNCOUNTED: ("x", "red"),
}
LEGEND = "> sent  = under way  | landed  # both  x not counted"


def screen(view: Mapping[str, Any]) -> RenderableType:
    """Everything of a view: heading, alarms, a row a region, the timeline."""
    parts: list[RenderableType] = [Text(line, overflow="fold") for line in heading(view)]
    if view["alarms"]:
        parts += [Text(f"! {line}", style="bold red") for line in view["alarms"]]
    else:
        parts.append(Text("no alarms", style="green"))
    parts.append(regions(view))
    parts += timeline(view)
    return Group(*parts)


def heading(view: Mapping[str, Any]) -> list[str]:
    """The state of the run in two or three lines."""
    kind = "nominal step" if view["nominal"] else "step"
    state = f"{kind} {view['done']:,} of {view['steps']:,}"
    if view["nominal"]:
        state += f" (inner step {view['step']:,})"
    if view["complete"]:
        state += ", complete"
    elif view["left_s"] is not None:
        state += f", about {duration(view['left_s'])} left"
    split = "one job per region" if view["jobs"] else "one process"
    lines = [
        f"{view['name']}: {view['method']}, {view['regions_of_run']} regions, {split}, "
        f"corpus {view['corpus']}",
        f"{state}; {rounded(view['tokens'])} tokens",
    ]
    if view["tokens_per_second"]:
        lines[-1] += f", {view['tokens_per_second']:,.0f} tokens/s"
    loss = view["eval"]["loss"]
    if view["eval"]["done"] is not None:
        shown = "not finite" if loss is None else f"{loss:.4f}"
        lines[-1] += f"; eval loss of the anchor {shown} at {kind} {view['eval']['done']:,}"
    if not view["complete"]:
        lines[-1] += f"; last record {duration(view['age_s'])} ago"
    return lines


def regions(view: Mapping[str, Any]) -> Table:
    """A row a region; columns without a value are left out. No number is cut off at 80 columns."""
    shown = {name: [cell(row) for row in view["regions"]] for name, cell in COLUMNS.items()}
    shown = {name: cells for name, cells in shown.items() if set(cells) != {"-"}}
    first = Column("region", justify="right", no_wrap=True)
    others = (Column(name.replace(" ", "\n"), justify="right", overflow="fold") for name in shown)
    out = Table(first, *others, box=box.SIMPLE_HEAD, padding=0)
    for i, row in enumerate(view["regions"]):
        style = None if row.finite else "red"
        out.add_row(str(row.number), *(cells[i] for cells in shown.values()), style=style)
    return out


COLUMNS = {
    "step": lambda r: f"{r.step:,}",
    "loss": lambda r: known(r.loss, "{:.4f}".format) if r.finite else "not finite",
    "took part": lambda r: known(r.participation, "{:.0%}".format),
    "stale- ness": lambda r: known(r.staleness, lambda late: f"{late} (<= {r.stalest})"),
    "sent": lambda r: size(r.sent),
    "received": lambda r: size(r.received),
    "sends now": lambda r: known(r.rate, lambda rate: f"{size(rate)}/s"),
    "of its way out": lambda r: known(r.link, lambda share: f"{100 * share:.2g}%"),
    "waits": lambda r: known(r.waiting, "{:.0%}".format),
    "waited": lambda r: known(r.waited, "{:.1f} s".format),
    "an exchange": lambda r: known(r.travel, lambda s: f"{1e3 * s:.0f} ms"),
    "skipped": lambda r: f"{r.skipped:,}" if r.skipped else "-",
}


def timeline(view: Mapping[str, Any]) -> list[Text]:
    """A line a region: a letter a step, for what was sent, under way and landed."""
    first, last = view["timeline"]["first"], view["timeline"]["last"]
    if (nothing := nothing_sent(view)) is not None:
        return [Text(nothing, style="dim")]
    lines = [Text(f"steps {first:,} to {last:,}   {LEGEND}", style="dim")]
    for number, marks in sorted(view["timeline"]["lanes"].items()):
        line = Text(f"{number:>4} ")
        for mark in marks:
            letter, style = _LETTERS[mark]
            line.append(letter, style=style)
        lines.append(line)
    return lines
