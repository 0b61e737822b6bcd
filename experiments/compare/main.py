"""Compare methods: variants x seeds at equal tokens (or bytes, or time), with intervals.

    python -m experiments compare --config=configs/compare/cocodc_vs_streaming.py --workdir=runs/b

Writes compare.json and report.html into WORKDIR; the run of a variant with seed K lies
in WORKDIR/VARIANT/seedK. Exit code 75: interrupted (Ctrl-C or SIGTERM); 1: runs failed. The same
command continues: it keeps complete runs and goes on with the others. Fields:
`compare --help --config=...`; `--config.common.FIELD=...` sets a field of the train config for all.

    python -m experiments compare --config=... --vary=method.outer.learning_rate=0.4,0.7,1.0

`--vary` makes a variant of every value, or of every combination where it is given several times. It
ends with the frontier: the variants for which no other has both a lower loss and fewer bytes, or a
lower loss and less virtual time. Writes points.csv and frontier.png, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from experiments.cli import (
    WORKDIR,
    Flags,
    config_asked_for,
    values_refused,
)
from experiments.compare import frontier
from experiments.compare.at_equal import sentence
from experiments.compare.config import FIELDS, REPORT, RESULT, refuse_unmade
from experiments.compare.equal import budgeted
from experiments.compare.plan import Comparison, plan
from experiments.compare.result import Logs, collect, read_logs
from experiments.compare.runs import run_all, terminations_interrupt
from experiments.compare.show import in_order, interval_of, show
from experiments.config import plain
from experiments.metrics import encoded
from experiments.progress import plain_console, say
from experiments.report import html_report
from experiments.report.columns import note
from experiments.report.html_data import Plotted
from experiments.train import compile_cache, fields
from experiments.workdir import occupied
from lowcomm_jax.interrupt import EXIT_INTERRUPTED

EXIT_FAILED = 1


def main(argv: Sequence[str]) -> int:
    """Compare as the command line says; returns the exit code."""
    options = Flags()
    options.text("workdir", None, WORKDIR)
    options.several(
        "vary", "FIELD=VALUE,VALUE: a variant for each, in place of the config's `vary`"
    )
    config, folder, _ = config_asked_for("compare", argv, options, __doc__, descriptions)
    values = options.values
    with values_refused("compare"):
        return compare(config, values.workdir or folder, vary=values.vary)


def descriptions(config: Mapping[str, Any]) -> dict[str, str]:
    """Dotted name -> description of the fields, and of the train config's in `common`."""
    common = plain(config["common"]) or {}
    given = (common.get(name) for name in ("method", "model"))
    of_runs = fields.descriptions(*(x if isinstance(x, Mapping) else {} for x in given))
    found = {name: field.about for name, field in FIELDS.items()}
    return found | {f"common.{name}": text for name, text in of_runs.items()}


def describe(comparison: Comparison, console: Console) -> None:
    """Print what is about to be trained."""
    say(
        console,
        f"{len(comparison.variants)} variants x {len(comparison.seeds)} seeds = "
        f"{len(comparison.runs)} runs, {comparison.config['parallel']} at once, in "
        f"{comparison.workdir}",
    )


def compare(
    config: Any,
    workdir: str | Path,
    console: Console | None = None,
    vary: Sequence[str] = (),
    announce: Callable[[Comparison, Console], None] = describe,
) -> int:
    """Train what is missing, then show and write the result.

    Args:
      config: made by `config.comparison`.
      workdir: folder of the comparison, made if missing.
      console: where everything is printed; None = standard output.
      vary: takes the place of the config's field, if there is any.
      announce: prints what is about to be trained.

    Returns:
      The exit code: 0, 1 when runs failed (named at the end), 75 when a signal ended it.

    Raises:
      RefusedError: every violation of the config, before any work starts; or another process
        trains in the folder.
    """
    refuse_unmade(config)
    if vary:
        config["vary"] = tuple(vary)
    console = console or plain_console()
    if config["parallel"] > 1:
        # This process only waits: it must not take the memory that the runs need.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with terminations_interrupt():
        try:
            comparison = plan(config, workdir)
            compile_cache.enable(comparison.config["compile_cache"])
            with occupied(comparison.workdir):
                announce(comparison, console)
                comparison = budgeted(comparison, console)
                complete = comparison is not None and run_all(comparison, console)
        except KeyboardInterrupt:
            complete = False
    if not complete:
        text = f"interrupted; run the same command to continue ({workdir})"
        console.print(text, highlight=False, soft_wrap=True)
        return EXIT_INTERRUPTED
    logs, failures = read_logs(comparison)
    result = collect(comparison, logs, failures)
    text = msgspec.json.format(encoded(result), indent=1)
    (comparison.workdir / RESULT).write_text(text + "\n", encoding="utf-8")
    page = report(comparison, logs, result)
    show(result, console)
    files = [comparison.workdir / RESULT, *page, *_frontier(comparison, result, console)]
    names = ", ".join(map(str, files))
    say(console, f"written: {names}")
    return EXIT_FAILED if result["failures"] else 0


def _frontier(comparison: Comparison, result: Mapping[str, Any], console: Console) -> list[Path]:
    """Show and write the frontier of varied fields; returns the files, [] where none is varied."""
    if not comparison.points:
        return []
    costs = frontier.costs_of(result)
    files = [comparison.workdir / name for name in (frontier.TABLE, frontier.PICTURE)]
    frontier.show(result, comparison.points, costs, console)
    frontier.write_csv(result, comparison.points, costs, files[0])
    frontier.picture(result, costs, files[1])
    return files


def report(comparison: Comparison, logs: Logs, result: Mapping[str, Any]) -> list[Path]:
    """Write the HTML report of the complete runs; returns its path, or [] without any."""
    rows = in_order(result)
    entries = [Plotted(name, tuple(logs[name].values())) for name in rows if logs[name]]
    if not entries:
        return []
    path = comparison.workdir / REPORT
    found = sentence(result["at_equal"], result["baseline"], len(result["seeds"]))
    about = [
        *([found] if found else []),
        f"Loss in nats per token on the same validation documents{interval_of(result)}.",
        note(result["networks"], result["step_seconds"]),
    ]
    seeds = [f"failed: {f['variant']} seed {f['seed']}: {f['error']}" for f in result["failures"]]
    title = comparison.config["title"]
    text = html_report.document(title, about + seeds, entries, rows, comparison.networks)
    path.write_text(text, encoding="utf-8")
    return [path]
