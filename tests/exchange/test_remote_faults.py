"""What a dead, silent, replaced or malicious region, and a store that goes away, cannot do."""

import contextlib
import pathlib
import shutil
import time

import numpy as np
import pytest
from exchange.party import LIKE, TIMING, at_once, check, land, payload, send, until

from lowcomm_jax import exchange
from lowcomm_jax.exchange.between import wire
from lowcomm_jax.exchange.between.secret import Seal


def folder(party) -> pathlib.Path:
    """Where the regions meet."""
    return pathlib.Path(party.url.removeprefix("file://"))


def vanish(region) -> None:
    """End a region as a crash does: from one moment to the next, without a word."""
    region._office.closing.set()
    region._office.beats.stop(leaving=False)
    region._office.transport.close()


@contextlib.contextmanager
def outage(party):
    """A file stands where the folder was: nothing can be read, listed or written."""
    place = folder(party)
    away = place.with_name("away")
    place.rename(away)
    while not place.is_file():
        # A write that was under way may have made the folder anew.
        shutil.rmtree(place, ignore_errors=True)
        with contextlib.suppress(IsADirectoryError):
            place.write_text("")
    try:
        yield
    finally:
        place.unlink()
        away.rename(place)


def test_a_dead_region_is_left_out_within_its_time(party):
    regions = party.run(3)
    vanish(regions[1])
    began = time.monotonic()
    alive = [regions[0], regions[2]]
    send(alive, "k")
    for arrived in land(alive, "k"):
        check(arrived, 3, [0, 2])
    assert time.monotonic() - began < TIMING.dead_after_s + 1
    assert regions[0].living() == {0, 2}
    vanish(regions[0])
    send(alive[1:], "alone", 1)
    check(land(alive[1:], "alone")[0], 3, [2], 1)


def test_a_region_that_leaves_is_not_waited_for(party):
    regions = party.run(2)
    regions[1].close(linger_s=0.0)
    began = time.monotonic()
    send(regions[:1], "k")
    check(land(regions[:1], "k")[0], 2, [0])
    assert time.monotonic() - began < TIMING.dead_after_s


def test_a_region_comes_back_while_the_others_go_on(party):
    regions = party.run(3)
    vanish(regions[2])
    alive = regions[:2]
    send(alive, "a")
    land(alive, "a")
    again = party.region(2, 3)
    began = time.monotonic()
    again.join(20.0)
    assert time.monotonic() - began < 5
    # Nobody waits for it before it has sent something.
    began = time.monotonic()
    send(alive, "b", 1)
    land(alive, "b")
    assert time.monotonic() - began < TIMING.dead_after_s
    check(again.skip("b", LIKE), 3, [0, 1], 1)
    send([again], "c", 2)
    time.sleep(0.3)
    send(alive, "c", 2)
    for arrived in land([*alive, again], "c"):
        check(arrived, 3, [0, 1, 2], 2)


def test_a_run_with_nobody_left_begins_anew_with_those_who_come(party):
    """They have gone back to a checkpoint: what was agreed on after it does not bind them."""
    regions = party.run(3)
    send(regions, "k")
    land(regions, "k")
    assert regions[0].give_state(9, {}, {})
    for x in regions:
        vanish(x)
    again = [party.region(r, 3) for r in range(2)]
    at_once(lambda x: x.join(1.0), again)
    assert again[0].newest_state() is None
    send(again, "k", 1)
    for arrived in land(again, "k"):
        check(arrived, 3, [0, 1], 1)


def test_a_region_that_slept_through_a_new_beginning_must_end(party):
    regions = party.run(2)
    sleeping = regions[1]._office.beats
    sleeping._look = sleeping._beat = lambda *_: None
    vanish(regions[0])
    party.region(0, 2).join(1.5)
    del sleeping._look
    until(lambda: sleeping._superseded)
    with pytest.raises(exchange.Superseded, match="begun anew without it"):
        send(regions[1:], "k")


def test_a_forged_epoch_begins_nothing(party):
    forge(party, "epoch/1", {"0": 1})
    regions = party.run(2)
    assert {x._office.beats.own.epoch for x in regions} == {2}


def test_a_new_run_needs_everyone(party):
    with pytest.raises(TimeoutError, match=r"regions \[1, 2\] of run 'run'"):
        party.region(0, 3).join(0.5)


def test_a_replaced_job_must_end(party):
    regions = party.run(2)
    party.region(1, 2).join(20.0)
    until(lambda: regions[1]._office.beats._superseded)
    with pytest.raises(exchange.Superseded, match="another job"):
        send(regions[1:], "k")


def test_deaths_are_not_made_up_by_an_outage_and_everyone_catches_up(party):
    regions = party.run(3)
    send(regions, "before")
    land(regions, "before")
    with outage(party):
        send(regions, "during", 1)
        time.sleep(2 * TIMING.dead_after_s)
        assert not any(x.ready("during") for x in regions)
        with pytest.raises(exchange.StoreUnavailable):
            regions[0].skip("other", LIKE)
    for arrived in land(regions, "during"):
        check(arrived, 3, range(3), 1)
    assert all(x.counts()["outage"] >= 1 for x in regions)


def test_an_empty_folder_in_place_of_the_store_is_an_outage(party):
    """As when a shared folder is not mounted: nothing may be decided there."""
    regions = party.run(2)
    place = folder(party)
    place.rename(place.with_name("away"))
    place.mkdir()
    send(regions, "k")
    time.sleep(2 * TIMING.dead_after_s)
    assert not any(x.ready("k") for x in regions)
    assert not list(place.rglob("commit"))
    shutil.rmtree(place)
    place.with_name("away").rename(place)
    for arrived in land(regions, "k"):
        check(arrived, 2, [0, 1])


