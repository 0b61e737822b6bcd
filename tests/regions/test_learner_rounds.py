"""Decoupled DiLoCo between jobs: quorum, grace, late ones, replay; against NumPy and the mesh."""

import contextlib

import jax
import numpy as np
import oracle
import pytest
from engine.test_oracle import close
from oracle import merging
from regions.learners import (
    MOST,
    PATTERN,
    TIMING,
    ByHand,
    Learner,
    R,
    assert_equal,
    derive,
    finish,
    look,
    method,
    records,
    run,
    table,
)
from regions.party import at_once, over_peers, until
from regions.together import engine
from rules.test_merge import ByInverseNorm

import lowcomm_jax as lc
from lowcomm_jax.checkpoint import Checkpoints
from lowcomm_jax.network import uniform
from lowcomm_jax.store.errors import Parted

ROUNDS, SPEEDS = 14, (1.0, 0.62, 0.8)
SGD = oracle.Momentum(0.05, 0.8)

RADIAL = "radial_directional", merging.radial_directional()
# method, speeds, away, (merge rule, the same in NumPy)
CASES = {
    "quorum 1": ((1, 0.0), SPEEDS, (), RADIAL),
    "quorum 2": ((2, 0.0), SPEEDS, (), RADIAL),
    "everyone": ((3, 0.0), SPEEDS, (), RADIAL),
    "grace": ((1, 0.9, 3, 2), SPEEDS, (), RADIAL),
    "away for rounds": ((2, 0.0, 5, 3), (1.0, 1.0, 1.0), ((2, 4, 15),), RADIAL),
    # Of rounds whose members differ: norms travel with reports.
    "norms": ((2, 0.0), SPEEDS, (), (ByInverseNorm(), merging.inverse_norms)),
}


@pytest.mark.parametrize("period", [3, 9])
def test_rounds_open_when_the_schedule_says(period, learners):
    made = method(period=period)
    jobs = learners(made)
    run(jobs, 5)
    for one in jobs:
        reported = [(step, number) for step, kind, number in one.log if kind == "report"]
        assert reported[:5] == [(made.schedule.opens(number), number) for number in range(5)]


QUICK = "quorum 2", "norms"


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(x, marks=pytest.mark.slow) for x in CASES if x not in QUICK)]
)
def test_anchors_are_those_of_the_records_replayed(name, learners):
    given, speeds, away, (rule, merge) = CASES[name]
    jobs = learners(method(*given, merge=rule))
    run(jobs, ROUNDS, speeds, away=away)
    admitted = records(jobs[0], ROUNDS)
    assert all(one.admitted == admitted for one in jobs)
    assert {len(who) for who in admitted.values()} <= set(range(given[0], R + 1))
    assert_equal(jobs)
    finish(jobs)
    assert_equal(jobs)
    anchors, values, momenta, before = derive(jobs, admitted, SGD, merge)
    for one, anchor, own, was in zip(jobs, anchors, values, before, strict=True):
        for key in anchor:
            close(one.before[key], was[key], f"{one.region} {key} before the end")
            close(one.anchor()[key], anchor[key], f"{one.region} {key}")
            close(one.values()[key], own[key], f"values of {one.region} {key}")
            close(np.array(_momentum(one, key)), momenta[one.region][key], f"momentum {key}")


def _momentum(one, key):
    traces = [x for state in one.state.outer for x in jax.tree_util.tree_leaves_with_path(state)]
    return next(x[0] for path, x in traces if jax.tree_util.keystr(path).endswith(f"['{key}']"))


def test_with_everyone_equal_they_are_the_mesh_bit_for_bit(learners):
    made = method(3, 0.0)
    jobs = learners(made)
    run(jobs, ROUNDS)
    data = jobs[0].data
    steps = jobs[0].step_number
    with jax.numpy_dtype_promotion("standard"):
        one = engine(made, R)
        state = one.init(oracle.make_params())
        state, _ = one.run(state, [oracle.step_batch(data, t) for t in range(1, steps + 1)])
    for job in jobs:
        assert job.step_number == steps
        for key, value in job.anchor().items():
            np.testing.assert_array_equal(value, state.anchor[key][0], key)
            np.testing.assert_array_equal(
                job.values()[key], state.inner.params[key][job.region], key
            )


@pytest.mark.slow
def test_a_grace_window_admits_who_is_half_a_step_behind(learners):
    """Learner 1 steps at ticks 2, 4, ...: a round of tick 1 waits for it, as overlap hides that."""
    made, speeds = [method(1, g, 4, 3) for g in (0.0, 0.9)], (1.0, 0.5)
    found = []
    for each in made:
        jobs = learners(each, 2, run_id=f"run{len(found)}")
        run(jobs, 12, speeds)
        found.append(records(jobs[0], 12))
    alone, patient = [[who for k, who in sorted(x.items()) if k >= 3] for x in found]
    assert set(alone) == {(0,)} and patient.count((0, 1)) >= 7


