"""EDiT and A-EDiT against their NumPy re-derivation: three regions, outliers, clips, absences."""

import jax
import numpy as np
import optax
import oracle
import pytest
from engine.test_oracle import ADAMW, SGD, absent, close, compare, train
from oracle_runs import one_device

import lowcomm_jax as lc

STEPS, R = 25, 3
# Outliers after two rounds, a clip that binds, and norms that weigh differently.
SHARP = {"clip": 0.08, "temperature": 0.05, "outlier": 0.8, "decay": 0.3, "warm_up": 2}


OUTER = oracle.Nesterov(0.7, 0.9)


@pytest.mark.parametrize("inner", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("settings", [{}, SHARP], ids=["defaults", "sharp"])
def test_edit(settings, inner):
    mask = absent(STEPS, R, ((6, 1), (9, 0), (15, 0), (15, 1), (15, 2)))
    given = {"period": 3, "outer": OUTER, **settings}
    who = {"steps": STEPS, "participants": mask}
    method = lc.methods.edit(3, **settings)
    _, run, batches = compare(method, oracle.run_edit, R, inner, **who, **given)
    if settings:
        outliers = {}
        for t, key, r in run.extra_outliers:
            outliers.setdefault((t, key), set()).add(r)
        alone = {len(who) for who in outliers.values()}
        assert {1, 2} & alone, f"no outlier beside others: {outliers}"
        given |= {"clip": np.inf, "inner": inner[0], "participants": mask}
        unclipped = oracle.run_edit(oracle.make_params(), batches, **given)
        apart = [
            np.abs(unclipped.last.anchors[0][k] - v).max() for k, v in run.last.anchors[0].items()
        ]
        assert max(apart) > 1e-3, "the clip never binds"


def test_where_all_are_outliers_anchor_and_momentum_stay():
    """One leaf's gradients grow a hundredfold in all regions; the other leaf goes on."""

    def pulled(params, batch, rng):
        return params["a"].sum() * batch["x"][0, 0] + params["b"].sum() * batch["x"][0, 1]

    method = lc.methods.edit(1, decay=0.5, warm_up=3, outlier=2.0)
    engine = lc.Engine(pulled, optax.sgd(0.1), method, R, mesh=one_device())
    start = {"a": np.zeros(2, np.float32), "b": np.zeros((3, 1), np.float32)}
    state = engine.init(start)
    spread = np.float32([0.9, 1.0, 1.1])
    for t in range(6):
        x = np.stack([spread * (100.0 if t == 5 else 1 + 0.1 * (t % 2)), spread], axis=1)
        before = jax.tree.map(np.array, (state.anchor, state.outer))
        state, _ = engine.step(state, {"x": x[:, None].astype(np.float32)})
    after = jax.tree.map(np.array, (state.anchor, state.outer))
    trace, old = (optax.tree.get(x[1][0], "trace") for x in (after, before))
    np.testing.assert_array_equal(after[0]["a"], before[0]["a"])
    np.testing.assert_array_equal(trace["a"], old["a"])
    assert np.abs(after[0]["b"] - before[0]["b"]).min() > 0.01
    assert np.abs(trace["b"] - old["b"]).min() > 0.01
    for name, value in lc.region_params(state).items():
        np.testing.assert_array_equal(value, np.broadcast_to(after[0][name], value.shape))
    assert state.merge[0]["a"].rounds.tolist() == [5] * R
    assert state.merge[0]["b"].rounds.tolist() == [6] * R


@pytest.mark.parametrize("speeds", [(2.0, 1.0, 0.3), (1.0, 1.0, 1.0)], ids=["uneven", "equal"])
def test_a_edit(speeds):
    """Rounds of 2.1 s in steps of 0.5 s are 4 ticks; the slowest is without a step in some."""
    mask = absent(STEPS, R, ((8, 0), (16, 1)))
    method = lc.methods.a_edit(2.1, 0.5, speeds, **SHARP)
    given = {"steps": STEPS, "participants": mask, "period": 4, "outer": OUTER, **SHARP}
    _, run, _ = compare(method, oracle.run_edit, R, speeds=speeds, **given)
    together = [event.regions for event in run.events]
    assert ((0, 1) in together) == (speeds[2] < 1), "the slowest always takes part"


def test_equal_weights_and_no_clip_are_diloco():
    method = lc.methods.edit(4, clip=np.inf, temperature=np.inf, outlier=np.inf)
    _, seen, _ = train(method, SGD[1], R, finish=True)
    _, expected, _ = train(lc.methods.diloco(4), SGD[1], R, finish=True)
    for (anchor, _), (other, _) in zip(seen, expected):
        for key, value in other.items():
            close(anchor[key], value, key)
