"""Regions that die, leave, come back or are replaced, and a store that goes away."""

import dataclasses
import functools
import itertools
import shutil
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest
from regions.faults import folder, outage, vanish
from regions.party import LIKE, TIMING, at_once, check, land, listen_to, send, until

from lowcomm_jax import exchange
from lowcomm_jax.rounds import membership
from lowcomm_jax.store.context import until_answered
from lowcomm_jax.store.kv import MetricsCounter, Store
from lowcomm_jax.store.records import Beat, Epoch
from lowcomm_jax.store.secret import Seal
from lowcomm_jax.store.slots import Slots

FAR_S = 30.0
"""Seconds that nothing here takes on any machine; what would be waited for wrongly takes longer."""
PATIENT = dataclasses.replace(TIMING, dead_after_s=300.0)


def test_who_waits_in_another_run_is_told_in_what_it_differs(party, monkeypatch, caplog):
    """Each sees the other's run: as soon as it has waited for a while, and at the end."""
    monkeypatch.setattr(membership, "_LOOKS_AROUND_S", 0.5)
    settings = {"seed": "1", "method.period": "6"}
    here = party.region(0, 2, run_id="a", identity=settings)
    there = party.region(1, 2, run_id="b", identity={**settings, "seed": "2"})
    strangers = party.region(1, 2, run_id="c", identity={}, secret=b"a stranger's secret")

    def waits_in_vain(region):
        with pytest.raises(TimeoutError) as caught:
            region.join(2.0)
        return str(caught.value)

    said = at_once(waits_in_vain, [here, there, strangers])
    told = "the folder also holds a run whose config differs in seed: 2 instead of 1"
    assert said[0] == f"regions [1] of run 'a' were not there in time; {told}"
    assert said[1].endswith("differs in seed: 1 instead of 2") and "holds" not in said[2]
    assert f"region 0 still waits for the others; {told}" in caplog.text


def test_a_dead_region_is_left_out_before_the_deadline(party):
    """That is for those that live, and ten minutes away."""
    regions = party.run(3)
    vanish(regions[1])
    began = time.monotonic()
    alive = [regions[0], regions[2]]
    send(alive, "k")
    for arrived in land(alive, "k"):
        check(arrived, 3, [0, 2])
    assert time.monotonic() - began < FAR_S
    assert regions[0].steps().keys() == {0, 2}
    vanish(regions[0])
    send(alive[1:], "alone", 1)
    check(land(alive[1:], "alone")[0], 3, [2], 1)


def test_a_region_that_leaves_is_not_waited_for(party):
    regions = party.run(2, timing=PATIENT)
    regions[1].close(linger_s=0.0)
    began = time.monotonic()
    send(regions[:1], "k")
    check(land(regions[:1], "k")[0], 2, [0])
    assert time.monotonic() - began < FAR_S


def test_a_region_comes_back_while_the_others_go_on(party):
    regions = party.run(3)
    vanish(regions[2])
    alive = regions[:2]
    send(alive, "a")
    land(alive, "a")
    again = party.region(2, 3)
    began = time.monotonic()
    again.join(2 * FAR_S)
    assert time.monotonic() - began < FAR_S
    # Nobody waits for it before it has sent something.
    began = time.monotonic()
    send(alive, "b", 1)
    land(alive, "b")
    assert time.monotonic() - began < FAR_S
    check(listen_to(again, "b", LIKE), 3, [0, 1], 1)
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
    regions[0].state_transfer.give(9, {}, {})
    for x in regions:
        vanish(x)
    again = [party.region(r, 3) for r in range(2)]
    at_once(lambda x: x.join(1.0), again)
    assert again[0].state_transfer.newest() is None
    send(again, "k", 1)
    for arrived in land(again, "k"):
        check(arrived, 3, [0, 1], 1)


