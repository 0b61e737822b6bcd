"""Some regions cannot reach the others for a while, or not as long: what has landed in one of them
and not in another must not pass for anchors that have parted."""

import contextlib
import threading

import pytest
from regions import away
from regions.away import ALONE, AWAY, one_process
from regions.faults import folder, outage
from regions.party import TIMING, until
from regions.test_same_numbers import assert_same

from experiments.faults.rendezvous_cut import cut_region, reconnect_region, region_link
from lowcomm_jax import exchange

NAME = "streaming"  # with three fragments


@pytest.fixture
def started(store_party):
    """`started(count, hold)`: (jobs that wait at step `AWAY`, what they will end with).

    Each has a door of its own to the folder; `hold(job)`: what it then waits for.
    """
    with contextlib.ExitStack() as held:

        def make(count, hold):
            folder(store_party).mkdir()

            def by_a_door(region):
                reconnect_region(folder(store_party), region)
                url = f"file://{region_link(folder(store_party), region)}"
                timing = exchange.Timing(**{**vars(TIMING), "deadline_s": 60})
                own = exchange.store(url, region, count, "run", timing=timing)
                store_party.made.append(own)
                return own

            holds = lambda job: {AWAY: lambda: hold(job)}  # noqa: E731
            jobs, ends = held.enter_context(away.started(NAME, count, by_a_door, holds))
            until(lambda: all(job.waits_for_outage() for job in jobs), 60.0)
            return jobs, ends

        yield make


def test_the_folder_comes_back_between_two_sends(started, store_party):
    """One has put off what leaves there, the other has not come to it."""
    gone = threading.Event()
    jobs, ends = started(2, lambda job: gone.is_set() and job.away)
    back = threading.Event()
    for job, step in zip(jobs, (AWAY + 4, AWAY + 2)):
        job.holds[step] = lambda job=job: back.is_set() and not job.away
    with outage(store_party):
        gone.set()
        until(lambda: [job.at for job in jobs] == [AWAY + 4, AWAY + 2], 60.0)
    back.set()
    ends = [end.result() for end in ends]
    together, counted = one_process(NAME, jobs)
    assert_same(ends, together, False)
    assert any(who.tolist() == [False, True] for who in counted.values())


class Requests:
    """Of a region's store: what is asked for one by one of what others have landed before."""

    def __init__(self, store, folder):
        self.read_all, store.read_all = store.read_all, self
        self.landed = {path.parent.name for path in (folder / "run").glob("round/1/*/commit.0")}
        self.blobs = {path.name for path in (folder / "run" / "blob").iterdir()}
        self.made = []

    def __call__(self, keys, nbytes=0):
        """Of one exchange: those of several are read ahead, and so are payloads."""
        if len(keys) == 1 or len({key.rpartition("/")[0] for key in keys} - {"blob"}) == 1:
            for key in keys:
                *_, folder, name = f"/{key}".split("/")
                if (folder == "blob" and name in self.blobs) or folder in self.landed:
                    self.made.append(key)
        return self.read_all(keys, nbytes)


@pytest.mark.parametrize("ahead", [True, False])
def test_round_trips_after_an_outage_do_not_grow_with_what_was_missed(
    ahead, started, store_party, monkeypatch
):
    """All of it is read at once; one by one it takes several requests for each exchange."""
    if not ahead:
        monkeypatch.setattr(exchange.RemoteExchange, "fetch_ahead", lambda *_: 0)
    shut, back = threading.Event(), threading.Event()
    jobs, ends = started(3, lambda job: shut.is_set() and job.away == (job.region == 0))
    jobs[0].holds[ALONE] = lambda: back.is_set() and not jobs[0].away
    for job in jobs[1:]:
        job.holds[ALONE + 2] = back.is_set
    cut_region(folder(store_party), 0)
    shut.set()
    until(lambda: jobs[0].at >= ALONE and min(j.at for j in jobs) >= ALONE, 60.0)
    until(lambda: all(job.at == ALONE + 2 for job in jobs[1:]), 60.0)
    context = jobs[0].exchange._context
    before = int(jobs[0].exchange._context.heartbeat.own.passed)
    requests = Requests(context.store, folder(store_party))
    missed = len(requests.landed) - before
    reconnect_region(folder(store_party), 0)
    back.set()
    ends = [end.result() for end in ends]
    together, _ = one_process(NAME, jobs)
    assert_same(ends, together, False)
    assert missed >= 10
    if ahead:
        # At most of the one that the others were about to end meanwhile.
        assert len({key.split("/")[2] for key in requests.made if "blob" not in key}) <= 2
        assert len(requests.made) < missed
    else:
        assert len(requests.made) > 4 * missed


@pytest.mark.parametrize("dead", [False, True])
def test_one_region_is_cut_off(dead, started, store_party):
    """For a moment, or for so long that the others go on without it."""
    shut = threading.Event()
    jobs, ends = started(3, lambda job: shut.is_set() and job.away == (job.region == 0))
    jobs[0].holds[ALONE] = lambda: not jobs[0].away
    cut_region(folder(store_party), 0)
    shut.set()
    until(lambda: jobs[0].at >= AWAY + 4, 60.0)
    if dead:
        until(lambda: jobs[1].at >= AWAY + 9, 60.0)
    reconnect_region(folder(store_party), 0)
    ends = [end.result() for end in ends]
    together, counted = one_process(NAME, jobs)
    assert_same(ends, together, False)
    alone = [step for step, who in counted.items() if who.tolist() == [False, True, True]]
    assert alone and all(step > AWAY for step in alone)
    assert all(who[1:].all() for who in counted.values())
