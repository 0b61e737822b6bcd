"""What is forged, replayed, damaged or of another run is counted and ignored."""

import shutil
import time

import numpy as np
import pytest
from regions.faults import folder, forge, vanish
from regions.party import SECRET, land, land_together, payload, send, until

from lowcomm_jax import exchange
from lowcomm_jax.store import wire
from lowcomm_jax.store.commits import Job
from lowcomm_jax.store.errors import Unreadable
from lowcomm_jax.store.records import FORMAT
from lowcomm_jax.store.secret import Seal


def test_a_forged_epoch_begins_nothing(party):
    """It takes a number in the slot, and not the epoch."""
    forge(party, "epoch/1.0", {"roster": {"0": 1}})
    regions = party.run(2)
    assert {x._context.heartbeat.own.epoch for x in regions} == {1}
    assert regions[0]._context.store.list("epoch/") == ["epoch/1.0", "epoch/1.1"]


def test_another_secret_can_not_join(party):
    party.run(2)
    for other in (b"a secret of a stranger", None):
        with pytest.raises(ValueError, match="another secret"):
            party.region(1, 2, secret=other).join(1.0)


def test_a_folder_that_goes_away_while_a_region_joins_is_waited_for(store_party, monkeypatch):
    """Its record is not that of another secret: there is none."""
    store_party.run(1)
    again = store_party.region(0, 1)
    read, gone = again._context.store.read, iter([True])

    def away(key, nbytes=0):
        return None if key == "run" and next(gone, False) else read(key, nbytes)

    monkeypatch.setattr(again._context.store, "read", away)
    again.join(20.0)
    assert not next(gone, False) and again.epoch


def test_who_has_other_settings_is_refused_and_what_differs_is_named(store_party):
    store_party.run(1, identity={"seed": "1", "period": "4"})

    def joins(count=1, **identity):
        store_party.region(0, count, identity=identity).join(1.0)

    with pytest.raises(ValueError, match="count is 1 there, 3 here"):
        joins(3, seed="1", period="4")
    with pytest.raises(ValueError, match=r"seed is '1' there, '2' here$"):
        joins(seed="2", period="4")
    with pytest.raises(ValueError, match="period is '4' there, None here"):
        joins(seed="1")


def test_a_run_of_another_format_is_refused_by_that(store_party):
    """Whatever else its record holds: the secret is the same."""
    later = {"format": 99, "run": "run", "colour": "blue"}
    place = folder(store_party) / "run" / "run"
    place.parent.mkdir(parents=True)
    place.write_bytes(Seal("run", SECRET).close("run", later, 0))
    with pytest.raises(ValueError, match=f"writes format 99, this one writes {FORMAT}"):
        store_party.run(1)


def test_runs_do_not_meet(party):
    regions = party.run(1) + party.run(1, run_id="other")
    for x in regions:
        x.start("k", payload(x.count + len(x._context.run_id)))
    for x in regions:
        arrived = x.finish("k")
        expected = payload(x.count + len(x._context.run_id))["w"]
        np.testing.assert_array_equal(arrived.arrays["w"], expected)


def test_forged_records_are_ignored_and_counted(party):
    regions = party.run(2)
    mine = {"digest": "0" * 64, "nbytes": 10}
    own = {"incarnation": 1, "payload": mine}
    forge(party, "round/1/k/commit.0", {"admitted": {"0": own}, "terms": {}, "writer": 0})
    forge(party, "round/1/k/announce.1.1.0", {"payload": mine, "terms": {}})
    forge(party, "round/1/k/confirm.1.1.0", {"holds": {"0": "0" * 64}})
    send(regions, "k")
    land_together(regions, "k", [0, 1])
    assert regions[0].counts()["rejected_record"] > 0


ODD = {"incarnation": 9, "colour": "blue"}


def test_records_of_another_version_stop_nobody(party):
    """Without a secret anybody can sign them, and so does a program of another version."""
    regions = party.run(2, secret=None)
    send(regions, "a")
    land(regions, "a")
    nobody, run = Seal("run", b""), folder(party) / "run"
    folder_of = "round/1/k"
    keys = [f"{folder_of}/{kind}.{r}.1.0" for kind in ("announce", "confirm") for r in range(2)]
    for key in (*keys, f"{folder_of}/commit.0", "epoch/2.0"):
        (run / key).parent.mkdir(parents=True, exist_ok=True)
        (run / key).write_bytes(nobody.close(key, ODD, FORMAT + 1))

    def read_by_both():
        """Again and again: their own beats may take the place of these before they are read."""
        (run / "beat" / "0").write_bytes(nobody.close("beat/0", ODD, FORMAT + 1))
        (run / "beat" / "1").write_bytes(nobody.close("beat/1", ODD, FORMAT + 1))
        return all(x.counts().get("rejected_record") for x in regions)

    until(read_by_both)
    send(regions, "k", 1)
    land_together(regions, "k", [0, 1], 1)


