"""What is due while the others cannot be reached is done later, in its order."""

import jax
import numpy as np
import oracle
import pytest
from regions.test_same_numbers import METHODS, RULE
from regions.together import CUT, batches, engine, values

import lowcomm_jax as lc
from lowcomm_jax import exchange
from lowcomm_jax.checkpoint import Checkpoints

STEPS, GONE, BACK = 30, 10, 21


class Alone:
    """A run of one region that can reach nobody in the steps between `GONE` and `BACK`.

    Attributes:
      events: (kind, step, did the region take part) of all sends and landings, by the step in whose
        row of the history they stand.
    """

    def __init__(self, folder, method):
        self.exchange = exchange.store(f"file://{folder}", 0, 1, "run")
        self.exchange.join(10)
        self.exchange.reachable = lambda: not GONE < self.step < BACK
        self.one, self.step, self.events = engine(method, 1, self.exchange), 0, {}
        self.data = batches(STEPS, 1)

    def begin(self):
        with jax.numpy_dtype_promotion("standard"):
            return self.one.init(oracle.make_params())

    def train(self, state, steps):
        with jax.numpy_dtype_promotion("standard"):
            for self.step in steps:
                state, record = self.one.run(state, [self.data[self.step - 1]])
                (row,) = record.rows()
                found = [(e["kind"], e["step"], *e["participants"]) for e in row["events"]]
                if found:
                    self.events[row["step"]] = found
        return state

    def finish(self, state):
        with jax.numpy_dtype_promotion("standard"):
            return self.one.finish(state)


@pytest.fixture
def alone(tmp_path):
    """`alone(name or method, folder)`"""
    made = []

    def make(method, folder="meet"):
        method = METHODS[method]() if isinstance(method, str) else method
        made.append(Alone(tmp_path / folder, method))
        return made[-1]

    yield make
    for one in made:
        one.exchange.close(linger_s=0.0)


def both(step, took_part):
    return [("send", step, took_part), ("land", step, took_part)]


def test_it_is_done_and_noted_once_the_others_are_back(alone):
    run = alone("diloco")
    state = run.train(run.begin(), range(1, BACK))
    assert state.counters.step == 20 and state.counters.done_until == 11
    assert run.events == {4: both(4, True), 8: both(8, True)}
    state = run.train(state, range(BACK, STEPS + 1))
    assert state.counters.step == state.counters.done_until == STEPS
    assert run.events[BACK] == both(12, False) + both(16, False) + both(20, False)
    assert run.events[24] == both(24, True) and run.events[28] == both(28, True)


def test_the_others_learn_how_far_it_is_with_both(alone, monkeypatch):
    """A newcomer begins where they train, and waiting goes by what they have sent."""
    run, told = alone("diloco"), []
    beat = run.exchange.beat

    def noted(step=None, trained=None):
        told.extend([] if step is None else [(step, trained)])
        beat(step, trained)

    monkeypatch.setattr(run.exchange, "beat", noted)
    state = run.train(run.begin(), range(1, BACK))
    assert run.exchange.steps() == {0: 20}, "as soon as anybody can hear it"
    run.train(state, range(BACK, 25))
    assert told == [(4, 4), (8, 8), (12, 21), (16, 21), (20, 21), (24, 24)]


def test_conclusions_are_drawn_from_what_was_sent_and_landed_at_that_step(alone, monkeypatch):
    """Seconds are those of who took part: where nobody did, nothing is measured."""
    measured = lc.methods.cocodc(
        6, 3, 2, gamma=0.5, measured=True, pattern=CUT, outer=RULE, taylor=0.5
    )
    run, landed = alone(measured), []
    schedule = type(run.one.method.schedule)
    decide = schedule.decide

    def noted(self, step, counters, landings):
        landed.append((step, landings))
        return decide(self, step, counters, landings)

    monkeypatch.setattr(schedule, "decide", noted)
    state = run.train(run.begin(), range(1, STEPS + 1))
    assert state.counters.done_until == STEPS
    events = [event for _, found in landed for event in found]
    assert all(event.step == step for step, found in landed for event in found)
    sent = [int(event.key.partition("@")[2]) for event in events]
    assert ["seconds" in event.values for event in events] == [not GONE < x < BACK for x in sent]
    assert any(GONE < step < BACK for step in sent)


def test_a_run_may_end_before_they_are_back(alone):
    """Then the end waits for them; what was under way lands after the last step, as usual."""
    run = alone("streaming")
    state = run.train(run.begin(), range(1, BACK - 1))
    assert state.counters.done_until == 11 and [f.sent for f in state.in_flight.values()] == [10]
    run.step = BACK
    state = run.finish(state)
    assert state.counters.done_until == state.counters.step == 19 and not state.in_flight
    for name, leaf in values(state)[1].items():
        np.testing.assert_array_equal(leaf, values(state)[0][name], name)


@pytest.mark.parametrize("name", ["diloco", "streaming", "cocodc", "dilocox"])
def test_a_checkpoint_of_a_region_that_is_behind(name, alone, tmp_path):
    """Goes on as if it had not been interrupted, bit for bit."""
    whole, cut = alone(name, "whole"), alone(name, "cut")
    together = whole.train(whole.begin(), range(1, STEPS + 1))
    state = cut.train(cut.begin(), range(1, 16))
    assert state.counters.done_until < state.counters.step == 15
    with Checkpoints(tmp_path / "saved") as checkpoints:
        checkpoints.save(state, extra={}, config={})
    cut.exchange.close(linger_s=0.0)
    again = alone(name, "cut")
    with Checkpoints(tmp_path / "saved") as checkpoints:
        state = checkpoints.restore(again.one, oracle.make_params(), config={}).state
    again.one.reconnect(state)
    state = again.train(state, range(16, STEPS + 1))
    assert {**cut.events, **again.events} == whole.events
    jax.tree.map(np.testing.assert_array_equal, values(state), values(together))
    ends = values(again.finish(state)), values(whole.finish(together))
    jax.tree.map(np.testing.assert_array_equal, *ends)
