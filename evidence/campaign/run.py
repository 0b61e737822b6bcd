"""Run a campaign: the claims of papers at several scales, unattended and resumable.

    python -m evidence campaign --config=evidence/configs/scale.py --core_hours=8

Every run leaves one small record in the campaign's folder of records, which is kept under version
control; `results` makes tables, figures and a page of them. The same command continues, on this
machine or, with the records, on another.

- `--plan` prints the runs that are left, in order, with their core-hours.
- Started several times with one `--workdir`, as on two cores or on a GPU that one run does not
  fill, the processes share the runs.
- `--shard=0/4` runs a quarter; other machines run the other quarters.
- `--since=5_accelerator` leaves earlier stages to others.
- `--core_hours` is a budget: no run starts that would exceed it.
- SIGTERM or Ctrl-C saves; exit code 75.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Column, Table

from evidence.campaign.cells import Cell, digest_of, fields_of
from evidence.campaign.estimate import RunEstimate, Seconds
from evidence.campaign.ledger import VERSION, Records, code_version, hours, read, update, write
from evidence.campaign.order import UNKNOWN, Step, ordered, own, runnable, shard_of
from evidence.campaign.plan import TITLE, Campaign, plan
from experiments import compile_cache
from experiments.cli import (
    Flags,
    RefusedError,
    flag_problems,
    load_config,
    problems_of,
    refuse_any,
    split_config,
)
from experiments.compare.costs import costs
from experiments.progress import Work, print_table, right
from experiments.report.html_data import bytes_at, tokens_at, virtual_at
from experiments.runlog import RunLog, read_run
from experiments.train.header import machine, versions
from experiments.train.loop import StuckError
from experiments.train.main import train
from experiments.train.resolve import resolve
from experiments.workdir import OccupiedError, occupied
from lowcomm_jax.data import load
from lowcomm_jax.interrupt import EXIT_INTERRUPTED, Interrupt

DEFAULT = "evidence/configs/scale.py"
_QUIET = Console(quiet=True)
_TAKEN = "taken"  # in the workdir: a folder a run, locked by the process that trains it
_POLL_SECONDS = 2.0
_NETWORK = "virtual"


@dataclasses.dataclass(frozen=True)
class Options:
    """What one call of the command may do; `core_hours`: None = no limit."""

    workdir: Path
    shard: int = 0
    shards: int = 1
    core_hours: float | None = None


def main(argv: Sequence[str]) -> int:
    """Run missing cells within the budget; returns the exit code."""
    path, overrides, others = split_config(argv)
    flags = Flags()
    flags.text("workdir", "runs/campaign", "folder of runs in progress")
    flags.text("shard", "0/1", "i/n: run part i of n, from 0")
    flags.text("only", None, "names of claims, separated by commas: run only what these need")
    flags.text("since", None, "first stage to run (default: the first of all)")
    flags.text("until", None, "last stage to run (default: the last of all)")
    flags.real("core_hours", None, "budget; no run starts that would exceed it (default: none)")
    flags.text("compile_cache", None, "folder of compiled programs, or off")
    flags.switch("plan", "print the runs that are left and their core-hours; run nothing")
    flags.switch("retry", "run failed runs again")
    values = flags.values
    found = flag_problems("campaign", others, values, __doc__)
    config, problems = load_config(path or DEFAULT, overrides)
    problems += found
    shard, shards, found = parse_shard(values.shard)
    problems += found
    if values.core_hours is not None and not values.core_hours > 0:
        problems.append(f"--core_hours={values.core_hours}: must be positive")
    refuse_any(problems, TITLE)
    only = None if values.only is None else values.only.split(",")
    campaign = plan(config, only, values.until, values.since)
    ledger = read(campaign)
    if values.retry:
        ledger.forget_failures()
    console = Console(highlight=False, soft_wrap=True)
    options = Options(Path(values.workdir), shard, shards, values.core_hours)
    if values.plan:
        show_plan(campaign, ledger, options, console)
        return 0
    problems = _corpus_problems(campaign, ledger, options.workdir)
    refuse_any(problems + _start_problems(campaign, ledger, options.workdir), TITLE)
    compile_cache.enable(values.compile_cache)
    if not run(campaign, ledger, options, console):
        console.print("interrupted; run the same command to continue")
        return EXIT_INTERRUPTED
    show_plan(campaign, ledger, options, console)
    return 0


def _corpus_problems(campaign: Campaign, ledger: Records, workdir: Path) -> list[str]:
    """Why new records would not count beside those that there are: another corpus is here."""
    if not ledger.found:
        return []
    cell, record = next(iter(ledger.found.items()))
    data = resolve(fields_of(campaign, cell), workdir / _TAKEN).data
    loaded, problems = problems_of(lambda: load(data))
    if problems:
        return problems
    here, there = loaded[0].summary["corpus_digest"], record["corpus_digest"]
    if here == there:
        return []
    return [
        f"the corpus {data.corpus} has the digest {here[:10]} here, and {there[:10]} in the "
        f"records in {campaign.records}: give that one, or other records, as "
        "--config.records=records/mine"
    ]


def _start_problems(campaign: Campaign, ledger: Records, workdir: Path) -> list[str]:
    """Why runs could not start: of every arm and every size that lacks runs, the first is checked.

    Else an arm that cannot train ends a campaign when its turn comes, hours after the start.
    """
    first: dict[tuple[str, str], Cell] = {}
    for step in ordered(campaign, ledger, lambda _: 1.0):
        for cell in (*step.tunes, *step.cells):
            point = campaign.arms[cell.arm].grid[0] if cell.point == UNKNOWN else cell.point
            cell = dataclasses.replace(cell, point=point)
            first.setdefault(("arm", cell.arm), cell)
            first.setdefault(("size", cell.size), cell)
    problems = []
    for cell in dict.fromkeys(first.values()):
        try:
            resolve(fields_of(campaign, cell), workdir / _TAKEN)
        except RefusedError as error:
            of = f"arms.{cell.arm} at sizes.{cell.size}"
            problems += [f"{of}: {line}" for line in error.problems]
    return problems


def parse_shard(text: str) -> tuple[int, int, list[str]]:
    """Read `i/n`; returns (i, n, problems)."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not int(found[1]) < int(found[2]):
        return 0, 1, [f"--shard={text}: write i/n with 0 <= i < n, e.g. 0/4"]
    return int(found[1]), int(found[2]), []


