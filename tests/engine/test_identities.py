"""Methods that must be the same algorithm for special settings, and what finish promises."""

import functools

import jax
import numpy as np
import optax
import oracle
import pytest
from oracle.jax_problem import loss_fn

import lowcomm_jax as lc

R = 3
MESH = lc.make_mesh(devices=jax.devices()[:1])
CUT = ["^a$|^s$", "^b$", "^c$"]


def make(method, inner=None, regions=R, **kwargs):
    inner = optax.sgd(0.05, momentum=0.8) if inner is None else inner
    engine = lc.Engine(loss_fn, inner, method, regions, mesh=MESH, **kwargs)
    return engine, engine.init(oracle.make_params())


def stream(steps, regions=R):
    batches = oracle.make_batches(steps=steps, regions=regions)
    return [oracle.step_batch(batches, t) for t in range(1, steps + 1)]


def values(state):
    return jax.tree.map(np.array, (state.anchor, state.inner.params))


def trajectory(method, steps, finish_at=(), **kwargs):
    """(anchor, locals) after every step, and then after finish at each of `finish_at`."""
    engine, state = make(method, **kwargs)
    seen, finished = [], []
    for t, batch in enumerate(stream(steps, kwargs.get("regions", R)), 1):
        state, _ = engine.step(state, batch)
        seen.append(values(state))
        if t in finish_at:
            finished.append(values(engine.finish(jax.tree.map(lambda x: x.copy(), state))))
    return seen + finished


def assert_equal(left, right):
    for t, (a, b) in enumerate(zip(left, right, strict=True), 1):
        jax.tree.map(lambda x, y, t=t: np.testing.assert_array_equal(x, y, f"record {t}"), a, b)


