"""After all were cut off, the rounds that nobody has a part in cost a few round trips together."""

import threading
from concurrent.futures import ThreadPoolExecutor

from regions.away import ALONE, AWAY, Job
from regions.faults import outage
from regions.party import TIMING, until

from lowcomm_jax import exchange

R = 3


class Asked:
    """What a region's exchanges ask the store for, one by one and at once; but no heartbeats."""

    def __init__(self, store):
        self.keys, self.together = [], []
        self._read_all, store.read_all = store.read_all, self

    def __call__(self, keys, nbytes=0):
        if len({key.rpartition("/")[0] for key in keys}) > 1:  # of several exchanges
            self.together.append(keys)
        elif not threading.current_thread().name.startswith(
            ("lowcomm-heartbeat", "lowcomm-at-once")
        ):
            self.keys += keys
        return self._read_all(keys, nbytes)

    def of(self, name):
        """Those of one exchange."""
        return [key for key in self.keys if key.startswith(f"round/{name}/")]


def test_rounds_that_all_have_missed_are_closed_together(store_party):
    gone, back = threading.Event(), threading.Event()
    timing = exchange.Timing(**{**vars(TIMING), "deadline_s": 60.0, "dead_after_s": 3.0})

    def one(region):
        own = store_party.region(region, R, timing=timing)
        own.join(60)
        job = Job("streaming", region, R, own)
        job.holds = {
            AWAY: lambda: gone.is_set() and job.away,
            ALONE: lambda: back.is_set() and not job.away,
        }
        return job

    with ThreadPoolExecutor(R) as pool:
        jobs = list(pool.map(one, range(R)))
        ends = [pool.submit(job.live) for job in jobs]
        until(lambda: all(job.waits_for_outage() for job in jobs), 60.0)
        with outage(store_party):
            gone.set()
            until(lambda: all(job.at == ALONE for job in jobs), 60.0)
            asked = [Asked(job.exchange._context.store) for job in jobs]
        back.set()
        for end in ends:
            end.result()
    seen = enumerate(jobs[0].seen, 1)
    missed = [f"1/{n}" for n, one in seen if not one.counted_N.any() and not one.last]
    assert len(missed) >= 10
    for region, each in enumerate(asked):
        # Only those that it began before the others were back, one after the other.
        assert sum(bool(each.of(name)) for name in missed) <= 4, region
        assert len(each.together) <= 30, region
        kinds = {key.split("/")[-1].split(".")[0] for keys in each.together for key in keys}
        assert kinds <= {"commit", "announce"}, "a round of no payload has none to read"
