"""The last loss of the runs of a comparison, and its costs: bytes, staleness, virtual time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.compare.stats import estimate
from experiments.report.virtual import StepSeconds, on_network
from experiments.runlog import RunLog, document_interval, summarise
from lowcomm_jax.network import Network


def costs(
    run: RunLog, networks: Mapping[str, Network], step_seconds: StepSeconds
) -> dict[str, Any]:
    """The last loss of one run, and its costs.

    Args:
      networks: name -> network; the run's events are replayed on each.
      step_seconds: see `StepSeconds`.

    Returns:
      A dict of
      - `loss`, `tokens`, `bytes_sent`, `seconds`: see `Summary`;
      - `compression`: bytes of AllReduce over those sent;
      - `staleness`: the largest, in inner steps;
      - `document_interval`: half of the last loss's 95 % interval over documents;
      - `exchanges`: steps at which something was sent;
      - `skipped`: steps that regions skipped, their gradients not being finite, over all regions;
      - `networks`: name -> virtual `seconds`, those of AllReduce for as many steps, `speedup`
        (their ratio) and `utilisation`.
    """
    summary = summarise(run)
    same = ("loss", "tokens", "bytes_sent", "seconds")
    same += ("compression", "staleness", "exchanges", "skipped")
    return {
        **{name: getattr(summary, name) for name in same},
        "document_interval": summary.interval,
        "networks": {name: _virtual(run, net, step_seconds) for name, net in networks.items()},
    }


def _virtual(run: RunLog, network: Network, step_seconds: StepSeconds) -> dict[str, float]:
    found = on_network(run, network, step_seconds)
    return {
        "seconds": found.clock.wall_s,
        "allreduce_seconds": found.allreduce_s,
        "speedup": found.allreduce_s / found.clock.wall_s,
        "utilisation": found.clock.utilisation,
    }


def mean_costs(rows: Sequence[Mapping[str, Any]], seeds: int) -> dict[str, Any]:
    """The means over seeds; with one seed its document interval.

    The loss has its interval over seeds (`stats.Estimate`). Of the staleness it is the largest, of
    skipped steps the sum.

    Args:
      rows: `costs` of every seed that is complete.
      seeds: how many seeds there should be.
    """
    stale = [row["staleness"] for row in rows if row["staleness"] is not None]
    names = rows[0]["networks"] if rows else ()
    means = ("tokens", "bytes_sent", "compression", "exchanges")
    return {
        "loss": dataclasses.asdict(estimate([row["loss"] for row in rows])),
        **{name: estimate([row[name] for row in rows]).mean for name in means},
        "staleness": max(stale, default=None),
        "document_interval": rows[0]["document_interval"] if rows and seeds == 1 else None,
        "skipped": sum(row["skipped"] for row in rows),
        "networks": {
            name: {
                key: estimate([row["networks"][name][key] for row in rows]).mean
                for key in rows[0]["networks"][name]
            }
            for name in names
        },
    }


def document_difference(here: RunLog, there: RunLog) -> float | None:
    """Half the width of the 95 % interval of the difference of two last losses over documents.

    Both were evaluated on the same documents, so that the differences are paired by document. None
    where an interval cannot be given.
    """
    sums = [np.array(run.evals[-1]["document_sum"], float) for run in (here, there)]
    return document_interval(sums[0] - sums[1], here.eval_count)
