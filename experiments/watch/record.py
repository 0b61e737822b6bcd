"""Read what is new in a metrics file that is being written, and keep what a view needs of it.

The size of what is kept does not grow with the run.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.metrics import record_of
from experiments.report.runlog import adaptive, in_nominal_steps

KEPT_STEPS = 400  # whose events are kept
KEPT_LANDINGS = 200  # whose norms are compared between regions


class RegionLog:
    """The numbers that one region has reported.

    Attributes:
      step: newest inner step.
      loss, loss_step: newest finite loss, and its step.
      finite: whether the loss of the newest step was finite.
      sent, received: bytes so far.
      rate: bytes sent per second of real time, between the newest two log intervals.
      counted, exchanges: exchanges that counted it, of all.
      missed: number of the last exchanges in a row that did not count it.
      staleness, stalest: inner steps between send and landing, of the newest landing and at most.
      waited: seconds that it waited for bytes so far; None where regions share a process.
      travel: seconds of the newest exchange, from its payload being ready to the arrival of the
        last one; None where regions share a process.
      skipped: steps whose gradients were not finite.
      link: share of what its way out carries; None without a virtual clock, or other regions.
      waiting: share of the virtual time; None without a clock.
    """

    def __init__(self, number: int):
        self.number, self.step = number, 0
        self.loss: float | None = None
        self.loss_step, self.finite = 0, True
        self.sent = self.received = 0
        self.rate: float | None = None
        self.counted = self.exchanges = self.missed = 0
        self.staleness: int | None = None
        self.stalest: int | None = None
        self.waited: float | None = None
        self.travel: float | None = None
        self.skipped, self.last_skipped = 0, -1
        self.link: float | None = None
        self.waiting: float | None = None
        self._mark: tuple[float, int] | None = None  # seconds, bytes at the end of an interval

    @property
    def participation(self) -> float | None:
        """Share of the exchanges that counted it; None before the first."""
        return self.counted / self.exchanges if self.exchanges else None

    def interval(self, seconds: float) -> None:
        """A log interval has ended, so many seconds after the start of the run."""
        if self._mark is not None and seconds > self._mark[0]:
            self.rate = (self.sent - self._mark[1]) / (seconds - self._mark[0])
        self._mark = (seconds, self.sent)


class Log:
    """What one metrics file holds so far: of all regions, or of one.

    Attributes:
      nominal: batches grow or trainers merge: the run's steps are those of the nominal batch, and
        `step` counts inner steps.
      steps_per_second: steps of the run a second, over the newest log interval.
      evals: inner step, loss of the anchor and tokens of every evaluation of the newest set.
    """

    def __init__(self):
        self.header: dict[str, Any] | None = None
        self.regions: dict[int, RegionLog] = {}
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.tokens_per_second: float | None = None
        self.nominal = False
        self.steps_per_second: float | None = None
        self.interval: tuple[int, float] | None = None  # steps and seconds of the newest
        self.evals: list[tuple[int, float | None, float]] = []
        self._eval_set: Any = None  # of the evaluations to come
        self._judged_on: Any = None  # and of those in `evals`
        self.behind = 0  # steps that the newest evaluated anchor is old
        self.own_anchors = False
        self.by_rounds = False  # regions have rounds in common, and no steps
        self.complete = False
        self.recent: deque[dict[str, Any]] = deque(maxlen=KEPT_STEPS)
        self.norms: OrderedDict[str, float] = OrderedDict()  # of landings, by key
        self._left_out: OrderedDict[str, Sequence[float]] = OrderedDict()  # of sends, by key
        self._before: tuple[float, float] | None = None  # seconds, steps of the run

    def done(self, step: int, tokens: float) -> float:
        """Steps of the run that an inner step, and the tokens until then, amount to."""
        if not self.nominal or self.header is None:
            return step
        return min(in_nominal_steps(self.header, tokens), self.header["steps"])

    def take(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take new records, in the file's order."""
        for record in records:
            kind = record["kind"]
            if kind == "header":
                self.header = dict(record)
                self.regions = {number: RegionLog(number) for number in record["here"]}
            elif kind == "step":
                self._step(record)
            elif kind == "interval":
                self._interval(record)
            elif kind == "eval_set":
                self._eval_set = record
            elif kind == "eval":
                if self._judged_on != self._eval_set:
                    self._judged_on, self.evals = self._eval_set, []
                self.evals.append((record["step"], record["anchor"], record["tokens"]))
                self.behind = record.get("behind", 0)
                self.own_anchors |= "anchor_variance" in record
            elif kind == "resume":
                self.complete = False
            elif kind == "end":
                self.complete = True
                for region, sent, got in zip(
                    self.regions.values(), record["bytes_sent"], record["bytes_received"]
                ):
                    region.sent, region.received = sent, got

    def _interval(self, record: Mapping[str, Any]) -> None:
        seconds, done = record["seconds"], self.done(record["step"], self.tokens)
        if self._before is not None and seconds > self._before[0]:
            self.interval = (record["steps"], seconds - self._before[0])
            self.steps_per_second = (done - self._before[1]) / (seconds - self._before[0])
        self._before = (seconds, done)
        for region in self.regions.values():
            region.interval(seconds)

    def _step(self, record: Mapping[str, Any]) -> None:
        self.step, self.tokens = record["step"], record["tokens"]
        self.seconds = record["seconds"]
        self.tokens_per_second = record["tokens_per_second"]
        self.nominal |= adaptive(record) and "tokens_per_step" in (self.header or {})
        skipped = record.get("skipped") or [0] * len(self.regions)
        for i, region in enumerate(self.regions.values()):
            loss = record["loss"][i]
            region.step = record["step"]
            region.finite = loss is not None and math.isfinite(loss)
            if region.finite:
                region.loss, region.loss_step = loss, record["step"]
            region.sent, region.received = record["bytes_sent"][i], record["bytes_received"][i]
            if skipped[i]:
                region.skipped += 1
                region.last_skipped = record["step"]
        for event in record["events"]:
            self._event(event)
        self.recent.append({"step": record["step"], "events": record["events"]})

    def _event(self, event: Mapping[str, Any]) -> None:
        if event["kind"] not in ("send", "land") or event["fragment"] < 0:
            return
        key = event["key"]
        if event["kind"] == "send":
            left_out = event.get("left_out") or [0] * len(self.regions)
            _keep(self._left_out, key, left_out)
            self._count(event, left_out)  # of methods without delay that land nothing of their own
            return
        if key is None:
            return
        self.by_rounds |= "admitted" in event
        if event.get("mean_norm") is not None and len(event["mean_norm"]) == 1:
            if "admitted" in event:
                _keep(self.norms, f"of round {event['round']}", event["mean_norm"][0])
            elif not self.by_rounds:  # there, a key names a step of this region
                _keep(self.norms, key, event["mean_norm"][0])
        for i, region in enumerate(self.regions.values()):
            if event["staleness"][i] >= 0:
                region.staleness = event["staleness"][i]
                region.stalest = max(region.stalest or 0, region.staleness)
            if "waited_seconds" in event and event["waited_seconds"][i] is not None:
                region.waited = (region.waited or 0.0) + event["waited_seconds"][i]
            if "travel_seconds" in event and event["travel_seconds"][i] is not None:
                region.travel = event["travel_seconds"][i]
        if "travel_seconds" in event:  # only when it lands does a job know whom the commit names
            left_out = self._left_out.get(key, [0] * len(self.regions))
            self._count(event, left_out, landed=True)

    def _count(self, event: Mapping[str, Any], left_out: Sequence[float], landed: bool = False):
        jobs = self.header is not None and len(self.regions) < self.header["regions"]
        if jobs and not landed:
            return
        for i, region in enumerate(self.regions.values()):
            region.exchanges += 1
            named = event["participants"][i]
            if "admitted" in event:
                named = event["admitted"][region.number]
            took_part = bool(named) and not left_out[i]
            region.counted += took_part
            # At a pace of one's own, rounds without one are none that one has missed.
            region.missed = 0 if took_part or self.by_rounds else region.missed + 1


