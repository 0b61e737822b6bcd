"""What a run has cost: until its end, and until its loss first reached a target.

Costs are steps, tokens, bytes and virtual time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.report.html_data import bytes_at, tokens_at, virtual_at
from experiments.report.runlog import RunLog, document_interval, nominal_steps, summarise
from experiments.report.stats import crossing, estimate
from experiments.report.virtual import Links, on_network

STEPS, TOKENS, BYTES = "steps", "tokens", "bytes_sent"

Cost = dict[str, float | None]


def costs(run: RunLog, networks: Mapping[str, Links]) -> dict[str, Any]:
    """The last loss of one run, and its costs.

    Args:
      networks: by name; the run's events are replayed on each.

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
        "networks": {name: _virtual(run, links) for name, links in networks.items()},
    }


def _virtual(run: RunLog, links: Links) -> dict[str, float]:
    found = on_network(run, links)
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


def seconds_on(network: str) -> str:
    """The key of the virtual time on a network."""
    return f"seconds_on_{network}"


def keys(networks: Iterable[str]) -> tuple[str, ...]:
    """Names of the costs: (nominal) inner steps, tokens of all regions, bytes a region, seconds."""
    return (STEPS, TOKENS, BYTES, *map(seconds_on, networks))


def to_target(run: RunLog, target: float | None, networks: Mapping[str, Links]) -> Cost:
    """The cost of reaching the target, by `keys`; all None where it was not reached.

    The loss is the anchor's. Between two evaluations everything is interpolated linearly.
    """
    losses = [record["anchor"] for record in run.evals]
    found = None if target is None else crossing(losses, target)
    if found is None:
        return dict.fromkeys(keys(networks))
    series = {
        STEPS: [float(nominal_steps(run, record)) for record in run.evals],
        TOKENS: tokens_at(run),
        BYTES: bytes_at(run),
    }
    for name, links in networks.items():
        series[seconds_on(name)] = virtual_at(links)(run)
    return {key: found.of(values) for key, values in series.items()}
