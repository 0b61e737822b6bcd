"""The frontier of varied fields: loss against bytes, and virtual time on every network."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table

from experiments.progress import print_table, right, size
from experiments.report.columns import brief, plus_minus, with_interval

MARK = "*"
TABLE, PICTURE = "points.csv", "frontier.png"


@dataclasses.dataclass(frozen=True)
class Cost:
    """One cost of the points.

    Attributes:
      heading: of its column.
      form: cost -> the text that is shown.
      of: name of the point -> price; None where the point has no complete run.
      edge: the points on the frontier, from the cheapest to the best.
    """

    heading: str
    form: Callable[[float], str]
    of: dict[str, float | None]
    edge: tuple[str, ...]


def costs_of(result: Mapping[str, Any]) -> list[Cost]:
    """Bytes sent per region, and virtual seconds on every network of a comparison's result."""
    rows, loss = result["variants"], losses(result)

    def cost(heading, form, price):
        of = {name: price(row) for name, row in rows.items()}
        return Cost(heading, form, of, tuple(frontier(loss, of)))

    return [
        cost("sent per region", size, lambda row: row["bytes_sent"]),
        *(
            cost(f"time on {n}", brief, lambda row, n=n: row["networks"].get(n, {}).get("seconds"))
            for n in result["networks"]
        ),
    ]


def frontier(loss: Mapping[str, float | None], cost: Mapping[str, float | None]) -> list[str]:
    """The points that no other dominates, from the cheapest to the best.

    A point dominates another if it is no worse in both and better in one. Points without a loss or
    a cost are left out. Intervals are not used: of two close points either may be better.
    """
    known = [n for n in loss if loss[n] is not None and cost[n] is not None]
    best, found = float("inf"), []
    for name in sorted(known, key=lambda n: (cost[n], loss[n])):
        if loss[name] < best:
            best = loss[name]
            found.append(name)
        elif loss[name] == best and cost[name] == cost[found[-1]]:
            found.append(name)
    return found


def losses(result: Mapping[str, Any]) -> dict[str, float | None]:
    """Mean final loss of every point."""
    return {name: row["loss"]["mean"] for name, row in result["variants"].items()}


def show(
    result: Mapping[str, Any],
    points: Mapping[str, Mapping[str, Any]],
    costs: list[Cost],
    console: Console,
) -> None:
    """Print every point, best loss first; a cost on its frontier is marked.

    Args:
      points: name -> the values of its fields, by dotted names.
    """
    loss = losses(result)
    fields = list(next(iter(points.values())))
    columns = [*map(Column, fields), *right(("eval loss", *(cost.heading for cost in costs)))]
    title = "all points, best first"
    out = Table(*columns, box=box.SIMPLE_HEAD, title=title, title_justify="left")
    unknown = float("inf")
    for name in sorted(loss, key=lambda n: unknown if loss[n] is None else loss[n]):
        cells = [
            "-" if cost.of[name] is None else cost.form(cost.of[name]) + MARK * (name in cost.edge)
            for cost in costs
        ]
        shown = plus_minus(with_interval(result["variants"][name]), ".4f")
        out.add_row(*map(str, points[name].values()), shown, *cells)
    print_table(console, out, names=len(fields))
    console.print(
        f"{MARK}: on the frontier, no other point has both a lower loss and a lower cost. "
        "Intervals are not used.",
        highlight=False,
    )


def write_csv(
    result: Mapping[str, Any],
    points: Mapping[str, Mapping[str, Any]],
    costs: list[Cost],
    path: Path,
) -> None:
    """Write a row a point: settings, loss, half interval, costs, and on which frontiers it is."""
    headings = [*next(iter(points.values())), "loss", "loss_half"]
    for cost in costs:
        headings += [cost.heading, f"on frontier: {cost.heading}"]
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["point", *headings])
        for name, point in points.items():
            found = with_interval(result["variants"][name])
            row = [name, *point.values(), found["mean"], found["half"]]
            for cost in costs:
                row += [cost.of[name], name in cost.edge]
            table.writerow(row)


def picture(result: Mapping[str, Any], costs: list[Cost], path: Path) -> None:
    """Draw loss against every cost, with the points of the frontier joined by a line."""
    from matplotlib.figure import Figure  # slow to import

    loss = losses(result)
    figure = Figure(figsize=(6.5 * len(costs), 4.5), layout="constrained")
    for number, cost in enumerate(costs, 1):
        axes = figure.add_subplot(1, len(costs), number)
        known = [n for n in loss if loss[n] is not None and cost.of[n]]
        axes.scatter([cost.of[n] for n in known], [loss[n] for n in known], color="C0", s=18)
        edge = [n for n in cost.edge if n in known]
        axes.plot([cost.of[n] for n in edge], [loss[n] for n in edge], color="C1", lw=1.2)
        for name in edge:
            axes.annotate(
                name,
                (cost.of[name], loss[name]),
                xytext=(4, 4),
                textcoords="offset points",
                fontsize="x-small",
            )
        axes.set(xlabel=cost.heading, ylabel="eval loss of the anchor, nats per token")
        if known:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda value, _, form=cost.form: form(value))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