@pytest.mark.parametrize("signed", [False, True])
def test_a_heartbeat_that_cannot_be_read_stops_nobody(party, signed):
    """Not one that is well signed, and odd, either: the region's next one takes its place."""
    regions, odd = party.run(2), b"[" * 200_000
    if signed:
        odd = Seal("run", SECRET).close("beat/1", ODD)
    place = folder(party) / "run" / "beat" / "1"
    # Again and again: the region's own beats may take its place before it is read.
    until(lambda: place.write_bytes(odd) and regions[0].counts().get("rejected_record"))
    send(regions, "k")
    land_together(regions, "k", [0, 1])


@pytest.mark.parametrize("key", ["commit.0", "announce.1.1.0", "confirm.1.1.0"])
def test_a_record_that_is_well_signed_and_odd_ends_who_reads_it(party, key):
    """Another reader may take it for what it says, and land that: to skip it parts them."""
    regions = party.run(2)
    place = folder(party) / "run" / "round" / "1" / "k" / key
    place.parent.mkdir(parents=True)
    place.write_bytes(Seal("run", SECRET).close(f"round/1/k/{key}", ODD))
    send(regions[:1], "k")
    if key.startswith("confirm"):  # which is read once there is an announcement
        regions[1]._context.commit_log.confirm = lambda name, job, holds: holds
        send(regions[1:], "k")
    with pytest.raises(Unreadable, match=f"{key} is signed .* and cannot be read"):
        regions[0].finish("k")


def test_a_true_record_means_nothing_elsewhere(party):
    """A stranger copies what the regions signed themselves to where it would help the stranger."""
    regions = party.run(2)
    send(regions, "a")
    land(regions, "a")
    rounds = folder(party) / "run" / "round" / "1"
    shutil.copytree(rounds / "a", rounds / "b")
    send(regions, "b", 1)
    land_together(regions, "b", [0, 1], 1)


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
        return regions[0].steps().keys() == {0}

    until(revive)
    for _ in range(20):
        assert revive()
        time.sleep(0.05)


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
    put = regions[1]._context.transport.put
    regions[1]._context.transport.put = lambda name, data: put(name, change(data))
    send(regions, "k")
    # The region itself has its payload whole, but that is not enough for the others.
    land_together(regions, "k", [0, 2])
    assert regions[0].counts()["rejected_damaged"] >= 3


@pytest.mark.parametrize("what", ["run", "region", "job", "shape", "dtype", "names"])
def test_a_payload_of_something_else_is_rejected_counted_and_as_if_missing(
    party, what, monkeypatch
):
    regions = party.run(3)
    pack = wire.pack

    def other(run_id, job, serial, arrays):
        if job.region == 1:
            run_id += "x" * (what == "run")
            job = Job(2 if what == "region" else 1, 2 if what == "job" else 1)
        return pack(run_id, job, serial, arrays)

    monkeypatch.setattr(wire, "pack", other)
    arrays = payload(1)
    if what == "shape":
        arrays["w"] = arrays["w"].reshape(1, 2, 3)
    if what == "dtype":
        arrays["w"] = arrays["w"].astype(np.float16)
    if what == "names":
        arrays["v"] = arrays.pop("w")
    send([regions[0], regions[2]], "k")
    regions[1].start("k", arrays)
    land_together([regions[0], regions[2]], "k", [0, 2])
    assert regions[0].counts()["rejected_content"] >= 1
    if what in ("shape", "dtype", "names"):
        # This region trains something else, and must hear of it.
        with pytest.raises(exchange.Rejected):
            regions[1].finish("k")


@pytest.mark.parametrize("name", ["x", "1.tmp", "-3", "٣", "1" * 40, "3_0"])
def test_files_whose_names_are_no_numbers_are_skipped_and_counted(party, name):
    """Left there by a stranger, an editor, or a tool that copies folders."""
    for place in ("epoch", "born/0", "born/1"):
        folder_of = folder(party) / "run" / place
        folder_of.mkdir(parents=True, exist_ok=True)
        for odd in (name, f"{name}.0"):
            (folder_of / odd).write_bytes(b"whatever")
    regions = party.run(2)
    assert {x._context.heartbeat.own.epoch for x in regions} == {1}
    send(regions, "k")
    land_together(regions, "k", [0, 1])
    assert all(x.counts()["unknown_key"] >= 2 for x in regions)