@pytest.mark.slow
def test_who_is_late_lands_what_it_never_reported_to_and_is_replaced(learners):
    jobs = learners(method(1, 0.0))
    run(jobs, 8, (1.0, 1.0, 0.3))
    late = jobs[2]
    missed = [k for k, who in late.admitted.items() if 2 not in who]
    reported = [k for _, kind, k in late.log if kind == "report"]
    assert missed and set(late.admitted) == set(range(8))
    assert set(missed) - set(reported), "it lands also what it never reported to"
    # All of its values are the anchor's, but for the steps since each fragment landed.
    last = {p: max(at for at, kind, k in late.log if kind == "land" and k % 3 == p) for p in (0, 1)}
    for p, key in enumerate("ac"):
        if last[p] == late.step_number:
            np.testing.assert_array_equal(late.values()[key], late.anchor()[key])
    assert any(at == late.step_number for at in last.values())


def test_who_dies_between_report_and_record_counts_and_nobody_waits(learners):
    """Learner 0 writes its payload and its report, and is gone: another one writes the record."""
    jobs = learners(method(2, 0.0))
    run(jobs, ROUNDS, last=3)
    dead, living = jobs[0], jobs[1:]
    dead.step(ROUNDS)
    number = dead.log[-1][2]
    assert dead.log[-1][1] == "report" and number not in records(living[0], number)
    dead.loop.carrier.rounds._publish()
    dead.exchange._context.heartbeat.stop(leaving=False)
    run(living, ROUNDS, (1.0, 1.0), first=4)
    admitted = records(living[0], ROUNDS)
    assert 0 in admitted[number] and all(who == (1, 2) for k, who in admitted.items() if k > number)
    assert_equal(living)
    *_, before = derive(jobs, admitted, SGD)
    for one in living:
        for key, value in one.anchor().items():
            close(value, before[one.region][key], key)


@pytest.mark.slow
def test_records_replayed_from_the_start_give_the_same_bits(learners, store_party):
    """A learner without anything lands all rounds that were committed, in their order."""
    jobs = learners(method(1, 0.0))
    run(jobs, ROUNDS, SPEEDS)
    jobs[2].exchange.close(linger_s=0.0)
    own = store_party.region(2, R, timing=TIMING)
    own.join(20.0)
    fresh = Learner(2, own, method(1, 0.0), table())
    fresh.step(ROUNDS)
    look([fresh])
    fresh.step(ROUNDS)
    assert fresh.loop.carrier.landed == ROUNDS and fresh.admitted == jobs[0].admitted
    assert_equal([jobs[0], fresh])
    for mine, theirs in zip(*(jax.tree.leaves(x.state.outer) for x in (fresh, jobs[0]))):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.slow
def test_all_stop_with_reports_under_way_and_go_on_bit_for_bit(learners, tmp_path):
    made, at = method(2, 0.0, codec={"name": "int4", "error_feedback": 0.9}), 7
    whole = learners(made, run_id="whole")
    run(whole, ROUNDS, SPEEDS)
    jobs = learners(made, run_id="parts")
    run(jobs, ROUNDS, SPEEDS, last=at)
    assert any(one.state.in_flight for one in jobs)
    for one in jobs:
        with contextlib.closing(Checkpoints(tmp_path / f"{one.region}")) as saved:
            saved.save(one.state, extra={}, config={}, method=made)
    positions = [one.loop.carrier.landed for one in jobs]
    at_once(lambda one: one.exchange.close(linger_s=0.0), jobs)
    assert len(set(positions)) == 1
    again = learners(made, run_id="parts", step=positions[0])
    for one in again:
        with contextlib.closing(Checkpoints(tmp_path / f"{one.region}")) as saved:
            one.state = saved.restore(one.one, oracle.make_params()).state
        assert one.exchange.awaited
        one.one.reconnect(one.state)
    look(again)
    run(again, ROUNDS, SPEEDS, first=at + 1)
    for mine, theirs in zip(again, whole, strict=True):
        assert mine.step_number == theirs.step_number
        assert_equal([mine, theirs])
        assert_equal([mine, theirs], "values")


@pytest.mark.slow
def test_payloads_stay_until_all_that_live_have_passed_them(learners):
    jobs = learners(method(1, 0.0), keep=1)
    run(jobs, ROUNDS, (1.0, 1.0, 1.0), away=((2, 3, MOST),), last=9)
    slow = jobs[2]
    store = slow.exchange._context.store
    ahead = jobs[0].loop.carrier.landed
    assert (
        ahead > slow.loop.carrier.landed + 3
        and len(store.list("blob/")) > ahead - slow.loop.carrier.landed
    )
    run(jobs, ROUNDS, first=10)
    assert_equal(jobs)
    for one in jobs:
        one.exchange._context.heartbeat.refresh()

    def left():
        look(jobs)
        for one in jobs:
            one.loop.carrier.rounds._gc.sweep()
        return len(store.list("blob/"))

    until(lambda: left() <= R)