def test_who_comes_back_with_less_comes_into_the_run_of_the_furthest(party):
    for x in party.run(3):
        vanish(x)
    again = [party.region(r, 3) for r in range(3)]
    at_once(lambda x: x.join(20.0, step=5 if x.region == 0 else 9), again)
    assert [x.awaited for x in again] == [False, True, True]
    send(again[1:], "k")
    for arrived in land(again[1:], "k"):
        check(arrived, 3, [1, 2])
    again[0].want_state()
    until(again[1].state_transfer.owed)
    again[1].state_transfer.give(9, {}, {})
    assert again[0].state_transfer.newest()[0] == 9
    again[0].come_in()
    send(again, "l", 1)
    for arrived in land(again, "l"):
        check(arrived, 3, range(3), 1)


def test_who_has_nothing_of_a_run_does_not_begin_it_anew(party):
    """What the others have in their checkpoints would be replaced by its fresh state."""
    regions = party.run(2)
    regions[0].beat(1000)
    until(lambda: regions[1].steps()[0] == 1000)
    for x in regions:
        vanish(x)
    with pytest.raises(
        TimeoutError, match=r"regions \[1\] have no checkpoint .* steps \{0: 1000\}"
    ):
        party.region(1, 2).join(1.5)
    again = party.region(0, 2)
    again.join(1.5, step=900)
    assert again.awaited


def test_who_waits_in_a_run_that_has_ended_is_no_part_of_the_next_one(party):
    """Neither of its roster, where it would be waited for, nor kept waiting for a state."""
    regions = party.run(3)
    regions[2].want_state()
    until(lambda: regions[0].state_transfer.asking().keys() == {2})
    for x in regions[:2]:
        vanish(x)
    again = [party.region(r, 3) for r in range(2)]
    until(lambda: regions[2].steps().keys() == {2})
    waiting = threading.Thread(target=at_once, args=(lambda x: x.join(3.0), again))
    waiting.start()
    until(lambda: regions[2].steps().keys() == {0, 1, 2})
    assert not regions[2].state_transfer.donors()
    vanish(regions[2])
    waiting.join(20.0)
    send(again, "k")
    for arrived in land(again, "k"):
        check(arrived, 3, [0, 1])


def test_a_job_may_come_back_while_the_store_is_away(party):
    regions = party.run(2)
    vanish(regions[1])
    again = party.region(1, 2)
    joining = threading.Thread(target=again.join, args=(20.0,))
    with outage(party):
        joining.start()
        time.sleep(0.5)
    joining.join(20.0)
    assert again.steps().keys() == {0, 1} and not again.awaited


def test_equal_payloads_of_two_beginnings_are_not_one(party):
    """A run repeats what it sent after its checkpoint: what is removed must be the old one."""
    names = []
    for number in range(2):
        x = party.region(0, 1)
        x.join(1.5, step=number)
        send([x], "k")
        land([x], "k")
        names.append(x._context.commit_log.committed(f"{number + 1}/k").admitted[0].payload.digest)
        vanish(x)
    assert names[0] != names[1]


def test_a_region_that_slept_through_a_new_beginning_must_end(party):
    regions = party.run(2)
    sleeping = regions[1]._context.heartbeat
    sleeping._look = sleeping._beat = lambda *_: None
    vanish(regions[0])
    party.region(0, 2).join(1.5)
    del sleeping._look
    until(lambda: sleeping._over)
    with pytest.raises(exchange.Lost, match="begun anew without it"):
        send(regions[1:], "k")


def test_a_new_run_needs_everyone(party):
    with pytest.raises(TimeoutError, match=r"regions \[1, 2\] of run 'run'"):
        party.region(0, 3).join(0.5)


def test_a_replaced_job_must_end(party):
    regions = party.run(2)
    party.joined(1, 2)
    until(lambda: regions[1]._context.heartbeat._over)
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
            regions[0].passed_over("other")
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


def test_a_pause_of_the_observer_counts_as_one_beat(party):
    """When a whole machine was suspended, nobody on it may be taken for dead or late."""
    (one,) = party.run(1)
    heartbeat, passed = one._context.heartbeat, []
    look = heartbeat._look

    def slow(passed_s):
        passed.append(passed_s)
        time.sleep(1.0 if len(passed) == 1 else 0.0)
        look(passed_s)

    heartbeat._look = slow
    until(lambda: len(passed) > 3)
    assert max(passed[1:]) <= TIMING.beat_s


