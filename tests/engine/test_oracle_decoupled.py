"""Decoupled DiLoCo against NumPy: speeds, quorum, grace, outages, recovery, weights."""

import numpy as np
import oracle
import pytest
from compilations import compilations
from engine.test_oracle import ADAMW, SGD, check, close, one_device, train
from oracle import merging
from oracle.jax_problem import loss_fn
from refused_lines import lines_of

import lowcomm_jax as lc
from lowcomm_jax import merge
from lowcomm_jax.engine import Engine

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


def derive(batches, case, inner, merge_rule=None, tokens=None):
    period, overlap, quorum, grace, speeds, outages = case
    return oracle.run_decoupled_diloco(
        oracle.make_params(),
        batches,
        fragments=KEYS,
        period=period,
        overlap=overlap,
        quorum=quorum,
        grace=grace,
        merge=merge_rule or merging.radial_directional(),
        inner=inner,
        outer=oracle.Nesterov(0.7, 0.9),
        speeds=speeds,
        outages=outages,
        tokens=tokens,
    )


@pytest.mark.parametrize("name", CASES)
def test_decoupled_diloco(name):
    case = CASES[name]
    inner = ADAMW if name in ("outages", "grace") else SGD
    state, seen, batches = train(make(*case), inner[1], 3, steps=STEPS)
    run = derive(batches, case, inner[0])
    check(seen, run)
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
    _, seen, batches = train(make(*case, merge=None), SGD[1], 3, steps=STEPS)
    check(seen, derive(batches, case, SGD[0], mean))


def test_weights_are_tokens_times_tokens_a_step():
    """Steps of unlike numbers of tokens: c_tokens and c_tokens^2 / c_steps are not proportional."""

    def counted(params, batch, rng):
        return loss_fn(params, batch, rng), {"tokens": 1.0 + 9.0 * batch["x"][0, 0] ** 2}

    case, batches = CASES["grace"], oracle.make_batches(steps=STEPS, regions=3)
    engine = Engine(counted, SGD[1], make(*case, merge=None), 3, mesh=one_device())
    steps = [oracle.step_batch(batches, t) for t in range(1, STEPS + 1)]
    state, _ = engine.run(engine.init(oracle.make_params()), steps)
    tokens = 1.0 + 9.0 * batches["x"][:, :, 0, 0] ** 2
    run = derive(batches, case, SGD[0], mean, tokens)
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


def test_rounds_of_unequal_learners():
    """Who is admitted, by hand: the slow learner of speed 1/2 steps in even ticks only."""
    plain = make(4, 2, 1, 0.0, (1.0, 0.5), ()).schedule
    closing = [plain.rounds_closing(t, 2) for t in range(1, 9)]
    rounds = [r for found in closing for r in found]
    assert [r.closes for r in rounds] == [1, 2, 4, 5, 6, 8]
    assert [r.admitted.tolist() for r in rounds] == [
        [True, False],
        [True, True],
        [True, True],
        [True, False],
        [True, True],
        [True, True],
    ]
    patient = make(4, 2, 1, 0.8, (1.0, 0.5), ()).schedule
    rounds = [r for t in range(1, 9) for r in patient.rounds_closing(t, 2)]
    assert all(r.admitted.all() for r in rounds)  # a window of one tick is enough
    assert [r.lands - r.quorum for r in rounds] == [2] * len(rounds)  # and costs no time


def test_the_engine_runs_blocks_and_compiles_nothing_later():
    method = make(*CASES["outages"])
    batches = oracle.make_batches(steps=40, regions=3)
    steps = [oracle.step_batch(batches, t) for t in range(1, 41)]
    engine = Engine(loss_fn, SGD[1], method, 3, mesh=one_device())
    state, history = engine.run(engine.init(oracle.make_params()), steps[:16])
    kinds = [event.kind for event in history.events]
    assert kinds.count("recover") == 2
    copied = [e for e in history.events if e.kind == "recover"]
    assert [np.flatnonzero(e.bytes_sent).tolist() for e in copied] == [[1], [0]]
    assert compilations(lambda: engine.run(state, steps[16:])[0].anchor) == 0


def test_a_run_ends_with_everyone_on_the_anchor():
    state, *_ = train(make(*CASES["outages"]), SGD[1], 3, steps=STEPS, finish=True)
    for key, value in lc.region_params(state).items():
        for r in range(3):
            np.testing.assert_array_equal(value[r], state.anchor[key][0])


def test_settings_that_cannot_work_are_listed_at_once():
    wrong = {"quorum": 4, "grace": 1.5, "speeds": (1.0, 0.0), "outages": [(7, 3, 2)]}
    parts = ["quorum=4", "grace=1.5", "weights='steps'", "2 values for 3", "positive speed"]
    parts += ["region 7 of 3", "(7, 3, 2)"]
    for period, overlap, more in (
        (4, 5, ["fragments=6 > period=4", "overlap=5 >= period=4"]),
        ("4", 1.5, ["period='4': give a whole number of at least 1", "overlap=1.5: give whole"]),
        (0, -1, ["period=0: give a whole number of at least 1", "overlap=-1: give whole"]),
    ):
        method = lc.methods.decoupled_diloco(period, 6, overlap, weights="steps", **wrong)
        lines = lines_of(method, 3)
        assert len(lines) == 9 and all(part in "\n".join(lines) for part in parts + more), lines
    nobody = lc.methods.decoupled_diloco(6, 3, 2, outages=[(0, 3, 5), (1, 4, 6)])
    assert "nobody is up at tick 4" in "\n".join(lines_of(nobody, 2))
    slow = merge.RadialDirectional(-1.0)
    assert "floor=-1.0" in "\n".join(lines_of(lc.methods.decoupled_diloco(6, 3, merge=slow), 2))
