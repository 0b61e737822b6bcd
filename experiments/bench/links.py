"""Train two jobs over a real link of a given rate, and compare with the virtual clock.

Each job has a core and a network namespace of its own; token buckets hold the link to the rate.
Runs without a limit measure two inputs of the clock: seconds of a step without waiting, and of an
exchange beside its bytes. There is one before and one after each limited run, since a machine's
speed drifts within minutes. The clock must predict everything else. It does not know the CPU time
that the limit itself costs.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.bench import netem
from experiments.metrics import read_records
from experiments.processes import run_together
from experiments.progress import right, tracked
from experiments.report.virtual import seconds_at
from experiments.runlog import RunLog, read_run
from experiments.workdir import METRICS
from lowcomm_jax.network import uniform

RATES = (25.0, 100.0, 500.0)
PERIOD, WARM_UP, TAU = 10, 4, 3
TARGET_SHARE, TARGET_CLOCK = 0.05, 0.10
_STREAMS = {"fragments": 3, "overlap": TAU}
METHODS = {
    "diloco": {},
    "streaming_diloco": _STREAMS,
    "cocodc": _STREAMS,
    # A window longer than the run: a new rank compiles once, which is not measured here.
    "dilocox": {"adaptive.window": 1000},
    "noloco": {},
}
_MODEL = {"layers": 4, "width": 96, "heads": 4, "kv_heads": 4, "head_dim": 24, "mlp_width": 256}
_SECONDS_TO_END = 600


@dataclasses.dataclass(frozen=True)
class TrainedOverLink:
    """A run over a link.

    Attributes:
      log: of both regions.
      period_S: measured seconds of every period after the warm-up.
      travel_N: seconds of every exchange after the warm-up, from the last payload being computed to
        everything being there.
      waited_S: of every period, how long that region waited for bytes whose payload was computed
        last. The other region waits longer, for steps.
    """

    log: RunLog
    period_S: np.ndarray
    travel_N: np.ndarray
    waited_S: np.ndarray


@dataclasses.dataclass(frozen=True)
class LinkRow:
    """A method at a rate.

    Attributes:
      measured, p90, foretold: seconds of a period, median, 90th percentile, and by the clock.
      travel, travel_p90: seconds of an exchange, median and 90th percentile.
      exposed: waiting as a share of what the exchanges took.
      hidden: whether tau inner steps take longer than nine in ten exchanges.
    """

    method: str
    rate: float
    measured: float
    p90: float
    foretold: float
    travel: float
    travel_p90: float
    exposed: float
    hidden: bool

    @property
    def error(self) -> float:
        return self.foretold / self.measured - 1


def rows(
    methods: Sequence[str], rates: Sequence[float], periods: int, batch: int, console: Console
):
    """Train every method at every rate; yields a `LinkRow` each.

    Raises:
      RuntimeError: a job failed, with the end of what it printed.
    """
    # Before and after every limited run, one without a limit.
    parts = [(method, rate) for method in methods for rate in (None, *rates)]
    after = (0.0, 0.0)
    for method, rate in tracked(parts, "bench wan: runs over real links", _named):
        if rate is None:
            after = costs(train(method, None, periods, batch))
        else:
            before, trained = after, train(method, rate, periods, batch)
            after = costs(train(method, None, periods, batch))
            (step, step_after), (fixed, fixed_after) = zip(before, after, strict=True)
            console.print(
                f"{method} before and after {rate:g} Mbit/s: {1e3 * step:.1f} and "
                f"{1e3 * step_after:.1f} ms a step, {1e3 * fixed:.0f} and {1e3 * fixed_after:.0f} "
                "ms an exchange"
            )
            yield row(method, rate, trained, (step + step_after) / 2, (fixed + fixed_after) / 2)


def _named(part: tuple[str, float | None]) -> str:
    method, rate = part
    return f"{method}, " + ("no limit" if rate is None else f"{rate:g} Mbit/s")


def costs(free: TrainedOverLink) -> tuple[float, float]:
    """Median seconds of (a step without waiting, an exchange), of a run without a limit."""
    step = statistics.median((free.period_S - free.waited_S) / PERIOD)
    return step, statistics.median(free.travel_N)


def row(
    method: str, rate: float, trained: TrainedOverLink, step: float, constant: float
) -> LinkRow:
    """Compare a run with the clock's prediction; `step`, `constant`: seconds, see `costs`."""
    goodput = rate / 1e3 * netem.GOODPUT
    network = uniform(2, goodput, compute_s=step, sync_constant_s=constant)
    ends = range(WARM_UP * PERIOD, len(trained.log.steps) + 1, PERIOD)
    foretold = np.diff(seconds_at(trained.log, network, step, list(ends)))
    travel, travel_p90 = (float(np.quantile(trained.travel_N, q)) for q in (0.5, 0.9))
    tau = {"diloco": 0, "noloco": 0, "dilocox": PERIOD}.get(method, TAU)
    return LinkRow(
        method=method,
        rate=rate,
        measured=float(np.median(trained.period_S)),
        p90=float(np.quantile(trained.period_S, 0.9)),
        foretold=float(np.median(foretold)),
        travel=travel,
        travel_p90=travel_p90,
        exposed=float(trained.waited_S.sum() / trained.travel_N.sum()),
        hidden=travel_p90 < tau * step,
    )


