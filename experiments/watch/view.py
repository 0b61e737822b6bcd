"""Put together what a person sees of a run: a dictionary of plain values."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.cli import RefusedError
from experiments.metrics import checked
from experiments.watch.alarms import alarms
from experiments.watch.record import Follower, Log
from experiments.workdir import METRICS
from lowcomm_jax.network import Network, VirtualClock, replay

SHOWN_STEPS = 60  # of the timeline
_AS_RECORDED = ("step", "loss", "finite", "exchanges", "staleness", "stalest", "sent", "received")
_AS_RECORDED += ("rate", "waited", "travel", "skipped")  # of a region

View = dict[str, Any]
"""Fields (losses in nats per token, bytes, seconds; None = not known):

- `name`, `method`, `corpus`, `steps` (of the run), `done` (how many of them), `step` (newest inner
  step of any region), `nominal` (batches grow or trainers merge: `steps`, `done` are
  in steps of the nominal batch; else `done` is `step`), `tokens`, `tokens_per_second`, `left_s`,
  `complete`, `age_s` (since the newest record), `jobs` (one job per region),
  `network` (its name; link use is then that of its clock).
- `eval`: `step`, `done`, `loss` of the newest evaluation of the anchor.
- `regions`: a dictionary each: `region`, `step`, `loss`, `finite`, `participation` (share),
  `exchanges`, `staleness`, `stalest`, `sent`, `received`, `rate` (bytes a second of real time),
  `link` (share of what its way out carries; None for a single region), `waiting` (share of the
  virtual time), `waited`, `travel`, `skipped`.
- `timeline`: `first`, `last` step, and `flights`: `region`, `fragment`, `sent`, `landed` (step;
  None: under way), `counted`.
- `alarms`: sentences, the worst first.
"""


class Watch:
    """Follows the files of one run.

    Args:
      workdir: of a run of one process, or of one job per region (`region<i>` in it). Jobs that
        appear later are found.
      network: on which the virtual clock runs; None = the run's own, if it has one.

    Raises:
      RefusedError: no run lies there, or one of another version.
    """

    def __init__(self, workdir: Path, network: Network | None = None):
        self.workdir, self._given = workdir, network
        self._logs: dict[Path, tuple[Follower, Log]] = {}
        self._clock: VirtualClock | None = None
        self._find()
        if not self._logs:
            problem = f"{workdir}: no run lies there yet ({METRICS} is missing)"
            raise RefusedError([problem], "watch")

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
          RefusedError: a file does not start with a header.
          ValueError: a line is no record, or lacks what every record of its kind has.
        """
        self._find()
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
        "network": None if clock is None else clock.network.name,
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
    """Seconds until the slowest is done, at the pace of its newest log interval."""
    going = [log for log in logs if not log.complete]
    if not all(log.pace for log in going):
        return None
    left = [(steps - log.done(log.step, log.tokens)) / log.pace for log in going]
    return max(left, default=0.0)


def _regions(logs: Sequence[Log], clock: VirtualClock | None) -> list[dict[str, Any]]:
    """One row for each region; `link` and `waiting` only where a virtual clock follows the run."""
    report = None if clock is None or clock.now_R.max() <= 0 else clock.report()
    rows = []
    for region in sorted((r for log in logs for r in log.regions.values()), key=lambda r: r.number):
        r = region.number
        row = {
            "region": r,
            **{name: getattr(region, name) for name in _AS_RECORDED},
            "participation": region.counted / region.exchanges if region.exchanges else None,
            "link": None,
            "waiting": None,
        }
        if report is not None:
            if way_out := _way_out(clock.network, r):
                row["link"] = float(report.mean_gbps_R[r]) / way_out
            row["waiting"] = float(report.exposed_R[r]) / report.wall_s
        rows.append(row)
    return rows


def _way_out(network: Network, region: int) -> float:
    """Gbit/s that leave a region at most: its egress, or all its links; 0 for a single region."""
    links = [network.bandwidth_RxR[region, other] for other in range(network.size)]
    return min(float(network.egress_R[region]), float(sum(links) - links[region]))


def _timeline(logs: Sequence[Log], step: int) -> dict[str, Any]:
    """Every payload of the last steps: sent, and landed or still under way."""
    first = max(1, step - SHOWN_STEPS + 1)
    flights: dict[tuple[int, str], dict[str, Any]] = {}
    for log in logs:
        numbers = list(log.regions)
        open_ended = log.step if log.complete else None  # the end lands what is under way
        for row in log.recent:
            for event in row["events"]:
                if event["kind"] in ("send", "land") and event["fragment"] >= 0 and event["key"]:
                    _note(flights, event, numbers, row["step"], open_ended)
    shown = [f for f in flights.values() if f["landed"] is None or f["landed"] >= first]
    return {"first": first, "last": step, "flights": shown}


def nothing_sent(view: View) -> str | None:
    """Why the timeline of a view is empty, in words; None where it is not."""
    shown = view["timeline"]
    if shown["flights"]:
        return None
    if not any(row["sent"] for row in view["regions"]):
        return "nothing has been sent yet"
    if view["complete"] and not any(row["exchanges"] for row in view["regions"]):
        return "nothing was sent but the last synchronisation, which belongs to no step"
    return f"no payload was sent in steps {shown['first']:,} to {shown['last']:,}"


def _note(
    flights: dict,
    event: Mapping[str, Any],
    numbers: Sequence[int],
    step: int,
    open_ended: int | None,
) -> None:
    for i, number in enumerate(numbers):
        name = number, event["key"]
        if event["kind"] == "send":
            if not event["participants"][i]:
                continue  # it sends nothing, and nothing of its own will land
            flights[name] = {
                "region": number,
                "fragment": event["fragment"],
                "sent": step,
                "landed": open_ended,
                "counted": not (event.get("left_out") or [0] * len(numbers))[i],
            }
        elif name in flights and event["staleness"][i] >= 0:
            flights[name]["landed"] = step
            # At a pace of one's own a round lands everywhere, and counts who was admitted to it.
            admitted = event.get("admitted")
            counted = event["participants"][i] if admitted is None else admitted[number]
            flights[name]["counted"] &= bool(counted)
