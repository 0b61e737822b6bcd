"""The probe against gradients by hand, in two regions with different data."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from compilations import compilations
from oracle.jax_problem import loss_fn
from rules.gradients import measure

import lowcomm_jax as lc
from lowcomm_jax.adloco.history import Told
from lowcomm_jax.adloco.probe import Probe, booked, make_probe_program
from lowcomm_jax.adloco.state import AdaptiveState, Trainer
from lowcomm_jax.network import VirtualClock, follow, parse

R, M, SIZE = 2, 3, 2
MESH = lc.make_mesh(devices=jax.devices()[:1])


@pytest.fixture(autouse=True, scope="module")
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def make(method=None, **kwargs):
    method = lc.methods.diloco(2) if method is None else method
    engine = lc.Engine(loss_fn, optax.sgd(0.1), method, R, **{"mesh": MESH, **kwargs})
    return engine, engine.init(oracle.make_params())


@pytest.fixture(scope="module")
def drifted():
    """An engine one step after a landing: regions have left the anchor, and it its start."""
    engine, state = make()
    batches = oracle.make_batches(steps=3, regions=R)
    for t in (1, 2, 3):
        state, _ = engine.step(state, oracle.step_batch(batches, t))
    return engine, state


def probed(m=SIZE):
    return oracle.step_batch(oracle.make_batches(9, steps=1, regions=R, batch_size=M * m), 1)


def gradients(params_R, batch, m=SIZE):
    """[R, M, D], by hand in float64."""
    rows = []
    for r in range(R):
        x, y = batch["x"][r].astype(np.float64), batch["y"][r].astype(np.float64)
        cuts = [slice(j * m, (j + 1) * m) for j in range(M)]
        rows.append([oracle.flatten(oracle.gradient(params_R[r], x[c], y[c])) for c in cuts])
    return np.array(rows)


def rows_of(tree):
    return [
        {k: np.asarray(x, np.float64)[r % x.shape[0]] for k, x in tree.items()} for r in range(R)
    ]


EVERYONE = np.ones(R, bool)


def found(measured_Rx4):
    """What travels of each region, `[3, R]` in float64."""
    return np.array(measured_Rx4, np.float64).T[:3]


def check(values_R, g_RxMxD, rtol=2e-5):
    want = np.array([measure(g) for g in g_RxMxD]).T
    np.testing.assert_allclose(found(values_R), want, rtol=rtol)


def test_gradients_are_those_at_the_anchor(drifted):
    engine, state = drifted
    batch = probed()
    values_R = Probe(engine, M).measure(state, batch, SIZE, np.array([True, False]))
    assert np.asarray(values_R)[:, 3].tolist() == [1, 0]  # who counts
    check(values_R, gradients(rows_of(state.anchor), batch))
    with pytest.raises(AssertionError):  # and not those at the points the regions drifted to
        check(values_R, gradients(rows_of(state.inner.params), batch), rtol=0.01)


def masked_loss(params, batch, rng):
    """The oracle's loss over the samples whose mask is 1: these are its tokens."""
    del rng
    flat = jnp.concatenate([jnp.ravel(params[key]) for key in sorted(params)])
    error, count = batch["x"] @ flat - batch["y"], jnp.sum(batch["mask"])
    loss = 0.5 * jnp.sum(batch["mask"] * error**2) / jnp.maximum(count, 1.0)
    return loss, {"tokens": count}


def test_microbatches_count_by_their_tokens():
    """gbar is the gradient that is trained on, and the deviations have the same weights."""
    size, tokens_RxM = 4, np.array([[4, 1, 2], [1, 3, 1]])
    method, inner = lc.methods.diloco(2), optax.sgd(1.0)
    engine = lc.Engine(masked_loss, inner, method, R, mesh=MESH)
    state = engine.init(oracle.make_params())
    mask = (np.arange(size) < tokens_RxM[..., None]).reshape(R, M * size).astype(np.float32)
    batch = {**probed(size), "mask": mask}
    values_R = Probe(engine, M).measure(state, batch, size, EVERYONE)
    anchors, rows = rows_of(state.anchor), []
    for r, counts in enumerate(tokens_RxM):
        x, y = batch["x"][r].astype(np.float64), batch["y"][r].astype(np.float64)
        cuts = [slice(j * size, j * size + n) for j, n in enumerate(counts)]
        rows.append([oracle.flatten(oracle.gradient(anchors[r], x[c], y[c])) for c in cuts])
    g, weight_RxM = np.array(rows), tokens_RxM / tokens_RxM.mean(axis=1, keepdims=True)
    gbar = (weight_RxM[..., None] * g).mean(axis=1)
    one = lc.Engine(masked_loss, inner, method, R, mesh=MESH, accumulate=M)
    trained, _ = one.step(one.init(oracle.make_params()), batch)
    for r, after in enumerate(rows_of(trained.inner.params)):
        moved = oracle.flatten(anchors[r]) - oracle.flatten(after)
        np.testing.assert_allclose(gbar[r], moved, rtol=2e-4, atol=2e-6)
    away, gbar2 = g - gbar[:, None], (gbar**2).sum(axis=1)
    along = (away * gbar[:, None]).sum(axis=2) ** 2 / gbar2[:, None]
    want = gbar2, (weight_RxM * (away**2).sum(2)).sum(axis=1), (weight_RxM * along).sum(axis=1)
    np.testing.assert_allclose(found(values_R), want, rtol=5e-5)


