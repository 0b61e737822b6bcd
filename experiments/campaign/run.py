"""Train one cell and make its record."""

from __future__ import annotations

import datetime
import math
import shutil
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from experiments.campaign.cells import Cell, digest_of, fields_of
from experiments.campaign.plan import Campaign
from experiments.campaign.records import VERSION, code_version
from experiments.compare.costs import costs
from experiments.compare.runs import attempt, error_of, finished
from experiments.report.html_data import bytes_at, tokens_at, virtual_at
from experiments.runlog import RunLog, read_run
from experiments.train.header import machine, versions

_QUIET = Console(quiet=True)
_NETWORK = "virtual"


def train_cell(campaign: Campaign, cell: Cell, workdir: Path) -> dict[str, Any] | None:
    """Train a cell, or continue it; returns its record, or None when a signal stopped it.

    The run's own folder is removed once its record is made. A run that failed has a record, too:
    its reason stands in `failed`.

    Args:
      workdir: of the campaign; the run lies in a folder of its own there.
    """
    fields = fields_of(campaign, cell)
    digest = digest_of(fields)
    folder = workdir / f"{cell.size}-{cell.arm}-{cell.name}-{digest[:10]}"
    began, used = time.monotonic(), time.process_time()
    if not attempt(fields, folder, _QUIET):
        return None
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
    if finished(folder):
        record |= _measured(campaign, cell, read_run(folder))
    else:
        record |= {"failed": error_of(folder) or "not complete", "corpus_digest": None}
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
    return {
        "failed": None if finite else "the final loss is not finite",
        "corpus_digest": run.header["data"]["corpus_digest"],
        "params": run.header["params"],
        "steps": run.header["steps"],
        "tokens": run.end["tokens"],
        "loss": round(last, 6) if finite else None,
        "bytes_sent": float(np.mean(run.end["bytes_sent"])),
        "allreduce_bytes": run.header["allreduce_bytes_per_step"] * run.header["steps"],
        "exchanges": cost["exchanges"],
        "staleness": cost["staleness"],
        "virtual": cost["networks"][_NETWORK],
        "document_interval": cost["document_interval"],
        "curve": [list(row) for row in rows],
    }
