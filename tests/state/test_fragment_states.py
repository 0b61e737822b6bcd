"""Every fragment has outer and landing states of its own, and says what its landing measured."""

import numpy as np
import optax
import pytest
from oracle_runs import started, stream

import lowcomm_jax as lc
from lowcomm_jax import landing

STEPS, R = 19, 3


def train(method):
    """Returns (state, events)."""
    engine, state = started(method)
    state, history = engine.run(state, stream(STEPS))
    return state, history.events


def test_the_counters_of_an_adaptive_outer_optimizer_tick_once_a_landing():
    """One state for the whole model would count every fragment's landing."""
    outer = optax.adam(0.1)
    method = lc.methods.streaming_diloco(6, 3, 2, 0.3, pattern="balanced", outer=outer)
    state, events = train(method)
    landings = [sum(e.kind == "land" and e.fragment == p for e in events) for p in range(3)]
    counts = [int(np.ravel(optax.tree.get(s, "count"))[0]) for s in state.outer]
    assert counts == landings == [3, 3, 2]


@pytest.mark.parametrize("mode", ["fixed", "norm"])
def test_landings_tell_the_size_of_the_taylor_correction(mode):
    taylor = landing.taylor_delay_correction(0.2, mode=mode)
    _, events = train(lc.methods.cocodc(6, 3, 2, taylor=taylor, pattern="balanced"))
    ratios = [np.asarray(e.values["correction_ratio"]) for e in events if e.kind == "land"]
    assert len(ratios) > 5 and all(r.shape == (R,) for r in ratios)
    assert all((r > 0).all() and (r <= 1).all() for r in ratios)
    if mode == "norm":  # lambda0, unless elements are clipped
        assert np.median(ratios) == pytest.approx(0.2, abs=0.05)


def test_staleness_is_each_regions_own():
    method = lc.methods.streaming_diloco(6, 2, (0, 2, 4), 0.3, pattern="balanced")
    state, events = train(method)
    seen = np.stack([e.staleness for e in events if e.kind == "land"])
    assert [set(column[column >= 0]) for column in seen.T] == [{0}, {2}, {4}]
    assert state.counters.staleness.max(axis=0).tolist() == [0, 2, 4]
