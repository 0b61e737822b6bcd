"""What is not finite, or an outlier, stays out of the mean and does no lasting harm."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from oracle_runs import one_device, started

import lowcomm_jax as lc

R, BAD = 3, 1
METHODS = {
    "ddp": lambda: lc.methods.ddp(),
    "diloco": lambda: lc.methods.diloco(3),
    "streaming": lambda: lc.methods.streaming_diloco(4, 2, 0, 0.0, pattern="balanced"),
    "overlapped": lambda: lc.methods.streaming_diloco(4, 2, 1, 0.3, pattern="balanced"),
    "cocodc": lambda: lc.methods.cocodc(4, 2, 1, pattern="balanced"),
    "eager": lambda: lc.methods.eager_diloco(3),
    "delayed": lambda: lc.methods.delayed_diloco(3),
    "noloco": lambda: lc.methods.noloco(3),
}


def stream(steps, bad_step=None, bad_regions=(BAD,), scale=np.nan):
    batches = oracle.make_batches(steps=steps, regions=R)
    if bad_step is not None:
        for r in bad_regions:
            batches["y"][bad_step - 1, r] *= scale
    return [oracle.step_batch(batches, t) for t in range(1, steps + 1)]


def finite(tree):
    return all(bool(np.isfinite(np.asarray(x)).all()) for x in jax.tree.leaves(tree))


def test_a_nan_region_is_left_out_counted_and_adopts_the_anchor():
    engine, state = started(lc.methods.diloco(3, outer=optax.sgd(0.7)), skip_nonfinite=False)
    before = {k: np.asarray(x)[0] for k, x in state.anchor.items()}
    batches = stream(3, bad_step=2)
    for batch in batches[:2]:
        state, _ = engine.step(state, batch)
    state, metrics = engine.step(state, batches[2])
    # The others' locals are those of the oracle, which never hears of the bad region.
    good = [r for r in range(R) if r != BAD]
    clean = oracle.make_batches(steps=3, regions=R)
    run = oracle.run_diloco(
        oracle.make_params(),
        clean,
        period=4,
        inner=oracle.Sgd(0.05),
        outer=oracle.Average(),
    )
    for key, start in before.items():
        mean = sum(start - run.at(3).locals[r][key] for r in good) / len(good)
        np.testing.assert_allclose(state.anchor[key][0], start - 0.7 * mean, rtol=2e-5, atol=2e-6)
        for r in range(R):
            np.testing.assert_array_equal(state.inner.params[key][r], state.anchor[key][0])
    send = next(e for e in metrics["events"] if e.kind == "send")
    assert np.asarray(send.values["left_out"]).tolist() == [False, True, False]
    assert np.asarray(send.values["weight"]).tolist() == [1, 0, 1]


INNER = {"sgd": lambda: optax.sgd(0.05), "adamw": lambda: optax.adamw(0.02)}


@functools.cache
def made(name, inner, skip_nonfinite=True):
    return started(METHODS[name](), inner=INNER[inner](), skip_nonfinite=skip_nonfinite)[0]


STATELESS = [(name, "sgd") for name in ("diloco", "streaming")]


@pytest.mark.parametrize("name,inner", [(name, "adamw") for name in METHODS] + STATELESS)
def test_one_bad_batch_does_no_lasting_harm(name, inner):
    """Two rounds after a NaN batch everything is finite, inside and outside the bad region."""
    engine = made(name, inner)
    state, _ = engine.run(engine.init(oracle.make_params()), stream(17, bad_step=2))
    assert finite(lc.global_params(state)), "the anchor"
    assert finite(state.outer), "the outer state"
    assert finite(state.inner.params), "the local values of the bad region"
    assert finite(state.inner.opt), "the inner optimizer of the bad region"


@pytest.mark.parametrize("name", ["ddp", "diloco", "streaming"])
def test_all_regions_bad_leaves_the_anchor_unchanged(name):
    engine = made(name, "sgd", skip_nonfinite=False)
    state = engine.init(oracle.make_params())
    before = jax.tree.map(np.array, (state.anchor, state.outer))
    steps = {"ddp": 1, "diloco": 3, "streaming": 4}[name]
    state, _ = engine.run(state, stream(steps, bad_step=1, bad_regions=range(R)))
    jax.tree.map(np.testing.assert_array_equal, (state.anchor, state.outer), before)


def test_a_nan_region_does_not_spoil_averaged_state():
    def loss(params, batch, rng):
        del rng
        updates = {"mean": 0.7 * params["mean"] + 0.3 * jnp.mean(batch["x"])}
        return jnp.mean((params["w"] * batch["x"]) ** 2), {"updates": updates}

    roles = {"w": "train", "mean": "average"}
    engine = lc.Engine(
        loss,
        optax.sgd(0.1),
        lc.methods.diloco(1),
        R,
        mesh=one_device(),
        roles=roles,
        skip_nonfinite=False,
    )
    state = engine.init({"w": np.float32(0.5), "mean": np.float32(0.0)})
    x = np.array([[1.0], [np.nan], [4.0]], np.float32)
    state, _ = engine.step(state, {"x": x})
    np.testing.assert_allclose(state.inner.buffers["mean"], [0.75] * R, rtol=1e-6)


@pytest.mark.parametrize("factor,left_out", [(None, False), (4.0, True), (1e6, False)])
def test_an_outlier_by_norm_is_left_out(factor, left_out):
    engine, state = started(lc.methods.diloco(3), outlier_factor=factor)
    batches = stream(3, bad_step=2, scale=50.0)
    for batch in batches:
        state, metrics = engine.step(state, batch)
    values = metrics["events"][0].values
    norms = np.asarray(values["delta_norm"])
    assert 4.0 * np.median(norms) < norms[BAD] < 1e6 * np.median(norms)
    assert np.asarray(values["left_out"]).tolist() == [False, left_out, False]


def test_the_median_is_over_those_who_take_part():
    """Absent regions have no say: among norms (n0, huge), huge is no outlier at factor 3."""
    engine, state = started(lc.methods.diloco(2), outlier_factor=3.0)
    batches = stream(2, bad_step=2, scale=50.0)
    state, _ = engine.step(state, batches[0])
    state, metrics = engine.step(state, batches[1], [True, True, False])
    assert not np.asarray(metrics["events"][0].values["left_out"]).any()


@pytest.mark.parametrize("limit", [0.01, 1e3])
def test_max_update_norm_clips_each_fragment_exactly(limit):
    method = lc.methods.streaming_diloco(2, 2, 0, 0.0, pattern=["a|s", "b|c"])
    clipped, free = (started(method, max_update_norm=m) for m in (limit, None))
    results = []
    for engine, state in (clipped, free):
        state, _ = engine.step(state, stream(1)[0])
        results.append(state.anchor)
    start = oracle.make_params()
    # H = 2, K = 2: only the first fragment has left after one step.
    update = {k: np.asarray(results[1][k])[0] - start[k] for k in ("a", "s")}
    norm = np.sqrt(sum((u.astype(np.float64) ** 2).sum() for u in update.values()))
    assert norm > 0.02
    for key, value in update.items():
        expected = start[key] + value * min(1.0, limit / norm)
        np.testing.assert_allclose(results[0][key][0], expected, rtol=1e-5, atol=1e-7)


def test_max_update_norm_holds_for_ddp_too():
    engine, state = started(lc.methods.ddp(), max_update_norm=1e-3)
    state, _ = engine.step(state, stream(1)[0])
    start = oracle.make_params()
    moved = {k: np.asarray(x)[0] - start[k] for k, x in state.anchor.items()}
    norm = np.sqrt(sum((u.astype(np.float64) ** 2).sum() for u in moved.values()))
    np.testing.assert_allclose(norm, 1e-3, rtol=1e-3)


def test_max_update_norm_holds_for_every_anchor_of_noloco():
    """In each of three landings; unbounded ones are longer."""
    limit = 0.01
    engine, state = started(lc.methods.noloco(1), max_update_norm=limit)
    for batch in stream(3):
        before = jax.tree.map(np.array, state.anchor)
        state, metrics = engine.step(state, batch)
        moved = {k: np.asarray(x) - before[k] for k, x in state.anchor.items()}
        norm_R = [
            np.linalg.norm(oracle.flatten({k: x[r] for k, x in moved.items()})) for r in range(R)
        ]
        np.testing.assert_allclose(norm_R, [limit] * R, rtol=1e-3)
        np.testing.assert_allclose(metrics["events"][1].values["update_norm"], norm_R, rtol=1e-3)


def test_a_weight_of_zero_is_not_a_rejection():
    engine, state = started(lc.methods.diloco(1), weights=[0.0, 0.4, 0.6])
    state, metrics = engine.step(state, stream(1)[0])
    values = metrics["events"][0].values
    assert not np.asarray(values["left_out"]).any()
