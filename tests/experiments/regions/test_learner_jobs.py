"""A process a region at its own pace: to the end; killed and back; stopped and continued."""

import signal

import numpy as np
import pytest
from launched import Configured, ends, fields_of
from pytest import approx

from experiments.__main__ import main
from experiments.metrics import read_records
from experiments.report.main import by_region
from experiments.report.runlog import read_run, summarise
from experiments.workdir import CHECKPOINTS, METRICS

PERIOD, FRAGMENTS = 6, 3
METHOD = {
    "method.period": PERIOD,
    "method.fragments": FRAGMENTS,
    "method.overlap": 4,
    "method.grace": 0.5,
    "log.every": 6,
}


def fields(tiny, root, **more):
    return {**fields_of(tiny.arguments(root)), **METHOD, **more}


def landed(log):
    """Rounds that have landed, in order, and who was admitted to each."""
    events = [e for r in log if r["kind"] == "step" for e in r["events"] if e["kind"] == "land"]
    return [e["round"] for e in events], {e["round"]: e["admitted"] for e in events}


def test_peers_are_refused_before_any_job_starts(tiny, root, capsys):
    given = [f"--config.{k}={v}" for k, v in fields(tiny, root).items()]
    command = ["launch", "--regions=2", "--config=configs/decoupled_jobs.py", *given]
    assert main([*command, f"--workdir={root / 'refused'}"]) == 2
    assert "use exchange.store without transport= (exchange=store)" in capsys.readouterr().err


def test_a_run_that_ends_before_the_first_arrival_is_refused(tiny, root, capsys):
    more = {"steps": 5, "method.period": PERIOD, "method.speeds": "(1.0, 1.0)"}
    plain = {k: v for k, v in fields(tiny, root).items() if k not in METHOD}
    given = [f"--config.{k}={v}" for k, v in {**plain, **more}.items()]
    command = ["launch", "--regions=2", "--exchange=store", "--config=configs/async_local_sgd.py"]
    assert main([*command, *given, f"--workdir={root / 'short'}"]) == 2
    assert "steps=5: the first round is at step 6; give more" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_three_processes_end_with_one_model(tiny, root, capfd):
    given = [f"--config.{k}={v}" for k, v in fields(tiny, root, steps=60).items()]
    command = ["launch", "--regions=3", "--exchange=store", "--config=configs/decoupled_jobs.py"]
    assert main([*command, *given, f"--workdir={root / 'three'}"]) == 0, capfd.readouterr().out
    logs, last = ends([root / "three" / f"region{r}" for r in range(3)])
    assert len({one["anchor"] for one in last}) == 1
    told = [landed(log) for log in logs]
    assert all(numbers == list(range(30)) for numbers, _ in told)
    assert told[0][1] == told[1][1] == told[2][1]
    assert summarise(read_run(root / "three")).loss == approx(last[0]["anchor"])


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_three_processes_that_arrive_end_with_one_model(tiny, root, capfd):
    more = {"steps": 60, "method.period": PERIOD, "method.speeds": "(1.0, 0.7, 0.5)"}
    plain = {k: v for k, v in fields(tiny, root).items() if k not in METHOD}
    given = [f"--config.{k}={v}" for k, v in {**plain, **more, "log.every": 6}.items()]
    command = ["launch", "--regions=3", "--exchange=store", "--config=configs/async_local_sgd.py"]
    assert main([*command, *given, f"--workdir={root / 'arrive'}"]) == 0, capfd.readouterr()
    logs, last = ends([root / "arrive" / f"region{r}" for r in range(3)])
    assert len({one["anchor"] for one in last}) == 1
    told = [landed(log) for log in logs]
    arrivals = 10 + 10 + 10  # every 6, 4 and 3 steps, at the declared speeds about at once
    assert all(numbers == list(range(arrivals)) for numbers, _ in told)
    assert told[0][1] == told[1][1] == told[2][1]
    assert all(sum(who) == 1 for who in told[0][1].values())
    merged = read_run(root / "arrive")
    assert summarise(merged).loss == approx(last[0]["anchor"])
    counted = np.array(list(told[0][1].values())).mean(0)
    assert [one.participation for one in by_region(merged)] == approx(counted.tolist())