def test_a_microbatch_without_tokens_counts_for_nothing():
    """Even when its gradient is not finite."""
    engine = lc.Engine(masked_loss, optax.sgd(1.0), lc.methods.diloco(2), R, mesh=MESH)
    state, batch = engine.init(oracle.make_params()), probed()
    mask = np.ones((R, M * SIZE), np.float32)
    mask[:, :SIZE] = 0
    x = batch["x"].copy()
    x[:, 0] = np.inf
    batch = {**batch, "x": x, "mask": mask}
    values = found(Probe(engine, M).measure(state, batch, SIZE, EVERYONE))
    assert np.isfinite(values).all() and (values[0] > 0).all()


def test_a_mesh_measures_the_same_and_no_gradient_travels(drifted):
    """Regions apart and samples sharded inside a region."""
    engine, state = drifted
    plain = found(Probe(engine, M).measure(state, probed(), SIZE, EVERYONE))
    spread, other = make(mesh=lc.make_mesh(region=2, fsdp=2))
    places = jax.tree.map(lambda x: x.sharding, other.anchor)
    other = other.replace(anchor=jax.device_put(jax.tree.map(np.array, state.anchor), places))
    values_R = Probe(spread, M).measure(other, probed(), SIZE, EVERYONE)
    np.testing.assert_allclose(found(values_R), plain, rtol=2e-5)
    assert crossing(spread, other) == 0


def crossing(engine, state):
    """Collectives over regions, which are written out: the region axis is manual."""
    programs = engine.sync_loop(state).programs
    batch = engine.place({k: v.reshape(R, M, SIZE, *v.shape[2:]) for k, v in probed().items()})
    inner = state.inner
    keys = engine.region_keys
    given = (state.anchor, inner.buffers, inner.step, state.frozen, batch, keys, np.ones(R))
    lowered = jax.jit(make_probe_program(programs)).lower(*given)
    return len(re.findall(r"all_to_all|all_gather|all_reduce|permute", lowered.as_text()))


def test_an_anchor_a_region_is_its_own_point():
    engine, state = make(lc.methods.eager_diloco(1))
    apart = np.array([1.0, -0.4], np.float32)
    moved = {k: (np.array(x).T * apart).T for k, x in state.anchor.items()}
    state = state.replace(anchor=jax.device_put(moved))
    anchors = rows_of(state.anchor)
    check(Probe(engine, M).measure(state, probed(), SIZE, EVERYONE), gradients(anchors, probed()))


def test_nothing_compiles_after_warming_up_and_nothing_changes(drifted):
    """Warmed up before the first step; the anchor has moved since."""
    engine, state = drifted
    before = jax.tree.map(np.array, state)
    probe = Probe(engine, M)
    probe.warm(engine.init(oracle.make_params()), probed(), [1, SIZE])
    assert compilations(lambda: probe.measure(state, probed(), SIZE, EVERYONE)) == 0
    assert compilations(lambda: probe.measure(state, probed(1), 1, EVERYONE)) == 0
    jax.tree.map(np.testing.assert_array_equal, state, before)


def test_what_travels_is_booked(drifted):
    """Three fp32 scalars a region, also on the virtual clock."""
    _, state = drifted
    clock = VirtualClock(parse({"regions": R, "bandwidth_gbps": 0.001, "compute_s": 1.0}))
    step = int(state.counters.step)
    for each in range(1, step + 1):
        clock.inner_step(each)
    before = clock.now_R.copy()
    measured, told = np.arange(R)[:, None] * np.ones(4), Told()
    trainers = AdaptiveState({0: Trainer(1, 0, {}, measured, state)}, 0)
    after = booked(trainers, np.ones(R, bool), told)
    assert told.noise[0].tolist() == [[1, 1, 1]]  # the other region has not measured
    follow(clock, step, told.events)
    for way in ("bytes_sent", "bytes_received"):
        more = getattr(after.counters, way) - getattr(state.counters, way)
        assert more.tolist() == [12] * R
    assert clock.ledger.sent_R().tolist() == pytest.approx([12] * R)
    assert (clock.now_R - before >= 8 * 12 / 1e6).all()
