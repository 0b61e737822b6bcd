"""After all were cut off a missed round costs its record and announcements, and no payload."""

import threading
from concurrent.futures import ThreadPoolExecutor

from runtime.away import ALONE, AWAY, Job
from runtime.faults import outage
from runtime.party import TIMING, until

from lowcomm_jax import exchange

R = 3


class Asked:
    """What a region's exchanges ask the store for; its heartbeat is left out."""

    def __init__(self, store):
        self.keys, self._get = [], store._get
        store._get = self

    def __call__(self, key, nbytes=0):
        if threading.current_thread().name != "lowcomm-heartbeat":
            self.keys.append(key)
        return self._get(key, nbytes)

    def of(self, name):
        """Those of one exchange."""
        return [key for key in self.keys if f"{key}/".split("/")[1] == name]


def test_keys_of_a_round_that_all_have_missed(store_party):
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
    missed = [one for one in jobs[0].seen if not one.counted_N.any() and not one.last]
    assert len(missed) >= 10
    for region, each in enumerate(asked):
        names = {key.split("/")[1] for key in each.keys if key.startswith("commit/")}
        rounds = sorted(names, key=lambda name: int(name.partition("@")[0].split(".")[1]))
        for name in rounds[: len(missed)]:
            # How often is a matter of waiting. A round of no payload has no averages to exchange.
            of = each.of(name)
            assert set(of) <= {f"commit/{name}/0", *(f"said/{name}/{r}" for r in range(R))}, region
            assert "@" not in name and of
