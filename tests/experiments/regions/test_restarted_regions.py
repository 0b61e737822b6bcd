"""Two jobs with a core each, as sites have: one is killed, started again, and is in the run again.

What it costs is counted from its death: starting a process, reading the corpus and the checkpoint,
compiling what its earlier life has not left in the cache, meeting the others, taking their state,
catching up. The bound is one for a machine that has nothing else to do.
"""

import os
import signal
import time

import pytest
from launched import Jobs, landings

from experiments.metrics import read_records
from experiments.regions.main import RegionJob
from experiments.workdir import CHECKPOINTS, METRICS
from lowcomm_jax.checkpoint.store import UNFINISHED

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_device")]

REJOIN_SECONDS = 30


class Two(Jobs):
    """Two regions of the nano model, whose steps take a tenth of a second or so."""

    def __init__(self, tiny, root, name, *more):
        given = [a for a in tiny.arguments(root) if not a.startswith("--config.model.")]
        fields = [a.removeprefix("--config.").split("=", 1) for a in given if "config" in a]
        fields = {**dict(fields), "regions": 2, "exchange": "peers", "method.period": 6}
        fields |= {"steps": 100_000, "batch": 8, "data.seq_len": 64, "log.every": 6, **dict(more)}
        (root / name).mkdir()
        where, rest = (root / name, root / name / "meet"), [f"--compile_cache={root / 'cache'}"]
        super().__init__(
            [RegionJob("diloco", [*fields.items()], r, 1, *where, rest, 0) for r in (0, 1)]
        )
        self._cores = sorted(os.sched_getaffinity(0))

    def start(self, region):
        super().start(region)
        # At once, before it has any threads.
        core = self._cores[region % len(self._cores)]
        os.sched_setaffinity(self.jobs[region].processes[0].pid, {core})

    def kill(self, region):
        """When it was killed, by `time.monotonic`."""
        self.jobs[region].signal(signal.SIGKILL)
        struck = time.monotonic()
        self.jobs[region].processes[0].wait()
        return struck


def test_a_killed_region_is_in_the_run_again_within_thirty_seconds(tiny, root):
    with Two(tiny, root, "killed") as run:
        for region in (0, 1):
            run.reached(region, 24)
        struck = run.kill(1)
        run.start(1)
        at = run.entered(1)
        seconds = time.monotonic() - struck
        print(f"at step {at}, {seconds:.1f} s after its death")
        run.reached(1, at + 18)
        _, back = run.interrupt()
    assert seconds < REJOIN_SECONDS
    again = landings(back, at + 6)
    assert len(again) >= 2 and all(event["participants"] == [True] for event in again)


def checkpoints(job):
    """Steps of the whole ones, ascending, and whether one is being saved."""
    folder = job.workdir / CHECKPOINTS
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(x) for x in names if x.isdigit()), any(UNFINISHED in name for name in names)


def test_killed_while_it_saves_and_the_newest_checkpoint_cut_off(tiny, root):
    """It says what is wrong with that one, takes the one before, and comes in."""
    with Two(tiny, root, "saving", ("checkpoint.every", 6)) as run:

        def saving():
            whole, under_way = checkpoints(run.jobs[1])
            return len(whole) > 1 and under_way

        run.until(saving)
        run.kill(1)
        before, newest = checkpoints(run.jobs[1])[0][-2:]
        there = (run.jobs[1].workdir / CHECKPOINTS / str(newest)).rglob("*")
        largest = max(there, key=lambda path: path.stat().st_size if path.is_file() else 0)
        os.truncate(largest, 100)
        run.start(1)
        at = run.entered(1)
        shown = run.shown(1)
        assert f"skipped checkpoint of step {newest}: " in shown, shown
        assert f"continues after step {before}\n" in shown, shown
        run.reached(1, at + 18)
        stayed, back = run.interrupt()
    assert at > newest
    again = landings(back, at + 6)
    assert len(again) >= 2 and all(event["participants"] == [True] for event in again)
    anchors = [{e["step"]: e["anchor"] for e in one.evals} for one in (stayed, back)]
    assert all(anchors[0][step] == loss for step, loss in anchors[1].items() if step in anchors[0])


@pytest.mark.parametrize("exchange", ["peers", "store"])
def test_who_comes_back_when_the_others_have_ended_takes_their_result(tiny, root, exchange):
    """Nobody is there any more; it ends with 0 and the same model, and trains nothing alone."""
    more = (("steps", 60), ("exchange", exchange), ("checkpoint.every", 12))
    with Two(tiny, root, f"ended-{exchange}", *more) as run:
        run.reached(1, 24)
        run.kill(1)
        run.until(lambda: run.jobs[0].poll() is not None)
        run.start(1)
        run.until(lambda: run.jobs[1].poll() is not None)
        assert [job.poll() for job in run.jobs] == [0, 0], run.shown(1)
        assert "came into the run at step 60" in run.shown(1)
        ends = [read_records(job.workdir / METRICS) for job in run.jobs]
    finals = [[r for r in one if r["kind"] == "eval" and r["final"]] for one in ends]
    assert [len(x) for x in finals] == [1, 1]
    assert finals[0][0]["anchor"] == finals[1][0]["anchor"]
    own = [r["step"] for r in ends[1] if r["kind"] == "step"]
    assert 24 <= max(own) < 60
