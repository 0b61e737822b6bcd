"""What coordination needs of an object store, from a server of its own, also when it fails."""

import collections
import threading
import time

import numpy as np
import pytest
from regions.faults import vanish
from regions.object_store import BUCKET, Proxy, at_random, s3_server
from regions.party import KINDS, Party, at_once, check, land, rounds, send, until

from lowcomm_jax import exchange
from lowcomm_jax.planner.requests import requests_a_round
from lowcomm_jax.store import kv
from lowcomm_jax.store.kv import MetricsCounter

WRITERS = 4


@pytest.fixture(scope="module")
def server():
    with s3_server() as port:
        yield port


@pytest.fixture
def proxy(server, monkeypatch):
    """Between the clients of this test and the server."""
    between = Proxy(server)
    for name, value in {
        kv.ENDPOINT: between.url,
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(kv.POLL_S, "s3", (0.02, 0.1))
    yield between
    between.close()


@pytest.fixture
def folder(proxy):
    """The URL of a folder that no other test has."""
    return f"s3://{BUCKET}/{time.monotonic_ns()}"


@pytest.fixture(params=[None, True], ids=["asks first", "conditional"])
def url(request, folder, monkeypatch):
    """Of a folder; by default TensorStore asks whether a key is there before it writes.
    With conditional writes alone the server decides."""
    if request.param:
        made = kv._spec
        monkeypatch.setattr(kv, "_spec", lambda root: made(root) | {"use_conditional_write": True})
    return folder


@pytest.fixture
def meet(proxy):
    """`meet(url, kind)`: makes regions that meet there, and closes them."""
    made = []

    def at(url, kind="store"):
        made.append(Party(KINDS[kind], url))
        return made[-1]

    yield at
    for party in made:
        party.close()


def written_by_four(stores, key):
    """Who was told that it created the key."""
    start = threading.Barrier(WRITERS)

    def write(number):
        start.wait()
        return stores[number].create(key, b"%d" % number)

    return [number for number, won in enumerate(at_once(write, range(WRITERS))) if won]


def test_of_four_writers_one_wins_and_everybody_sees_it(proxy, url):
    stores = [kv.Store(url, "run", MetricsCounter()) for _ in range(WRITERS)]
    for number in range(10):
        key = f"key/{number}"
        (winner,) = written_by_four(stores, key)
        assert {store.read(key) for store in stores} == {b"%d" % winner}
        # Listed at once, by who has not written it, too.
        assert all(store.list("key/")[-1] == key for store in stores)
    for store in stores:
        store.delete("key/3")
        assert "key/3" not in store.list("key/") and store.read("key/3") is None


@pytest.mark.slow
def test_a_store_that_is_busy_slow_and_loses_answers_has_one_winner_at_most(proxy, url):
    """Whose answer is lost may be told that it lost; what stands there is what one has written."""
    stores = [kv.Store(url, "run", MetricsCounter()) for _ in range(WRITERS)]
    proxy.trouble = at_random(7, busy=0.1, slow=0.1, lost=0.1)
    kinds = collections.Counter()
    for number in range(4):
        winners = written_by_four(stores, f"key/{number}")
        found = {store.read(f"key/{number}") for store in stores}
        assert len(found) == 1 and found <= {b"%d" % n for n in range(WRITERS)}
        assert len(winners) <= 1 and {b"%d" % n for n in winners} <= found
        kinds[len(winners)] += 1
    assert {0, 503} <= {status for *_, status in proxy.seen}
    assert kinds[1] >= 1


def test_a_state_whose_answer_was_lost_is_given(proxy, url, meet):
    """The donor is told that the record stood there already: it is its own."""
    lost = []

    def once(method, path):
        if method == "PUT" and "/state/" in path and not lost:
            lost.append(path)
            return "lost"
        return None

    regions = meet(url).run(2)
    regions[1].want_state()
    until(regions[0].state_transfer.owed)
    proxy.trouble = once
    regions[0].state_transfer.give(7, {"w": np.arange(3.0)}, {})
    assert lost
    step, arrays, _ = regions[1].state_transfer.newest()
    assert step == 7 and arrays["w"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_regions_exchange_and_one_dies_and_comes_back(folder, meet, kind):
    party = meet(folder, kind)
    regions = party.run(3)
    rounds(regions, 0, 2)
    vanish(regions[1])
    alive = [regions[0], regions[2]]
    rounds(alive, 2, 3)
    again = party.joined(1, 3)
    again.want_state()
    until(regions[0].state_transfer.owed)
    regions[0].state_transfer.give(7, {}, {})
    assert again.state_transfer.newest()[0] == 7
    everyone = [*alive, again]
    send(everyone, "together", 3)
    for arrived in land(everyone, "together"):
        check(arrived, 3, range(3), 3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_that_ignores_conditions_is_refused_by_name(proxy, folder, meet, kind):
    """A proxy drops the header: of two jobs that create one key both would be told yes."""
    proxy.trouble = lambda method, path: "unconditional" if method == "PUT" else None
    party = meet(folder, kind)
    with pytest.raises(ValueError, match=f"{folder}/run/ through {proxy.url}: .* twice"):
        party.joined(0, 2)
    assert not any("/beat/" in path or "/born/" in path for _, path, _ in proxy.seen)
    proxy.trouble = lambda method, path: None
    party.run(2)
    assert not kv.Store(folder, "run", MetricsCounter()).list("tried/")


def test_other_runs_of_a_folder_are_found(folder):
    here, there = (kv.Store(folder, name, MetricsCounter()) for name in ("a", "b"))
    here.create("run", b"ours")
    there.create("run", b"theirs")
    there.create("epoch/1", b"roster")
    assert here.beside("run") == {"b": b"theirs"} and there.beside("run") == {"a": b"ours"}


def test_another_secret_can_not_join(folder, meet):
    party = meet(folder)
    party.run(1)
    with pytest.raises(ValueError, match="another secret"):
        party.region(0, 1, secret=b"a stranger's secret").join(1.0)


@pytest.mark.slow
def test_regions_exchange_through_a_store_that_fails(proxy, url, meet):
    timing = exchange.Timing(beat_s=0.5, dead_after_s=20, deadline_s=60)
    regions = meet(url).run(3, timing=timing)
    proxy.trouble = at_random(3, busy=0.05, slow=0.05, lost=0.05)
    rounds(regions, 0, 5)
    proxy.trouble = lambda method, path: None
    assert {0, 503} <= {status for *_, status in proxy.seen}


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_requests_of_a_round_are_those_that_plan_prints(proxy, url, meet, count):
    regions = meet(url).run(count)
    rounds(regions, 0, 3)
    proxy.seen.clear()
    rounds(regions, 3, 9)
    seen = [(m, p) for m, p, _ in proxy.seen if "/beat/" not in p]
    a_round = len(seen) / count / 6
    least = requests_a_round(count)
    assert least <= a_round * 1.05 and a_round < 2 * least
