"""Compare runs: a table and a picture from their metrics files.

    python -m experiments report runs/a [runs/b ...] [--network=us_4_regions] [--html=report.html]

- `--network` replays the runs' events on a network: hours, utilisation and a timeline per run. A
  step takes `--step_seconds`, else the file's `compute_s`, else what the run measured. The last
  synchronisation, which belongs to no step, is not on the clock.
- `--against=plan.json` compares a run with the plan of its config.
- `--html` writes everything into one page that opens without a network connection.
- `--csv` writes one number a row, `--json` all records, for other programs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.cli import Flags, RefusedError, refuse_any
from experiments.progress import (
    duration,
    known,
    plain_console,
    print_table,
    right,
    say,
    size,
    thousands,
    validation_documents,
)
from experiments.refusals import checked_flags
from experiments.report.against import Deviation, against, read_plan, verdict
from experiments.report.against import table as table_against
from experiments.report.columns import brief, note, step_seconds_in_words
from experiments.report.export_table import regions_of, write_csv, write_json
from experiments.report.html_data import Plotted, step_curves
from experiments.report.merged import counted, exchange_of
from experiments.report.runlog import (
    RunLog,
    Summary,
    missing_logs,
    nominal_steps,
    read_run,
    summarise,
)
from experiments.report.virtual import Links, Virtual, check, on_network
from experiments.workdir import CURVES
from lowcomm_jax.network import BASELINE

_INTERVAL = "± is a 95 % interval over documents, one seed"


def main(argv: Sequence[str]) -> int:
    """Show the runs of the command line; returns the exit code."""
    options = Flags()
    options.text("png", None, "file of the picture (default: beside the first run)")
    options.text(
        "network", None, "replay on a network: a preset's name, aws:A,B,... or a .yaml file"
    )
    options.real(
        "step_seconds",
        None,
        "seconds of a region's inner step there (default: the file's compute_s, else as measured)",
    )
    options.text("html", None, "file to write the page to")
    options.text("csv", None, "file to write the numbers to, one a row")
    options.text("json", None, "file to write all records to")
    options.text("against", None, "plan.json (or its folder) to compare the runs with")
    values = options.values
    workdirs = [Path(folder) for folder in checked_flags("report", argv, values, __doc__)]
    plan = None if values.against is None else read_plan(Path(values.against))
    console = plain_console()
    chosen = values.png, values.network, values.step_seconds, values.html
    runs = show(workdirs, console, *chosen, plan)
    for write, path in ((write_csv, values.csv), (write_json, values.json)):
        if path is not None:
            write(dict(zip(unlike_names(workdirs), runs)), Path(path))
    return 0


def read_all(workdirs: Sequence[Path]) -> list[RunLog]:
    """The runs in these folders.

    Raises:
      RefusedError: lists every folder that holds no run.
    """
    runs, problems = [], []
    for workdir in workdirs:
        try:
            runs.append(read_run(workdir))
        except RefusedError as error:
            problems += error.problems
    refuse_any(problems, "report")
    return runs


def show(
    workdirs: Sequence[Path],
    console: Console,
    png: str | None = None,
    network: str | None = None,
    step_seconds: float | None = None,
    page: str | None = None,
    plan: Mapping[str, Any] | None = None,
) -> list[RunLog]:
    """Print the table of the runs and draw their loss curves; returns them.

    Args:
      page: file of the HTML page; None = none.
      plan: that the runs are compared with, by `against.read_plan`; None = with none.

    Raises:
      RefusedError: lists every folder that holds no run; or the plan does not know a run.
    """
    runs = read_all(workdirs)
    # Before anything is printed: a run that the plan does not know is refused.
    held = [] if plan is None else [(run.name, against(run, plan)) for run in runs]
    if len({run.name for run in runs}) < len(runs) == len({w.resolve() for w in workdirs}):
        names = unlike_names(workdirs)  # seed0 and seed0 tell nobody anything
        runs = [dataclasses.replace(run, name=name) for run, name in zip(runs, names)]
    links = check(runs, network, step_seconds) if network else None
    # One clock: where a network is asked for, nothing is said of the one that a run trained with.
    _show_losses(runs, links is None, console)
    name = CURVES if len(runs) == 1 else "report.png"
    picture = Path(png) if png else workdirs[0] / name
    try:
        import matplotlib  # noqa: F401  (slow to import)
    except OSError as error:  # there is no folder that it can write, not even a temporary one
        if page is not None:
            raise RefusedError([str(error)], "report") from error
        say(console, f"loss curves are not drawn: {error}")
    else:
        loss_curves(runs, picture)
        say(console, f"loss curves: {picture}")
    if links is not None:
        _show_replayed(runs, links, console)
    if page is not None:
        networks = {} if network is None or links is None else {network: links}
        path = Path(page)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [lines for _, lines in held]
        path.write_text(page_of(runs, workdirs, networks, held=lines), encoding="utf-8")
        say(console, f"report: {page}")
    for name, lines in held:
        print_table(console, table_against(name, lines))
        console.print(f"{name}: {verdict(lines)}", highlight=False)
    return runs


def _show_losses(runs: Sequence[RunLog], own_network: bool, console: Console) -> None:
    """Print the tables of the runs and of their regions, and what the losses are of."""
    summaries = [summarise(run) for run in runs]
    print_table(console, table(summaries, own_network))
    for run in runs:
        if regions := by_region(run):
            print_table(console, region_table(run, regions))
        if lost := missing_logs(run):
            say(console, f"{run.name}: {lost}")
    interval = "" if all(s.interval is None for s in summaries) else f"; {_INTERVAL}"
    console.print(
        f"loss in nats per token on {validation_documents(len(runs[0].eval_count))}{interval}. "
        "AllReduce: fp32 gradients exchanged at every step.",
        highlight=False,
    )
    for corpus in {run.header["data"]["corpus"]: run.header["data"] for run in runs}.values():
        if found := left_out(corpus):
            text = f"left out of the corpus {corpus['corpus']}: {found}"
            console.print(text, highlight=False, soft_wrap=True)


def _show_replayed(runs: Sequence[RunLog], links: Links, console: Console) -> None:
    """Print what the runs cost on a network."""
    replayed = [on_network(run, links) for run in runs]
    print_table(console, virtual_table([run.name for run in runs], replayed))
    console.print(f"{BASELINE}, on the same clock.", highlight=False)
    each = step_seconds_in_words(links.step_seconds)
    console.print(f"A region's inner step takes {each}.", highlight=False)
    if warning := links.paces_apart(runs):
        say(console, f"warning: {warning}")
    for run in (run for run, virtual in zip(runs, replayed) if virtual.uneven):
        console.print(
            f"{run.name}: its regions step at different rates. With a network whose compute_s "
            "says nothing of it, those that step more seldom wait for their peers.",
            highlight=False,
        )


def left_out(corpus: Mapping[str, Any]) -> str | None:
    """How many files of a corpus could not be read, and which ones; None = all could.

    Args:
      corpus: its summary in a run's header.
    """
    count, names = corpus.get("unreadable_left_out", 0), corpus.get("unreadable_names", [])
    if not count:
        return None
    more = f"; and {count - len(names)} more" if count > len(names) else ""
    return f"{count} that cannot be read: {'; '.join(names)}{more}"


def page_of(
    runs: Sequence[RunLog],
    workdirs: Sequence[Path],
    networks: Mapping[str, Links],
    about: Sequence[str] = (),
    held: Sequence[Sequence[Deviation]] = (),
) -> str:
    """The HTML report of single runs.

    Args:
      about: sentences below the table, before the report's own.
      held: how each run compares with its plan; empty = with none.
    """
    from experiments.report import html_report  # draws with matplotlib, slow to import

    entries = [Plotted(name, (run,)) for name, run in zip(unlike_names(workdirs), runs)]
    evaluated = {tuple(run.eval_count.tolist()) for run in runs}
    about = list(about)
    if any(summarise(run).interval is not None for run in runs):
        about.append(f"{_INTERVAL}.")
    about.append(note(list(networks), next((x.step_seconds for x in networks.values()), None)))
    if len(evaluated) > 1:
        about.append("The runs were evaluated on different documents: their losses do not compare.")
    about += [f"{e.name}: {lost}" for e in entries if (lost := missing_logs(e.runs[0]))]
    for warning in filter(None, (links.paces_apart(runs) for links in networks.values())):
        about.append(f"Warning: {warning}.")
    rows = {e.name: html_report.row_of(e.runs[0], networks) for e in entries}
    plans = dict(zip(rows, held))
    return html_report.document("Runs", about, entries, rows, networks, plans)


def unlike_names(workdirs: Sequence[Path]) -> list[str]:
    """The shortest parts of the folders' paths that differ.

    Raises:
      RefusedError: a folder is named twice.
    """
    parts = [workdir.resolve().parts for workdir in workdirs]
    while len(set(parts)) > 1 and len({p[-1] for p in parts}) == 1:
        parts = [p[:-1] for p in parts]  # of a/seed0 and b/seed0 the second says nothing
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    raise RefusedError([f"a folder is named twice: {', '.join(map(str, workdirs))}"], "report")


def virtual_table(names: Sequence[str], replayed: Sequence[Virtual]) -> Table:
    """Costs of the runs on the network; one column a run."""
    title = f"on the network {replayed[0].network}"
    out = Table("", *right(names), box=box.SIMPLE_HEAD, title=title)
    for heading, cell in _VIRTUAL_ROWS.items():
        out.add_row(heading, *(cell(virtual) for virtual in replayed))
    return out


def table(summaries: Sequence[Summary], own_network: bool = True) -> Table:
    """One column a run, one row a number that some run has: a few runs fit a narrow terminal.

    Args:
      own_network: whether to show the virtual time on the network that a run trained with.
    """
    names = (s.name if s.complete else f"{s.name} (at step {s.step})" for s in summaries)
    out = Table("", *right(names), box=box.SIMPLE_HEAD)
    for heading, cell in _ROWS.items():
        cells = [cell(summary) for summary in summaries]
        if set(cells) != {"-"}:
            out.add_row(heading, *cells)
    if own_network and any(s.virtual_seconds is not None for s in summaries):
        for heading, cell in _OWN_NETWORK_ROWS.items():
            known = [s.virtual_seconds is not None for s in summaries]
            out.add_row(heading, *(cell(s) if k else "-" for s, k in zip(summaries, known)))
    return out


def _loss(value: float | None, interval: float | None = None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if interval is None else f"{value:.4f} ± {interval:.3f}"


_VIRTUAL_ROWS = {
    "seconds of a region's step": lambda v: f"{v.step_seconds:.3g}",
    "wall-clock": lambda v: brief(v.clock.wall_s),
    "utilisation": lambda v: f"{v.clock.utilisation:.1%}",
    "waiting for bytes": lambda v: brief(float(v.clock.exposed_R.mean())),
    "AllReduce's wall-clock": lambda v: brief(v.allreduce_s),
    "faster than AllReduce": lambda v: f"{v.allreduce_s / v.clock.wall_s:.3g}x",
}

_OWN_NETWORK_ROWS = {
    "virtual time on its network": lambda s: brief(s.virtual_seconds),
    "utilisation there": lambda s: f"{s.utilisation:.1%}",
}

_ROWS = {
    "method": lambda s: s.method,
    "eval loss, anchor": lambda s: _loss(s.loss, s.interval),
    "best, at step": lambda s: known(s.best, lambda best: f"{best:.4f}, {s.best_step}"),
    "eval loss, mean of regions": lambda s: _loss(s.mean_loss),
    "single regions": lambda s: known(s.region_losses, "{0[0]:.4f} to {0[1]:.4f}".format),
    "variance of the anchors": lambda s: known(s.anchor_variance, "{:.3g}".format),
    "its factor per round": lambda s: known(s.contraction, "{:.3f}".format),
    "in theory, without gradients": lambda s: known(s.expected_contraction, "{:.3f}".format),
    "tokens": lambda s: f"{s.tokens:,}",
    "batch of a trainer": lambda s: known(s.batch, "{0[0]:.3g} to {0[1]:.3g}".format),
    "trainers": lambda s: known(s.trainers, "{0[0]} to {0[1]}".format),
    "merges": lambda s: known(s.merges, str),
    "steps skipped, not finite": lambda s: f"{s.skipped:,}" if s.skipped else "-",
    "exchanges": lambda s: "-" if s.batch is None else f"{s.exchanges} in {s.step} steps",
    "time": lambda s: duration(s.seconds),
    "tokens/s": lambda s: known(s.tokens_per_second, "{:,.0f}".format),
    "sent per region": lambda s: size(s.bytes_sent),
    "less than AllReduce": lambda s: known(s.compression, "{:.3g}x".format),
    "largest staleness": lambda s: known(s.staleness, "{} steps".format),
    "regions that took part": lambda s: known(s.participation, "{:.0%}".format),
}


@dataclasses.dataclass(frozen=True)
class RegionRun:
    """One region of a run.

    Attributes:
      participation: share of the run's landings that counted its payload.
      liveness: share of the run's steps so far that this region has made itself.
      progress: its last step as a share of the run's steps; where batches grow, those are steps of
        the configured batch, by the tokens so far.
      waited_s: seconds that it waited for bytes.
      travel_s: median seconds from its payload being computed to the arrival of the last payload;
        nan where the region saw no exchange.

    All are nan where the region's log is missing.
    """

    participation: float = math.nan
    liveness: float = math.nan
    progress: float = math.nan
    waited_s: float = math.nan
    travel_s: float = math.nan


def by_region(run: RunLog) -> list[RegionRun]:
    """The regions of a run of jobs, in order.

    Empty for a run of one process, whose regions start and end together, and for the log of a
    single job, which does not hold the others.
    """
    landings = [e for step in run.steps for e in step["events"] if "travel_seconds" in e]
    if not landings or "present" not in run.steps[0]:
        return []
    # Regions at a pace of their own land a round at different steps: it counts once.
    took = counted(run.steps)
    rounds = {e["round"]: took[exchange_of(e)] for e in landings if "admitted" in e}
    rows = list(rounds.values()) or [took[exchange_of(e)] for e in landings]
    counted_LxR = np.array(rows, bool)
    travel_LxR = np.array([e["travel_seconds"] for e in landings], float)
    waited_LxR = np.array([e["waited_seconds"] for e in landings], float)
    made_SxR = np.array([step["present"] for step in run.steps], bool)
    done_S = np.array([nominal_steps(run, step) for step in run.steps]) / run.header["steps"]
    found = []
    for r in range(made_SxR.shape[1]):
        if r not in run.header["here"]:
            found.append(RegionRun())
            continue
        seen = travel_LxR[~np.isnan(travel_LxR[:, r]), r]
        found.append(
            RegionRun(
                participation=float(counted_LxR[:, r].mean()),
                liveness=float(made_SxR[:, r].mean()),
                progress=min(1.0, float((done_S * made_SxR[:, r]).max())),
                waited_s=float(np.nansum(waited_LxR[:, r])),
                travel_s=float(np.median(seen)) if seen.size else math.nan,
            )
        )
    return found


def region_table(run: RunLog, regions: list[RegionRun]) -> Table:
    """A row a region."""
    headings = ("region", "participation", "liveness", "progress", "waited", "an exchange")
    out = Table(*right(headings), box=box.SIMPLE_HEAD, title=f"regions of {run.name}")
    for number, region in enumerate(regions):
        shares = [region.participation, region.liveness, region.progress]
        cells = [known(share, "{:.0%}".format) for share in shares]
        cells.append(known(region.waited_s, "{:.1f} s".format))
        cells.append(known(region.travel_s, lambda s: f"{1e3 * s:.0f} ms"))
        out.add_row(str(number), *cells)
    return out


def loss_curves(runs: Sequence[RunLog], path: Path) -> None:
    """Draw loss against tokens: training loss per region and the evaluated anchor."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    if len(runs) == 1:
        losses = runs[0].steps[0]["loss"] if runs[0].steps else []
        for column, region in enumerate(regions_of(losses, runs[0].header["here"])):
            _training(axes, runs[0], column, alpha=0.8, label=f"region {region}, training")
    for number, run in enumerate(runs):
        # The evaluation before training does not depend on the method.
        evals = [e for e in run.evals if e["step"] and e["anchor"] is not None]
        tokens, losses = [e["tokens"] for e in evals], [e["anchor"] for e in evals]
        colour = "black" if len(runs) == 1 else f"C{number % 10}"
        label = "anchor, validation" if len(runs) == 1 else f"{run.name}, anchor, validation"
        axes.plot(tokens, losses, "o-", ms=4, color=colour, label=label)
        if len(runs) > 1:
            _training(axes, run, None, color=colour, alpha=0.35)
    title = ", ".join(dict.fromkeys(run.header["method"] for run in runs))
    regions = "/".join(dict.fromkeys(str(run.header["regions"]) for run in runs))
    _leave_out_the_first_fall(axes, runs)
    axes.set(xlabel="tokens, all regions", ylabel="loss, nats per token")
    corpora = " and ".join(dict.fromkeys(str(run.header["data"]["corpus"]) for run in runs))
    axes.set_title(f"{title}: {regions} regions, corpus {corpora}")
    axes.xaxis.set_major_formatter(thousands)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _leave_out_the_first_fall(axes, runs: Sequence[RunLog]) -> None:
    """Start the axis at the losses after 3 % of the run; earlier ones would fill the picture."""
    start = [run.steps[len(run.steps) // 33]["loss_mean"] for run in runs if run.steps]
    seen = [loss for loss in start if loss is not None and math.isfinite(loss)]
    if seen and all(len(run.steps) >= 100 for run in runs):
        axes.set_ylim(top=1.05 * max(seen))


def _training(axes, run: RunLog, column: int | None, **style) -> None:
    """The training loss of one region, averaged over windows; None = the mean of all."""
    kind = "ce" if run.steps and "ce" in run.steps[0] else "loss"

    def value(row):
        losses = row[kind] if column is None else [row[kind][column]]
        return None if None in losses else sum(losses) / len(losses)

    for curve in step_curves([Plotted(run.name, (run,))], value):
        axes.plot(curve.x, curve.y, lw=1, **style)
