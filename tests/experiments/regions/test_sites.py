"""What engineers of a site meet first, as they see it: what jobs print, leave, and end with."""

import signal
import socket
import time

import pytest
from launched import SAVED_S, STANDS_S, Configured, ends, fields_of, landings, nowhere

from experiments.workdir import CHECKPOINTS, METRICS
from lowcomm_jax.interrupt import EXIT_INTERRUPTED
from lowcomm_jax.rounds.remote import RUNNING
from lowcomm_jax.store.secret import Seal

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_device")]

PERIOD = 6


def sites(tiny, root, *own, **shared):
    """Regions of a tiny DiLoCo run, each with settings of its own."""
    fields = fields_of(tiny.arguments(root))
    fields |= {"regions": len(own), "exchange": "peers", "method.period": PERIOD}
    fields |= {"steps": 4 * PERIOD, "log.every": PERIOD, "eval.every": 0, **shared}
    return Configured(root, "diloco", fields, own)


def test_an_address_that_others_cannot_reach_is_named_and_does_not_end_well(tiny, root):
    wrong = nowhere()
    told = f"region 0 cannot reach region 1 at {wrong['address']}"
    with sites(tiny, root, {}, wrong, deadline_s=600) as run:
        # Region 0 waits in the first exchange: the fault is told long before that is over.
        run.until(lambda: told in run.shown(0), 300)
        run.kill()
        for region in (0, 1):
            run.start(region, deadline_s=1)
        assert run.exits() == [0, 1], [run.shown(0), run.shown(1)]
        assert "cannot reach" not in run.shown(1)
        assert "not counted" not in run.shown(0)
        assert f"was not counted in {RUNNING} exchanges running, and trains on" in run.shown(1)
        assert "train: complete (step 24), but the others counted nothing" in run.shown(1)
        there, away = run.runs()
        assert [e["participants"] for e in landings(there)] == [[True]] * 4
        assert [e["participants"] for e in landings(away)] == [[False]] * 4
        logs, last = ends([job.workdir for job in run.jobs])
        assert last[0]["anchor"] == last[1]["anchor"]
        assert [log[-1]["kind"] for log in logs] == ["end", "end"]
        # Whoever starts it again is told the same.
        run.start(1)
        assert run.exits(run.jobs[1]) == [1]
        assert run.shown(1).count("train: complete (step 24)") == 2


def test_another_seed_is_told_by_name(tiny, root):
    """To both, who else would only say that the other was not there in time."""
    with sites(tiny, root, {}, {"seed": 1}, wait_minutes=0.2, exchange="store") as run:
        assert run.exits() == [2, 2], [run.shown(0), run.shown(1)]
        told = "were not there in time; the folder also holds a run whose config differs in seed"
        assert f"{told}: 1 instead of 0" in run.shown(0)
        assert f"{told}: 0 instead of 1" in run.shown(1)


def test_a_signed_record_that_cannot_be_read_ends_both_in_one_line(tiny, root):
    with sites(tiny, root, {}, {}, exchange="store") as run:
        meet = run.jobs[0].workdir.parent / "meet"
        (met,) = run.until(lambda: list(meet.glob("*/run")))
        key = "round/1/1/commit.0"
        (met.parent / key).parent.mkdir(parents=True, exist_ok=True)
        odd = Seal(met.parent.name, b"").close(key, {"colour": "blue"})
        (met.parent / key).write_bytes(odd)
        assert run.exits() == [1, 1], [run.shown(0), run.shown(1)]
        for region in (0, 1):
            shown = run.shown(region)
            told = f"train: {key} is signed as a record of this run, and cannot be read"
            assert shown.splitlines()[-1].startswith(told) and "Traceback" not in shown


