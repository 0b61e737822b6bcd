"""Regions of several processes: from the command line, through interrupts, deaths and restarts."""

import signal
import time

import pytest
from launched import Configured, fields_of, landings

from experiments.__main__ import main
from experiments.report.runlog import read_run, summarise
from experiments.train.processes import EXIT_LOST
from experiments.workdir import METRICS
from lowcomm_jax.interrupt import EXIT_INTERRUPTED

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_device")]


def jobs(tiny, root, name, steps, config="diloco", **more):
    """Region 0 of two processes, region 1 of one."""
    fields = {k: x for k, x in fields_of(tiny.arguments(root)).items() if k != "mesh.fsdp"}
    fields |= {"regions": 2, "exchange": "store", "steps": steps, "method.period": 6}
    fields |= {"log.every": 6, **more}
    return Configured(root, config, fields, processes=(2, 1), name=name)


def losses(run):
    return [[step["loss"] for step in end.steps] for end in run.runs()]


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


def test_a_signal_to_any_process_saves_and_the_run_continues(tiny, root):
    """To the first one, and after that to the second one."""
    name, steps, last = "signal", 600, 0
    for process in range(2):
        with jobs(tiny, root, name, steps, config="streaming_diloco") as run:
            run.reached(0, last + 18)
            run.jobs[0].processes[process].send_signal(signal.SIGTERM)
            run.jobs[1].signal(signal.SIGTERM)
            assert run.exits() == [EXIT_INTERRUPTED] * 2, run.shown(0)
            stopped = [end.steps[-1]["step"] for end in run.runs()]
            assert last + 18 <= stopped[0] == stopped[1] < steps
            last = stopped[0]
    with jobs(tiny, root, name, steps, config="streaming_diloco") as run:
        assert run.exits() == [0, 0], run.shown(0)
    with jobs(tiny, root, "whole", steps, config="streaming_diloco") as whole:
        assert whole.exits() == [0, 0]
    assert losses(run) == losses(whole)
    for one, other in zip(run.runs(), whole.runs()):
        assert one.evals[-1]["anchor"] == other.evals[-1]["anchor"]


def test_a_killed_process_ends_its_region_which_takes_part_again(tiny, root):
    """The first process, and then the second one. Steps take milliseconds, and the job compiles for
    thousands of them when it comes back."""
    with jobs(tiny, root, "killed", 100_000, **{"checkpoint.every": 600}) as run:
        run.reached(0, 60)
        came = []
        for process in range(2):
            struck = time.monotonic()
            run.jobs[0].processes[process].kill()
            # Of the one that was killed, or of the one that noticed, whichever was seen first.
            assert run.exits(run.jobs[0])[0] in (-signal.SIGKILL, EXIT_LOST)
            assert time.monotonic() - struck < 30
            survivor = run.shown(0, 1 - process)
            assert f"process {process} of this job has ended" in survivor, survivor
            assert run.jobs[1].poll() is None
            run.jobs[0].start()
            came.append(run.entered(0, process + 1))
            run.reached(0, came[-1] + 150)
        back, other = run.interrupt()
        for entered in came:
            again = [e for e in landings(back, entered) if e["step"] <= entered + 150]
            assert len(again) >= 25 and all(e["participants"] == [True] for e in again)
        anchors = [{e["step"]: e["anchor"] for e in end.evals} for end in (back, other)]
        both = [step for step in anchors[0] if step > came[0]]
        # The same anchor, of which two devices and one sum the loss in another order.
        assert max(both) > came[1] and all(
            anchors[0][step] == pytest.approx(anchors[1][step], rel=1e-6) for step in both
        )


def test_refused_by_all_processes_at_once(tiny, root):
    """One of them was given another method, and both an overlap that cannot be."""
    with jobs(tiny, root, "refused", 12, **{"method.period": -1}) as run:
        assert run.exits(run.jobs[0]) == [2]
        for process in range(2):
            assert "period" in run.shown(0, process)
        assert not (run.jobs[0].workdir / METRICS).exists()
