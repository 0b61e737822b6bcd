"""Two jobs with a core each, as sites have: one is killed, started again, and is in the run again.

What it costs is counted from its death: starting a process, reading the corpus and the checkpoint,
compiling what its earlier life has not left in the cache, meeting the others, taking their state,
catching up. The bound is one for a machine that has nothing else to do.
"""

import os
import re
import signal
import time

import pytest
from launched import entered

from experiments.metrics import read_records
from experiments.region_job import RegionJob
from experiments.runlog import read_run
from experiments.workdir import CHECKPOINTS, METRICS
from lowcomm_jax.interrupt import EXIT_INTERRUPTED

pytestmark = pytest.mark.slow

REJOIN_SECONDS = 30


@pytest.fixture(scope="module")
def root(tmp_path_factory, tiny):
    folder = tmp_path_factory.mktemp("restarted")
    tiny.corpus(folder / "texts")
    return folder


@pytest.fixture(autouse=True)
def one_device_a_job(monkeypatch):
    """The suite cuts the processor into eight devices."""
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
    monkeypatch.setenv("XLA_FLAGS", flags)


class Two:
    """Two regions of the nano model, whose steps take a tenth of a second or so."""

    def __init__(self, tiny, root, name, *more):
        given = [a for a in tiny.arguments(root) if not a.startswith("--config.model.")]
        fields = [a.removeprefix("--config.").split("=", 1) for a in given if "config" in a]
        fields = {**dict(fields), "regions": 2, "exchange": "peers", "method.period": 6}
        fields |= {"steps": 100_000, "batch": 8, "data.seq_len": 64, "log.every": 6, **dict(more)}
        (root / name).mkdir()
        where, rest = (root / name, root / name / "meet"), [f"--compile_cache={root / 'cache'}"]
        self.jobs = [RegionJob("diloco", [*fields.items()], r, 1, *where, rest, 0) for r in (0, 1)]
        self._cores = sorted(os.sched_getaffinity(0))

    def start(self, region):
        job = self.jobs[region]
        job.start()
        # At once, before it has any threads.
        os.sched_setaffinity(job.processes[0].pid, {self._cores[region % len(self._cores)]})

    def __enter__(self):
        for region in (0, 1):
            self.start(region)
        return self

    def __exit__(self, *error):
        for job in self.jobs:
            job.signal(signal.SIGKILL)
            job.processes[0].wait()

    def wait(self, what, seconds=300):
        """What it gives, once that is something."""
        until = time.monotonic() + seconds
        while not (found := what()):
            shown = [self.shown(region) for region in (0, 1)]
            assert time.monotonic() < until, shown
            assert None in [job.poll() for job in self.jobs], shown
            time.sleep(0.005)
        return found

    def shown(self, region):
        return self.jobs[region].output().read_text()

    def reached(self, region, step):
        path = self.jobs[region].workdir / METRICS
        return path.is_file() and any(r.get("step", 0) >= step for r in read_records(path))

    def kill(self, region):
        """When it was killed, by `time.monotonic`."""
        self.jobs[region].signal(signal.SIGKILL)
        struck = time.monotonic()
        self.jobs[region].processes[0].wait()
        return struck

    def end(self):
        """Both are interrupted and stop at one step; their runs."""
        for job in self.jobs:
            job.signal(signal.SIGTERM)
        self.wait(lambda: all(job.poll() is not None for job in self.jobs), 120)
        assert [job.poll() for job in self.jobs] == [EXIT_INTERRUPTED] * 2, self.shown(1)
        return [read_run(job.workdir) for job in self.jobs]


def landings_since(run, step):
    return [e for s in run.steps if s["step"] > step for e in s["events"] if e["kind"] == "land"]


def test_a_killed_region_is_in_the_run_again_within_thirty_seconds(tiny, root):
    with Two(tiny, root, "killed") as run:
        for region in (0, 1):
            run.wait(lambda region=region: run.reached(region, 24))
        struck = run.kill(1)
        run.start(1)
        at = run.wait(lambda: entered(run.shown(1)))
        seconds = time.monotonic() - struck
        print(f"at step {at}, {seconds:.1f} s after its death")
        run.wait(lambda: run.reached(1, at + 18))
        stayed, back = run.end()
    assert seconds < REJOIN_SECONDS
    again = landings_since(back, at + 6)
    assert len(again) >= 2 and all(event["participants"] == [True] for event in again)
    assert back.steps[-1]["step"] == stayed.steps[-1]["step"]


def checkpoints(job):
    """Steps of the whole ones, ascending, and whether one is being saved."""
    folder = job.workdir / CHECKPOINTS
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(x) for x in names if x.isdigit()), any("tmp" in name for name in names)


def test_killed_while_it_saves_and_the_newest_checkpoint_cut_off(tiny, root):
    """It says what is wrong with that one, takes the one before, and comes in."""
    with Two(tiny, root, "saving", ("checkpoint.every", 6)) as run:

        def saving():
            whole, under_way = checkpoints(run.jobs[1])
            return len(whole) > 1 and under_way

        run.wait(saving)
        run.kill(1)
        before, newest = checkpoints(run.jobs[1])[0][-2:]
        shared = run.jobs[1].workdir / CHECKPOINTS / str(newest) / "shared"
        largest = max(shared.rglob("*"), key=lambda path: path.stat().st_size)
        os.truncate(largest, 100)
        run.start(1)
        at = run.wait(lambda: entered(run.shown(1)))
        shown = run.shown(1)
        assert f"checkpoint of step {newest} is left out: " in shown, shown
        assert f"continues after step {before}\n" in shown, shown
        run.wait(lambda: run.reached(1, at + 18))
        stayed, back = run.end()
    assert at > newest
    again = landings_since(back, at + 6)
    assert len(again) >= 2 and all(event["participants"] == [True] for event in again)
    anchors = [{e["step"]: e["anchor"] for e in one.evals} for one in (stayed, back)]
    assert all(anchors[0][step] == loss for step, loss in anchors[1].items() if step in anchors[0])
