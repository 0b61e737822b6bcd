"""Show a view in a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from experiments.progress import duration, rounded, size
from experiments.watch.view import nothing_sent

_MARKS = {
    "step": ("·", "dim"),
    "sent": (">", "green"),
    "under way": ("=", "green"),
    "landed": ("|", "bold"),
    "both": ("#", "bold green"),
    "uncounted": ("x", "red"),
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
        style = None if row["finite"] else "red"
        out.add_row(str(row["region"]), *(cells[i] for cells in shown.values()), style=style)
    return out


def _known(value: Any, form) -> str:
    return "-" if value is None else form(value)


COLUMNS = {
    "step": lambda r: f"{r['step']:,}",
    "loss": lambda r: _known(r["loss"], "{:.4f}".format) if r["finite"] else "not finite",
    "took part": lambda r: _known(r["participation"], "{:.0%}".format),
    "stale- ness": lambda r: (
        "-" if r["staleness"] is None else f"{r['staleness']} (<= {r['stalest']})"
    ),
    "sent": lambda r: size(r["sent"]),
    "received": lambda r: size(r["received"]),
    "sends now": lambda r: _known(r["rate"], lambda rate: f"{size(rate)}/s"),
    "of its way out": lambda r: _known(r["link"], lambda share: f"{100 * share:.2g}%"),
    "waits": lambda r: _known(r["waiting"], "{:.0%}".format),
    "waited": lambda r: _known(r["waited"], "{:.1f} s".format),
    "an exchange": lambda r: _known(r["travel"], lambda s: f"{1e3 * s:.0f} ms"),
    "skipped": lambda r: f"{r['skipped']:,}" if r["skipped"] else "-",
}


def timeline(view: Mapping[str, Any]) -> list[Text]:
    """A line a region: a letter a step, for what was sent, under way and landed."""
    first, last = view["timeline"]["first"], view["timeline"]["last"]
    if (nothing := nothing_sent(view)) is not None:
        return [Text(nothing, style="dim")]
    lines = [Text(f"steps {first:,} to {last:,}   {LEGEND}", style="dim")]
    for row in view["regions"]:
        line = Text(f"{row['region']:>4} ")
        for mark in lane(view["timeline"], row["region"], row["step"]):
            letter, style = _MARKS[mark]
            line.append(letter, style=style)
        lines.append(line)
    return lines


def lane(timeline: Mapping[str, Any], region: int, done: int) -> list[str]:
    """What a region did in each of the steps shown, up to its newest."""
    first = timeline["first"]
    marks = ["step"] * max(0, min(done, timeline["last"]) - first + 1)

    def put(step: int, mark: str) -> None:
        place = step - first
        if not 0 <= place < len(marks):
            return
        if {mark, marks[place]} == {"sent", "landed"}:
            mark = "both"
        order = list(_MARKS)
        if order.index(mark) > order.index(marks[place]):
            marks[place] = mark

    for flight in timeline["flights"]:
        if flight["region"] != region:
            continue
        end = flight["landed"] if flight["landed"] is not None else done + 1
        for step in range(max(first, flight["sent"] + 1), end):
            put(step, "under way")
        put(flight["sent"], "sent" if flight["counted"] else "uncounted")
        if flight["landed"] is not None:
            put(flight["landed"], "landed")
    return marks
