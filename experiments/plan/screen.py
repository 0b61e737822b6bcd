"""Print the short answer of a plan: one screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table

from experiments.progress import duration, right, rounded, say, size
from lowcomm_jax.planner.plan import PlanRow
from lowcomm_jax.planner.requests import requests_a_round, requests_a_second


def show_answer(result: Mapping[str, Any], rows: Sequence[PlanRow], console: Console) -> None:
    """Print the planned run, a row a method, the commands of the best ones, and open questions."""
    network, found = result["network"], result["answer"]
    regions, devices = len(network["regions"]), found["devices_per_region"]
    limit = found["device_gb"]
    of = "" if limit is None else f" of {limit:g} GB"
    say(
        console,
        f"{result['name']}: {rounded(result['params'])} parameters, "
        f"{rounded(result['tokens'])} tokens in {result['steps']:,.0f} steps of "
        f"{result['step_s']:.3g} s",
        f"{regions} regions of {devices} devices{of}; network {network['name']}, slowest link "
        f"{network['slowest_gbps']:.3g} Gbit/s ({network['confidence']})",
    )
    console.print(_table(rows, found))
    for number, name in enumerate(found["best"], 1):
        entry = found["rows"][name]
        if entry["train"] is None:
            say(console, f"{number}. {name}: no command, {entry['no_train']}")
        else:
            say(console, f"{number}. {name}: {result['starts'][name]}")
    for line in (*_remarks(rows, found), result["scenario"]):
        say(console, line)


def _table(rows: Sequence[PlanRow], found: Mapping[str, Any]) -> Table:
    headings = ["GB a device (estimate)", "time", "busy", "sent a region", "loss penalty"]
    if priced := any(entry["price"] for entry in found["rows"].values()):
        headings += ["price", "of it sending"]
    headings = ("\n".join(heading.rsplit(" ", 1)) for heading in headings)
    columns = Column("", no_wrap=True), *right(headings, no_wrap=True, vertical="bottom")
    out = Table(*columns, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    place = {name: f"{i}." for i, name in enumerate(found["best"], 1)}
    by_name = {row.method.name: row for row in rows}
    for name in found["order"]:
        row, entry = by_name[name], found["rows"][name]
        cells = [
            f"{entry['gb']:.1f}" + (" (above)" if entry["above"] else ""),
            _time(row.hours),
            f"{row.utilisation:.0%}",
            _sent(row.sent_bytes_total),
            "?" if row.penalty_nats is None else f"{row.penalty_nats:+.3f}",
        ]
        if priced:
            total = entry["price"]["total"]
            share = entry["price"]["traffic"] / total if total else 0.0
            cells += [rounded(total), f"{share:.0%}"]
        out.add_row(f"{place.get(name, '  ')} {name}", *cells)
    return out


def _time(hours: float) -> str:
    if hours < 48:
        return duration(hours * 3600)
    return f"{hours / 24:,.1f} d" if hours < 2400 else f"{hours / 24:,.0f} d"


def _sent(nbytes: float) -> str:
    return size(nbytes) if nbytes < 1e15 else f"{nbytes / 1e12:,.0f} TB"


def _remarks(rows: Sequence[PlanRow], found: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, entry in found["rows"].items():
        if entry["above"]:
            more = entry["below_with"]
            what = "no number of devices" if more is None else f"mesh.fsdp={more}"
            lines.append(
                f"{name}: the estimate of {entry['gb']:.1f} GB is above a device's memory; {what} "
                "brings it below"
            )
    if not found["activations"]:
        lines.append(
            "memory: without activations, which a plan does not know of a model of your own: "
            "plan --target with the training config asks the compiler"
        )
    elif found["device_gb"] is None:
        lines.append("beside a device's memory: give --config.device_gb=80.0 (an H100's)")
    if not any(entry["price"] for entry in found["rows"].values()):
        lines.append(
            "price: give --config.price_per_gpu_hour=2.5 and --config.price_per_gb=0.02 (sent)"
        )
    lines += [f"warning: {warning}" for row in rows for warning in row.warnings]
    lines += [requests_line(row) for row in rows if row.requests is not None]
    lines.append(
        f"frontier: {', '.join(found['frontier']) or 'no method'}; no other one is as cheap at a "
        "smaller published loss penalty (? = none published). Memory: only a compiler knows "
        "(--target). More: --explain (which number drives it), --details (all tables)"
    )
    return lines


def requests_line(row: PlanRow) -> str:
    """One line on the requests of independent learners to their store."""
    asked, tau = row.requests, row.method.tau
    hidden_s = tau * asked.round_s * row.method.fragments / row.method.period
    return (
        f"{row.method.name}: a round every {asked.round_s:.3g} s; each learner asks the store "
        f"{asked.total:.3g} times a second ({asked.writes:.2g} writes, {asked.reads:.2g} reads, "
        f"{asked.deletes:.2g} deletes, {asked.beats:.2g} for heartbeats); writing, committing and "
        f"fetching takes {asked.exchange_s:.2g} s of the {hidden_s:.2g} s that tau = {tau} hides"
    )


def show_explanation(
    result: Mapping[str, Any], row: PlanRow, why: Mapping[str, Any], console: Console
) -> None:
    """Print how the best row's hours are computed, and what each input would change."""
    name = row.method.name
    steps, step_s = result["steps"], result["step_s"]
    whole = f"{steps:,.0f}" if steps >= 1e5 else f"{steps:,.6g}"
    say(  # with so many digits that the hours follow from the others
        console,
        f"{name}: {row.hours:,.4g} h = {whole} steps x {step_s:.6g} s / "
        f"{100 * row.utilisation:.6g}% of the time computing: the {why['driver']} drive it",
    )
    columns = "one at a time", *right(("hours", "change"))
    table = Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1))
    for change, hours, ratio in why["changes"]:
        table.add_row(change, f"{hours:,.4g}", f"{ratio - 1:+.1%}")
    console.print(table)
    part, nbytes = why["memory"]
    say(console, f"memory: {part} is the largest part, {size(nbytes)} a device")
    price = result["answer"]["rows"][name]["price"]
    if price is not None:
        what = {"gpu": "GPU hours", "traffic": "traffic"}[why["price"]]
        share = price[why["price"]] / price["total"] if price["total"] else 0.0
        say(console, f"price: {what} are {share:.0%} of it")
    say(console, _store_line(len(result["network"]["regions"]), steps, row))


def _store_line(regions: int, steps: float, row: PlanRow) -> str:
    """One line on the requests of regions as separate jobs to their store."""
    a_round, a_second = requests_a_round(regions), requests_a_second(regions)
    rounds = steps / row.method.period * row.method.fragments
    total = rounds * a_round + 3600 * row.hours * a_second
    return (
        f"store: with one job per region and exchange=store, {a_round} requests a round and region "
        f"at least, and {a_second:.0f} a second: {rounded(total)} a region"
    )


def command(path: Path, name: str) -> str:
    """The command that starts a planned method."""
    return (
        f"python -m experiments train --config={path} "
        f"--config.data.corpus=text:my_texts/ --workdir=runs/{name}"
    )
