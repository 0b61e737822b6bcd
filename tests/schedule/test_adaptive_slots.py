"""CoCoDC's slots and scores from what is measured, given or drawn from the network."""

import jax
import numpy as np
import optax
import oracle
import pytest
from leaving import leaves
from oracle_runs import started, stream

import lowcomm_jax as lc
from lowcomm_jax import history
from lowcomm_jax.checkpoint import Checkpoints
from lowcomm_jax.schedule import Adaptive
from lowcomm_jax.state.train_state import SyncCounters
from lowcomm_jax.sync.measurements import Stopwatch

CUT = ("a|s", "b", "c")
NAMES = (("a", "s"), ("b",), ("c",))
R = 3


def make(method, **kwargs):
    return started(method, R, optax.sgd(0.05, momentum=0.8), **kwargs)


def drifts(state, step, last_sent):
    """||Theta_p - theta_p||_1 / (age numel) of every region and fragment, by hand."""
    theta, anchor = jax.tree.map(np.array, (state.inner.params, state.anchor))
    rows = np.zeros((R, len(NAMES)))
    for p, names in enumerate(NAMES):
        numel = sum(anchor[k][0].size for k in names)
        age = max(1, step - max(0, last_sent[p]))
        for r in range(R):
            rows[r, p] = sum(np.abs(anchor[k][0] - theta[k][r]).sum() for k in names) / (
                age * numel
            )
    return rows


@pytest.mark.parametrize("absent", [None, 1])
def test_drift_is_that_of_the_regions_that_took_part(absent):
    tau, steps = 2, 24
    method = lc.methods.cocodc(8, 3, tau, syncs_per_period=4, score="drift", pattern=CUT)
    engine, state = make(method)
    batches = oracle.make_batches(steps=steps, regions=R)
    mask = np.ones(R, bool)
    if absent is not None:
        mask[absent] = False
    sent_headers, picks = {}, []
    for t in range(1, steps + 1):
        before = np.array(state.counters.last_sent)
        state, metrics = engine.step(state, oracle.step_batch(batches, t), mask)
        for event in metrics["events"]:
            if event.kind == "land":
                expected = sent_headers[event.key][mask].mean(axis=0)
                np.testing.assert_allclose(state.rate, expected, rtol=1e-5)
            else:
                if (before >= 0).all() and (t - before < 8).all():
                    scores = np.array(state.rate)
                    busy = [int(f.fragment) for f in state.in_flight.values() if f.sent < t]
                    pick = oracle.choose_fragment(t, 8, list(before), list(scores), busy)
                    picks.append((event.fragment, pick))
                sent_headers[event.key] = drifts(state, t, before)
    assert len(picks) > 3 and all(a == b for a, b in picks)
    assert len({a for a, _ in picks}) > 1


def test_the_header_is_booked():
    plain = lc.methods.cocodc(8, 3, 2, syncs_per_period=4, pattern=CUT)
    drift = lc.methods.cocodc(8, 3, 2, syncs_per_period=4, score="drift", pattern=CUT)
    sizes = []
    for method in (plain, drift):
        engine, state = make(method)
        (batch,) = stream(1)
        events = []
        for _ in range(2):
            state, metrics = engine.step(state, batch)
            events += metrics["events"]
        sizes.append(events[0].nbytes)
    assert sizes[1] == sizes[0] + 4 * 3


NETWORK = {
    "regions": ["a", "b", "c"],
    "compute_s": 2.0,
    "bandwidth_gbps": 1e-6,
    "delay_ms": 0.0,
}


def measured(period=12, fragments=3, gamma=0.5):
    return Adaptive(period, fragments, fragments, 1, gamma=gamma, measured=True)


def landing(step, seconds):
    never = np.full(R, -1)
    return history.Event(
        "land", step, 0, "k", np.ones(R, bool), never, 0, never, never, "", {"seconds": seconds}
    )


def slots_of(schedule, clock, last, at=None):
    """Every slot up to `last`; `at` maps a step to the seconds that land there."""
    step, slots = 0, []
    while step < last:
        upcoming = schedule.next_send(step, clock)
        stops = [s for s in (at or {}) if step < s < upcoming]
        step = min([upcoming, *stops])
        if step == upcoming and step <= last:
            assert leaves(schedule, step, clock, (), lambda: np.zeros(3)), step
            slots.append(step)
        if at and step in at:
            decided = schedule.decide(step, clock, [landing(step, np.float32(at[step]))])
            clock.decided = clock.decided if decided is None else decided
    return slots


def test_measured_slots_change_at_the_next_period():
    schedule = measured()
    clock = SyncCounters.start(3, R, schedule.start())
    # gamma H T_c / T_s = 0.5 * 12 * 2 / 2 = 6 slots from step 12 on, 3 again from 24 on.
    found = slots_of(schedule, clock, 36, {5: (2.0, 2.0), 17: (2.0, 9.0)})
    assert found == [4, 8, 12, 14, 16, 18, 20, 22, 24, 28, 32, 36]


def test_a_landing_at_the_boundary_does_not_undo_the_change():
    """tau = 0, or tau a multiple of the spacing: something lands at every boundary."""
    schedule = measured()
    clock = SyncCounters.start(3, R, schedule.start())
    # 6 slots from step 12 on; what lands at 12 and 24 says the same, what lands at 36 says 3.
    found = slots_of(
        schedule, clock, 60, {t: (2.0, 2.0 if t < 36 else 9.0) for t in (8, 12, 24, 36)}
    )
    assert found == [4, 8, 12, *range(14, 49, 2), 52, 56, 60]


