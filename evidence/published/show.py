"""Print published figures beside ours, with the error; nothing is trained.

python -m evidence published                # all tables, in about half a minute
python -m evidence published dilocox sync   # some of them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from evidence.published import figures
from evidence.published.figures import PublishedFigure
from evidence.published.goodput import goodput_table
from experiments.cli import Flags, closest, parse_flags, refuse_any
from experiments.progress import plain_console

TABLES: dict[str, Callable[[], list[PublishedFigure]]] = {
    "streaming": lambda: (
        [figure for _, _, figure in figures.bandwidth_table()] + figures.hours_table()
    ),
    "dilocox": figures.dilocox_table,
    "noloco": figures.noloco_table,
    "sync": figures.sync_table,
    "goodput": goodput_table,
}


def main(argv: Sequence[str]) -> int:
    """Print the named tables, or all; returns the exit code."""
    names = parse_flags("published", argv, Flags().values, __doc__)
    refuse_any(
        [
            f"there is no table {name!r}{closest(name, TABLES)}"
            for name in names
            if name not in TABLES
        ],
        "published",
    )
    console = plain_console()
    for name in names or TABLES:
        console.print(table_of(name, TABLES[name]()))
    return 0


def table_of(name: str, found: Sequence[PublishedFigure]) -> Table:
    """A row a figure."""
    headings = ("what", "unit", "ours", "published", "error", "confidence")
    table = Table(*headings, title=f"{name}: beside the published figures", title_justify="left")
    for one in found:
        low, high = one.published
        shown = f"{low:.4g}" if low == high else f"{low:.4g} - {high:.4g}"
        cells = one.what, one.unit, f"{one.ours:.4g}", shown, f"{one.error:+.1%}"
        table.add_row(*cells, one.confidence)
    return table