def _keep(kept: OrderedDict, key: str, value: Any) -> None:
    kept[key] = value
    while len(kept) > KEPT_LANDINGS:
        kept.popitem(last=False)


class Follower:
    """The records of one file, as they come.

    Attributes:
      restarted: the last `read` began anew: the file was replaced, as by a run that continues.
      changed: when the file was last written, in seconds since 1970; 0 before it is there.
    """

    def __init__(self, path: Path):
        self.path, self.restarted, self.changed = path, False, 0.0
        self._identity: tuple[int, int] | None = None
        self._offset, self._line = 0, 0

    def read(self) -> list[dict[str, Any]]:
        """All whole records since the last call; a line that is being written waits.

        Raises:
          ValueError: a whole line that is no record.
        """
        self.restarted = False
        try:
            with self.path.open("rb") as file:
                return self._new(file)
        except FileNotFoundError:
            return []

    def _new(self, file) -> list[dict[str, Any]]:
        found = os.fstat(file.fileno())
        identity = (found.st_dev, found.st_ino)
        if identity != self._identity or found.st_size < self._offset:
            self.restarted = self._identity is not None
            self._identity, self._offset, self._line = identity, 0, 0
        self.changed = found.st_mtime
        file.seek(self._offset)
        whole, _, _ = file.read().rpartition(b"\n")
        if not whole:
            return []
        self._offset += len(whole) + 1
        try:
            lines = whole.decode("utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: no text ({error})") from error
        first, self._line = self._line + 1, self._line + len(lines)
        return [record_of(line, f"{self.path}, line {n}") for n, line in enumerate(lines, first)]