# -- who may join, decided from beats and records ---------------------------------------------


def among(region=0, count=3, epoch=2, dead=(), **beats):
    """The context of a region that has seen these beats."""
    own = Beat(1, epoch=epoch, awaited=True)
    latest = {int(name[1:]): beat for name, beat in beats.items()} | {region: own}
    heartbeat = SimpleNamespace(
        own=own, latest=lambda: latest, living=lambda certain=True: set(latest) - set(dead)
    )
    heartbeat.update, heartbeat.check = (lambda **changes: None), (lambda: None)
    closing = SimpleNamespace(waits=[], closes=False, is_set=lambda: closing.closes)
    closing.wait = lambda seconds: closing.waits.append(seconds) or closing.closes
    return SimpleNamespace(
        region=region,
        count=count,
        run_id="run",
        heal="stop",
        heartbeat=heartbeat,
        timing=exchange.Timing(beat_s=1.0),
        closing=closing,
        halted=threading.Event(),
        counter=MetricsCounter(),
        transport=SimpleNamespace(name="store", lingers=False),
    )


TRAINS = Beat(4, epoch=2, awaited=True)


@pytest.mark.parametrize(
    ("beat", "epoch", "goes_on"),
    [
        (TRAINS, 2, True),
        (TRAINS, 3, False),
        (msgspec.structs.replace(TRAINS, awaited=False), 2, False),
        (msgspec.structs.replace(TRAINS, wants=True), 2, False),
        (msgspec.structs.replace(TRAINS, paused=True), 2, False),
        (msgspec.structs.replace(TRAINS, epoch=0), 0, False),  # there is no run yet
    ],
)
def test_a_run_goes_on_where_one_trains(beat, epoch, goes_on):
    assert membership._run_goes_on([Beat(9), beat], epoch) is goes_on
    assert not membership._run_goes_on([], epoch)


def test_a_new_roster_are_the_furthest_of_those_who_came():
    latest = {0: Beat(3, step=7), 1: Beat(5, step=9), 2: Beat(2, step=9), 3: Beat(8, step=50)}
    assert membership._furthest(latest, {0, 1, 2}) == {1: 5, 2: 2}
    assert membership._furthest(latest, {0}) == {0: 3}


@pytest.mark.parametrize(
    ("steps", "coming", "fine"),
    [
        ((0, 0, 0), {0, 1}, True),
        ((0, 0, 9), {0, 1}, False),
        ((0, 5, 9), {0, 1}, True),
        ((0, 0, 9), {0, 1, 2}, True),
    ],
)
def test_who_is_fresh_begins_no_run_anew_that_another_may_have(steps, coming, fine):
    beats = {f"r{r}": Beat(1, step=step) for r, step in enumerate(steps) if r}
    context = among(**beats)
    if fine:
        membership._check_not_fresh(context, coming)
    else:
        with pytest.raises(TimeoutError, match=r"regions \[0, 1\] have no .* steps \{2: 9\}"):
            membership._check_not_fresh(context, coming)


def test_why_a_region_could_not_join():
    context = among(r2=Beat(1, epoch=3))
    context.store = SimpleNamespace(beside=lambda key: {})
    assert "regions [1] of run" in membership._why_not_in(context, {0, 2}, 3)
    told = membership._why_not_in(context, {0, 2}, 2)
    assert "regions [2] of run 'run' train, but there is no record" in told


def member(context):
    given = context.region, context.count, "stop"
    return membership.Membership(*given, lambda: context, 2)


