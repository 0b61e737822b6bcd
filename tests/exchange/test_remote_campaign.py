"""Many random faults at once: whatever happens, all regions that land a key land the same."""

import contextlib
import dataclasses
import threading
import time

import numpy as np
import pytest
from exchange.faults import outage, vanish
from exchange.party import LIKE, TIMING, payload, until

from lowcomm_jax import exchange
from lowcomm_jax.exchange.between import wire

COUNT = 4
FAST = dataclasses.replace(TIMING, deadline_s=2.0)


class Worker:
    """A region that exchanges one key after another until it is ended."""

    def __init__(self, party, region: int):
        self.one = party.region(region, COUNT, timing=FAST, keep=8)
        self.landed: dict[int, tuple] = {}
        self.rests = 0.0
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.one.join(30.0)
            self._train(max(0, *self.one.steps().values()))
        except RuntimeError:
            pass  # Its exchange was closed: this job has died.
        except BaseException as error:
            self.error = error

    def _train(self, number: int) -> None:
        while True:
            self.one.beat(number)
            time.sleep(self.rests + 0.02)
            self.rests = 0.0
            try:
                arrived = self._exchange(number)
            except exchange.StoreUnavailable:
                continue
            except exchange.Lost:
                number = max(number + 1, *self.one.steps().values())
                continue
            data = b"".join(x.tobytes() for _, x in sorted(arrived.arrays.items()))
            self.landed[number] = (tuple(arrived.participants.tolist()), wire.digest(data))
            number += 1

    def _exchange(self, number: int) -> exchange.Arrived:
        arrived = self.one.skip(f"{number}", LIKE)
        if arrived is None:
            self.one.start(f"{number}", payload(self.one.region, number))
            arrived = self.one.finish(f"{number}", LIKE)
        return arrived

    def corrupt(self) -> None:
        """The next payload is published with a flipped bit."""
        transport, put = self.one._office.transport, self.one._office.transport.put

        def once(name, data, readers):
            transport.put = put
            return put(name, data[:-1] + bytes([data[-1] ^ 1]), readers)

        transport.put = once


def strike(kind: str, region: int, workers: dict[int, Worker], dead: list[Worker], party) -> None:
    """One fault."""
    if kind == "kill" and len(workers) > 1 and region in workers:
        vanish(workers[region].one)
        dead.append(workers.pop(region))
    elif kind == "rejoin" and region not in workers:
        workers[region] = Worker(party, region)
    elif kind == "late" and region in workers:
        workers[region].rests = 3.0
    elif kind == "corrupt" and region in workers:
        workers[region].corrupt()
    elif kind == "outage":
        with outage(party):
            time.sleep(1.5)


def campaign(party, faults: int, seed: int) -> list[dict[int, tuple]]:
    """Run, strike and heal; what every job has landed, by key."""
    rng = np.random.default_rng(seed)
    workers, dead = {r: Worker(party, r) for r in range(COUNT)}, []
    until(lambda: all(len(w.landed) > 2 for w in workers.values()), 30.0)
    kinds = ["kill", "kill", "rejoin", "rejoin", "late", "corrupt", "outage"]
    for _ in range(faults):
        strike(str(rng.choice(kinds)), int(rng.integers(COUNT)), workers, dead, party)
        time.sleep(float(rng.uniform(0.05, 0.8)))
    for region in range(COUNT):
        strike("rejoin", region, workers, dead, party)

    def healed():
        assert not [w.error for w in workers.values() if w.error]
        return all(any(all(p) for p, _ in list(w.landed.values())[-3:]) for w in workers.values())

    until(healed, 60.0)
    everyone = [*workers.values(), *dead]
    for worker in workers.values():
        vanish(worker.one)
    for worker in everyone:
        worker.thread.join(20.0)
        assert not worker.thread.is_alive()
    with contextlib.suppress(StopIteration):
        raise next(w.error for w in everyone if w.error)
    return [w.landed for w in everyone]


def assert_agreed(landed: list[dict[int, tuple]]) -> None:
    """All jobs that landed a key have landed the same."""
    for number in set().union(*landed):
        assert len({one[number] for one in landed if number in one}) == 1


def test_few_faults(party):
    assert_agreed(campaign(party, 8, seed=0))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_many_faults(party, seed):
    assert_agreed(campaign(party, 60, seed))
