"""Put together what a person sees of a run: a dictionary of plain values."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.cli import RefusedError
from experiments.metrics import checked
from experiments.watch.alarms import alarms
from experiments.watch.record import Follower, Log, RegionLog
from experiments.workdir import METRICS
from lowcomm_jax.network import Network, VirtualClock, replay

SHOWN_STEPS = 60  # of the timeline
# What a region did at a step, the weaker first: of two marks the stronger one is shown.
MARKS = STEP, SENT, UNDER_WAY, LANDED, BOTH, UNCOUNTED = (
    "step",
    "sent",
    "under way",
    "landed",
    "both",
    "uncounted",
)

View = dict[str, Any]
"""Fields (losses in nats per token, bytes, seconds; None = not known):

- `name`, `method`, `corpus`, `steps` (of the run), `done` (how many of them), `step` (newest inner
  step of any region), `nominal` (batches grow or trainers merge: `steps`, `done` are
  in steps of the nominal batch; else `done` is `step`), `tokens`, `tokens_per_second`, `left_s`,
  `complete`, `age_s` (since the newest record), `jobs` (one job per region).
- `eval`: `step`, `done`, `loss` of the newest evaluation of the anchor.
- `regions`: a `RegionLog` each, by their numbers.
- `timeline`: `first`, `last` step, and `lanes`: region -> one of `MARKS` for each of its steps.
- `alarms`: sentences, the worst first.
"""


class Watch:
    """Follows the files of one run.

    Args:
      workdir: of a run of one process, or of one job per region (`region<i>` in it). Jobs that
        appear later are found.
      network: on which the virtual clock runs; None = the run's own, if it has one.
    """

    def __init__(self, workdir: Path, network: Network | None = None):
        self.workdir, self._given = workdir, network
        self._logs: dict[Path, tuple[Follower, Log]] = {}
        self._clock: VirtualClock | None = None

    @property
    def network(self) -> Network | None:
        """On which the virtual clock of the newest view runs; None = there is no clock."""
        return None if self._clock is None else self._clock.network

    def _find(self) -> None:
        own = self.workdir / METRICS
        found = [own] if own.is_file() else sorted(self.workdir.glob(f"region*/{METRICS}"))
        for path in found:
            self._logs.setdefault(path, (Follower(path), Log()))

    def look(self, now: float | None = None) -> View:
        """Read what is new and give the view.

        Args:
          now: Unix time; None = the present.

        Raises:
          RefusedError: no run lies there yet, or a file does not start with a header.
          ValueError: a line is no record, or lacks what every record of its kind has.
        """
        self._find()
        if not self._logs:
            problem = f"{self.workdir}: no run lies there yet ({METRICS} is missing)"
            raise RefusedError([problem], "watch")
        for path, (follower, log) in list(self._logs.items()):
            records = follower.read()
            if follower.restarted:
                log = Log()
                self._logs[path] = (follower, log)
                self._clock = None
            if records and log.header is None and records[0]["kind"] != "header":
                raise RefusedError([f"{path} does not start with a header"], "watch")
            log.take(checked(records, path))
            self._follow_clock(log, records)
        logs = [log for _, log in self._logs.values() if log.header is not None]
        changed = max(follower.changed for follower, _ in self._logs.values())
        return _view(self.workdir, logs, now or time.time(), changed, self._clock)

    def _follow_clock(self, log: Log, records: Sequence[Mapping[str, Any]]) -> None:
        """The virtual clock of a run in one process; jobs have real links."""
        if log.header is None or len(log.header["here"]) < log.header["regions"]:
            return
        if self._clock is None:
            network = self._network(log.header)
            if network is None:
                return
            self._clock = VirtualClock(network)
        steps = [record for record in records if record["kind"] == "step"]
        replay(self._clock.network, steps, record_from=None, clock=self._clock)

    def _network(self, header: Mapping[str, Any]) -> Network | None:
        from lowcomm_jax.network import parse

        network = self._given
        if network is None and header["config"].get("network"):
            network = parse(header["config"]["network"])
        if network is not None and network.size != header["regions"]:
            fix = "name one of that size"
            problem = f"network {network.name} has {network.size} regions, the run "
            raise RefusedError([f"{problem}{header['regions']}: {fix}"], "watch")
        return network


def _view(
    workdir: Path, logs: Sequence[Log], now: float, changed: float, clock: VirtualClock | None
) -> View:
    """The view of a run that `look` gives, of logs as they are at `now`."""
    header = logs[0].header if logs else {}
    jobs = bool(logs) and len(header["here"]) < header["regions"]
    step = max((log.step for log in logs), default=0)
    done = max((log.done(log.step, log.tokens) for log in logs), default=0)
    view: View = {
        "name": str(workdir),
        "method": header.get("method"),
        "corpus": header.get("data", {}).get("corpus"),
        "steps": header.get("steps", 0),
        "regions_of_run": header.get("regions", 0),
        "done": int(done),
        "step": step,
        "nominal": any(log.nominal for log in logs),
        "tokens": sum(log.tokens for log in logs),
        "tokens_per_second": sum(log.tokens_per_second or 0.0 for log in logs) or None,
        "left_s": _left(logs, header.get("steps", 0)),
        "complete": bool(logs) and all(log.complete for log in logs) and _all_there(logs, header),
        "age_s": max(0.0, now - changed),
        "jobs": jobs,
        "eval": _evaluations(logs),
        "regions": _regions(logs, clock),
        "timeline": _timeline(logs, step),
    }
    view["alarms"] = alarms(view, logs)
    return view


def _all_there(logs: Sequence[Log], header: Mapping[str, Any]) -> bool:
    return sum(len(log.regions) for log in logs) == header["regions"]


def _evaluations(logs: Sequence[Log]) -> dict[str, Any]:
    """Those of the log with the newest evaluation of an anchor that is not behind."""
    ahead = [log for log in logs if not log.behind] or logs
    evaluated = [log for log in ahead if log.evals]
    if not evaluated:
        return {"step": None, "done": None, "loss": None}
    log = max(evaluated, key=lambda log: log.evals[-1][0])
    step, loss, tokens = log.evals[-1]
    return {"step": step, "done": int(log.done(step, tokens)), "loss": loss}


def _left(logs: Sequence[Log], steps: int) -> float | None:
    """Seconds until the slowest is done, at the speed of its newest log interval."""
    going = [log for log in logs if not log.complete]
    if not all(log.steps_per_second for log in going):
        return None
    left = [(steps - log.done(log.step, log.tokens)) / log.steps_per_second for log in going]
    return max(left, default=0.0)


def _regions(logs: Sequence[Log], clock: VirtualClock | None) -> list[RegionLog]:
    """All regions; `link` and `waiting` follow the virtual clock, where there is one."""
    found = sorted((r for log in logs for r in log.regions.values()), key=lambda r: r.number)
    if clock is not None and clock.now_R.max() > 0:
        report = clock.report()
        for region in found:
            r = region.number
            if way_out := _way_out(clock.network, r):
                region.link = float(report.mean_gbps_R[r]) / way_out
            region.waiting = float(report.exposed_R[r]) / report.wall_s
    return found


def _way_out(network: Network, region: int) -> float:
    """Gbit/s that leave a region at most: its egress, or all its links; 0 for a single region."""
    links = [network.bandwidth_RxR[region, other] for other in range(network.size)]
    return min(float(network.egress_R[region]), float(sum(links) - links[region]))


def _timeline(logs: Sequence[Log], step: int) -> dict[str, Any]:
    """What every region did in the last steps."""
    first = max(1, step - SHOWN_STEPS + 1)
    lanes = {number: _lane(log, i, first) for log in logs for i, number in enumerate(log.regions)}
    return {"first": first, "last": step, "lanes": lanes}


def _lane(log: Log, i: int, first: int) -> list[str]:
    """Marks of the i-th region of a log in each of its steps from `first` on."""
    marks = [STEP] * max(0, log.step - first + 1)

    def put(step: int, mark: str) -> None:
        if first <= step <= log.step:
            there = marks[step - first]
            mark = BOTH if {mark, there} == {SENT, LANDED} else mark
            marks[step - first] = max(mark, there, key=MARKS.index)

    number, flights = list(log.regions)[i], {}  # key -> (step of the send, not left out)

    def show(key: str, landed: int | None, counted: bool = True) -> None:
        sent, kept = flights.pop(key)
        for step in range(max(first, sent + 1), log.step + 1 if landed is None else landed):
            put(step, UNDER_WAY)
        put(sent, SENT if kept and counted else UNCOUNTED)
        if landed is not None:
            put(landed, LANDED)

    for row in log.recent:
        for event in row["events"]:
            if event["kind"] not in ("send", "land") or event["fragment"] < 0:
                continue
            if (key := event["key"]) is None:
                continue  # of a landing of which nothing was due
            if event["kind"] == "send" and event["participants"][i]:
                flights[key] = row["step"], not (event.get("left_out") or {i: False})[i]
            elif event["kind"] == "land" and key in flights and event["staleness"][i] >= 0:
                # At a pace of one's own a round lands everywhere, and counts who was admitted.
                admitted = event.get("admitted")
                counted = event["participants"][i] if admitted is None else admitted[number]
                show(key, row["step"], bool(counted))
    for key in list(flights):
        show(key, log.step if log.complete else None)  # the end lands what is under way
    return marks


def nothing_sent(view: View) -> str | None:
    """Why the timeline of a view is empty, in words; None where it is not."""
    shown = view["timeline"]
    if any({*marks} - {STEP} for marks in shown["lanes"].values()):
        return None
    if not any(region.sent for region in view["regions"]):
        return "nothing has been sent yet"
    if view["complete"] and not any(region.exchanges for region in view["regions"]):
        return "nothing was sent but the last synchronisation, which belongs to no step"
    return f"no payload was sent in steps {shown['first']:,} to {shown['last']:,}"
