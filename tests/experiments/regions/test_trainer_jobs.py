"""AdLoCo with a process a region: as one process; killed and back; stopped and continued."""

import pytest
from launched import Configured, fields_of, nowhere
from pytest import approx

from experiments.__main__ import main
from experiments.metrics import read_records
from experiments.report.main import by_region
from experiments.report.runlog import read_run, summarise
from experiments.workdir import METRICS

CONFIG, PERIOD = "configs/adloco.py", 4
METHOD = {
    "method.period": PERIOD,
    "method.trainers": 2,
    "method.merge_every": 3,
    "method.inner_batching.cap": 4,
    "adaptive.largest_microbatch": 1,
    "log.every": 6,
    "regions": 2,
}


def fields(tiny, root, **more):
    return {**fields_of(tiny.arguments(root)), **METHOD, **more}


def trained(log):
    """By step, what all regions must have in common."""
    kept = ("batch", "samples", "microbatch", "rate")
    return {
        r["step"]: (
            {n: [one[k] for k in kept] for n, one in r["trainers"].items()},
            r.get("merges"),
            r.get("looks"),
        )
        for r in log
        if r["kind"] == "step"
    }


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_two_jobs_end_as_one_process(tiny, root, capfd):
    given = [f"--config.{k}={v}" for k, v in fields(tiny, root, steps=40).items()]
    command = [f"--config={CONFIG}", *given, "--config.eval.every=12"]
    launched = ["launch", *command, "--exchange=store", f"--workdir={root / 'jobs'}"]
    assert main(launched) == 0, capfd.readouterr().out
    alone = ["train", *command, "--config.mesh.region=1", f"--workdir={root / 'alone'}", "--quiet"]
    assert main(alone) == 0
    run, whole = read_run(root / "jobs"), read_run(root / "alone")
    assert [step["loss"] for step in run.steps] == [step["loss"] for step in whole.steps]
    batches = [{n: t["batch"] for n, t in step["trainers"].items()} for step in run.steps]
    assert batches == [{n: t["batch"] for n, t in step["trainers"].items()} for step in whole.steps]
    assert len(batches[0]) == 2 and len(batches[-1]) == 1 and max(batches[-1].values()) > 1
    jobs, one = summarise(run), summarise(whole)
    assert (jobs.complete, jobs.loss, jobs.tokens) == (True, one.loss, one.tokens)
    assert [r.progress for r in by_region(run)] == [1.0, 1.0]
    assert [r.participation for r in by_region(run)] == [1.0, 1.0]
    losses = [step["trainers"]["0"]["loss"] for step in run.steps]
    assert losses == approx([step["trainers"]["0"]["loss"] for step in whole.steps])


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_killed_and_back_then_all_stopped_and_continued(tiny, root):
    given = fields(tiny, root, exchange="store", steps=100_000, **{"method.merge_every": 60})
    with Configured(root, CONFIG, given) as run:
        for region in (0, 1):
            run.reached(region, 12)
        run.kill(1)
        run.start(1)
        at = run.entered(1)
        run.reached(1, at + 3 * PERIOD)
        logs = stopped(run)
        counted = [
            e["participants"]
            for r in logs[1]
            if r["kind"] == "step" and r["step"] > at
            for e in r["events"]
            if e["kind"] == "land"
        ]
        assert [True] in counted, "it is counted again"
        for region in (0, 1):
            run.start(region)
        last = logs[0][-1]["step"]
        for region in (0, 1):
            run.reached(region, last + 2 * PERIOD)
        stopped(run)
    mine, theirs = (trained(read_records(job.workdir / METRICS)) for job in run.jobs)
    shared = mine.keys() & theirs.keys()
    assert max(shared) > last > at and not [s for s in shared if mine[s][:2] != theirs[s][:2]]
    # Where one of them has stood in the exchange when the signal came, it tells later.
    looks = [(mine[s][2], theirs[s][2]) for s in shared if mine[s][2] and theirs[s][2]]
    assert looks and all(one == other for one, other in looks)


def stopped(run):
    """The logs of all regions, which a signal has stopped at one step."""
    run.interrupt()
    return [read_records(job.workdir / METRICS) for job in run.jobs]


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_signal_in_the_exchange_of_a_round_saves_at_once(tiny, root):
    """Nobody gets what the others send. Who is killed then goes on within that step."""
    more = {"exchange": "peers", "steps": 3 * PERIOD, "deadline_s": 600, "log.every": 1}
    own = (nowhere(), nowhere())
    with Configured(root, CONFIG, fields(tiny, root, **more), own) as run:
        run.save_in_an_exchange(PERIOD - 1, PERIOD)
        run.kill()
        for region in (0, 1):
            run.start(region, address=None, listen=None)
        assert run.exits() == [0, 0], [run.shown(0), run.shown(1)]
        mine, theirs = (trained(read_records(job.workdir / METRICS)) for job in run.jobs)
        assert mine == theirs and max(mine) > PERIOD
