"""The exchange through an S3-like store: a server of this process, which has conditional writes."""

import threading
import time
import urllib.request

import pytest
from moto.server import ThreadedMotoServer
from runtime.faults import vanish
from runtime.party import TIMING, Party, at_once, check, land, send, until

from lowcomm_jax import exchange
from lowcomm_jax.runtime import kv
from lowcomm_jax.runtime.kv import MetricsCounter

KINDS = {"store": exchange.store, "peers": exchange.peers}
BUCKET = "bucket"


@pytest.fixture(scope="module")
def endpoint():
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    urllib.request.urlopen(urllib.request.Request(f"{url}/{BUCKET}", method="PUT")).read()
    yield url
    server.stop()


@pytest.fixture
def cloud(endpoint, monkeypatch):
    """The store's url; its client needs credentials, the server takes any."""
    for name, value in {
        kv.ENDPOINT: endpoint,
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(kv.POLL_S, "s3", (0.02, 0.1))
    return f"s3://{BUCKET}/{time.monotonic_ns()}"


def test_of_many_who_create_a_key_one_does(cloud):
    store = kv.Store(cloud, "run", MetricsCounter())
    for number in range(3):
        start, created = threading.Barrier(8), []

        def create(value, key=f"key {number}", start=start, created=created):
            start.wait()
            if store.create(key, bytes([value])):
                created.append(value)

        threads = [threading.Thread(target=create, args=(value,)) for value in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(created) == 1 and store.read(f"key {number}") == bytes(created)
    assert store.list("key ") == [f"key {number}" for number in range(3)]
    store.delete("key 1")
    assert store.read("key 1") is None


@pytest.mark.parametrize("kind", KINDS)
def test_regions_exchange_and_one_dies_and_comes_back(cloud, kind):
    party = Party(KINDS[kind], cloud)
    try:
        regions = party.run(3)
        for number in range(2):
            send(regions, f"{number}", number)
            for arrived in land(regions, f"{number}"):
                check(arrived, 3, range(3), number)
        vanish(regions[1])
        alive = [regions[0], regions[2]]
        began = time.monotonic()
        send(alive, "alone", 2)
        for arrived in land(alive, "alone"):
            check(arrived, 3, [0, 2], 2)
        assert time.monotonic() - began < TIMING.dead_after_s + 4
        again = party.region(1, 3)
        again.join(20.0)
        again.want_state()
        until(regions[0].owes_state)
        assert regions[0]._state_transfer.give(7, {}, {}) and again.newest_state()[0] == 7
        everyone = [*alive, again]
        send(everyone, "together", 3)
        for arrived in land(everyone, "together"):
            check(arrived, 3, range(3), 3)
    finally:
        party.close()


def test_another_secret_can_not_join(cloud):
    party = Party(exchange.store, cloud)
    try:
        party.run(1)
        with pytest.raises(ValueError, match="another secret"):
            at_once(lambda x: x.join(1.0), [party.region(0, 1, secret=b"a stranger's secret")])
    finally:
        party.close()
