"""Methods that must be the same algorithm for special settings, and what finish promises."""

import functools

import jax
import numpy as np
import optax
import oracle
import pytest
from oracle_runs import one_device, started, stream

import lowcomm_jax as lc

R = 3
SGD = optax.sgd(0.05, momentum=0.8)
CUT = ["^a$|^s$", "^b$", "^c$"]


def values(state):
    return jax.tree.map(np.array, (state.anchor, state.inner.params))


def trajectory(method, steps, finish_at=(), inner=SGD, **kwargs):
    """(anchor, locals) after every step, and then after finish at each of `finish_at`."""
    engine, state = started(method, inner=inner, **kwargs)
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


def test_delayed_with_a_blocking_first_round_starts_as_diloco():
    delayed = lc.methods.delayed_diloco(4, outer=rule(), first_round="blocking")
    assert_equal(trajectory(delayed, 7), diloco_4()[:7])


def test_so_does_an_eager_one():
    """No region's own part has been applied before, and none is swapped."""
    delayed = lc.methods.delayed_diloco(4, lc.outer.eager(rule()), first_round="blocking")
    found = trajectory(delayed.named("eager", anchors="per_region"), 7)
    assert_equal([locals_ for _, locals_ in found], [locals_ for _, locals_ in diloco_4()[:7]])


# -- what compressed methods are without compression -----------------------------------------------

ALL = 4096  # entries of a whole chunk


def test_sparseloco_that_sends_all_in_fp32_is_averaging():
    sparse = lc.methods.sparseloco(4, k=ALL, bits=32)
    dense = lc.methods.local_sgd(4, codec={"name": "fp32", "reduce": "all_gather"})
    assert_equal(trajectory(sparse, 12, (10, 12)), trajectory(dense, 12, (10, 12)))


def test_muloco_in_fp32_is_diloco():
    outer = lc.outer.nesterov(0.7, 0.6)
    muloco = lc.methods.muloco(4, codec="fp32")
    dense = lc.methods.diloco(4, outer=outer, codec="fp32")
    assert_equal(trajectory(muloco, 12, (10,)), trajectory(dense, 12, (10,)))


def test_decoupled_momentum_that_sends_all_is_diloco_without_momentum():
    decoupled = lc.methods.decoupled_momentum(4, k=ALL)
    dense = lc.methods.diloco(4, outer=lc.outer.sgd(0.7))
    assert_close(trajectory(decoupled, 12, (10, 12)), trajectory(dense, 12, (10, 12)))


@pytest.mark.parametrize("k", [1, ALL])
def test_decoupled_momentum_as_coded_is_nesterov_for_one_region(k):
    """What is taken out of the momentum comes back, whatever was sent."""
    decoupled = lc.methods.decoupled_momentum(3, "as_coded", k=k, decay=0.8)
    dense = lc.methods.diloco(3, outer=lc.outer.nesterov(0.7, 0.8))
    wanted = trajectory(dense, 11, (11,), regions=1)
    assert_close(trajectory(decoupled, 11, (11,), regions=1), wanted)


def test_demo_that_sends_all_is_the_sign_of_the_mean_gradient():
    """Nothing stays in the momentum: signSGD."""
    inner = optax.sgd(0.02)
    demo = trajectory(lc.methods.demo(codec="fp32"), 7, inner=inner)
    signed = optax.chain(optax.scale_by_sign(), inner)
    assert_equal(demo, trajectory(lc.methods.ddp(codec="fp32"), 7, inner=signed))


# -- finish ---------------------------------------------------------------------------------------

EQUAL, UNEQUAL = (1.0, 1.0, 1.0), (1.0, 0.6, 0.8)
METHODS = {
    "ddp": lambda: lc.methods.ddp(),
    "diloco": lambda: lc.methods.diloco(4),
    "streaming": lambda: lc.methods.streaming_diloco(4, 2, 1, 0.3, pattern="balanced"),
    "cocodc": lambda: lc.methods.cocodc(4, 2, 1, pattern="balanced"),
    "eager": lambda: lc.methods.eager_diloco(4),
    "delayed": lambda: lc.methods.delayed_diloco(4),
    "noloco": lambda: lc.methods.noloco(4),
    "sparseloco": lambda: lc.methods.sparseloco(4, k=2, block=4),
    "pulseloco": lambda: lc.methods.pulseloco(4, k=2, block=4),
    "muloco": lambda: lc.methods.muloco(4),
    "demo": lambda: lc.methods.demo(k=3),
    "decoupled": lambda: lc.methods.decoupled_momentum(4, k=3),
    "as_coded": lambda: lc.methods.decoupled_momentum(4, "as_coded", k=3),
    "learners": lambda: lc.methods.decoupled_diloco(
        4, 2, 1, 1, 0.8, UNEQUAL, ((0, 5, 7), (2, 8, 12)), pattern="balanced"
    ),
    "async": lambda: lc.methods.async_local_sgd(4, EQUAL),
    "heloco": lambda: lc.methods.heloco(3, UNEQUAL, 0.6, 0.8),
    "halos": lambda: lc.methods.halos(4, UNEQUAL, ((0, 2), (1,)), 3, 0.3, travel=(2, 4)),
}


@functools.cache
def made(name, regions):
    return started(METHODS[name](), regions, SGD)[0]


@pytest.mark.parametrize(
    "name,regions", [*((name, R) for name in METHODS), ("diloco", 1), ("cocodc", 1), ("delayed", 1)]
)
def test_finish_synchronises_moves_nothing_twice_and_lets_training_go_on(name, regions):
    """Nothing is in flight, and all hold the anchor; the next step donates no buffer of theirs."""
    engine, batches = made(name, regions), stream(17, regions)
    state, _ = engine.run(engine.init(oracle.make_params()), batches[:6])
    state, _ = engine.run(engine.finish(state), batches[6:10])  # straight from what was drained
    state = engine.finish(state)
    assert not state.in_flight
    for held in (state.inner.params, state.received or {}):
        for key, local in held.items():
            anchor = np.broadcast_to(np.asarray(state.anchor[key]), local.shape)
            np.testing.assert_array_equal(local, anchor)
    once = values(state)
    state = engine.finish(state)
    jax.tree.map(np.testing.assert_array_equal, values(state), once)
    state, _ = engine.run(state, batches[10:])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(values(state)))
    assert int(state.counters.step) == 17


# -- one engine, several models -------------------------------------------------------------------


def test_one_engine_serves_trees_of_equal_names_and_other_shapes():
    """The first state's programs must not be replaced by those of the second."""

    def loss(params, batch, rng):
        del rng
        return (batch["x"] * (params["w"] ** 2).sum(axis=1).mean()).mean()

    method = lc.methods.streaming_diloco(2, 2, 0, 0.0, outer=optax.sgd(1.0))
    engine = lc.Engine(loss, optax.sgd(0.1), method, R, mesh=one_device(), stacked=("w",))
    first = engine.init({"w": np.ones((4, 2), np.float32)})
    engine.init({"w": np.ones((6, 3), np.float32)})
    batch = {"x": np.array([[1.0], [2.0], [4.0]], np.float32)}
    for _ in range(2):
        first, _ = engine.step(first, batch)
    moved = np.asarray(first.anchor["w"])[0]
    assert moved.shape == (4, 2) and (moved < 0.99).all()
