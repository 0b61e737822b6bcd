"""Run a campaign: the claims of papers at several scales, unattended and resumable.

    python -m evidence campaign --config=evidence/configs/scale.py --core_hours=8

Every run leaves one small record in the campaign's folder of records, which is kept under version
control; `results` makes tables, figures and a page of them. The same command continues, on this
machine or, with the records, on another.

- `--plan` prints the runs that are left, in order, with their core-hours.
- Started several times with one `--workdir`, as on two cores or on a GPU that one run does not
  fill, the processes share the runs.
- `--since=5_accelerator` leaves earlier stages to others.
- `--core_hours` is a budget: no run starts that would exceed it.
- SIGTERM or Ctrl-C saves; exit code 75.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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
from evidence.campaign.estimate import RunEstimate
from evidence.campaign.ledger import VERSION, Records, code_version, hours, read, update, write
from evidence.campaign.order import UNKNOWN, ordered, runnable
from evidence.campaign.plan import TITLE, Campaign, plan
from experiments.cli import (
    Flags,
    RefusedError,
    load_config,
    parse_flags,
    problems_of,
    refuse_any,
    split_config,
    unexpected,
)
from experiments.progress import Work, plain_console, print_table, right
from experiments.report.costs import costs
from experiments.report.html_data import bytes_at, tokens_at, virtual_at
from experiments.report.runlog import RunLog, read_run
from experiments.report.virtual import Links
from experiments.train import compile_cache
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


def main(argv: Sequence[str]) -> int:
    """Run missing cells within the budget; returns the exit code."""
    path, overrides, others = split_config(argv)
    flags = Flags()
    flags.text("workdir", "runs/campaign", "folder of runs in progress")
    flags.text("only", None, "names of claims, separated by commas: run only what these need")
    flags.text("since", None, "first stage to run (default: the first of all)")
    flags.text("until", None, "last stage to run (default: the last of all)")
    flags.real("core_hours", math.inf, "budget; no run starts that would exceed it")
    flags.text("compile_cache", None, "folder of compiled programs, or off")
    flags.switch("plan", "print the runs that are left and their core-hours; run nothing")
    values = flags.values
    problems = unexpected(parse_flags("campaign", others, values, __doc__), {})
    config, found = load_config(path or DEFAULT, overrides)
    problems += found
    if not values.core_hours > 0:
        problems.append(f"--core_hours={values.core_hours}: must be positive")
    refuse_any(problems, TITLE)
    only = None if values.only is None else values.only.split(",")
    campaign = plan(config, only, values.until, values.since)
    ledger, workdir = read(campaign), Path(values.workdir)
    console = plain_console(highlight=False, soft_wrap=True)
    if not values.plan:
        problems = corpus_problems(ledger, workdir)
        refuse_any(problems + start_problems(ledger, workdir), TITLE)
        compile_cache.enable(values.compile_cache)
        if not run(ledger, workdir, console, 3600 * values.core_hours):
            console.print("interrupted; run the same command to continue")
            return EXIT_INTERRUPTED
    show_plan(ledger, console)
    return 0


def corpus_problems(ledger: Records, workdir: Path) -> list[str]:
    """Why new records would not count beside those that there are: another corpus is here."""
    campaign = ledger.campaign
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


def start_problems(ledger: Records, workdir: Path) -> list[str]:
    """Why runs could not start: of every arm and every size that lacks runs, the first is checked.

    Else an arm that cannot train ends a campaign when its turn comes, hours after the start.
    """
    first: dict[tuple[str, str], Cell] = {}
    for step in ordered(ledger, lambda _: 1.0):
        for cell in (*step.tunes, *step.cells):
            point = ledger.campaign.arms[cell.arm].grid[0] if cell.point == UNKNOWN else cell.point
            cell = dataclasses.replace(cell, point=point)
            first.setdefault(("arm", cell.arm), cell)
            first.setdefault(("size", cell.size), cell)
    problems = []
    for cell in dict.fromkeys(first.values()):
        try:
            resolve(fields_of(ledger.campaign, cell), workdir / _TAKEN)
        except RefusedError as error:
            of = f"arms.{cell.arm} at sizes.{cell.size}"
            problems += [f"{of}: {line}" for line in error.problems]
    return problems


def run(
    ledger: Records,
    workdir: Path,
    console: Console,
    budget: float = math.inf,
) -> bool:
    """Train cell after cell, for at most `budget` core-seconds; False when a signal ended it.

    Other processes with this workdir may train at the same time: each takes cells that no other
    has, and waits while all that is left depends on what others train.
    """
    code_version()  # of the code that is running
    estimate = RunEstimate(ledger, jax.default_backend())
    spent, began, done = 0.0, time.monotonic(), 0
    with Interrupt() as interrupt, Work("campaign: runs") as work:
        while not interrupt.requested:
            left = [c for s in ordered(ledger, estimate.seconds) for c in s.runs]
            cells = to_train(ledger, estimate, budget - spent)
            first = next(cells, None)
            if first is None:
                return True
            with ExitStack() as until_recorded:
                cell = take(chain((first,), cells), ledger, workdir, until_recorded)
                if cell is None:
                    work.at("other processes train what is next", done, done + len(left))
                    time.sleep(_POLL_SECONDS)
                estimate.learn(update(ledger))
                if cell is None or ledger.done(cell):
                    continue
                pace = (time.monotonic() - began) / spent if spent else 1.0
                seconds = pace * min(sum(map(estimate.seconds, left)), budget - spent)
                work.at(cell.title, done, done + len(left), seconds_left=seconds)
                record = train_cell(ledger.campaign, cell, workdir)
                if record is None:
                    break
                file = write(ledger.campaign, cell, record)
                estimate.learn(update(ledger))
                if not ledger.done(cell):
                    reason = ledger.excluded[-1].reason
                    raise RefusedError([f"{file} does not count: {reason}"], TITLE)
            done, spent = done + 1, spent + record["core_seconds"]
            failed = record["failed"]
            result = f"failed: {failed}" if failed else f"loss {record['loss']:.4f}"
            of = "" if math.isinf(budget) else f" of {budget / 3600:g}"
            console.print(
                f"{cell.title}: {result}, {record['core_seconds']:.0f} core-seconds "
                f"({spent / 3600:.2f}{of} core-hours)"
            )
            jax.clear_caches()  # hundreds of programs would fill the memory
    return False


def take(
    cells: Iterable[Cell], ledger: Records, workdir: Path, until_recorded: ExitStack
) -> Cell | None:
    """The first cell that no other process has; this one has it until the stack is closed."""
    for cell in cells:
        with suppress(OccupiedError):
            folder = workdir / _TAKEN / _folder_name(cell, ledger.digest(cell))
            until_recorded.enter_context(occupied(folder))
            return cell
    return None


def to_train(ledger: Records, estimate: RunEstimate, seconds: float) -> Iterator[Cell]:
    """The cells that can run, in order: those that take no more than `seconds`."""
    for step in ordered(ledger, estimate.seconds):
        for cell in runnable(ledger, step):
            if estimate.seconds(cell) <= seconds:
                yield cell


def show_plan(ledger: Records, console: Console) -> None:
    """Print what is left in order, its core-hours, and the records that do not count."""
    estimate = RunEstimate(ledger, jax.default_backend())
    names = ("stage", "claim", "size", "rounds", "regions", "split")
    columns = [*map(Column, names), *right(("cells", "tuning", "core-hours", "in all"))]
    title, total = "left to run, in order", 0.0
    table = Table(*columns, box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for step in ordered(ledger, estimate.seconds):
        cost = step.seconds / 3600
        total += cost
        counts = len(step.cells), len(step.tunes)
        row = (step.stage, step.claim, *vars(step.rung).values(), *counts)
        table.add_row(*map(str, row), f"{cost:.2f}", f"{total:.2f}")
    print_table(console, table)
    reported = sum(not cell.tunes for cell in ledger.found)
    console.print(
        f"{reported} cells and {len(ledger.found) - reported} runs of the tuning are recorded in "
        f"{ledger.campaign.records}: {hours(ledger.found.values())}"
    )
    counts = Counter(entry.reason for entry in ledger.excluded)
    for reason, count in sorted(counts.items()):
        console.print(f"excluded: {count} records: {reason}")


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
    links = Links(campaign.network(cell.regions), campaign.step_seconds)
    losses = [record["anchor"] for record in run.evals]
    rows = zip(
        (record["step"] for record in run.evals),
        tokens_at(run),
        (round(sent) for sent in bytes_at(run)),
        (round(value, 4) for value in virtual_at(links)(run)),
        (None if loss is None else round(loss, 6) for loss in losses),
    )
    cost = costs(run, {_NETWORK: links})
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