@pytest.mark.parametrize(
    ("beats", "misses"),
    [
        ({"r1": TRAINS, "r2": TRAINS}, False),
        ({"r1": TRAINS}, True),
        ({"r1": TRAINS, "r2": Beat(1, epoch=2)}, True),  # it is only coming in
        ({"r1": TRAINS, "r2": Beat(1, epoch=1, awaited=True)}, True),  # of another past
        ({"r1": TRAINS, "r2": msgspec.structs.replace(TRAINS, wants=True)}, True),
        ({"r1": TRAINS, "r2": Beat(1, leaving=True, step=20)}, False),
        ({"r1": TRAINS, "r2": Beat(1, leaving=True, trained=20)}, False),
        ({"r1": TRAINS, "r2": Beat(1, leaving=True, step=19, trained=19)}, True),
        ({"r1": TRAINS, "r2": Beat(1, step=20)}, True),
    ],
)
def test_a_run_that_ends_without_somebody(beats, misses):
    """The lowest of those who are there says how it has ended."""

    def asked(region):
        others = {k: v for k, v in {"r0": TRAINS, **beats}.items() if k != f"r{region}"}
        left = {int(name[1:]) for name, beat in others.items() if beat.leaving}
        context = among(region, dead=left, **others)
        return member(context).misses(20)

    assert asked(0) is misses and not asked(1)


def test_steps_are_those_made_and_those_exchanged():
    context = among(r1=Beat(1, step=8, trained=5), r2=Beat(1, step=3, trained=9), dead=(2,))
    one = member(context)
    assert one.steps() == {0: 0, 1: 8}
    context.heartbeat.living = lambda certain=True: {0, 1, 2}
    assert one.steps() == {0: 0, 1: 8, 2: 9}


def test_the_furthest_of_those_who_train():
    trains = {"awaited": True, "epoch": 2}
    context = among(
        r1=Beat(1, step=8, trained=12, **trains),
        r2=Beat(1, step=9, **trains),
        r3=Beat(1, step=50, wants=True, **trains),
        r4=Beat(1, step=60, **trains),
        count=5,
        dead=(4,),
    )
    context.heartbeat.own = msgspec.structs.replace(context.heartbeat.own, step=70)
    one = member(context)
    assert one.frontier() == 12 and one.frontier(done=True) == 9
    context.heartbeat.living = lambda certain=True: {0, 3}
    assert one.frontier() == 0


def test_one_beat_is_waited_for_unless_more_are_asked_for():
    context, waited = among(), []
    context.heartbeat.wait_for_beats, told = waited.append, []
    context.heartbeat.update = lambda **changes: told.append((len(waited), changes))
    one = member(context)
    one.wait_for_beats(), one.wait_for_beats(3), one.come_in()
    assert waited == [1, 3, 2], "the second was made after it had read ours"
    assert told == [(2, {"awaited": True, "wants": False})]


def test_a_store_that_does_not_answer_is_asked_until_the_time_is_up(monkeypatch, caplog):
    context, now, answers, waits = among(), [100.0], [], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    context.store = SimpleNamespace(pauses=lambda: itertools.repeat(0.5))
    ask = functools.partial(until_answered, context, "joining")

    def wait(seconds):
        waits.append(seconds)
        now[0] += seconds

    def act():
        if not answers:
            raise exchange.StoreUnavailable("away")
        return answers.pop()

    context.closing.wait = wait
    with pytest.raises(exchange.StoreUnavailable):
        ask(act, 101.25)
    assert waits == [0.5, 0.5, 0.25] and len(caplog.records) == 1
    waits.clear()
    answers.append("found")
    assert ask(act, 0.0) == "found" and not waits
    context.halted.set()
    with pytest.raises(RuntimeError, match="joining was not finished when the exchange closed"):
        ask(act, now[0] + 9.0)


def test_the_newest_record_of_an_epoch_that_is_signed_counts(tmp_path):
    context = among()
    context.store = Store(f"file://{tmp_path}", "run", context.counter)
    context.slots = Slots(context.store, Seal("run", b""))
    assert membership._newest_epoch(context) == (0, {})
    for number, roster in ((2, {0: 1}), (4, {0: 3, 2: 1})):
        context.slots.create(f"epoch/{number}", Epoch(roster))
    context.store.write("epoch/7.0", b"junk")
    assert membership._newest_epoch(context) == (4, {0: 3, 2: 1})
    assert context.counter.read()["rejected_record"] == 1
