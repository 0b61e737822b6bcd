"""Payloads that are reduced in slices: what becomes of them, whoever is late, absent or lost."""

import dataclasses
import threading
import time

import jax
import numpy as np
import pytest
from regions.faults import vanish
from regions.party import TIMING, at_once, listen_to, until

from lowcomm_jax.rounds.slicing import Slicing
from lowcomm_jax.store.context import FaultHooks
from lowcomm_jax.store.errors import Rejected

R, SIZE = 3, 14  # 14 values in 3 slices of 5: one is padding
LIKE = {"weight": jax.ShapeDtypeStruct((1,), np.float32)}


class Averaging:
    """Weighted sums of `x`, in slices, which wait for `may` if it `holds`; `began` tells of it."""

    def __init__(self, count=R, holds=False):
        self.parts, self.each = count, -(-SIZE // count)
        self.like = {"x": ("float32", (self.each,))}
        self.rest = {"weight": ("float32", ())}
        self.whole = self.rest | {"x": ("float32", (SIZE,))}
        self.began, self.may = threading.Event(), threading.Event()
        if not holds:
            self.may.set()

    def split(self, arrays):
        padded = np.pad(arrays["x"], (0, self.parts * self.each - SIZE))
        return {"weight": arrays["weight"]}, {"x": padded.reshape(self.parts, self.each)}

    def average(self, slices, rest, number):
        self.began.set()
        self.may.wait()
        zeros = np.zeros(self.each, np.float32)
        return {"x": sum((rest[r]["weight"] * x["x"] for r, x in slices.items()), zeros)}

    average_all = Slicing.average_all


def payload(region, number=0):
    rng = np.random.default_rng([region, number])
    x = rng.integers(-9, 9, (1, SIZE)).astype(np.float32)
    return {"x": x, "weight": np.array([region + 2], np.float32)}


def expected(regions, number=0):
    """Whole numbers, so that the order of a sum cannot matter."""
    return sum((region + 2) * payload(region, number)["x"][0] for region in regions)


def check(arrived, regions, number=0, count=R):
    regions = list(regions)
    assert arrived.participants.tolist() == [r in regions for r in range(count)]
    weights = [r + 2 if r in regions else 0 for r in range(count)]
    assert arrived.arrays.keys() == {"weight"}
    np.testing.assert_array_equal(arrived.arrays["weight"], np.array(weights, np.float32))
    found = arrived.reduced["x"].reshape(-1)[:SIZE]
    np.testing.assert_array_equal(found, expected(regions, number) if regions else np.zeros(SIZE))


def send(regions, key, number=0, averaging=None, **options):
    for x in regions:
        how = averaging or Averaging(x.count)
        x.start(key, payload(x.region, number), reduction=how, **options)


def land(regions, key):
    return at_once(lambda x: x.finish(key), regions)


@pytest.mark.parametrize("count", [1, 3, 4])
def test_everyone_holds_the_averages(party, count):
    regions = party.run(count)
    for number in range(2):
        send(regions, f"{number}", number)
    for number in range(2):
        for arrived in land(regions, f"{number}"):
            check(arrived, range(count), number, count)


def test_its_time_is_that_of_both_halves(party):
    regions, averaging = party.run(R), Averaging(holds=True)
    send(regions, "k", averaging=averaging)
    try:
        assert averaging.began.wait(30)
        time.sleep(0.2)
    finally:
        averaging.may.set()
    assert all(arrived.seconds >= 0.2 for arrived in land(regions, "k"))


@pytest.mark.parametrize("part", [[1, 2], []])
def test_who_sits_out_averages_its_slice_all_the_same(party, part):
    regions = party.run(R)
    for x in regions:
        send([x], "k", takes_part=x.region in part)
    for arrived in land(regions, "k"):
        check(arrived, part)


def test_the_slice_of_the_dead_falls_to_another(party):
    regions = party.run(4)
    vanish(regions[1])
    alive = [regions[r] for r in (0, 2, 3)]
    for arrived in (send(alive, "k"), land(alive, "k"))[1]:
        check(arrived, [0, 2, 3], count=4)


@pytest.mark.parametrize("lost", [[1], [0, 2]])
def test_who_is_lost_between_the_halves_counts_in_no_slice(party, lost):
    regions = party.run(R)
    hangs = Averaging(holds=True)
    for x in regions:
        send([x], "k", averaging=hangs if x.region in lost else None)
    until(hangs.began.is_set)
    for region in lost:
        vanish(regions[region])
    alive = [x for x in regions if x.region not in lost]
    arrived = land(alive, "k")
    hangs.may.set()
    for one in arrived:
        check(one, [x.region for x in alive])
    # Nobody waits for them any longer, and the others average their slices.
    send(alive, "l", 1)
    for one in land(alive, "l"):
        check(one, [x.region for x in alive], 1)


def test_a_slice_that_only_the_job_before_had_is_not_asked_of_anybody(party):
    """It was to average that slice itself, and sent it to nobody: the others go on without it."""
    regions = party.run(R)
    hangs = Averaging(holds=True)
    for x in regions:
        send([x], "k", averaging=hangs if x.region == 1 else None)
    until(hangs.began.is_set)
    vanish(regions[1])
    for arrived in land([regions[0], regions[2]], "k"):
        check(arrived, [0, 2])
    hangs.may.set()
    again = party.joined(1, R)
    send([again], "k", number=1)  # what it has computed since is another payload
    [arrived] = land([again], "k")
    check(arrived, [0, 2])
    log = again._context.commit_log
    assert log.committed("1/k").present == {0: 1, 1: 1, 2: 1}
    assert log.committed("1/k+averages").admitted.keys() == {0, 2}


def fallen_back(party, alter=lambda whole: whole):
    """Regions of which the last two are lost between the halves; the first one has landed "k" with
    whole payloads, its own altered."""
    regions, hangs = party.run(R), Averaging(holds=True)
    send(regions[:1], "k")
    send(regions[1:], "k", averaging=hangs)
    until(hangs.began.is_set)
    exchange = regions[0]._open["k"]
    until(lambda: exchange.commit is not None)
    given = exchange.host_payload
    exchange.host_payload = dataclasses.replace(given, whole=alter(given.whole))
    for lost in regions[1:]:
        vanish(lost)
    land(regions[:1], "k")
    hangs.may.set()
    return regions


def test_a_listener_takes_whole_payloads_too(party):
    regions = fallen_back(party)
    again = party.joined(1, R)
    check(listen_to(again, "k", LIKE, reduction=Averaging()), [0])
    record = again._context.commit_log.committed("1/k+whole")
    assert record == regions[0]._context.commit_log.committed("1/k+whole")
    assert record.admitted.keys() == {0}


def test_a_listener_refuses_whole_payloads_of_other_shapes(party):
    """It would average other numbers than those who sent them."""
    fallen_back(party, lambda whole: whole | {"x": whole["x"].astype(np.float64)})
    again = party.joined(1, R)
    with pytest.raises(Rejected, match=r"payload of region 0: x is .*float64"):
        listen_to(again, "k", LIKE, reduction=Averaging())


def test_a_damaged_slice_leaves_its_sender_out(party):
    regions = party.run(R)

    class Damage(FaultHooks):
        def sent(self, key, data):
            first = len(data) // 4  # in the slice that region 0 averages, of three pieces
            flipped = data[:first] + bytes([data[first] ^ 1]) + data[first + 1 :]
            return flipped if key == "k" else data

    regions[1]._context.fault_hooks = Damage()
    send(regions, "k")
    for arrived in land(regions, "k"):
        check(arrived, [0, 2])
    assert regions[0].counts()["rejected_damaged"] >= 1


def test_late_regions_and_listeners_take_what_stands(party):
    timing = dataclasses.replace(TIMING, deadline_s=0.5)
    regions = party.run(R, timing=timing)
    like = {"reduction": Averaging()}
    assert listen_to(regions[2], "k", LIKE, **like) is None
    send(regions[:2], "k")
    land(regions[:2], "k")
    check(listen_to(regions[2], "k", LIKE, **like), [0, 1])
    again = party.joined(0, R)
    check(listen_to(again, "k", LIKE, **like), [0, 1])
    assert listen_to(again, "never", LIKE, **like) is None


def listening(party, region):
    """A new job in a region's place, which listens to the exchange."""
    again = party.joined(region, R)
    again.start("k", {}, reduction=Averaging(), joins=False)
    return again


def test_a_listener_waits_for_both_halves(party):
    regions = party.run(R)
    hangs = Averaging(holds=True)
    send(regions[:1], "k", averaging=hangs)
    send(regions[1:2], "k")
    send(regions[2:], "k", takes_part=False)
    until(hangs.began.is_set)
    again = listening(party, 2)
    until(lambda: again._open["k"].commit is not None)
    assert not again.ready("k")
    hangs.may.set()
    for arrived in land([*regions[:2], again], "k"):
        check(arrived, [0, 1])


def test_a_listener_waits_for_nothing_more_where_nobody_took_part(party):
    regions = party.run(R)
    send(regions, "k", takes_part=False)
    land(regions, "k")
    again = listening(party, 2)
    until(lambda: again.ready("k"))
    check(again.finish("k"), [])
    assert again._context.commit_log.committed("1/k+averages") is None


def test_a_listener_waits_for_whole_payloads_where_averages_were_not_brought(party):
    """Region 1 was present and is lost; the record without its slice is not the last one."""
    regions, may = party.run(R), threading.Event()

    class Holds(FaultHooks):
        def begins(self, key, terms):
            if key == "k/whole":
                may.wait(60)

    hangs = Averaging(holds=True)
    alive = [regions[0], regions[2]]
    for x in alive:
        x._context.fault_hooks = Holds()
    send(alive, "k")
    send(regions[1:2], "k", averaging=hangs)
    until(hangs.began.is_set)
    vanish(regions[1])
    log = regions[0]._context.commit_log
    until(lambda: log.committed("1/k+averages") is not None)
    hangs.may.set()
    again = listening(party, 1)
    until(lambda: [x.request.name for x in again._open["k"]._followers][1:] == ["1/k+whole"])
    assert not again.ready("k")
    may.set()
    for arrived in land([*alive, again], "k"):
        check(arrived, [0, 2])


def test_payloads_of_both_halves_are_removed(party):
    regions = party.run(R, keep=1)
    for number in range(4):
        send(regions, f"{number}", number)
        land(regions, f"{number}")
    listed = regions[0]._context.store.list

    def left():
        for x in regions:
            x._payload_gc.sweep()
        return listed("blob/") + [key for key in listed("round/") if "commit" not in key]

    # A payload is in R pieces and an average, each region's; and twice what it says about them.
    until(lambda: len(left()) <= 2 * R * (R + 1 + 4))