def assert_close(left, right, rtol=2e-5, atol=2e-6):
    for a, b in zip(left, right, strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


def rule():
    return lc.outer.nesterov(0.6, 0.85)


@functools.cache
def diloco_4():
    return trajectory(lc.methods.diloco(4, outer=rule()), 12, (10, 12))


def test_streaming_of_one_fragment_is_diloco():
    streaming = lc.methods.streaming_diloco(4, 1, 0, 0.0, outer=rule())
    assert_equal(trajectory(streaming, 12, (10, 12)), diloco_4())


def test_fp32_payloads_reduced_in_slices_are_dense():
    codec = lc.compression.make("fp32", reduce="two_shot")
    assert_equal(trajectory(lc.methods.diloco(4, rule(), codec), 12, (10, 12)), diloco_4())


@pytest.fixture(scope="module")
def cocodc_and_streaming():
    """K divides H and N = K, so that the slots are those of the staggered schedule."""
    cocodc = lc.methods.cocodc(6, 3, 0, taylor=0.0, pattern=CUT, outer=rule())
    streaming = lc.methods.streaming_diloco(6, 3, 0, 0.0, pattern=CUT, outer=rule())
    with jax.numpy_dtype_promotion("standard"):
        return [trajectory(method, 12, (11, 12)) for method in (cocodc, streaming)]


def test_cocodc_without_taylor_and_delay_is_streaming(cocodc_and_streaming):
    cocodc, streaming = cocodc_and_streaming
    assert_equal(cocodc[:12], streaming[:12])


@pytest.mark.parametrize("finished_at", [11, 12])
def test_and_stays_so_through_finish(cocodc_and_streaming, finished_at):
    """Step 12 is a send: momentum alone must not move the fragment that has just landed."""
    cocodc, streaming = cocodc_and_streaming
    record = finished_at + 1
    assert_equal(cocodc[record : record + 1], streaming[record : record + 1])


def test_local_sgd_of_one_step_is_data_parallel_sgd():
    inner = optax.sgd(0.05)
    local = trajectory(lc.methods.local_sgd(1), 7, inner=inner)
    ddp = trajectory(lc.methods.ddp(), 7, inner=inner)
    assert_close(local, ddp)


def test_one_region_with_averaging_is_plain_training():
    seen = trajectory(lc.methods.local_sgd(3), 8, regions=1)
    inner, params = oracle.Momentum(0.05, 0.8), oracle.make_params()
    state = inner.init(params)
    for t, batch in enumerate(stream(8, 1)):
        grads = oracle.gradient(params, batch["x"][0], batch["y"][0])
        params, state = inner.step(params, grads, state)
        for key, value in params.items():
            np.testing.assert_allclose(seen[t][1][key][0], value, rtol=2e-5, atol=2e-6)


def test_eager_of_one_region_is_diloco():
    """With R = 1 nothing is late: g = late + own - own late = own."""
    eager = trajectory(lc.methods.eager_diloco(3, outer=rule()), 10, regions=1)
    diloco = trajectory(lc.methods.diloco(3, outer=rule()), 10, regions=1)
    assert_close(eager, diloco)


def test_delayed_with_a_blocking_first_round_starts_as_diloco():
    delayed = lc.methods.delayed_diloco(4, outer=rule(), first_round="blocking")
    assert_equal(trajectory(delayed, 7), diloco_4()[:7])


def test_eager_disagreement_telescopes_over_sixty_rounds():
    """With descent of rate eta: Theta_r - mean = -eta (w Delta_r - mean of w Delta), any round."""
    eta, rounds, period = 0.6, 60, 2
    method = lc.methods.eager_diloco(period, outer=optax.sgd(eta))
    engine, state = make(method, optax.sgd(0.02))
    weights, largest = 1 / R, []
    batches = stream(rounds * period)
    for n in range(rounds):
        state, _ = engine.run(state, batches[n * period : (n + 1) * period])
        (flight,) = state.in_flight.values()
        for key, anchor in state.anchor.items():
            part = weights * np.asarray(flight.payload[key], np.float64)
            anchor = np.asarray(anchor, np.float64)
            disagreement = anchor - anchor.mean(axis=0)
            np.testing.assert_allclose(disagreement, -eta * (part - part.mean(axis=0)), atol=1e-5)
            largest.append(np.abs(disagreement).max())
    assert max(largest) > 1e-3, "regions that agree prove nothing"


# -- finish ---------------------------------------------------------------------------------------

METHODS = {
    "ddp": lambda: lc.methods.ddp(),
    "diloco": lambda: lc.methods.diloco(4),
    "streaming": lambda: lc.methods.streaming_diloco(4, 2, 1, 0.3, pattern="balanced"),
    "cocodc": lambda: lc.methods.cocodc(4, 2, 1, pattern="balanced"),
    "eager": lambda: lc.methods.eager_diloco(4),
    "delayed": lambda: lc.methods.delayed_diloco(4),
    "noloco": lambda: lc.methods.noloco(4),
}


@functools.cache
def made(name, regions):
    return make(METHODS[name](), regions=regions)[0]


@pytest.mark.parametrize("name", METHODS)
def test_finish_synchronises_everything_and_a_second_one_moves_nothing(name):
    engine = made(name, R)
    state, _ = engine.run(engine.init(oracle.make_params()), stream(10))
    state = engine.finish(state)
    assert not state.in_flight
    for key, local in state.inner.params.items():
        anchor = np.broadcast_to(np.asarray(state.anchor[key]), local.shape)
        np.testing.assert_array_equal(local, anchor)
    once = values(state)
    jax.tree.map(np.testing.assert_array_equal, values(engine.finish(state)), once)


@pytest.mark.parametrize(
    "name,regions", [*((name, R) for name in METHODS), ("diloco", 1), ("cocodc", 1), ("delayed", 1)]
)
def test_training_goes_on_after_finish(name, regions):
    """What finish returns shares no buffer that the next step donates."""
    engine = made(name, regions)
    batches = stream(17, regions)
    state, _ = engine.run(engine.init(oracle.make_params()), batches[:6])
    state = engine.finish(state)
    state, _ = engine.run(state, batches[6:])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(values(state)))
    assert int(state.counters.step) == 17


# -- one engine, several models -------------------------------------------------------------------


def test_one_engine_serves_trees_of_equal_names_and_other_shapes():
    """The first state's programs must not be replaced by those of the second."""

    def loss(params, batch, rng):
        del rng
        return (batch["x"] * (params["w"] ** 2).sum(axis=1).mean()).mean()

    method = lc.methods.streaming_diloco(2, 2, 0, 0.0, outer=optax.sgd(1.0))
    engine = lc.Engine(loss, optax.sgd(0.1), method, R, mesh=MESH, stacked=("w",))
    first = engine.init({"w": np.ones((4, 2), np.float32)})
    engine.init({"w": np.ones((6, 3), np.float32)})
    batch = {"x": np.array([[1.0], [2.0], [4.0]], np.float32)}
    for _ in range(2):
        first, _ = engine.step(first, batch)
    moved = np.asarray(first.anchor["w"])[0]
    assert moved.shape == (4, 2) and (moved < 0.99).all()
