"""Who may delete can hold a run up or end it, but not make its anchors part unnoticed."""

import contextlib
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import oracle
import pytest
from regions.faults import folder, vanish
from regions.party import SECRET, check, land, rounds, send, until
from regions.together import batches, engine, rows, values

import lowcomm_jax as lc
from lowcomm_jax import exchange
from lowcomm_jax.store.errors import Lost, Parted

R, PERIOD, STEPS = 3, 4, 40
COMMITS, CONFIRMS = "round/*/*/commit.*", "round/*/*/confirm.*"
# What is deleted from under a run, and how a job may end by it.
EXPECTED = {
    "round/*/*/announce.*": (),
    CONFIRMS: (Parted,),
    COMMITS: (Parted,),
    "beat": (),
    "born": (),
    "epoch": (),
    "blob": (Lost,),
}


def delete(run, *prefixes):
    """Everything under these names that is there."""
    for path in (path for prefix in prefixes for path in run.glob(prefix)):
        with contextlib.suppress(OSError):  # it is written to meanwhile
            path.unlink() if path.is_file() else shutil.rmtree(path)


@contextlib.contextmanager
def vandal(run, *prefixes):
    """Deletes again and again."""
    enough = threading.Event()

    def act():
        while not enough.wait(0.03):
            delete(run, *prefixes)

    thread = threading.Thread(target=act)
    thread.start()
    yield
    enough.set()
    thread.join()


def method():
    return lc.methods.diloco(PERIOD, lc.outer.nesterov(0.6, 0.85))


def ends(make, given):
    """The anchor of each region that has trained on `given(region)`, or what it raises.

    None of them may hang.
    """

    def job(region, own):
        with jax.numpy_dtype_promotion("standard"):
            one = engine(method(), R, own)
            state, _ = one.run(one.init(oracle.make_params()), given(region))
            return values(state)[0]

    with ThreadPoolExecutor(R) as pool:
        made = list(pool.map(make, range(R)))
        running = [pool.submit(job, r, made[r]) for r in range(R)]
        try:
            until(lambda: all(one.done() for one in running), 60)
        finally:
            for one in made:
                one._context.closing.set()
    return [one.exception() or one.result() for one in running]


@pytest.mark.parametrize("what", EXPECTED)
def test_the_anchors_stay_the_same_or_the_run_says_why_not(what, between, tmp_path):
    timing = exchange.Timing(beat_s=0.1, dead_after_s=1.0, answer_s=0.5, deadline_s=1.5)
    data = batches(STEPS, R)

    def given(region):
        for batch in data:
            time.sleep(0.02)
            yield rows(batch, region)

    made = between(R, timing, secret=SECRET)
    with contextlib.ExitStack() as stack:

        def make(region):
            own = made(region)
            if region == 0:
                stack.enter_context(vandal(tmp_path / "run", what))
            return own

        found = ends(make, given)
    anchors = [one for one in found if not isinstance(one, EXPECTED[what])]
    assert anchors and not any(isinstance(one, BaseException) for one in anchors), found
    for anchor in anchors[1:]:
        jax.tree.map(np.testing.assert_array_equal, anchor, anchors[0])


@pytest.mark.parametrize(("deleted", "parts"), [([COMMITS], False), ([COMMITS, CONFIRMS], True)])
def test_without_its_record_an_exchange_is_agreed_on_as_before(store_party, deleted, parts):
    """Unless who held what is deleted, too: the one way there is to part an exchange.

    With anchors the digest of the next payload tells (below).
    """
    timing = exchange.Timing(beat_s=0.1, dead_after_s=5.0, deadline_s=0.5)
    regions = store_party.run(R, timing=timing)
    send(regions[:2], "k")
    together = land(regions[:2], "k")[0].participants.tolist()
    assert together == [True, True, False]
    delete(folder(store_party) / "run", *deleted)
    send(regions[2:], "k")
    assert (land(regions[2:], "k")[0].participants.tolist() != together) is parts


def test_anchors_that_parted_so_are_noticed_by_all(between, tmp_path):
    timing = exchange.Timing(beat_s=0.1, dead_after_s=5.0, deadline_s=2.0)
    data, gone, landed = batches(STEPS, R), threading.Event(), threading.Event()

    def given(region):
        for step, batch in enumerate(data, 1):
            if step == PERIOD and region == 2:
                assert gone.wait(20)
            if step == PERIOD + 1:  # the first landing is over
                if region == 0:
                    delete(tmp_path / "run", COMMITS, CONFIRMS)
                    gone.set()
                landed.set() if region == 2 else landed.wait(20)
            time.sleep(0.02)
            yield rows(batch, region)

    found = ends(between(R, timing, secret=SECRET), given)
    assert [type(one) for one in found] == [Parted] * R
    assert len({str(one) for one in found}) == 1 and "region 2: " in str(found[0])


def test_without_the_record_of_the_run_all_wait_until_it_is_back(store_party, caplog):
    """As for a folder that is not mounted; jobs say which record they miss."""
    regions = store_party.run(2)
    rounds(regions, 0, 1)
    record = folder(store_party) / "run" / "run"
    kept = record.read_bytes()
    record.unlink()
    send(regions, "1", 1)
    until(lambda: all(x.counts().get("outage") for x in regions))
    assert "the run's record 'run' is not there" in caplog.text
    time.sleep(1.5)
    assert not any(x.ready("1") for x in regions)
    record.write_bytes(kept)
    # Beats can be read meanwhile and not be written: a region may have been taken for dead.
    first, second = land(regions, "1")
    for arrived in (first, second):
        check(arrived, 2, np.flatnonzero(first.participants), 1)


@pytest.mark.parametrize("gone", [("born",), ("born", "beat/1"), ("beat/1",)])
def test_a_job_that_starts_again_is_not_taken_for_the_one_before(store_party, gone):
    """Else it would go on from nothing where that one was."""
    regions = store_party.run(2)
    rounds(regions, 0, 2)
    vanish(regions[1])
    delete(folder(store_party) / "run", *gone)
    again = store_party.region(1, 2)
    again.join(20.0)
    assert again._context.heartbeat.own.incarnation == 2 and not again.awaited
    again.want_state()
    until(lambda: regions[0].state_transfer.asking().keys() == {1})


def test_without_the_records_of_the_epochs_nobody_can_come_in(store_party):
    regions = store_party.run(2)
    vanish(regions[1])
    delete(folder(store_party) / "run", "epoch")
    with pytest.raises(TimeoutError, match="no record of when it began"):
        store_party.region(1, 2).join(1.5)
