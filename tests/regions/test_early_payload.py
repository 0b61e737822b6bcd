"""Arrays that travel before their exchange: counted with its payload, or not at all.

And NoLoCo's anchors, which travel so: what partners are said to have sent one another is what
crossed between their jobs, and when.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import msgspec
import numpy as np
import oracle
import pytest
from regions.faults import outage, vanish
from regions.party import KINDS, idle, land, land_together, payload, until
from regions.test_same_numbers import METHODS, assert_same, expected
from regions.together import batches, engine, in_jobs, rows, values

import lowcomm_jax as lc
from lowcomm_jax import exchange
from lowcomm_jax.jobs.anchors_ahead import AnchorsAhead
from lowcomm_jax.params.fragments import partition
from lowcomm_jax.store.context import FaultHooks
from lowcomm_jax.store.errors import Missing
from lowcomm_jax.store.records import Admitted, Commit, Payload
from lowcomm_jax.store.wire import parse

# Nobody is to be taken for dead where the machine is busy.
PATIENT = {"beat_s": 0.1, "dead_after_s": 10.0, "answer_s": 1.0}


def parts(region):
    """(what is sent early, the rest) of `party.payload`."""
    whole = payload(region)
    return {"w": whole["w"]}, {"code": whole["code"]}


def send_early(regions, key="early", **options):
    for x in regions:
        x.send_early(key, parts(x.region)[0], **options)


def send(regions, key="k", early="early", **options):
    for x in regions:
        x.start(key, parts(x.region)[1], early=early, **options)


def here(x, key="early"):
    """The regions whose early bytes are here."""
    return {r for r, fetch in x._early[key].fetches.items() if fetch.complete}


def spy(x):
    """The digests that this region asks for, from now on."""
    get, asked = x._context.transport.get, []

    def spied(name, *args):
        asked.append(name)
        return get(name, *args)

    x._context.transport.get = spied
    return asked


def test_what_is_here_before_its_exchange_is_not_fetched_again(party):
    regions = party.run(3, timing=exchange.Timing(**PATIENT))
    send_early(regions)
    until(lambda: all(here(x) == {0, 1, 2} - {x.region} for x in regions))
    asked = [spy(x) for x in regions]
    send(regions)
    land_together(regions, "k", range(3))
    assert [len(names) for names in asked] == [2, 2, 2], "the payloads alone"
    assert not any(x._early for x in regions)
    until(lambda: all(idle(x) for x in regions))


def test_who_sent_nothing_early_is_counted_and_who_sits_out_lands_all_the_same(party):
    """A job that was started again, say, sends both with its exchange."""
    regions = party.run(3, timing=exchange.Timing(**PATIENT))
    send_early(regions[:2])
    send(regions[:2])
    send_early(regions[2:])
    send(regions[2:])
    land_together(regions, "k", range(3))
    send_early(regions[:2], "next early")
    send_early(regions[2:], "next early", takes_part=False)
    send(regions[:1], "next", "next early")
    send(regions[1:], "next", "next early", takes_part=False)
    land_together(regions, "next", [0])


def test_what_a_later_job_sends_takes_the_place_of_what_was_sent_before(store_party):
    """The exchange names the bytes: what else was fetched meanwhile is left."""
    regions = store_party.run(2)
    regions[0].send_early("early", {"w": np.zeros((1, 3, 2), np.float32)})
    send_early(regions[1:])
    until(lambda: here(regions[1]) == {0})
    regions[0].drop_early()
    send_early(regions[:1])
    send(regions)
    land_together(regions, "k", range(2))


def test_who_is_not_here_with_both_is_counted_by_nobody(store_party):
    """One of them could not get the early bytes, and all the payload: the record says so."""
    regions = store_party.run(3, timing=exchange.Timing(**PATIENT, deadline_s=3.0))
    get, cut = regions[1]._context.transport.get, threading.Event()

    def cut_off(name, nbytes, holders):
        if holders[0] == 2 and not cut.is_set():
            cut.set()
            lost.append(name)
        if name in lost:
            raise Missing("cut off")
        return get(name, nbytes, holders)

    lost = []
    regions[1]._context.transport.get = cut_off
    send_early(regions)
    until(lambda: here(regions[0]) == {1, 2} and here(regions[2]) == {0, 1} and cut.is_set())
    send(regions)
    land_together(regions, "k", [0, 1])
    log = regions[0]._context.commit_log
    assert lost == [log.announced("1/k", {2: [1]})[2].payload.early.digest]
    assert sorted(log.committed("1/k").admitted) == [0, 1]


def test_who_dies_after_its_early_bytes_is_not_counted(store_party):
    regions = store_party.run(3)
    send_early(regions)
    until(lambda: here(regions[0]) == {1, 2})
    vanish(regions[2])
    send(regions[:2])
    land_together(regions[:2], "k", [0, 1])


def test_early_bytes_wait_for_the_store(store_party):
    """Nobody waits for them meanwhile: a step goes on at once."""
    regions = store_party.run(2)
    with outage(store_party):
        until(lambda: all(x._context.heartbeat.outage for x in regions))
        send_early(regions)
    send(regions)
    land_together(regions, "k", range(2))


def announced(store):
    """Keys of announcements."""
    return [key for key in store.list("round/") if "/announce." in key]


def test_early_bytes_are_removed_with_the_payloads(store_party):
    regions = store_party.run(2, keep=1, timing=exchange.Timing(**PATIENT))
    for number in range(3):
        send_early(regions, f"early{number}")
        send(regions, f"{number}", f"early{number}")
        land(regions, f"{number}")
    store = regions[0]._context.store

    def left():
        for x in regions:  # what the others have told since is known with their next beats
            x._payload_gc.sweep()
        names = {key.split("/")[2] for key in announced(store)}
        return [n for n in range(9) if names & {f"early{n}", f"{n}"}]

    until(lambda: left() == [2])
    assert len(store.list("blob/")) == 4
    for x in regions:  # what is dropped goes with what comes next
        x.send_early("never", parts(x.region)[0])
    until(lambda: all(here(x, "never") for x in regions))
    for x in regions:
        x.drop_early()
        assert not x._early
    for number in range(3, 5):
        send_early(regions, f"early{number}")
        send(regions, f"{number}", f"early{number}")
        land(regions, f"{number}")
    until(lambda: left() == [4])
    assert len(store.list("blob/")) == 4 and not any("never" in key for key in announced(store))


@pytest.mark.parametrize("kind", KINDS)
def test_closing_waits_for_no_early_bytes(kind, between):
    """The partner never comes."""
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(between(2, kind=KINDS[kind]), range(2)))
    send_early(made[:1])
    one = made[0]._early["early"]
    until(lambda: one.sent is not None)
    made[0].close(linger_s=0.0)
    assert idle(made[0]) and not one.fetches


def test_an_error_where_early_bytes_are_sent_ends_the_exchange(store_party):
    class Broken(FaultHooks):
        def begins(self, key, terms):
            if key == "early":
                raise ValueError("broken")

    regions = store_party.run(1, fault_hooks=Broken())
    send_early(regions)
    with pytest.raises(ValueError, match="broken"):
        send(regions)
        regions[0].finish("k")


def test_what_cannot_be_sent_so_is_refused(store_party):
    regions = store_party.run(2)
    send_early(regions[:1], takes_part=False)
    with pytest.raises(ValueError, match="early='other' of exchange 'k': give a key"):
        send(regions[:1], early="other")
    with pytest.raises(ValueError, match="a region that takes part here"):
        send(regions[:1])
    with pytest.raises(ValueError, match="needs its own"):
        send_early(regions[:1])
    send(regions, early=None, takes_part=False)


EARLY = Payload("a" * 64, 5)
BOTH = Payload("b" * 64, 7, early=EARLY)


def test_a_record_names_early_bytes_where_there_are_some():
    record = Commit({0: Admitted(2, BOTH)}, {}, 0)
    assert msgspec.json.decode(msgspec.json.encode(record), type=Commit) == record
    assert BOTH.digests == ["b" * 64, "a" * 64] and BOTH.nbytes_for(0) == 12
    assert BOTH.content not in (BOTH.digest, EARLY.digest)


def test_a_payload_without_its_early_part_counts_as_absent(store_party):
    """Of a program of another version, or a stranger."""
    regions = store_party.run(2)
    regions[1].start("k", parts(1)[1])
    until(lambda: regions[0]._context.commit_log.announced("1/k", {1: [1]}))
    send_early(regions[:1])
    send(regions[:1])
    land_together(regions[:1], "k", [0])


# -- NoLoCo -----------------------------------------------------------------------------------


def of_three():
    return lc.methods.noloco(4, 3, seed=5, alpha=0.3, beta=0.6, gamma=0.8)


def sitting_out(step):
    """Everyone, but region 1 in the second period, and 0 and 2 in the third."""
    return [step not in range(9, 13), step not in range(5, 9), step not in range(9, 13)]


def test_absent_regions_are_as_absent_as_on_the_mesh(between):
    """In pairs: `test_lost_regions`."""
    together = expected(of_three(), 3, 14, sitting_out)
    assert_same(in_jobs(between(3), of_three(), 3, 14, sitting_out), together, True)


def test_started_again_between_two_boundaries_the_numbers_stay(between):
    """What was sent ahead is of another epoch: it is sent once more, with the payload."""
    stop, steps, states = 6, 14, {}
    together = expected(METHODS["noloco"](), 3, steps)
    data = batches(steps, 3)

    def first(region):
        made = between(3)(region)
        one = engine(METHODS["noloco"](), 3, made)
        with jax.numpy_dtype_promotion("standard"):
            state = one.init(oracle.make_params())
            state, _ = one.run(state, [rows(batch, region) for batch in data[:stop]])
        ahead = "0.1.anchor"
        assert one.carrier.anchors_ahead.keys == {0: ahead} and list(made._early) == [ahead]
        states[region] = state
        made.pause()
        assert idle(made)
        made.close()

    def again(region):
        made = between(3)(region)
        one = engine(METHODS["noloco"](), 3, made)
        with jax.numpy_dtype_promotion("standard"):
            one.init(oracle.make_params())
            one.reconnect(states[region])
            own = [rows(batch, region) for batch in data[stop:]]
            state, history = one.run(states[region], own)
            send = next(event for event in history.events if event.kind == "send")
            before = values(state)
            return made.epoch, send.nbytes, (before, values(one.finish(state)))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(first, range(3)))
        ends = list(pool.map(again, range(3)))
    size = 4 * sum(x.size for x in oracle.make_params().values())
    assert [(epoch, nbytes) for epoch, nbytes, _ in ends] == [(2, 2 * size)] * 3
    assert_same([one for *_, one in ends], together, True)


def test_an_anchor_of_another_round_is_sent_anew():
    """None is: a fragment's next send is of the round that was sent ahead."""
    calls = []
    there = SimpleNamespace(
        send_early=lambda key, arrays, **how: calls.append((key, sorted(arrays), how["step"])),
        drop_early=lambda: calls.append("drop"),
    )
    ahead = AnchorsAhead(there)
    fragments = partition({"w": jax.ShapeDtypeStruct((2,), np.float32)}, 1)
    anchor = {"w": np.zeros((1, 2), np.float32)}
    flight = SimpleNamespace(fragment=0, sent=8, takes_part=np.ones(1, bool))

    def key(sends):
        """Of the anchor that goes with the newest of so many payloads."""
        counters = SimpleNamespace(sends=np.array([sends]))
        state = SimpleNamespace(in_flight={"0@8": flight}, anchor=anchor, counters=counters)
        return ahead.take(state, flight, fragments, (0, 1))

    ahead.send(0, 1, anchor, fragments, (0, 1), 4)
    assert key(sends=2) == "0.1.anchor" and calls == [("0.1.anchor", ["anchor/w"], 4)]
    calls.clear()
    ahead.send(0, 2, anchor, fragments, (0, 1), 4)
    assert key(sends=6) == "0.5.anchor"
    assert calls[1:] == ["drop", ("0.5.anchor", ["anchor/w"], 8)] and not ahead.keys