def test_measured_slots_keep_every_fragment_within_the_bound():
    rng = np.random.default_rng(2)
    changes = 0
    for _ in range(120):
        period = int(rng.integers(2, 40))
        fragments = int(rng.integers(1, min(period, 7) + 1))
        delay = int(rng.integers(0, period))
        schedule = Adaptive(period, fragments, fragments, delay, gamma=0.5, measured=True)
        clock = SyncCounters.start(fragments, R, schedule.start())
        favourite = np.eye(fragments)[rng.integers(fragments)]
        times, flying, step = [[0] for _ in range(fragments)], {}, 0
        while step < 8 * period:
            step = min([schedule.next_send(step, clock), *flying.values()])
            landed = [p for p, due in flying.items() if due == step]
            flying = {p: due for p, due in flying.items() if p not in landed}
            for p in leaves(schedule, step, clock, flying, lambda f=favourite: f):
                times[p].append(step)
                clock.last_sent[p] = step
                flying[p] = step + delay
            landed += [p for p, due in flying.items() if due == step]
            flying = {p: due for p, due in flying.items() if p not in landed}
            seconds = np.float32([2.0 ** rng.integers(-4, 5), 1.0])
            decided = schedule.decide(step, clock, [landing(step, seconds) for _ in landed])
            if decided is not None:
                changes += decided["syncs"][0] != clock.decided["syncs"][0]
                clock.decided = decided
        waits = [np.diff([*sent, 8 * period]).max() for sent in times]
        # The bound is that of the widest slots, N = K, and the h behind a change.
        h = schedule._spacing(schedule.fragments)
        assert max(waits) <= (-(-period // h) + schedule.fragments) * h, (schedule, times)
    assert changes > 100, "N hardly ever changed, so the bound was not tried"


def test_an_unfinished_measurement_decides_nothing():
    schedule = measured()
    clock = SyncCounters.start(3, R, schedule.start())
    assert schedule.decide(4, clock, [landing(4, np.array([np.nan, 1.0]))]) is None
    assert schedule.decide(4, clock, []) is None


def test_of_several_landings_the_newest_payload_decides():
    schedule = measured()
    clock = SyncCounters.start(3, R, schedule.start())
    old, new = (landing(5, np.float32([2, seconds])) for seconds in (9, 2))
    assert schedule.decide(5, clock, [old, new])["syncs"].tolist() == [3, 6]


def test_measured_seconds_reach_the_decision():
    engine, state = make(lc.methods.cocodc(6, 3, 1, gamma=1.0, measured=True, pattern=CUT))
    seen = []
    for batch in stream(30):
        state, metrics = engine.step(state, batch)
        seen += [e.values["seconds"] for e in metrics["events"] if "seconds" in e.values]
    finite = [pair for pair in seen if np.isfinite(pair).all()]
    assert finite and all((pair > 0).all() for pair in finite)
    assert 3 <= state.counters.decided["syncs"][1] <= 6


def test_what_the_host_does_between_steps_is_no_step(monkeypatch):
    clock = iter([0.0, 1.0, 50.0, 56.0, 57.0])
    monkeypatch.setattr("lowcomm_jax.sync.measurements.time.perf_counter", lambda: next(clock))
    watch = Stopwatch()
    watch.starts()  # the first steps compile
    watch.computed((), 3)
    assert np.isnan(watch.seconds(R)).all()
    watch.synchronised((), 0)
    watch.starts()  # 49 seconds later: an evaluation, say
    watch.computed((), 3)
    watch.synchronised((), 2)
    np.testing.assert_array_equal(watch.seconds(R), np.tile(np.float32([2.0, 1.0]), (R, 1)))


def test_measured_seconds_in_flight_are_saved(tmp_path):
    method = lc.methods.cocodc(6, 3, 2, gamma=1.0, measured=True, score="drift", pattern=CUT)
    engine, state = make(method)
    for batch in stream(9):
        state, _ = engine.step(state, batch)
    (flight,) = state.in_flight.values()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, extra={}, config={}, method=method)
        found = checkpoints.restore(engine, oracle.make_params()).state
    (again,) = found.in_flight.values()
    assert sorted(again.header) == ["drift", "seconds"]
    for name, values in flight.header.items():
        np.testing.assert_array_equal(again.header[name], values)
    for name, value in state.counters.decided.items():
        np.testing.assert_array_equal(found.counters.decided[name], value)


def test_the_network_settles_the_slots():
    method = lc.methods.cocodc(24, 3, 1, gamma=0.5, pattern=CUT)
    engine, state = make(method, network=NETWORK)
    settled = engine.sync_loop(state).programs.method.schedule
    # Fragment a + s is the largest: 16 values.
    seconds = lc.network.sync_seconds(engine.clock.network, 4 * 16, "two_shot")
    assert settled.syncs == oracle.syncs_per_period(24, 3, 0.5, 2.0, seconds) > 3
    sends = 0
    for batch in stream(12):
        state, metrics = engine.step(state, batch)
        sends += sum(e.kind == "send" for e in metrics["events"])
    assert sends == 12 // (24 // settled.syncs)


def test_without_delay_a_round_hides_nothing():
    slow = {**NETWORK, "bandwidth_gbps": 1e-8}
    method = lc.methods.dilocox(4, {"name": "low_rank", "least": 1.0}, 2, delay=0)
    engine, state = make(method, network=slow)
    assert engine.sync_loop(state).programs.method.schedule.travel == ()
