"""Runs of one job per region, as tests start them, watch them, kill them and read their logs."""

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from experiments.metrics import read_records
from experiments.processes import free_port
from experiments.regions.main import RegionJob
from experiments.report.runlog import read_run
from experiments.workdir import CHECKPOINTS, METRICS
from lowcomm_jax.interrupt import EXIT_INTERRUPTED


def start(*arguments):
    """A command of this project as a process of its own; what it prints can be read from it."""
    return subprocess.Popen(
        [sys.executable, "-m", "experiments", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ},
    )


@contextlib.contextmanager
def killed_at_last(processes):
    """A context at whose end none of these lives: where one has failed, the others wait for it."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def reached(launcher, workdir, step):
    """Wait until a run has written this step."""

    def there():
        records = read_records(workdir / METRICS) if (workdir / METRICS).is_file() else []
        return any(record.get("step", 0) >= step for record in records)

    until = time.monotonic() + 300
    while not there():
        if (late := time.monotonic() > until) or launcher.poll() is not None:
            if late:
                launcher.kill()
            shown = launcher.communicate(timeout=60)[0]  # jobs end with their launcher
            raise AssertionError(f"step {step} was not reached: {shown}")
        time.sleep(0.1)


def kill(launcher, *workdirs):
    """Kill the jobs of these regions: all are found before the first one is killed."""
    children = ["pgrep", "-P", str(launcher.pid), "-f"]
    jobs = [
        subprocess.run(
            [*children, f"workdir={workdir}"], check=True, text=True, stdout=subprocess.PIPE
        )
        for workdir in workdirs
    ]
    for job in jobs:
        os.kill(int(job.stdout), signal.SIGKILL)


def entered(shown, count=1):
    """The step at which a region came into the run for the first time, or for a later one, from
    what was printed; None = not (yet)."""
    found = re.findall(r"came into the run at step (\d+)", shown)
    return int(found[count - 1]) if len(found) >= count else None


def assert_logged_once(workdir, at):
    """All steps that a region made, before it was lost and after it came in at a step, and what
    they cost.
    """
    records = read_records(workdir / METRICS)
    assert [r["kind"] for r in records if r["kind"] in ("header", "resume", "end")] == [
        "header",
        "resume",
        "end",
    ]
    steps = [r for r in records if r["kind"] == "step"]
    before = [r["step"] for r in steps if r["step"] <= at]
    assert before == list(range(1, len(before) + 1)) and len(before) >= 40
    assert [r["step"] for r in steps[len(before) :]] == list(range(at + 1, 1 + records[-1]["step"]))
    tokens = [0, *(r["tokens"] for r in steps)]
    most = records[0]["tokens_per_step"] // records[0]["regions"]
    assert all(0 < now - then <= most for then, now in itertools.pairwise(tokens))
    for name in ("seconds", "bytes_sent", "bytes_received"):
        column = [r[name] for r in [*steps, records[-1]]]
        assert column == sorted(column), name
    sent = sum(e["bytes_sent"][0] for r in steps for e in r["events"])
    assert steps[-1]["bytes_sent"] == [sent] and records[-1]["tokens"] == steps[-1]["tokens"]


def fields_of(arguments):
    """A config's fields, by name, of a command's arguments."""
    given = [a.removeprefix("--config.") for a in arguments if a.startswith("--config.")]
    return dict(one.split("=", 1) for one in given)


def ends(workdirs):
    """(records, last evaluation) of each region."""
    logs = [read_records(workdir / METRICS) for workdir in workdirs]
    return logs, [next(r for r in log if r["kind"] == "eval" and r["final"]) for log in logs]


STANDS_S = 3.0
"""Seconds for a step, after which a region stands in an exchange."""
SAVED_S = 60.0
"""Seconds from a signal until everything is saved; 2 on a machine that has nothing else to do."""


class Jobs:
    """Jobs of regions (`RegionJob`) that tests start, watch, kill and stop."""

    def __init__(self, jobs):
        self.jobs = jobs

    def __enter__(self):
        for region in range(len(self.jobs)):
            self.start(region)
        return self

    def __exit__(self, *error):
        self.kill()

    def start(self, region, **changes):
        """Start a region's job, with these fields changed; None = as its config has them."""
        job = self.jobs[region]
        kept = [(name, value) for name, value in job.shared if name not in changes]
        job.shared = kept + [(name, x) for name, x in changes.items() if x is not None]
        job.start()

    def kill(self, *regions):
        """Kill the jobs of these regions, or of all, and wait until they are gone."""
        jobs = [self.jobs[region] for region in regions] or self.jobs
        for job in jobs:
            job.signal(signal.SIGKILL)
        for process in [process for job in jobs for process in job.processes]:
            process.wait()

    def until(self, what, seconds=600):
        """What it gives, once that is something."""
        end = time.monotonic() + seconds
        while not (found := what()):
            shown = [self.shown(region) for region in range(len(self.jobs))]
            assert time.monotonic() < end, shown
            assert None in [job.poll() for job in self.jobs], shown
            time.sleep(0.05)
        return found

    def shown(self, region, process=0):
        return self.jobs[region].output(process).read_text()

    def reached(self, region, step):
        """Wait until a region has written this step."""
        path = self.jobs[region].workdir / METRICS
        self.until(
            lambda: path.is_file() and any(r.get("step", 0) >= step for r in read_records(path))
        )

    def entered(self, region, count=1):
        """The step at which a region comes into the run, once it has (so many times)."""
        return self.until(lambda: entered(self.shown(region), count))

    def exits(self, *jobs):
        """Exit codes, once they have ended."""
        jobs = jobs or self.jobs
        self.until(lambda: all(job.poll() is not None for job in jobs))
        return [job.poll() for job in jobs]

    def saved(self, region):
        """Steps of the checkpoints in a region's folder."""
        folder = self.jobs[region].workdir / CHECKPOINTS
        return [int(p.name) for p in folder.glob("*") if p.name.isdigit()]

    def save_in_an_exchange(self, reached, step):
        """Signal regions that have reached a step and stand in the exchange after another: all save
        there at once, and wait on."""
        for region in range(len(self.jobs)):
            self.reached(region, reached)
        time.sleep(STANDS_S)
        began = time.monotonic()
        for job in self.jobs:
            job.signal(signal.SIGTERM)
        self.until(lambda: all(step in self.saved(region) for region in range(len(self.jobs))))
        took = time.monotonic() - began
        print(f"saved {took:.1f} s after the signal")
        assert took < SAVED_S
        assert [job.poll() for job in self.jobs] == [None] * len(self.jobs)

    def lose_until_the_end(self, region, step):
        """Kill one of two regions once it has reached a step, and start it again when the other has
        ended; both end with one model."""
        self.reached(region, step)
        self.kill(region)
        self.until(lambda: self.jobs[1 - region].poll() is not None)
        self.start(region)
        self.until(lambda: self.jobs[region].poll() is not None)
        assert self.exits() == [0, 0], [self.shown(0), self.shown(1)]
        _, last = ends([job.workdir for job in self.jobs])
        assert last[0]["anchor"] == last[1]["anchor"]

    def interrupt(self):
        """Stop them all, at one step; their runs."""
        for job in self.jobs:
            job.signal(signal.SIGTERM)
        assert self.exits() == [EXIT_INTERRUPTED] * len(self.jobs), self.shown(0)
        runs = self.runs()
        assert len({run.steps[-1]["step"] for run in runs}) == 1
        return runs

    def runs(self):
        return [read_run(job.workdir) for job in self.jobs]