def test_another_secret_can_not_join(party):
    party.run(2)
    for other in (b"a secret of a stranger", None):
        with pytest.raises(ValueError, match="another secret"):
            party.region(1, 2, secret=other).join(1.0)


def test_other_settings_can_not_join(party):
    party.run(2)
    with pytest.raises(ValueError, match="count is 2 there, 3 here"):
        party.region(1, 3).join(1.0)


def test_runs_do_not_meet(party):
    regions = party.run(1) + party.run(1, run_id="other")
    for x in regions:
        x.start("k", payload(x.count + len(x._office.run_id)))
    for x in regions:
        arrived = x.finish("k", LIKE)
        expected = payload(x.count + len(x._office.run_id))["w"]
        np.testing.assert_array_equal(arrived.arrays["w"][0], expected)


def forge(party, key: str, body: dict) -> None:
    """A stranger writes to the store what it likes, signed with a secret of its own."""
    path = folder(party) / "run" / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(Seal("run", b"a secret of a stranger").close(key, body))


def test_forged_records_are_ignored_and_counted(party):
    regions = party.run(2)
    mine = {"digest": "0" * 64, "nbytes": 10}
    forge(party, "commit/1.k/0", {"payloads": {"0": mine}, "notes": {}, "writer": 0})
    forge(party, "said/1.k/1", {"region": 1, "incarnation": 9, "payload": mine, "note": None})
    send(regions, "k")
    for arrived in land(regions, "k"):
        check(arrived, 2, [0, 1])
    assert regions[0].counts()["rejected_record"] > 0


def test_a_true_record_means_nothing_elsewhere(party):
    """A stranger copies what the regions signed themselves to where it would help the stranger."""
    regions = party.run(2)
    send(regions, "a")
    land(regions, "a")
    commits = folder(party) / "run" / "commit"
    (commits / "1.b").mkdir()
    (commits / "1.b" / "0").write_bytes((commits / "1.a" / "0").read_bytes())
    send(regions, "b", 1)
    for arrived in land(regions, "b"):
        check(arrived, 2, [0, 1], 1)


def test_old_heartbeats_that_are_written_again_revive_nobody(party):
    regions = party.run(2)
    place = folder(party) / "run" / "beat" / "1"
    old = []
    while len(old) < 2:
        old = [*old, place.read_bytes()] if place.read_bytes() not in old else old
        time.sleep(0.02)
    time.sleep(0.3)
    vanish(regions[1])

    def revive():
        old.reverse()
        place.write_bytes(old[0])
        return regions[0].living() == {0}

    until(revive)
    for _ in range(20):
        assert revive()
        time.sleep(0.05)


def test_a_pause_of_the_observer_counts_as_one_beat(party):
    """When a whole machine was suspended, nobody on it may be taken for dead or late."""
    (one,) = party.run(1)
    beats, passed = one._office.beats, []
    look = beats._look

    def slow(passed_s):
        passed.append(passed_s)
        time.sleep(1.0 if len(passed) == 1 else 0.0)
        look(passed_s)

    beats._look = slow
    until(lambda: len(passed) > 3)
    assert max(passed[1:]) <= TIMING.beat_s


def altered(change):
    """Options of a damaged transport: `change` is done to every payload that is published."""

    def apply(region):
        put = region._office.transport.put
        region._office.transport.put = lambda name, data, readers: put(name, change(data), readers)

    return apply


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda d: d[:-3] + bytes([d[-3] ^ 1]) + d[-2:], id="flipped bit"),
        pytest.param(lambda d: d[: len(d) // 2], id="cut"),
        pytest.param(lambda d: b"", id="empty"),
    ],
)
def test_a_damaged_payload_is_rejected_counted_and_as_if_missing(party, change):
    regions = party.run(3)
    altered(change)(regions[1])
    send(regions, "k")
    # The region itself has its payload whole, but that is not enough for the others.
    for arrived in land(regions, "k"):
        check(arrived, 3, [0, 2])
    assert regions[0].counts()["rejected_damaged"] >= 3


@pytest.mark.parametrize("what", ["run", "key", "region", "shape", "dtype", "names"])
def test_a_payload_of_something_else_is_rejected_counted_and_as_if_missing(
    party, what, monkeypatch
):
    regions = party.run(3)
    pack = wire.pack

    def other(run_id, key, region, arrays):
        if region == 1 and what in ("run", "key"):
            return pack(run_id + "x" * (what == "run"), key + "x" * (what == "key"), 1, arrays)
        if region == 1 and what == "region":
            return pack(run_id, key, 2, arrays)
        return pack(run_id, key, region, arrays)

    monkeypatch.setattr(wire, "pack", other)
    arrays = payload(1)
    if what == "shape":
        arrays["w"] = arrays["w"].T
    if what == "dtype":
        arrays["w"] = arrays["w"].astype(np.float16)
    if what == "names":
        arrays["v"] = arrays.pop("w")
    send([regions[0], regions[2]], "k")
    regions[1].start("k", arrays)
    for arrived in land([regions[0], regions[2]], "k"):
        check(arrived, 3, [0, 2])
    assert regions[0].counts()["rejected_content"] >= 1
    if what in ("shape", "dtype", "names"):
        # This region trains something else, and must hear of it.
        with pytest.raises(exchange.Rejected):
            regions[1].finish("k", LIKE)
