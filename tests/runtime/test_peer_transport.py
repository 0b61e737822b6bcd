"""What only exchanges have whose payloads go from region to region by JAX's transfer server."""

import dataclasses
import functools
import socket
import time

import numpy as np
import pytest
from runtime.faults import vanish
from runtime.party import LIKE, TIMING, Party, at_once, check, land, payload, send, until
from runtime.test_two_shot_exchange import LIKE as BESIDE
from runtime.test_two_shot_exchange import Averaging
from runtime.test_two_shot_exchange import payload as weighted

from lowcomm_jax import exchange


@pytest.fixture
def party(tmp_path):
    """Makes regions that pull from each other."""
    made = Party(functools.partial(exchange.peers, transport="jax"), f"file://{tmp_path}/meet")
    yield made
    made.close()


def test_an_address_that_is_taken_is_refused(party):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = "127.0.0.1:{1}".format(*other.getsockname())
        with pytest.raises(ValueError, match=f"'{address}' cannot be listened on .* already in"):
            party.region(0, 1, address=address)


def test_a_payload_outlives_its_region_with_those_who_hold_it(party):
    regions = party.run(3, timing=dataclasses.replace(TIMING, deadline_s=1.0))
    send(regions[:2], "k")
    land(regions[:2], "k")
    vanish(regions[0])
    check(regions[2].skip("k", LIKE), 3, [0, 1])


def test_what_is_gone_with_everyone_who_held_it_is_said_to_be_lost(party):
    timing = dataclasses.replace(TIMING, deadline_s=0.5, answer_s=0.3)
    regions = party.run(2, timing=timing)
    send(regions[:1], "k")
    land(regions[:1], "k")
    vanish(regions[0])
    with pytest.raises(exchange.Lost, match="region 0 for 'k'"):
        regions[1].skip("k", LIKE)


def test_a_link_that_hangs_costs_its_region_the_round_and_nobody_else(party, monkeypatch):
    timing = dataclasses.replace(TIMING, deadline_s=2.0, answer_s=0.5)
    regions = party.run(3, timing=timing)
    monkeypatch.setattr(regions[1]._context.transport._server, "offer", lambda number, data: None)
    began = time.monotonic()
    send(regions, "k")
    for arrived in land(regions, "k"):
        check(arrived, 3, [0, 2])
    assert time.monotonic() - began < 2 * timing.deadline_s + 2
    monkeypatch.undo()
    send(regions, "next", 1)
    for arrived in land(regions, "next"):
        check(arrived, 3, range(3), 1)


class Slow:
    """An array that is there `seconds` after it could be."""

    def __init__(self, array, seconds):
        self._array, self._until = array, time.monotonic() + seconds

    def is_ready(self):
        return time.monotonic() > self._until and self._array.is_ready()

    def __array__(self, *args, **kwargs):
        return np.asarray(self._array)


def test_a_link_that_becomes_slower_than_it_was_is_given_the_time(party, monkeypatch):
    """Pulls that last thrice what the watchdog allows at first, and less than the deadline."""
    timing = dataclasses.replace(TIMING, deadline_s=8.0, answer_s=0.4)
    regions = party.run(2, timing=timing)
    server = regions[1]._context.transport._server
    pull = server.pull
    monkeypatch.setattr(server, "pull", lambda *args: Slow(pull(*args), 1.2))
    patience = []
    for number in range(4):
        send(regions, f"{number}", number)
        for arrived in land(regions, f"{number}"):
            check(arrived, 2, [0, 1], number)
        patience.append(regions[1]._context.transport._patience[0])
    # As it was, once what is expected follows from what was seen.
    assert patience[0] > 1 == patience[-1]


def test_memory_holds_no_more_than_the_kept_payloads(party):
    regions = party.run(2, keep=2)
    for number in range(8):
        send(regions, f"{number}", number)
        land(regions, f"{number}")
        time.sleep(0.15)
    for x in regions:
        assert len(x._context.transport._held) <= 2 * 3


def test_offers_to_the_dead_are_withdrawn(party):
    regions = party.run(2, keep=1)
    vanish(regions[1])
    send(regions[:1], "0")
    values = sum(x.nbytes for x in payload(0).values())
    until(lambda: regions[0].counts().get("sent", 0) > values)
    land(regions[:1], "0")
    for number in range(1, 4):
        send(regions[:1], f"{number}", number)
        land(regions[:1], f"{number}")
    assert regions[0].counts()["sent"] == 0


@pytest.mark.parametrize("sliced", [False, True])
def test_nothing_is_offered_to_one_that_only_comes_in(party, sliced):
    """It compiles, and never pulls what was sent meanwhile."""
    regions = party.run(3)
    vanish(regions[2])
    regions[2] = party.region(2, 3)
    regions[2].join(20.0)
    until(lambda: regions[0].living() == regions[1].living() == {0, 1, 2})
    like, make = (BESIDE, weighted) if sliced else (LIKE, payload)
    how = {"reduction": Averaging()} if sliced else {}

    def exchanged(key, members):
        for x in members:
            x.start(key, make(x.region), **how)
        return at_once(lambda x: x.finish(key, like), members)

    exchanged("0", regions[:2])
    for x in regions[:2]:
        offers = x._context.transport._offers.values()
        assert {region for offered in offers for region in offered.values()} == {1 - x.region}
    regions[2].come_in()
    regions[2].beat(1)  # past where it was missed
    until(lambda: all(x._wait_list.awaited(2) for x in regions[:2]))
    for arrived in exchanged("1", regions):
        assert arrived.participants.all()


def test_a_region_that_ends_waits_for_those_who_still_fetch(party):
    regions = party.run(2)
    send(regions, "k")
    land(regions[:1], "k")
    regions[0].close(linger_s=10.0)
    check(land(regions[1:], "k")[0], 2, [0, 1])


def test_a_pull_that_begins_as_this_end_closes_has_failed(party):
    """As any other that comes to nothing: what waits for it is told why it ends."""
    regions = party.run(2)
    transport, address = regions[0]._context.transport, regions[1]._context.heartbeat.own.address
    vanish(regions[0])
    assert transport._pull(address, 1, 10, holder=1) is None
