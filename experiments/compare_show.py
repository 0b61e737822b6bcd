"""Show what a comparison found: a table per panel in the terminal, and one picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from experiments.plots import thousands
from experiments.progress import duration, size


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print one table per panel, what the numbers mean, and the runs that failed."""
    for panel in result["panels"]:
        console.print(table(result, panel))
        for name, share in panel["other_bytes"].items():
            text = f"not at equal bytes: {name} sends {share:+.1%} against {panel['baseline']}"
            console.print(text, highlight=False)
    source = f"the highest final loss of {result['baseline']}"
    if result["target_from"] == "config":
        source = "given"
    target = "-" if result["target"] is None else f"{result['target']:.4f}"
    console.print(
        f"loss in nats per token on the same validation documents; {interval_of(result)}; MB are "
        "per region. Differences are paired by seed, so they share initial weights and data. "
        f"Target loss {target} ({source}): first crossing of the evaluated anchor, interpolated; "
        "the mean is over the seeds that reach it.",
        highlight=False,
    )
    for network in result["networks"] or [None]:
        console.print(costs_table(result, network))
    console.print(costs_note(result), highlight=False)
    for failure in result["failures"]:
        text = f"failed: {failure['variant']} seed {failure['seed']}: {failure['error']}"
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def table(result: Mapping[str, Any], panel: Mapping[str, Any]) -> Table:
    """One row a variant."""
    base = panel["baseline"]
    title = ": ".join(filter(None, (panel["title"], f"differences are from {base}")))
    out = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    out.add_column("variant", no_wrap=True)
    for heading in ("eval loss", "difference", "steps to target", "MB sent", "tokens"):
        out.add_column(heading, justify="right", min_width=max(map(len, heading.split())))
    for name, difference in panel["differences"].items():
        row = result["variants"][name]
        steps, fewer = _steps(row["steps_to_target"]), difference["steps_to_target"]
        if name != base and fewer["mean"] is not None:
            steps += f"\n{_number(fewer, '+.1%')}, {fewer['verdict']}"
        out.add_row(
            name,
            _loss(row, len(result["seeds"])),
            "baseline" if name == base else _difference(difference["loss"]),
            steps,
            "-" if row["bytes_sent"] is None else f"{row['bytes_sent'] / 1e6:.3g}",
            _count(row["tokens"]),
        )
    return out


def interval_of(result: Mapping[str, Any]) -> str:
    """What the ± of a loss is."""
    if len(result["seeds"]) == 1:
        return (
            "one seed: ± is a 95 % interval over these documents, and says nothing of other seeds"
        )
    return f"± is a 95 % t-interval over {len(result['seeds'])} seeds"


def costs_table(result: Mapping[str, Any], network: str | None) -> Table:
    """What every variant learned and what it cost, with its time on a network if there is one."""
    title = "AllReduce = fp32 gradients exchanged at every step"
    out = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    if network is not None:
        out.title = f"on the network {network}; {title}"
    out.add_column("variant", no_wrap=True)
    columns = cost_columns(network)
    for heading in columns:
        out.add_column(heading, justify="right", min_width=max(map(len, heading.split())))
    for name, row in result["variants"].items():
        out.add_row(name, *(cell(row) for cell in columns.values()))
    return out


def cost_columns(network: str | None) -> dict[str, Callable[[Mapping[str, Any]], str]]:
    """Heading -> the cell of a variant."""
    columns = {
        "eval loss": _short_loss,
        "tokens": lambda row: _count(row["tokens"]),
        "sent per region": lambda row: _known(row["bytes_sent"], size),
        "less than AllReduce": lambda row: _known(row["compression"], "{:.3g}x".format),
    }
    if network is not None:
        columns |= {
            "virtual time": lambda row: _there(row, network, "seconds", duration),
            "utili- sation": lambda row: _there(row, network, "utilisation", "{:.0%}".format),
            "faster": lambda row: _there(row, network, "speedup", "{:.3g}x".format),
        }
    return columns | {"largest staleness": lambda row: _known(row["staleness"], str)}


