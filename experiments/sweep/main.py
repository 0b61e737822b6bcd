"""Sweep fields of a config, on a grid or at random, and find the frontier of loss and cost.

    python -m experiments sweep --config=configs/sweep/diloco_period.py --workdir=runs/s

All points are runs of one comparison (experiments/compare/main.py); the same command continues one
that was interrupted or failed. Ends with the frontier: the points for which no other has both a
lower loss and fewer bytes, or a lower loss and less virtual time. Writes sweep.csv and
frontier.png beside the comparison's files. Fields: experiments/sweep/config.py;
`--config.common.FIELD=...` sets a field of the train config for all points.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.cli import load_config, made_or_refused, refuse_incomplete
from experiments.compare import main as compare
from experiments.compare.config import comparison
from experiments.config import plain
from experiments.progress import say
from experiments.sweep.config import as_comparison, sweep
from experiments.sweep.frontier import costs_of, picture, show, write_csv
from experiments.sweep.space import points

TABLE, PICTURE = "sweep.csv", "frontier.png"


def main(config: Any, workdir: str | Path, console: Console | None = None) -> int:
    """Train what is missing, then show and write the frontier; returns `compare.main`'s code.

    Raises:
      RefusedError: every violation, before any work starts.
    """
    console = console or Console(markup=False)
    refuse_incomplete(config, sweep("", ()), "experiments.sweep.config.sweep")
    fields = plain(config)
    base, _ = load_config(fields["config"], [])
    make = (base, fields["over"], fields["draws"], fields["draw_seed"])
    found = made_or_refused(lambda: points(*make), "cannot sweep")
    code = compare.main(comparison(**as_comparison(fields, found)), workdir, console)
    file = Path(workdir) / compare.RESULT
    if code not in (0, compare.EXIT_FAILED) or not file.is_file():
        return code
    result = json.loads(file.read_text(encoding="utf-8"))
    costs = costs_of(result)
    show(result, found, costs, console)
    write_csv(result, found, costs, Path(workdir) / TABLE)
    picture(result, costs, Path(workdir) / PICTURE)
    names = f"{Path(workdir) / TABLE}, {Path(workdir) / PICTURE}"
    say(console, f"written: {names}")
    return code