def run(campaign: Campaign, ledger: Records, options: Options, console: Console) -> bool:
    """Train cell after cell; returns False when a signal ended it.

    Other processes with this workdir may train at the same time: each takes cells that no other
    has, and waits while all that is left depends on what others train.
    """
    code_version()  # of the code that is running
    estimate = RunEstimate(campaign, ledger.found.values(), jax.default_backend())
    spent, began, done = 0.0, time.monotonic(), 0
    with Interrupt() as interrupt, Work("campaign: runs") as work:
        while not interrupt.requested:
            runs, core_seconds = _to_go(campaign, ledger, estimate, options, spent)
            cells = _to_train(campaign, ledger, estimate, options, spent)
            first = next(cells, None)
            if first is None:
                return True
            with ExitStack() as until_recorded:
                cell = _take(chain((first,), cells), ledger, options.workdir, until_recorded)
                if cell is None:
                    work.at("other processes train what is next", done, done + runs)
                    time.sleep(_POLL_SECONDS)
                _learn(update(ledger), estimate)
                if cell is None or ledger.done(cell):
                    continue
                pace = (time.monotonic() - began) / spent if spent else 1.0
                name = f"{cell.size} {cell.arm} {cell.name}"
                work.at(name, done, done + runs, seconds_left=pace * core_seconds)
                record = train_cell(campaign, cell, options.workdir)
                if record is None:
                    break
                file = write(campaign, cell, record)
                _learn(update(ledger), estimate)
                if not ledger.done(cell):
                    reason = ledger.excluded[-1].reason
                    raise RefusedError([f"{file} does not count: {reason}"], TITLE)
            done += 1
            spent += record["core_seconds"]
            console.print(line_of(cell, record, spent, options.core_hours))
            jax.clear_caches()  # hundreds of programs would fill the memory
    return False


def _take(
    cells: Iterable[Cell], ledger: Records, workdir: Path, until_recorded: ExitStack
) -> Cell | None:
    """The first cell that no other process has; this one has it until the stack is closed."""
    for cell in cells:
        with suppress(OccupiedError):
            name = _folder_name(cell, ledger.digest(cell))
            until_recorded.enter_context(occupied(workdir / _TAKEN / name))
            return cell
    return None


def _learn(records: Iterable[Mapping[str, Any]], estimate: RunEstimate) -> None:
    for record in records:
        estimate.learn(record)


def _to_go(
    campaign: Campaign, ledger: Records, estimate: RunEstimate, options: Options, spent: float
) -> tuple[int, float]:
    """(runs of this shard, core-seconds they will take within the budget)."""
    runs, seconds = 0, 0.0
    for step in ordered(campaign, ledger, estimate.seconds):
        mine = own(campaign, (*step.cells, *step.tunes), options.shard, options.shards)
        runs, seconds = runs + len(mine), seconds + sum(map(estimate.seconds, mine))
    left = float("inf") if options.core_hours is None else 3600 * options.core_hours - spent
    return runs, min(seconds, left)


def _to_train(
    campaign: Campaign, ledger: Records, estimate: RunEstimate, options: Options, spent: float
) -> Iterator[Cell]:
    """The cells that can run, in order: those of this shard that fit what is left of the budget."""
    left = float("inf") if options.core_hours is None else 3600 * options.core_hours - spent
    for step in ordered(campaign, ledger, estimate.seconds):
        for cell in runnable(campaign, ledger, step):
            mine = shard_of(campaign, cell, options.shards) == options.shard
            if mine and estimate.seconds(cell) <= left:
                yield cell