def costs_note(result: Mapping[str, Any]) -> str:
    """What the columns of `costs_table` mean."""
    text = "staleness in inner steps."
    if not result["networks"]:
        return text
    step = result["step_seconds"]
    pace = "the network's own" if step is None else f"{step:g} s"
    return (
        f"virtual time: the run's events replayed on the network, a region's inner step taking "
        f"{pace}; utilisation: share of it spent computing; faster: than AllReduce for as many "
        f"steps on the same clock; {text}"
    )


def _short_loss(row: Mapping[str, Any]) -> str:
    half = row["document_interval"] if row["loss"]["half"] is None else row["loss"]["half"]
    return _number({**row["loss"], "half": half}, ".3f")


def _count(tokens: float | None) -> str:
    return _known(tokens, lambda count: thousands(float(f"{count:.3g}"), None))


def _known(value: Any, form: Callable[[Any], str]) -> str:
    return "-" if value is None else form(value)


def _there(row: Mapping[str, Any], network: str, key: str, form: Callable[[Any], str]) -> str:
    found = row["networks"].get(network)  # empty if no run is complete
    return "-" if found is None else form(found[key])


def _loss(row: Mapping[str, Any], seeds: int) -> str:
    half = row["document_interval"] if seeds == 1 else row["loss"]["half"]
    text = _number({**row["loss"], "half": half}, ".4f")
    lost = len(row["runs"]) - row["loss"]["count"]
    missing = seeds - len(row["runs"])
    notes = [f"{lost} not finite"] if lost else []
    notes += [f"{missing} missing"] if missing else []
    return f"{text} ({', '.join(notes)})" if notes else text


def _steps(found: Mapping[str, Any]) -> str:
    if not found["not_reached"]:
        return _number(found, ".0f")
    of = found["count"] + found["not_reached"]
    if not found["count"]:
        return "not reached"
    return f"{_number(found, '.0f')} (not reached: {found['not_reached']} of {of})"


def _difference(found: Mapping[str, Any]) -> str:
    if found["mean"] is None:
        return "-"
    if found["documents_half"] is not None:
        return _number({**found, "half": found["documents_half"]}, "+.4f")
    return f"{_number(found, '+.4f')}\n{found['verdict']}"


def _number(found: Mapping[str, Any], form: str) -> str:
    if found["mean"] is None:
        return "-"
    half = "" if found["half"] is None else f" ± {found['half']:{form.lstrip('+')}}"
    return f"{found['mean']:{form}}{half}"


def picture(result: Mapping[str, Any], path: Path) -> None:
    """Draw evaluation loss against tokens, one plot a panel: mean over seeds and its interval."""
    from matplotlib.figure import Figure  # slow to import

    panels = result["panels"]
    columns = math.ceil(math.sqrt(len(panels)))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(6.5 * columns, 4.5 * rows), layout="constrained")
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, number + 1)
        _plot(axes, result, panel)
        axes.set(xlabel="tokens, all regions", ylabel="eval loss of the anchor, nats per token")
        axes.set_title(panel["title"])
        axes.xaxis.set_major_formatter(thousands)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_lines():
            axes.legend(frameon=False, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _plot(axes, result: Mapping[str, Any], panel: Mapping[str, Any]) -> None:
    early = []  # losses when a tenth of the run is done: the first fall would take the picture
    for number, name in enumerate(panel["differences"]):
        curve = [p for p in result["variants"][name]["curve"] if p["mean"] is not None]
        if not curve:
            continue
        tokens, mean = [p["tokens"] for p in curve], [p["mean"] for p in curve]
        half = [p["half"] or 0.0 for p in curve]
        style = {"color": f"C{number % 10}", "ls": "-" if number < 10 else "--"}
        axes.plot(tokens, mean, lw=1.4, label=name, **style)
        low, high = ([m + sign * h for m, h in zip(mean, half)] for sign in (-1, 1))
        axes.fill_between(tokens, low, high, color=style["color"], alpha=0.15, lw=0)
        early += [m for t, m in zip(tokens, mean) if t >= 0.1 * tokens[-1]][:1]
    if early:
        axes.set_ylim(top=1.02 * max(early))
    if result["target"] is not None:
        axes.axhline(result["target"], color="black", lw=0.8, ls=":")