def comparable(workdir):
    """Records of a run that was continued which are those of one that ran through: all but where it
    was continued, and how long what took."""
    timing = ("seconds", "tokens_per_second", "time")
    found = [r for r in read_records(workdir / METRICS) if r["kind"] not in ("resume", "interval")]
    return [{k: v for k, v in r.items() if k not in timing} for r in found]


def landings(run, since=0):
    """Those of a region after a step."""
    return [e for s in run.steps if s["step"] > since for e in s["events"] if e["kind"] == "land"]


def nowhere():
    """Settings of a region that gets what others send, and whose payloads nobody gets."""
    return {"address": f"127.0.0.1:{free_port()}", "listen": "127.0.0.1:0"}


class Configured(Jobs):
    """Regions of one config, in a folder of their own or in that of a name.

    `own`: fields of each region's; `processes`: how many each has.
    """

    def __init__(self, root, config, fields, own=({}, {}), processes=None, name=None):
        home = Path(tempfile.mkdtemp(prefix="jobs", dir=root)) if name is None else root / name
        home.mkdir(exist_ok=True)
        # Of several processes, all but one keep nothing that they have compiled.
        cache = "off" if processes else root / "cache"
        where, rest = (home, home / "meet"), [f"--compile_cache={cache}"]
        jobs = []
        for region, more in enumerate(own):
            count = processes[region] if processes else 1
            given = {**fields, **more} | ({"processes": count} if processes else {})
            jobs.append(RegionJob(config, [*given.items()], region, count, *where, rest, 0))
        super().__init__(jobs)
