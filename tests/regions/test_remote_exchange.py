"""What every way between jobs must do when all is well, and when regions are late or absent."""

import dataclasses
import time

import jax.numpy as jnp
import numpy as np
import pytest
from regions.party import LIKE, TIMING, at_once, check, land, listen_to, payload, send, until

from lowcomm_jax import exchange


def test_everyone_holds_everything_in_region_order(party):
    regions = party.run(3)
    for number in range(3):
        send(regions, f"round {number}", number)
        for arrived in land(regions, f"round {number}"):
            check(arrived, 3, range(3), number)
            assert arrived.seconds > 0 and arrived.waited >= 0


def test_one_region_alone(party):
    (alone,) = party.run(1)
    send([alone], "k")
    (arrived,) = land([alone], "k")
    check(arrived, 1, [0])
    assert "received" not in alone.counts()


def test_jax_arrays_of_narrow_types_and_odd_shapes(party):
    regions = party.run(2)
    arrays = {
        "half": jnp.arange(6, dtype=jnp.bfloat16).reshape(1, 2, 3),
        "eight": jnp.array([[1, -8, 7]], jnp.float8_e4m3fn),
        "empty": jnp.zeros((1, 0, 4), jnp.float32),
        "scalar": jnp.array([2.5], jnp.float32),
        "mask": jnp.array([[True, False]]),
    }
    for x in regions:
        x.start("k", arrays)
    for arrived in at_once(lambda x: x.finish("k"), regions):
        for name, x in arrays.items():
            assert arrived.arrays[name].dtype == x.dtype
            np.testing.assert_array_equal(arrived.arrays[name], np.concatenate([x, x]))


@pytest.mark.parametrize("part", [[0, 2], []])
def test_who_takes_no_part_gets_the_result_and_counts_for_zero(party, part):
    regions = party.run(3)
    for x in regions:
        send([x], "k", takes_part=x.region in part)
    for arrived in land(regions, "k"):
        check(arrived, 3, part)


def test_an_announcement_whose_answer_was_lost_stands(party):
    """The others count it meanwhile; the region keeps its own payload, and does not fetch it."""
    timing = exchange.Timing(beat_s=0.1, dead_after_s=30.0, answer_s=1.0, deadline_s=1.0)
    regions = party.run(3, timing=timing)
    first, others = regions[0], regions[1:]
    store, transport = first._context.store, first._context.transport
    create, get, lost, fetched = store.create, transport.get, [], []

    def loses_the_answer(key, value):
        created = create(key, value)
        if "/k/announce." in key and not lost:
            lost.append(key)
            until(lambda: store.read("round/1/k/commit.0") is not None)
            raise exchange.StoreUnavailable("no answer")
        return created

    def noting(name, *args):
        fetched.append(name)
        return get(name, *args)

    store.create, transport.get = loses_the_answer, noting
    send(regions, "k")
    for arrived in land(regions, "k"):
        check(arrived, 3, range(3))
        assert arrived.ours
    record = first._context.commit_log.committed("1/k")
    assert lost == ["round/1/k/announce.0.1.0"] and record.writer in (1, 2)
    digests = {r: one.payload.digest for r, one in record.admitted.items()}
    assert sorted(fetched) == sorted(digests[x.region] for x in others)


def land_or_part(region, key="k"):
    """What a region ends an exchange with: what arrived, or that it has parted."""
    try:
        return region.finish(key)
    except exchange.Parted as error:
        return error


@pytest.mark.parametrize(
    "heal, holds", [("stop", []), ("majority", [0, 2]), ("lowest", [0, 2]), ("majority", [])]
)
def test_what_is_sent_on_other_terms_does_not_count(party, heal, holds):
    """The record tells every region who has decided what; here region 1 has another anchor, and
    where nothing holds of three regions region 2 has a third one."""
    regions = party.run(3, heal=heal)
    thirds = 7 if heal != "stop" and not holds else 5
    anchors = [np.array(x, np.uint32) for x in ([1, 5], [1, 6], [1, thirds])]
    for x, anchor in zip(regions, anchors):
        x.start("k", payload(x.region), terms={"step": 40, "fragment": 2, "anchor": anchor})
    ended = at_once(land_or_part, regions)
    for region, end in enumerate(ended):
        if region in holds:
            check(end, 3, holds)
            continue
        assert isinstance(end, exchange.Parted) and end.heals == bool(holds)
        listed = "; ".join(
            f"region {r}: anchor {a[0]:08x}{a[1]:08x}" for r, a in enumerate(anchors)
        )
        assert str(end).endswith(f"exchange k, fragment 2, step 40: {listed}")


def test_who_decided_on_another_payload_learns_what_the_others_sent(party):
    """Its payload has another shape, so that it cannot even be read."""
    regions = party.run(3, heal="majority")
    for x, fragment in zip(regions, (0, 0, 1)):
        arrays = payload(x.region) if fragment == 0 else {"v": np.ones((1, 7), np.float32)}
        x.start("k", arrays, terms={"step": 8, "fragment": fragment})
    ended = at_once(land_or_part, regions)
    for end in ended[:2]:
        check(end, 3, [0, 1])
    assert isinstance(ended[2], exchange.Parted) and "region 2: fragment 1" in str(ended[2])


def test_whoever_has_no_terms_goes_by_those_of_the_others(party):
    regions = party.run(3)
    for x in regions:
        x.start("k", payload(x.region), terms=None if x.region == 1 else {"step": 3})
    for arrived in land(regions, "k"):
        check(arrived, 3, [0, 1, 2])