def kind(name, tiny, root, steps=4000):
    """(config file, fields) of a run of two; with so many steps it does not end by itself."""
    given = fields(tiny, root, regions=2, exchange="store", steps=steps, batch=4)
    if name == "learners":
        return "configs/decoupled_jobs.py", given
    given = {k: v for k, v in given.items() if k not in METHOD}
    given |= {"method.period": PERIOD, "method.speeds": "(1.0, 1.0)", "log.every": 6}
    return "configs/async_local_sgd.py", given


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("name", ["learners", "arrivals"])
def test_killed_after_their_last_round_they_end_all_the_same(name, tiny, root):
    """All of them: what was saved before the last synchronisation is enough."""
    file, given = kind(name, tiny, root, steps=24)
    given |= {"eval.every": 0, "checkpoint.every": 0, "model.width": 128, "model.layers": 4}
    given |= {"model.mlp_width": 512, "eval.batch": 1, "eval.sequences": 100}
    with Configured(root, 2, file, given) as run:
        folders = [job.workdir / CHECKPOINTS for job in run.jobs]
        run.until(lambda: all(any(x.name.isdigit() for x in f.glob("*")) for f in folders))
        for job in run.jobs:
            job.signal(signal.SIGKILL)
        assert run.exits() == [-signal.SIGKILL] * 2, "the evaluation was too short for this test"
        for region in (0, 1):
            run.start(region)
        assert run.exits() == [0, 0], [run.shown(0), run.shown(1)]
        _, last = ends([job.workdir for job in run.jobs])
        assert len({one["anchor"] for one in last}) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("name", ["learners", "arrivals"])
def test_killed_and_back_then_all_stopped_and_continued(name, tiny, root):
    with Configured(root, 2, *kind(name, tiny, root)) as run:
        for region in (0, 1):
            run.reached(region, 12)
        run.jobs[1].signal(9)
        run.jobs[1].processes[0].wait()
        run.start(1)
        at = run.entered(1)
        run.reached(1, at + 12)
        for job in run.jobs:
            job.signal(15)
        assert run.exits() == [75, 75], [run.shown(r) for r in (0, 1)]
        logs = [read_records(job.workdir / METRICS) for job in run.jobs]
        stopped = [landed(log)[0][-1] for log in logs]
        assert stopped[0] == stopped[1]
        again = landed([r for r in logs[1] if r.get("step", 0) > at])
        assert any(who[1] for who in again[1].values()), "it is admitted again"
        for job in run.jobs:
            job.shared = [(k, v) for k, v in job.shared]
            job.start()
        run.until(
            lambda: all(
                landed(read_records(job.workdir / METRICS))[0][-1] > stopped[0] + 6
                for job in run.jobs
            )
        )
        for job in run.jobs:
            job.signal(15)
        assert run.exits() == [75, 75], [run.shown(r) for r in (0, 1)]
    for (_, mine), (_, theirs) in [[landed(read_records(j.workdir / METRICS)) for j in run.jobs]]:
        shared = mine.keys() & theirs.keys()
        assert shared and all(mine[k] == theirs[k] for k in shared)


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("name", ["learners", "arrivals"])
def test_who_comes_back_after_the_end_takes_the_result(name, tiny, root):
    with Configured(root, 2, *kind(name, tiny, root, steps=120)) as run:
        run.reached(1, 6)
        run.jobs[1].signal(9)
        run.jobs[1].processes[0].wait()
        run.until(lambda: run.jobs[0].poll() is not None)
        run.start(1)
        run.until(lambda: run.jobs[1].poll() is not None)
        assert run.exits() == [0, 0], [run.shown(r) for r in (0, 1)]
        _, last = ends([job.workdir for job in run.jobs])
        assert last[0]["anchor"] == last[1]["anchor"]
