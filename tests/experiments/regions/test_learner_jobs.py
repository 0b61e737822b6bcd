"""A process a region at its own pace: to the end; killed and back; stopped and continued."""

import json
import signal

import numpy as np
import pytest
from launched import Configured, ends, fields_of
from pytest import approx

from experiments.__main__ import main
from experiments.metrics import read_records
from experiments.report.main import by_region
from experiments.report.runlog import read_run, summarise
from experiments.workdir import METRICS

PERIOD = 6
LEARNERS = {"method.fragments": 3, "method.overlap": 4, "method.grace": 0.5}
KINDS = {  # config file, and fields
    "learners": ("configs/decoupled_jobs.py", LEARNERS),
    "arrivals": ("configs/async_local_sgd.py", {"method.speeds": "(1.0, 1.0)"}),
}


def fields(tiny, root, kind, **more):
    given = {**fields_of(tiny.arguments(root)), "method.period": PERIOD, "log.every": 6}
    return {**given, **KINDS[kind][1], **more}


def launch(tiny, root, kind, name, *options, **more):
    """Exit code of a launcher of regions of this kind, in a folder of this name."""
    given = [f"--config.{k}={v}" for k, v in fields(tiny, root, kind, **more).items()]
    command = ["launch", f"--config={KINDS[kind][0]}", *options, *given]
    return main([*command, f"--workdir={root / name}"])


def landed(log):
    """Rounds that have landed, in order, and who was admitted to each."""
    events = [e for r in log if r["kind"] == "step" for e in r["events"] if e["kind"] == "land"]
    return [e["round"] for e in events], {e["round"]: e["admitted"] for e in events}


def test_peers_are_refused_before_any_job_starts(tiny, root, capsys):
    assert launch(tiny, root, "learners", "refused", "--regions=2") == 2
    assert "use exchange.store without transport= (exchange=store)" in capsys.readouterr().err


def test_a_run_that_ends_before_the_first_arrival_is_refused(tiny, root, capsys):
    options = ("--regions=2", "--exchange=store")
    assert launch(tiny, root, "arrivals", "short", *options, steps=5) == 2
    assert "steps=5: the first round is at step 6; give more" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("kind", KINDS)
def test_three_processes_end_with_one_model(kind, tiny, root, capfd):
    options = ("--regions=3", "--exchange=store")
    more = {"method.speeds": "(1.0, 0.7, 0.5)"} if kind == "arrivals" else {}
    assert launch(tiny, root, kind, kind, *options, steps=60, **more) == 0, capfd.readouterr().out
    logs, last = ends([root / kind / f"region{r}" for r in range(3)])
    assert len({one["anchor"] for one in last}) == 1
    told = [landed(log) for log in logs]
    # Arrivals: every 6, 4 and 3 steps, at the declared speeds about at once.
    assert all(numbers == list(range(30)) for numbers, _ in told)
    assert told[0][1] == told[1][1] == told[2][1]
    merged = read_run(root / kind)
    assert summarise(merged).loss == approx(last[0]["anchor"])
    if kind == "arrivals":
        assert all(sum(who) == 1 for who in told[0][1].values())
        counted = np.array(list(told[0][1].values())).mean(0)
        assert [one.participation for one in by_region(merged)] == approx(counted.tolist())


def two(kind, tiny, root, steps=4000):
    """(config file, fields) of two regions; with so many steps they do not end by themselves."""
    given = {"regions": 2, "exchange": "store", "steps": steps, "batch": 4}
    return KINDS[kind][0], fields(tiny, root, kind, **given)


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("kind", KINDS)
def test_killed_after_their_last_round_they_end_all_the_same(kind, tiny, root):
    """All of them: what was saved before the last synchronisation is enough."""
    file, given = two(kind, tiny, root, steps=24)
    given |= {"eval.every": 0, "checkpoint.every": 0, "model.width": 128, "model.layers": 4}
    given |= {"model.mlp_width": 512, "eval.batch": 1, "eval.sequences": 100}
    with Configured(root, file, given) as run:
        run.until(lambda: all(run.saved(region) for region in (0, 1)))
        run.kill()
        assert run.exits() == [-signal.SIGKILL] * 2, "the evaluation was too short for this test"
        for region in (0, 1):
            run.start(region)
        assert run.exits() == [0, 0], [run.shown(0), run.shown(1)]
        _, last = ends([job.workdir for job in run.jobs])
        assert len({one["anchor"] for one in last}) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("kind", KINDS)
def test_killed_and_back_then_all_stopped_and_continued(kind, tiny, root):
    with Configured(root, *two(kind, tiny, root)) as run:
        for region in (0, 1):
            run.reached(region, 12)
        run.kill(1)
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
        for region in (0, 1):
            run.start(region)
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
@pytest.mark.parametrize("kind", KINDS)
def test_who_comes_back_after_the_end_takes_the_result(kind, tiny, root):
    with Configured(root, *two(kind, tiny, root, steps=120)) as run:
        run.lose_until_the_end(1, 6)


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_learner_that_the_last_rounds_did_not_admit_ends_with_0(tiny, root):
    """A quorum need not hold every learner: one is enough here, and region 1 is five times slower.

    With DiLoCo, where all regions are waited for, a job ends with 1 (`test_sites`).
    """
    slow = {"step": 1, "kind": "straggle", "steps": 1000}
    script = [{**slow, "region": r, "delay": delay} for r, delay in enumerate((0.1, 0.5))]
    (root / "slow.yaml").write_text(json.dumps(script))
    file, given = two("learners", tiny, root, steps=48)
    given |= {"method.grace": 0.0, "eval.every": 0, "faults": root / "slow.yaml"}
    with Configured(root, file, given) as run:
        assert run.exits() == [0, 0], [run.shown(0), run.shown(1)]
        logs, last = ends([job.workdir for job in run.jobs])
    assert last[0]["anchor"] == last[1]["anchor"]
    numbers, admitted = landed(logs[1])
    assert [admitted[number] for number in numbers[-3:]] == [[True, False]] * 3
