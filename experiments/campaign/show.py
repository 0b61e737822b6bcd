"""Output of a campaign: a line a run, and the table of runs that are left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Column, Table

from experiments.campaign.cells import Cell
from experiments.campaign.estimate import Seconds
from experiments.campaign.order import Step, own
from experiments.campaign.plan import Campaign
from experiments.campaign.records import Records
from experiments.printing import right


def line_of(cell: Cell, record: Mapping[str, Any], spent: float, core_hours: float | None) -> str:
    """One run that has ended."""
    result = f"failed: {record['failed']}" if record["failed"] else f"loss {record['loss']:.4f}"
    budget = "" if core_hours is None else f" of {core_hours:g}"
    return (
        f"{cell.size} {cell.arm} {cell.name}: {result}, {record['core_seconds']:.0f} core-seconds "
        f"({spent / 3600:.2f}{budget} core-hours)"
    )


def left_table(
    campaign: Campaign, steps: Sequence[Step], seconds: Seconds, shard: int, shards: int
) -> Table:
    """Steps in order, and the sum of core-hours behind each; of one shard only its own cells."""
    title = "left to run, in order" + (f", shard {shard} of {shards}" if shards > 1 else "")
    names = ("stage", "claim", "size", "rounds", "regions", "split")
    columns = [Column(name, no_wrap=True) for name in names]
    columns += right(("cells", "tuning", "core-hours", "in all"), no_wrap=True)
    out = Table(*columns, box=box.SIMPLE_HEAD, title=title, title_justify="left")
    total = 0.0
    for step in steps:
        cells, tunes = (own(campaign, part, shard, shards) for part in (step.cells, step.tunes))
        if not cells and not tunes:
            continue
        hours = sum(map(seconds, (*cells, *tunes))) / 3600
        total += hours
        rung = step.rung
        where = (rung.size, str(rung.rounds), str(rung.regions), rung.split)
        counts = (str(len(cells)), str(len(tunes)))
        out.add_row(step.stage, step.claim, *where, *counts, f"{hours:.2f}", f"{total:.2f}")
    return out


def excluded_lines(ledger: Records) -> list[str]:
    """Lines on the records that no figure uses, by reason."""
    counts = Counter(entry.reason for entry in ledger.excluded)
    return [f"excluded: {count} records: {reason}" for reason, count in sorted(counts.items())]
