"""Decoupled DiLoCo against NumPy: speeds, quorum, grace, outages, recovery, weights."""

import numpy as np
import oracle
import pytest
from engine.test_oracle import ADAMW, SGD, close, compare, train
from oracle import merging
from oracle.jax_problem import loss_fn
from oracle_runs import started, stream

import lowcomm_jax as lc

KEYS = [["a"], ["c"], ["b", "s"]]
PATTERN = ["^a$", "^c$", "^(b|s)$"]
SPEEDS = (1.0, 0.62, 0.8)
STEPS = 23

# period, overlap, quorum, grace, speeds, outages
CASES = {
    "all equal": (3, 2, 3, 0.0, None, ()),
    "quorum 1": (3, 2, 1, 0.0, SPEEDS, ()),
    "grace": (5, 3, 1, 0.7, SPEEDS, ()),
    "quorum 2, no overlap": (4, 0, 2, 0.0, SPEEDS, ()),
    "everyone": (3, 2, 3, 0.5, SPEEDS, ()),
    "outages": (3, 2, 1, 0.8, SPEEDS, ((0, 5, 9), (2, 8, 12))),
    "a quorum that waits": (4, 2, 3, 0.0, None, ((1, 6, 11),)),
    "a window that shrinks": (4, 2, 2, 0.5, (1.0, 0.3, 0.15), ()),
}


def make(period, overlap, quorum, grace, speeds, outages, **more):
    return lc.methods.decoupled_diloco(
        period, 3, overlap, quorum, grace, speeds, outages, pattern=PATTERN, **more
    )


def settings(period, overlap, quorum, grace, speeds, outages, merge_rule=None):
    """The oracle's."""
    return {
        "fragments": KEYS,
        "period": period,
        "overlap": overlap,
        "quorum": quorum,
        "grace": grace,
        "merge": merge_rule or merging.radial_directional(),
        "outer": oracle.Nesterov(0.7, 0.9),
        "speeds": speeds,
        "outages": outages,
    }


def compared(method, inner, **given):
    return compare(method, oracle.run_decoupled_diloco, 3, inner, STEPS, finish=False, **given)


@pytest.mark.parametrize("name", CASES)
def test_decoupled_diloco(name):
    case = CASES[name]
    inner = ADAMW if name in ("outages", "grace") else SGD
    state, run, _ = compared(make(*case), inner, **settings(*case))
    landed = state.counters.sends - np.array(
        [sum(f.fragment == p for f in state.in_flight.values()) for p in range(3)]
    )
    assert landed.tolist() == [sum(e.fragment == p for e in run.of("land")) for p in range(3)]


def mean(deltas, weights, momentum):
    del momentum
    total = sum(weights)
    return {k: sum(w * d[k] for w, d in zip(weights, deltas)) / total for k in deltas[0]}


def test_without_a_merge_rule_it_is_the_mean_by_tokens_a_step():
    case = CASES["grace"]
    compared(make(*case, merge=None), SGD, **settings(*case, mean))


def test_weights_are_tokens_times_tokens_a_step():
    """Steps of unlike numbers of tokens: c_tokens and c_tokens^2 / c_steps are not proportional."""

    def counted(params, batch, rng):
        return loss_fn(params, batch, rng), {"tokens": 1.0 + 9.0 * batch["x"][0, 0] ** 2}

    case, batches = CASES["grace"], oracle.make_batches(steps=STEPS, regions=3)
    engine, state = started(make(*case, merge=None), 3, SGD[1], counted)
    state, _ = engine.run(state, stream(STEPS))
    tokens = 1.0 + 9.0 * batches["x"][:, :, 0, 0] ** 2
    given = settings(*case, mean) | {"inner": SGD[0], "tokens": tokens}
    run = oracle.run_decoupled_diloco(oracle.make_params(), batches, **given)
    for key, value in state.anchor.items():
        close(value[0], run.at(STEPS).anchors[0][key], key)


def test_with_everyone_equal_it_is_streaming_with_replacement():
    """Quorum of all, equal speeds, the mean: Streaming DiLoCo with alpha 0 and the same cut."""
    decoupled = make(6, 2, 3, 0.0, None, (), merge=None, weights="given")
    streaming = lc.methods.streaming_diloco(
        6, 3, 2, 0.0, pattern=PATTERN, outer=lc.outer.nesterov(0.7, 0.9)
    )
    found = [train(m, SGD[1], 3, steps=STEPS)[0] for m in (decoupled, streaming)]
    for key in found[0].anchor:
        # Two programs: compilers may contract others of their products and sums.
        close(found[0].anchor[key], np.array(found[1].anchor[key]), key)