PERIOD, ROUNDS = 4, 3


def moved(made):
    """Bytes of arrays in the files that get here, file by file, by kind."""
    get, found = made._context.transport.get, {"payload": [], "anchor": []}

    def spied(*args):
        data = get(*args)
        _, arrays = parse(data)
        for kind, sizes in found.items():
            own = [x.nbytes for name, x in arrays.items() if name.startswith(f"{kind}/")]
            sizes += [sum(own)] if own else []
        return data

    made._context.transport.get = spied
    return found


@pytest.mark.parametrize("more", [0, 1])
def test_anchors_are_booked_and_travel_ahead_of_the_payloads(between, more):
    """At a boundary pseudo-gradients alone travel; before the first one nobody has landed.

    The last synchronisation, after so many steps more, takes the anchor that was sent ahead, and
    sends none for a round that does not follow.
    """
    regions = 2
    values = sum(x.size for x in oracle.make_params().values())
    size, got = 4 * values, {}

    def job(region):
        made = between(regions)(region)
        got[region] = found = moved(made)
        one = engine(lc.methods.noloco(PERIOD, seed=3), regions, made)
        table = [rows(x, region) for x in batches(PERIOD * ROUNDS + more, regions)]
        with jax.numpy_dtype_promotion("standard"):
            state = one.init(oracle.make_params())
            for number in range(ROUNDS):
                data = table[number * PERIOD : (number + 1) * PERIOD]
                state, history = one.run(state, data[:-1])
                if number:  # it is here before the boundary
                    until(lambda n=number: len(found["anchor"]) == n + 1, 60.0)
                    assert len(found["payload"]) == number
                state, at_boundary = one.run(state, data[-1:])
                send, land = [*history.events, *at_boundary.events]
                ahead = 0 if number else size
                assert (send.nbytes, land.ahead) == (size + ahead, size)
                assert send.bytes_sent.tolist() == send.bytes_received.tolist() == [size + ahead]
                assert land.bytes_sent.tolist() == land.bytes_received.tolist() == [size]
                assert land.groups == [(0, 1)]
            until(lambda: len(found["anchor"]) == ROUNDS + 1, 60.0)
            state, _ = one.run(state, table[PERIOD * ROUNDS :])
            booked = [state.counters.copy(), one.finish(state).counters]
        until(lambda: idle(made), 20.0)
        assert not made._early, "no round follows"
        return booked

    with ThreadPoolExecutor(regions) as pool:
        booked = list(pool.map(job, range(regions)))
    files = {"payload": [size] * (ROUNDS + more), "anchor": [size] * (ROUNDS + 1)}
    for region, counters in enumerate(booked):
        assert got[region] == files
        for one, payloads in zip(counters, (ROUNDS, ROUNDS + more), strict=True):
            total = [(ROUNDS + 1 + payloads) * size]
            assert one.bytes_sent.tolist() == one.bytes_received.tolist() == total