def train(method: str, rate: float | None, periods: int, batch: int) -> TrainedOverLink:
    """One run of `WARM_UP + periods` periods, so many sequences a step."""
    with tempfile.TemporaryDirectory(prefix="lowcomm-link-") as made, netem.link(rate) as places:
        folder, cores, parts = Path(made), sorted(os.sched_getaffinity(0)), []
        for region, place in enumerate(places):
            workdir = folder / f"region{region}"
            workdir.mkdir()
            pinned = [*place, "taskset", "-c", str(cores[region % len(cores)])]
            steps = (WARM_UP + periods) * PERIOD
            arguments = _arguments(method, region, folder, steps, batch)
            parts.append((arguments, workdir / "output.txt", pinned))
        run_together(f"{method} at {rate} Mbit/s", "experiments", parts, _SECONDS_TO_END)
        return _read(folder)


def _arguments(method: str, region: int, folder: Path, steps: int, batch: int) -> list[str]:
    fields = {
        "regions": 2,
        "region": region,
        "exchange": "peers",
        "address": f"{netem.ADDRESSES[region]}:0",
        "rendezvous": (folder / "rendezvous").as_uri(),
        "steps": steps,
        "batch": batch,
        "mesh.region": 1,
        "mesh.fsdp": 1,
        "data.seq_len": 64,
        "eval.every": 0,
        "log.every": PERIOD,
        "checkpoint.every": 0,
        "method.period": PERIOD,
        **{f"model.{name}": value for name, value in _MODEL.items()},
        **{f"method.{name}": value for name, value in METHODS[method].items()},
    }
    given = [f"--config.{name}={value}" for name, value in fields.items()]
    workdir = f"--workdir={folder}/region{region}"
    return ["train", f"--config=configs/{method}.py", *given, workdir, "--quiet"]


def _read(folder: Path) -> TrainedOverLink:
    log = read_run(folder)
    records = read_records(folder / "region0" / METRICS)
    seconds = [r["seconds"] for r in records if r["kind"] == "interval"][WARM_UP - 1 :]
    waited_S, travel = np.zeros(len(log.steps) // PERIOD), []
    for step in log.steps:
        for event in step["events"]:
            if "travel_seconds" in event:
                period = (step["step"] - 1) // PERIOD
                waited_S[period] += min(event["waited_seconds"])
                if period >= WARM_UP:
                    travel.append(min(event["travel_seconds"]))
    return TrainedOverLink(log, np.diff(seconds), np.array(travel), waited_S[WARM_UP:])


def table(found: Sequence[LinkRow]) -> Table:
    """The figures with their targets."""
    headings = ("Mbit/s", "measured", "p90", "clock", "off")
    made = Table(
        "method",
        *right((*headings, "exchange", "p90", "waited for", "hidden")),
        title="training over real links, seconds of a period of 10 steps",
        caption=f"off: by how much the clock misses the median, at most {TARGET_CLOCK:.0%}; "
        "hidden: where nine in ten exchanges take less than tau steps, at most "
        f"{TARGET_SHARE:.0%} of their time is waited for",
    )
    for r in found:
        times = [f"{x:.3f}" for x in (r.measured, r.p90, r.foretold)]
        off = f"{r.error:+.1%} {_met(abs(r.error) <= TARGET_CLOCK)}"
        exchange = [f"{r.travel:.3f}", f"{r.travel_p90:.3f}", f"{r.exposed:.1%}"]
        hidden = _met(r.exposed <= TARGET_SHARE) if r.hidden else "cannot be"
        made.add_row(r.method, f"{r.rate:g}", *times, off, *exchange, hidden)
    return made


def _met(target: bool) -> str:
    return "yes" if target else "NO"
