"""Many random faults at once: whatever happens, all regions that land a key land the same."""

import contextlib
import dataclasses
import functools
import threading
import time

import numpy as np
import pytest
from regions.faults import outage, vanish
from regions.party import LIKE, TIMING, listen_to, payload, until
from regions.test_two_shot_exchange import LIKE as BESIDE
from regions.test_two_shot_exchange import Averaging
from regions.test_two_shot_exchange import payload as weighted

from lowcomm_jax import exchange
from lowcomm_jax.store import wire

COUNT = 4
FAST = dataclasses.replace(TIMING, deadline_s=2.0)


class Worker:
    """A region that exchanges one key after another, whole or in slices, until it is ended."""

    def __init__(self, party, region: int, sliced: bool):
        self.sliced = sliced
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
            try:
                arrived = self._exchange(number)
            except exchange.StoreUnavailable:
                continue
            except exchange.Lost:
                number = max(number + 1, *self.one.steps().values())
                continue
            arrays = {**arrived.arrays, **(arrived.reduced or {})}
            data = b"".join(x.tobytes() for _, x in sorted(arrays.items()))
            self.landed[number] = (tuple(arrived.participants.tolist()), wire.digest(data))
            number += 1

    def _exchange(self, number: int) -> exchange.Arrived:
        how = {"reduction": Averaging(COUNT) if self.sliced else None}
        like, make = (BESIDE, weighted) if self.sliced else (LIKE, payload)
        arrived = listen_to(self.one, f"{number}", like, **how)
        if arrived is None:
            time.sleep(self.rests + 0.02)  # its inner steps; who catches up makes none
            self.rests = 0.0
            self.one.start(f"{number}", make(self.one.region, number), **how)
            arrived = self.one.finish(f"{number}")
        return arrived

    def corrupt(self) -> None:
        """The next payload is published with a flipped bit."""
        transport, put = self.one._context.transport, self.one._context.transport.put

        def once(name, data):
            transport.put = put
            return put(name, data[:-1] + bytes([data[-1] ^ 1]))

        transport.put = once


def strike(kind: str, region: int, workers: dict[int, Worker], dead: list[Worker], make) -> None:
    """One fault; `make(region)`: a new worker."""
    # Somebody must be left who has come in: those who have nothing do not begin a run anew.
    others = [worker for r, worker in workers.items() if r != region]
    going_on = any(worker.landed and worker.one.awaited for worker in others)
    if kind == "kill" and region in workers and going_on:
        vanish(workers[region].one)
        dead.append(workers.pop(region))
    elif kind == "rejoin" and region not in workers:
        workers[region] = make(region)
    elif kind == "late" and region in workers:
        workers[region].rests = 3.0
    elif kind == "corrupt" and region in workers:
        workers[region].corrupt()
    elif kind == "outage":
        with outage(make.args[0]):
            time.sleep(1.5)


def campaign(party, faults: int, seed: int, sliced: bool) -> list[dict[int, tuple]]:
    """Run, strike and heal; what every job has landed, by key."""
    rng, make = np.random.default_rng(seed), functools.partial(Worker, party, sliced=sliced)
    workers, dead = {r: make(r) for r in range(COUNT)}, []
    until(lambda: all(len(w.landed) > 2 for w in workers.values()), 30.0)
    kinds = ["kill", "kill", "rejoin", "rejoin", "late", "corrupt", "outage"]
    for _ in range(faults):
        strike(str(rng.choice(kinds)), int(rng.integers(COUNT)), workers, dead, make)
        time.sleep(float(rng.uniform(0.05, 0.8)))
    for region in range(COUNT):
        strike("rejoin", region, workers, dead, make)

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


@pytest.mark.parametrize("sliced", [False, True])
def test_few_faults(party, sliced):
    assert_agreed(campaign(party, 8, 0, sliced))


@pytest.mark.slow
@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
def test_many_faults(party, seed, sliced):
    assert_agreed(campaign(party, 60, seed, sliced))
