"""What the tests of DiLoCoX against its oracle share."""

import jax
import numpy as np
import optax
import oracle
from oracle.jax_problem import loss_fn

import lowcomm_jax as lc
from lowcomm_jax.engine import Engine

SHAPES = {"b": (7,), "v": (9, 12), "w": (8, 9)}
RANK = 4
NESTEROV = oracle.Nesterov(0.7, 0.9)
# Long runs of short rounds: the published momentum would blow rounding differences up.
CALM = {"oracle": oracle.Nesterov(0.3, 0.4), "engine": lc.outer.nesterov(0.3, 0.4)}
SGD = oracle.Momentum(0.05, 0.8)


def codec(**settings):
    """Low-rank factors that pay off on the test's small matrices."""
    return {"name": "low_rank", "least": 1.0, **settings}


def warm_bases(method):
    """The bases [columns, r] that the codec starts from, by leaf."""
    like = {k: jax.ShapeDtypeStruct(s, np.float32) for k, s in SHAPES.items()}
    leaves = dict(zip(sorted(SHAPES), method.codec.init(like).codec))
    return {k: np.array(state["q"][0]) for k, state in leaves.items() if state != ()}


def make_engine(method, regions, devices=1):
    mesh = lc.make_mesh(devices, devices=jax.devices()[:devices])
    return Engine(loss_fn, optax.sgd(0.05, momentum=0.8), method, regions, mesh=mesh)


def train(method, regions, steps, mask=None, finish=False, devices=1):
    """Run the engine step by step; returns (state, [(anchor, locals, decided)], batches)."""
    engine = make_engine(method, regions, devices)
    state = engine.init(oracle.make_params(shapes=SHAPES))
    batches = oracle.make_batches(steps=steps, regions=regions, shapes=SHAPES)
    seen = []
    for t in range(1, steps + 1):
        present = None if mask is None else mask[t - 1]
        state, _ = engine.step(state, oracle.step_batch(batches, t), present)
        decided = {k: np.array(v) for k, v in state.counters.decided.items()}
        anchor = {k: np.array(x[0]) for k, x in state.anchor.items()}
        seen.append((anchor, jax.tree.map(np.array, lc.region_params(state)), decided))
    if finish:
        state = engine.finish(state)
    return state, seen, batches


def check(seen, run, tolerance=2e-5):
    for t, (anchor, local, _) in enumerate(seen, 1):
        want = run.at(t)
        for key in SHAPES:
            options = {"rtol": tolerance, "atol": tolerance, "err_msg": f"step {t} {key}"}
            np.testing.assert_allclose(anchor[key], want.anchors[0][key], **options)
            for r, tree in enumerate(want.locals):
                np.testing.assert_allclose(local[key][r], tree[key], **options)


def run_oracle(method, batches, period, outer=NESTEROV, **settings):
    return oracle.run_dilocox(
        oracle.make_params(shapes=SHAPES),
        batches,
        period=period,
        rank=RANK,
        inner=SGD,
        outer=outer,
        bases=warm_bases(method),
        **settings,
    )