def test_terms_of_who_only_listens_are_compared_too(party):
    regions = party.run(2)
    for x in regions:
        x.start("k", payload(x.region), terms={"step": 3})
    land(regions, "k")
    check(listen_to(regions[0], "k", LIKE, terms={"step": 3}), 2, [0, 1])
    with pytest.raises(exchange.Parted, match="region 0: step 4; region 1: step 3"):
        listen_to(regions[0], "k", LIKE, terms={"step": 4})


def test_groups_exchange_under_one_key_without_the_others(party):
    regions = party.run(4)
    groups = [(0, 2), (1, 3)]
    for group in groups:
        send([regions[r] for r in group], "k", members=group)
    for group in groups:
        for arrived in land([regions[r] for r in group], "k"):
            check(arrived, 4, group)


def test_two_keys_in_flight_finished_out_of_order(party):
    regions = party.run(2)
    send(regions, "a", 1)
    send(regions, "b", 2)
    for arrived in land(regions, "b"):
        check(arrived, 2, [0, 1], 2)
    for arrived in land(regions, "a"):
        check(arrived, 2, [0, 1], 1)


def test_start_returns_at_once_and_ready_tells_when_finish_will_not_wait(party):
    regions = party.run(2)
    send(regions[:1], "k")
    time.sleep(0.3)
    assert not regions[0].ready("k")
    send(regions[1:], "k")
    until(lambda: regions[0].ready("k"), 10.0)
    (arrived,) = land(regions[:1], "k")
    assert arrived.waited < 0.1 < 0.3 < arrived.seconds


def test_bytes_are_those_that_moved(party):
    regions = party.run(3)
    for number in range(2):
        send(regions, f"k{number}", number)
        land(regions, f"k{number}")
    received = sum(x.counts()["received"] for x in regions)
    values = sum(x.nbytes for x in payload(0).values())
    # Every region needs the payloads of the two others, twice; headers come on top.
    assert 12 * values < received < 12 * (values + 400)


def test_a_late_region_obeys_the_commit_that_stands(party):
    timing = dataclasses.replace(TIMING, deadline_s=0.5)
    regions = party.run(3, timing=timing)
    send(regions[:2], "k")
    for arrived in land(regions[:2], "k"):
        check(arrived, 3, [0, 1])
    send(regions[2:], "k")
    (late,) = land(regions[2:], "k")
    check(late, 3, [0, 1])


def test_what_was_counted_is_noted_where_the_loop_finishes_it(party, caplog):
    """Exchanges that end at the same time warn once, and count in the order of the loop."""
    timing = dataclasses.replace(TIMING, deadline_s=0.5)
    regions = party.run(3, timing=timing)
    late, keys = regions[2], [f"{number}" for number in range(4)]
    for key in keys:
        send(regions[:2], key)
        land(regions[:2], key)
    caplog.clear()
    for key in keys:
        send([late], key)
    until(lambda: all(map(late.ready, keys)))
    assert not late.never_counted(4), "nothing is finished yet"
    assert "this region" not in caplog.text
    for key in keys:
        check(late.finish(key), 3, [0, 1])
    assert late.never_counted(4)
    assert caplog.text.count("was not counted in 3 exchanges running") == 1
    assert caplog.text.count("went on without this region") == 1


def assert_not_waited_for(region, key):
    """One region exchanges alone, though the deadline for the others is far away from now on."""
    region._context.pace._timing = dataclasses.replace(TIMING, deadline_s=300.0)
    began = time.monotonic()
    send([region], key)
    land([region], key)
    assert time.monotonic() - began < 30


def test_a_region_left_out_is_not_waited_for_before_it_has_caught_up(party):
    timing = dataclasses.replace(TIMING, deadline_s=1.0)
    regions = party.run(2, timing=timing)
    slow = regions[1]
    regions[0].beat(10)
    slow.beat(3)
    send(regions[:1], "a")
    land(regions[:1], "a")
    assert_not_waited_for(regions[0], "b")
    slow.beat(10)  # it may hang where the others are
    until(lambda: regions[0].steps()[1] == 10)
    assert_not_waited_for(regions[0], "where they are")
    slow.beat(11)
    time.sleep(0.5)
    send(regions[:1], "c", 3)
    time.sleep(0.3)
    send(regions[1:], "c", 3)
    for arrived in land(regions, "c"):
        check(arrived, 2, [0, 1], 3)


def test_who_listens_reads_what_stands_without_taking_part(party):
    regions = party.run(3)
    assert listen_to(regions[2], "k", LIKE) is None
    send(regions[:2], "k")
    send(regions[2:], "k", takes_part=False)
    land(regions, "k")
    late = party.joined(2, 3)
    check(listen_to(late, "k", LIKE), 3, [0, 1])
    assert listen_to(late, "never", LIKE) is None


def test_one_commit_stands_however_many_write_it(party):
    regions = party.run(3)
    rounds = 40
    for number in range(rounds):
        # Absent by turns: every region is able to write the record, and tries to.
        for x in regions:
            x.start(f"{number}", payload(x.region, number), takes_part=(number + x.region) % 4 > 0)
    for number in range(rounds):
        expected = [r for r in range(3) if (number + r) % 4 > 0]
        for arrived in land(regions, f"{number}"):
            check(arrived, 3, expected, number)


def test_what_cannot_be_started_is_refused(party):
    with pytest.raises(ValueError, match="has not joined"):
        send([party.region(0, 1)], "k")
    first, _ = party.run(2)
    for wrong, message in (
        ({"key": ""}, "key is empty"),
        ({"key": "k", "members": (0, 2)}, "must be different regions of 0..1"),
        ({"key": "k", "members": (1,)}, "must contain this region, 0"),
    ):
        with pytest.raises(ValueError, match=message):
            first.start(arrays=payload(0), **wrong)
    send([first], "k")
    with pytest.raises(ValueError, match="every exchange needs its own"):
        send([first], "k")