def test_outages_are_refused_between_jobs_and_rounds_where_regions_count_steps(store_party):
    wrong = lc.methods.decoupled_diloco(4, 3, 2, outages=[(0, 2, 3)], pattern=PATTERN)
    with pytest.raises(ValueError, match=r"outages=.*as often away, as they are; leave it out"):
        engine(wrong, R, store_party.region(0, R))
    with pytest.raises(ValueError, match=r"use exchange\.store"):
        engine(method(), R, over_peers(store_party.url, 0, R, "other"))
    with pytest.raises(ValueError, match="regions count steps here"):
        one = engine(lc.methods.diloco(4), 2)
        one.run(one.init(oracle.make_params()), [], rounds=3)


def test_a_run_that_has_not_landed_its_rounds_cannot_end(learners):
    jobs = learners(method(1, 0.0), 1)
    run(jobs, 5, (1.0,), last=2)
    with pytest.raises(ValueError, match="rounds have landed here, of 5"):
        jobs[0].one.finish(jobs[0].state)


def test_an_overlap_that_cannot_hide_a_round_is_refused_at_the_start(store_party):
    own, network = store_party.region(0, R), uniform(R, 1.0, 0.05, compute_s=0.4)
    with pytest.raises(ValueError, match="writing, committing and fetching") as error:
        engine(method(), R, own, network=network).init(oracle.make_params())
    assert "overlap=2" in str(error.value) and "use overlap >= 3" in str(error.value)
    engine(method(1, 0.0, 4, 3), R, own, network=network).init(oracle.make_params())


@pytest.mark.slow
def test_who_is_not_admitted_keeps_its_residual_as_if_it_had_not_sent(learners):
    """Its report changed the residual; the others went on without it."""
    made = method(1, 0.0, codec={"name": "int4", "error_feedback": 0.9})
    one, other = learners(made, 2)
    for _ in range(2):
        one.step(ROUNDS), other.step(ROUNDS)
        look([one])  # alone: the other one has looked at nothing, and is late
    assert records(one, 2) == {0: (0,), 1: (0,)}
    look([one, other])
    assert any(np.any(x) for x in jax.tree.leaves(other.state.codec[0])), "it has sent"
    while 0 not in other.admitted:
        other.step(ROUNDS)
    assert other.log[:2] == [(1, "report", 0), (2, "report", 1)] and 1 not in other.admitted[0]
    # At this very step it has landed the round, and has not reported to the next of the fragment.
    assert not any(np.any(x) for x in jax.tree.leaves(other.state.codec[0]))
    assert any(np.any(x) for x in jax.tree.leaves(one.state.codec[0]))


@pytest.mark.slow
@pytest.mark.parametrize("heal", ["stop", "majority"])
def test_who_has_another_anchor_is_found_out_before_anything_lands(learners, heal):
    """Learner 1's fragment 0 is altered: its next report to it names another digest."""
    jobs = learners(method(2, 0.0), heal=heal)
    run(jobs, ROUNDS, last=4)
    odd, others = jobs[1], [jobs[0], jobs[2]]
    odd.state = odd.state.replace(anchor={**odd.state.anchor, "a": odd.state.anchor["a"] + 1e-6})
    found, number = [], max(k for one in jobs for _, kind, k in one.log if kind == "report")
    for tick in range(5, 30):
        ByHand.now = float(tick)
        for one in list(jobs):
            try:
                one.step(ROUNDS)
            except Parted as error:
                found.append((one.region, error.heals))
                jobs.remove(one)
                # As a job that ends: the others do not wait for it.
                one.exchange._context.heartbeat.stop()
        if not jobs:
            break
        look(jobs)
    assert found == [(1, heal == "majority")], "it alone: the others agree"
    admitted = [k for k, who in others[0].admitted.items() if 1 not in who]
    assert not admitted or min(admitted) > number
    assert_equal(others)


@pytest.mark.slow
def test_a_run_may_go_on_after_its_end(learners):
    """The last synchronisation counts as a round of each fragment; numbers go on from there."""
    jobs = learners(method(3, 0.0))
    run(jobs, 6)
    finish(jobs)
    assert_equal(jobs)
    first = jobs[0].step_number + 1
    run(jobs, 15, first=first)
    assert_equal(jobs)
    assert records(jobs[0], 15, since=9) == dict.fromkeys(range(9, 15), (0, 1, 2))