def test_a_mute_host_does_not_let_a_complete_run_crash(tiny, root):
    """Who connects to it is let in, and hears nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "127.0.0.1:{1}".format(*silent.getsockname())
        mute = {"address": address, "listen": "127.0.0.1:0"}
        with sites(tiny, root, {}, mute, deadline_s=1) as run:
            assert run.exits() == [0, 1], [run.shown(0), run.shown(1)]
            assert [one.end["step"] for one in run.runs()] == [4 * PERIOD] * 2


def standing(tiny, root, steps, *own, **shared):
    """Two regions that make steps until one of them waits in vain for what the other one sends."""
    own = own or (nowhere(), nowhere())
    return sites(tiny, root, *own, steps=steps, **{"log.every": 1, **shared})


@pytest.mark.parametrize("steps, at", [(4 * PERIOD, PERIOD), (PERIOD - 1, PERIOD - 1)])
def test_a_signal_in_an_exchange_saves_at_once_and_nothing_is_lost_by_a_kill(steps, at, tiny, root):
    """In an exchange on the way, and in the last one; what goes on has the bits of what never was
    stopped."""
    with standing(tiny, root, steps, deadline_s=600) as run:
        run.save_in_an_exchange(PERIOD - 1, at)
        run.kill()
        for region in (0, 1):
            run.start(region, address=None, listen=None)
        assert run.exits() == [0, 0], [run.shown(0), run.shown(1)]
        with sites(tiny, root, {}, {}, **{"steps": steps, "log.every": 1}) as whole:
            assert whole.exits() == [0, 0]
        for one, other in zip(run.runs(), whole.runs()):
            assert [s["loss"] for s in one.steps] == [s["loss"] for s in other.steps]
            assert one.evals[-1]["anchor"] == other.evals[-1]["anchor"]
            assert len(landings(one)) == len(landings(other)) == steps // PERIOD


def test_after_a_signal_in_an_exchange_a_job_waits_on_and_stops_where_all_do(tiny, root):
    with standing(tiny, root, 1000, {}, nowhere(), deadline_s=8) as run:
        run.save_in_an_exchange(PERIOD - 1, PERIOD)
        assert run.exits() == [EXIT_INTERRUPTED] * 2, [run.shown(0), run.shown(1)]
        ends = [one.steps[-1]["step"] for one in run.runs()]
        assert ends[0] == ends[1] and all(ends[0] in run.saved(r) for r in (0, 1))
        assert all(f"saved at step {PERIOD}; this job goes on" in run.shown(r) for r in (0, 1))


def test_who_would_have_to_come_back_after_a_signal_ends(tiny, root):
    """What counts of region 0 is not to be had for region 1."""
    with standing(tiny, root, 1000, deadline_s=8) as run:
        run.save_in_an_exchange(PERIOD - 1, PERIOD)
        assert run.exits() == [EXIT_INTERRUPTED] * 2, [run.shown(0), run.shown(1)]
        assert "is agreed on, but gone" in run.shown(1) and run.saved(1) == [PERIOD]


def ends_at_once(run, region):
    """Signal a region that has nothing to save yet."""
    job, began = run.jobs[region], time.monotonic()
    job.signal(signal.SIGTERM)
    [process] = job.processes
    process.wait(SAVED_S)
    print(f"ended {time.monotonic() - began:.1f} s after the signal")
    assert job.poll() == EXIT_INTERRUPTED, run.shown(region)


def test_a_signal_while_a_job_waits_for_the_others_to_come_ends_it(tiny, root):
    run = sites(tiny, root, {}, {})
    run.jobs = run.jobs[:1]
    with run:
        run.until(lambda: "waits for the others" in run.shown(0))
        time.sleep(STANDS_S)
        ends_at_once(run, 0)


def test_a_signal_while_a_region_that_came_back_waits_for_a_state_ends_it(tiny, root):
    """Whoever is to give one lives, and cannot be reached. What had been saved and logged stays."""
    more = {"steps": 100_000, "method.period": 10_000, "checkpoint.every": PERIOD}
    with sites(tiny, root, nowhere(), {}, **more) as run:
        run.until(lambda: run.saved(1))
        run.kill(1)
        left = written(back := run.jobs[1])
        run.start(1)
        run.until(lambda: [*(back.workdir.parent / "meet").glob("*/state/*/*")])
        time.sleep(STANDS_S)
        ends_at_once(run, 1)
        assert "came into the run" not in run.shown(1) and written(back) == left
        assert run.jobs[0].poll() is None


def written(job):
    """What a region's job has saved and logged, by file."""
    saved = [step for step in (job.workdir / CHECKPOINTS).iterdir() if step.name.isdigit()]
    paths = [path for step in saved for path in step.rglob("*") if path.is_file()]
    assert paths
    return {path: path.read_bytes() for path in [job.workdir / METRICS, *paths]}
