"""Regions of several processes: from the command line, through interrupts, deaths and restarts."""

import os
import re
import signal
import time

import pytest

from experiments.__main__ import main
from experiments.distributed import EXIT_LOST
from experiments.metrics import read_records
from experiments.region_job import RegionJob
from experiments.runlog import read_run, summarise
from experiments.workdir import METRICS
from lowcomm_jax.interrupt import EXIT_INTERRUPTED

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory, tiny):
    folder = tmp_path_factory.mktemp("processes")
    tiny.corpus(folder / "texts")
    return folder


@pytest.fixture(autouse=True)
def one_device_a_process(monkeypatch):
    """The suite cuts the processor into eight devices; here every process is to have one."""
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
    monkeypatch.setenv("XLA_FLAGS", flags)


class Run:
    """Region 0 of two processes, region 1 of one."""

    def __init__(self, tiny, root, name, steps, *more, config="diloco"):
        given = [a for a in tiny.arguments(root) if a.startswith("--config.") and "fsdp" not in a]
        fields = [tuple(a.removeprefix("--config.").split("=", 1)) for a in given]
        fields += [("regions", 2), ("exchange", "store"), ("steps", steps), ("method.period", 6)]
        fields += [("log.every", 6), *more]
        (root / name).mkdir(exist_ok=True)
        meet, rest = root / name / "meet", ["--compile_cache=off"]
        self.jobs = [
            RegionJob(config, [*fields, ("processes", n)], r, n, root / name, meet, rest, 0)
            for r, n in enumerate((2, 1))
        ]

    def __enter__(self):
        for job in self.jobs:
            job.start()
        return self

    def __exit__(self, *error):
        for job in self.jobs:
            job.signal(signal.SIGKILL)

    def wait(self, *jobs, seconds=600):
        """Exit codes."""
        until = time.monotonic() + seconds
        while any(job.poll() is None for job in jobs or self.jobs):
            assert time.monotonic() < until, [job.says for job in self.jobs]
            time.sleep(0.1)
        return [job.poll() for job in jobs or self.jobs]

    def reached(self, region, step):
        """Wait until a region has written this step."""
        path, until = self.jobs[region].workdir / METRICS, time.monotonic() + 600
        while not (path.is_file() and any(r.get("step", 0) >= step for r in read_records(path))):
            assert time.monotonic() < until and self.jobs[region].poll() is None, self.shown(region)
            time.sleep(0.1)

    def entered(self, region):
        """The step at which a region comes into the run, once it has."""
        until = time.monotonic() + 600
        while not (found := re.search(r"came into the run at step (\d+)", self.shown(region))):
            assert time.monotonic() < until and self.jobs[region].poll() is None, self.shown(region)
            time.sleep(0.1)
        return int(found[1])

    def shown(self, region, process=0):
        return self.jobs[region].output(process).read_text()

    def ends(self):
        return [read_run(job.workdir) for job in self.jobs]


def losses(run):
    return [[step["loss"] for step in end.steps] for end in run.ends()]


def test_launched_processes_end_with_the_loss_of_one_process_a_region(tiny, root, capfd):
    shared = ["launch", "--config=streaming_diloco", "--regions=2", "--config.steps=12"]
    shared += [a for a in tiny.arguments(root) if "fsdp" not in a and "regions" not in a]
    shared += ["--config.method.period=6", "--config.log.every=6", "--config.mesh.fsdp=2"]
    for name, more in (("two", ["--processes=2"]), ("one", [])):
        assert main([*shared, *more, f"--workdir={root / name}"]) == 0
        shown = capfd.readouterr().out
        assert "region 1" in shown and "step 12/12" in shown
    two, one = (read_run(root / name) for name in ("two", "one"))
    assert [step["loss"] for step in two.steps] == [step["loss"] for step in one.steps]
    assert summarise(two).complete and summarise(two).loss == summarise(one).loss
    second = (root / "two" / "region0" / "output.1.txt").read_text()
    assert "step" not in second  # only the first one reports


@pytest.mark.parametrize("process", [0, 1])
def test_a_signal_to_any_process_saves_and_the_run_continues(process, tiny, root):
    name, steps = f"signal{process}", 600
    with Run(tiny, root, name, steps, config="streaming_diloco") as run:
        run.reached(0, 18)
        run.jobs[0].processes[process].send_signal(signal.SIGTERM)
        run.jobs[1].signal(signal.SIGTERM)
        assert run.wait() == [EXIT_INTERRUPTED] * 2, run.shown(0)
        stopped = [end.steps[-1]["step"] for end in run.ends()]
        assert 18 <= stopped[0] == stopped[1] < steps
    with Run(tiny, root, name, steps, config="streaming_diloco") as run:
        assert run.wait() == [0, 0], run.shown(0)
    with Run(tiny, root, "whole", steps, config="streaming_diloco") as whole:
        assert whole.wait() == [0, 0]
    assert losses(run) == losses(whole)
    for one, other in zip(run.ends(), whole.ends()):
        assert one.evals[-1]["anchor"] == other.evals[-1]["anchor"]


@pytest.mark.parametrize("process", [0, 1])
def test_a_killed_process_ends_its_region_which_takes_part_again(process, tiny, root):
    """Steps take milliseconds, and the job compiles for thousands of them when it comes back."""
    with Run(tiny, root, f"killed{process}", 100_000, ("checkpoint.every", 600)) as run:
        run.reached(0, 60)
        struck = time.monotonic()
        run.jobs[0].processes[process].kill()
        # Of the one that was killed, or of the one that noticed, whichever was seen first.
        assert run.wait(run.jobs[0], seconds=600)[0] in (-signal.SIGKILL, EXIT_LOST)
        assert time.monotonic() - struck < 30
        survivor = run.shown(0, 1 - process)
        assert f"process {process} of this job has ended" in survivor, survivor
        assert run.jobs[1].poll() is None
        run.jobs[0].start()
        entered = run.entered(0)
        run.reached(0, entered + 150)
        for job in run.jobs:
            job.signal(signal.SIGTERM)
        assert run.wait() == [EXIT_INTERRUPTED] * 2, run.shown(0)
        back, other = run.ends()
        since = [step for step in back.steps if step["step"] > entered]
        landings = [e for step in since for e in step["events"] if e["kind"] == "land"]
        assert len(landings) >= 25 and all(e["participants"] == [True] for e in landings)
        assert back.steps[-1]["step"] == other.steps[-1]["step"]
        anchors = [{e["step"]: e["anchor"] for e in end.evals} for end in (back, other)]
        both = [step for step in anchors[0] if step > entered]
        # The same anchor, of which two devices and one sum the loss in another order.
        assert both and all(
            anchors[0][step] == pytest.approx(anchors[1][step], rel=1e-6) for step in both
        )


def test_refused_by_all_processes_at_once(tiny, root):
    """One of them was given another method, and both an overlap that cannot be."""
    with Run(tiny, root, "refused", 12, ("method.period", -1)) as run:
        assert run.wait(run.jobs[0]) == [2]
        for process in range(2):
            assert "period" in run.shown(0, process)
        assert not (run.jobs[0].workdir / METRICS).exists()
