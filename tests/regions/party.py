"""Several regions of one run in threads of one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from lowcomm_jax import exchange


def over_peers(
    *place, address="127.0.0.1:0", listen=None, certificates=None, **options
) -> exchange.RemoteExchange:
    """`exchange.store` with the transport `exchange.peers`."""
    transport = exchange.peers(address, listen=listen, certificates=certificates)
    return exchange.store(*place, transport=transport, **options)


KINDS = {"store": exchange.store, "peers": over_peers}
SECRET = b"a secret of the tests"
TIMING = exchange.Timing(beat_s=0.1, dead_after_s=1.0, answer_s=1.0)
LIKE = {
    "w": jax.ShapeDtypeStruct((1, 3, 2), np.float32),
    "code": jax.ShapeDtypeStruct((1, 5), np.uint8),
}


def payload(region: int, number: int = 0) -> dict[str, np.ndarray]:
    """Arrays `[1, ...]` that tell the region and the exchange apart."""
    rng = np.random.default_rng([region, number])
    return {
        "w": rng.normal(size=(1, 3, 2)).astype(np.float32),
        "code": rng.integers(0, 256, (1, 5), np.uint8),
    }


def gathered(count: int, regions: Iterable[int], number: int = 0) -> dict[str, np.ndarray]:
    """What everyone must hold after an exchange in which these regions took part."""
    whole = {n: np.zeros((count, *s.shape[1:]), s.dtype) for n, s in LIKE.items()}
    for region in regions:
        for name, x in payload(region, number).items():
            whole[name][region] = x[0]
    return whole


def check(arrived: exchange.Arrived, count: int, regions: Iterable[int], number: int = 0) -> None:
    """The arrays and the participants are those of `gathered`, bit for bit."""
    regions = list(regions)
    assert arrived.participants.tolist() == [r in regions for r in range(count)]
    expected = gathered(count, regions, number)
    assert arrived.arrays.keys() == expected.keys()
    for name, x in expected.items():
        assert arrived.arrays[name].dtype == x.dtype
        np.testing.assert_array_equal(arrived.arrays[name], x)


class Party:
    """Makes regions of one run; `at_once` runs something in several of them at the same time."""

    def __init__(self, make: Callable, url: str):
        self.make, self.url = make, url
        self.made: list[exchange.RemoteExchange] = []

    def region(self, region: int, count: int, **options) -> exchange.RemoteExchange:
        """One region that has not joined yet."""
        options = {"timing": TIMING, "secret": SECRET, "run_id": "run", **options}
        made = self.make(self.url, region, count, **options)
        self.made.append(made)
        return made

    def joined(self, region: int, count: int, **options) -> exchange.RemoteExchange:
        """One region that has joined, as a new job in the place of one that was there."""
        made = self.region(region, count, **options)
        made.join(20.0)
        return made

    def run(self, count: int, **options) -> list[exchange.RemoteExchange]:
        """All regions of a run, joined."""
        regions = at_once(lambda r: self.region(r, count, **options), range(count))
        at_once(lambda x: x.join(20.0), regions)
        return regions

    def close(self) -> None:
        """End them all."""
        at_once(lambda x: x.close(linger_s=0.0), self.made)


def at_once(act: Callable[[Any], Any], regions: Iterable[Any]) -> list[Any]:
    """The results of `act(region)`, all at the same time; the first error is raised."""
    regions = list(regions)
    results: list[Any] = [None] * len(regions)
    errors: list[BaseException] = []

    def one(index: int) -> None:
        try:
            results[index] = act(regions[index])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(len(regions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive(), "a region waits for ever"
    if errors:
        raise errors[0]
    return results


def send(regions: Iterable[exchange.RemoteExchange], key: str, number: int = 0, **options) -> None:
    """Start one exchange in these regions."""
    for x in regions:
        x.start(key, payload(x.region, number), **options)


def land(regions: Iterable[exchange.RemoteExchange], key: str) -> list[exchange.Arrived]:
    """Finish one exchange in these regions."""
    return at_once(lambda x: x.finish(key), regions)


def land_together(
    regions: list[exchange.RemoteExchange], key: str, who: Iterable[int], number: int = 0
) -> None:
    """Finish one exchange in these regions: all of them get the payloads of who took part."""
    who = list(who)
    for arrived in land(regions, key):
        check(arrived, regions[0].count, who, number)


def listen_to(
    one: exchange.RemoteExchange, key: str, like: dict = LIKE, **options
) -> exchange.Arrived | None:
    """What the others have exchanged, without a part in it; None = there is no record yet."""
    if one.agreed_terms(key) is None:
        return None
    one.start(key, like, joins=False, **options)
    return one.finish(key)


def rounds(regions: list[exchange.RemoteExchange], first: int, last: int) -> None:
    """Exchange some keys; all of these regions take part, and nobody else."""
    for number in range(first, last):
        send(regions, f"{number}", number)
        land_together(regions, f"{number}", [x.region for x in regions], number)


def idle(one: Any) -> bool:
    """Whether nothing runs in the background of an exchange but what serves others."""
    return not one._context.background._others(serving=False)


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait for something that must come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