def show_plan(campaign: Campaign, ledger: Records, options: Options, console: Console) -> None:
    """Print what is left in order, its core-hours, and the records that do not count."""
    estimate = RunEstimate(campaign, ledger.found.values(), jax.default_backend())
    steps: list[Step] = list(ordered(campaign, ledger, estimate.seconds))
    left = left_table(campaign, steps, estimate.seconds, options.shard, options.shards)
    print_table(console, left)
    reported = sum(not cell.tunes for cell in ledger.found)
    tuned = len(ledger.found) - reported
    console.print(
        f"{reported} cells and {tuned} runs of the tuning are recorded in {campaign.records}: "
        f"{hours(ledger.found.values())}"
    )
    for line in excluded_lines(ledger):
        console.print(line)


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
    columns = [*map(Column, names), *right(("cells", "tuning", "core-hours", "in all"))]
    out = Table(*columns, box=box.SIMPLE_HEAD, title=title, title_justify="left")
    total = 0.0
    for step in steps:
        cells, tunes = (own(campaign, part, shard, shards) for part in (step.cells, step.tunes))
        if not cells and not tunes:
            continue
        cost = sum(map(seconds, (*cells, *tunes))) / 3600
        total += cost
        rung = step.rung
        where = (rung.size, str(rung.rounds), str(rung.regions), rung.split)
        counts = (str(len(cells)), str(len(tunes)))
        out.add_row(step.stage, step.claim, *where, *counts, f"{cost:.2f}", f"{total:.2f}")
    return out


def excluded_lines(ledger: Records) -> list[str]:
    """Lines on the records that no figure uses, by reason."""
    counts = Counter(entry.reason for entry in ledger.excluded)
    return [f"excluded: {count} records: {reason}" for reason, count in sorted(counts.items())]


def _folder_name(cell: Cell, digest: str) -> str:
    return f"{cell.size}-{cell.arm}-{cell.name}-{digest[:10]}"


def train_cell(campaign: Campaign, cell: Cell, workdir: Path) -> dict[str, Any] | None:
    """Train a cell, or continue it; returns its record, or None when a signal stopped it.

    The run's own folder is removed once its record is made. A run that diverged has a record, too:
    its reason stands in `failed`. Any other error says nothing of the method, and is raised.

    Args:
      workdir: of the campaign; the run lies in a folder of its own there.

    Raises:
      RefusedError: the run cannot start; or another process trains it.
    """
    fields = fields_of(campaign, cell)
    digest = digest_of(fields)
    folder = workdir / _folder_name(cell, digest)
    began, used = time.monotonic(), time.process_time()
    diverged = None
    try:
        # Without its result: of 150M parameters in four regions it has 7 GB, and is not kept.
        job = dataclasses.replace(resolve(fields, folder), saves_result=False)
        if not train(job, _QUIET):
            return None
    except StuckError as error:
        diverged = str(error)
    seconds, cpu = time.monotonic() - began, time.process_time() - used
    on_cpu = jax.default_backend() == "cpu"
    record = {
        "version": VERSION,
        "cell": vars(cell).copy(),
        "config_digest": digest,
        "code": code_version(),
        "machine": machine(),
        "versions": versions(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "core_seconds": round(cpu if on_cpu else seconds, 1),
    }
    if diverged is None:
        record |= _measured(campaign, cell, read_run(folder))
    else:
        record |= {"failed": diverged, "corpus_digest": None}
    shutil.rmtree(folder, ignore_errors=True)
    return record


def _measured(campaign: Campaign, cell: Cell, run: RunLog) -> dict[str, Any]:
    """The record of a finished run: metrics of its log, and its costs on the virtual network."""
    network = campaign.network(cell.regions)
    seconds_at = virtual_at(network, campaign.step_seconds)
    losses = [record["anchor"] for record in run.evals]
    rows = zip(
        (record["step"] for record in run.evals),
        tokens_at(run),
        (round(sent) for sent in bytes_at(run)),
        (round(value, 4) for value in seconds_at(run)),
        (None if loss is None else round(loss, 6) for loss in losses),
    )
    cost = costs(run, {_NETWORK: network}, campaign.step_seconds)
    last = losses[-1]
    finite = last is not None and math.isfinite(last)
    spread = run.evals[-1].get("anchor_variance") if finite else None
    return {
        "failed": None if finite else "the final loss is not finite",
        "corpus_digest": run.header["data"]["corpus_digest"],
        "params": run.header["params"],
        "steps": run.header["steps"],
        "tokens": run.end["tokens"],
        "loss": round(last, 6) if finite else None,
        "anchor_variance": None if spread is None else float(f"{spread:.6g}"),
        "bytes_sent": float(np.mean(run.end["bytes_sent"])),
        "allreduce_bytes": run.header["allreduce_bytes_per_step"] * run.header["steps"],
        **{name: cost[name] for name in ("exchanges", "staleness", "document_interval")},
        "virtual": cost["networks"][_NETWORK],
        "curve": [list(row) for row in rows],
    }
