"""Print the result of a comparison, a table per panel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table

from experiments.progress import known, print_table, right, rounded, say, size
from experiments.report.columns import brief, columns, note, plus_minus, with_interval
from experiments.report.costs import BYTES, STEPS, TOKENS, seconds_on


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print one table per panel, what the numbers mean, and the runs that failed."""
    for panel in result["panels"]:
        print_table(console, table(result, panel), names=1)
        for name, share in panel["other_bytes"].items():
            text = f"not at equal bytes: {name} sends {share:+.1%} against {panel['baseline']}"
            console.print(text, highlight=False)
    if result["apart"]:
        shares = ", ".join(f"{name} {share:+.1%}" for name, share in result["apart"].items())
        text = f"at equal {result['equal']}, against {result['baseline']}: {shares}"
        console.print(text, highlight=False)
    source = f"the highest final loss of {result['baseline']}"
    if result["target_from"] == "config":
        source = "given"
    target = known(result["target"], "{:.4f}".format)
    console.print(
        f"loss in nats per token on the same validation documents{interval_of(result)}; MB are "
        "per region. Differences are paired by seed, so they share initial weights and data. "
        f"Target loss {target} ({source}): first crossing of the evaluated anchor, interpolated; "
        "the mean is over the seeds that reach it.",
        highlight=False,
    )
    if result["target"] is not None:
        print_table(console, target_table(result), names=1)
    for network in result["networks"] or [None]:
        print_table(console, costs_table(result, network), names=1)
    about = note(result["networks"], result["step_seconds"])
    console.print(about, highlight=False)
    for failure in result["failures"]:
        text = f"failed: {failure['variant']} seed {failure['seed']}: {failure['error']}"
        say(console, text)


def table(result: Mapping[str, Any], panel: Mapping[str, Any]) -> Table:
    """One row a variant."""
    base = panel["baseline"]
    title = ": ".join(filter(None, (panel["title"], f"differences are from {base}")))
    out = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    out.add_column("variant")
    for heading in ("eval loss", "difference", "steps to target", "MB sent", "tokens"):
        out.add_column(heading, justify="right")
    for name, difference in panel["differences"].items():
        row = result["variants"][name]
        steps, fewer = _reached(row["to_target"][STEPS]), difference["steps_to_target"]
        if name != base and fewer["mean"] is not None:
            steps += f"\n{plus_minus(fewer, '+.1%')}"
            steps += f", {fewer['verdict']}" if len(result["seeds"]) > 1 else ""
        out.add_row(
            name,
            _loss(row, len(result["seeds"])),
            "baseline" if name == base else _difference(difference["loss"]),
            steps,
            known(row["bytes_sent"], lambda sent: f"{sent / 1e6:.3g}"),
            columns([])["tokens"].text(row),
        )
    return out


def in_order(result: Mapping[str, Any]) -> dict[str, Any]:
    """The variants in the order of the panels, those of no panel behind them."""
    shown = [name for panel in result["panels"] for name in panel["differences"]]
    return {name: result["variants"][name] for name in (*shown, *result["variants"])}


def interval_of(result: Mapping[str, Any]) -> str:
    """What the ± of a loss is, with `; ` before it; empty where none is shown."""
    if all(with_interval(row)["half"] is None for row in result["variants"].values()):
        return ""
    if len(result["seeds"]) == 1:
        return "; one seed: ± is a 95 % interval over these documents, and holds for this seed only"
    return f"; ± is a 95 % t-interval over {len(result['seeds'])} seeds"


def costs_table(result: Mapping[str, Any], network: str | None) -> Table:
    """Every variant's loss and costs, with its time on a network if there is one."""
    title = "what it cost" if network is None else f"on the network {network}"
    skipped = any(row.get("skipped") for row in result["variants"].values())
    shown = columns([] if network is None else [network], skipped)
    out = _narrow_table(title, [heading.replace(" ", "\n") for heading in shown])
    for name, row in in_order(result).items():
        out.add_row(name, *(column.text(row) for column in shown.values()))
    return out


def _narrow_table(title: str, headings: Sequence[str]) -> Table:
    columns = Column("variant"), *right(headings)
    how = {"title_justify": "left", "pad_edge": False, "padding": (0, 2, 0, 0)}
    return Table(*columns, box=None, title=title, **how)


def _loss(row: Mapping[str, Any], seeds: int) -> str:
    text = plus_minus(with_interval(row), ".4f")
    text = text.replace(" ", "") if seeds == 1 else text
    lost = len(row["runs"]) - row["loss"]["count"]
    missing = seeds - len(row["runs"])
    notes = [f"{lost} not finite"] if lost else []
    notes += [f"{missing} missing"] if missing else []
    return f"{text} ({', '.join(notes)})" if notes else text


def target_table(result: Mapping[str, Any]) -> Table:
    """Costs of reaching the target: tokens, bytes, and virtual time on every network."""
    shown = {"tokens": (TOKENS, rounded), "sent per region": (BYTES, size)}
    for name in result["networks"]:
        shown[f"time on {name}"] = (seconds_on(name), brief)
    out = _narrow_table(f"to reach the loss {result['target']:.4f}", list(shown))
    for name, row in in_order(result).items():
        cells = [_reached(row["to_target"][key], form) for key, form in shown.values()]
        out.add_row(name, *cells)
    return out


def _reached(found: Mapping[str, Any], form: Callable[[float], str] = "{:.0f}".format) -> str:
    if not found["count"]:
        return "not reached"
    text = form(found["mean"])
    text += "" if found["half"] is None else f" ± {form(found['half'])}"
    of = found["count"] + found["not_reached"]
    return f"{text} (not reached: {found['not_reached']} of {of})" if found["not_reached"] else text


def _difference(found: Mapping[str, Any]) -> str:
    if found["mean"] is None:
        return "-"
    if found["documents_half"] is not None:
        return plus_minus({**found, "half": found["documents_half"]}, "+.3f").replace(" ", "")
    return f"{plus_minus(found, '+.4f')}\n{found['verdict']}"
