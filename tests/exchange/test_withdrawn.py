"""A payload that is taken back while it is handed over: nobody waits, nothing of it stays."""

import threading

import pytest
from exchange.party import check, land, send

from lowcomm_jax.exchange import StoreUnavailable


class Held:
    """Holds a region in its first `put` until the payload is withdrawn there.

    Attributes:
      puts: names that were handed over; drops: of what was removed, as often as it was tried.
    """

    def __init__(self, region, monkeypatch, fails=0):
        self.transport, self.puts, self.drops, self.fails = region._office.transport, [], [], fails
        self.region, self.holds, self.goes = region, threading.Event(), threading.Event()
        for name in ("put", "drop"):
            monkeypatch.setattr(self.transport, name, getattr(self, name))

    def put(self, name, data, readers=()):
        self.puts.append(name)
        self.holds.set()
        assert self.goes.wait(10)
        return type(self.transport).put(self.transport, name, data, readers)

    def drop(self, name, *how, **more):
        self.drops.append(name)
        if len(self.drops) <= self.fails:
            raise StoreUnavailable("for a moment")
        type(self.transport).drop(self.transport, name, *how, **more)

    def withdraw(self, key):
        assert self.holds.wait(10) and self.region._open[key].withdraw()
        self.goes.set()


def test_the_store_fails_once_more_while_it_is_removed(party, monkeypatch):
    regions = party.run(2)
    held = Held(regions[0], monkeypatch, fails=2)
    send(regions, "k")
    held.withdraw("k")
    for arrived in land(regions, "k"):
        check(arrived, 2, [1])
    assert len(held.puts) == 1 and len(held.drops) == 3


@pytest.mark.parametrize("party", ["peers"], indirect=True)
def test_what_was_offered_is_offered_no_longer(party, monkeypatch):
    """It would stay in memory: nobody who was not told of it pulls it."""
    regions = party.run(2)
    transport = regions[0]._office.transport
    held = Held(regions[0], monkeypatch)
    offered = []
    offer = transport._server.offer
    monkeypatch.setattr(
        transport._server, "offer", lambda n, x: (offered.append((n, x.size)), offer(n, x))
    )
    send(regions, "k")
    held.withdraw("k")
    land(regions, "k")
    ((first, whole), (again, byte)) = offered
    assert first == again and whole > 1 and byte == 1
    assert not transport._tally.take("sent") and held.puts[0] not in transport._held
