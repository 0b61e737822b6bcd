"""Leaves below fp32: what rounding takes from the values a region takes over is no progress.

A tree holds every leaf twice, in bf16 and in fp32. Inner steps move both by the same multiples of
1/128, which bf16 holds between 1 and 2. So both must end alike.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilations import compilations

import lowcomm_jax as lc
from lowcomm_jax.channels import Channel
from lowcomm_jax.recovery.rejoin import rejoin_regions
from lowcomm_jax.schedule import Never

R, AVERAGE = 4, lc.outer.average()
SPEEDS, AWAY = (1.0, 1.0, 0.5, 1.0), ((1, 5, 7),)
CUT, SHAPES = ("^a/", "^b/"), {"a": (4, 6), "b": (5,)}


def streaming(overlap=1, alpha=0.5, **answers):
    found = lc.methods.streaming_diloco(4, 2, overlap, alpha, pattern=CUT, outer=AVERAGE)
    return dataclasses.replace(found, **answers)


def decoupled(**settings):
    return lc.methods.decoupled_diloco(4, 2, 1, pattern=CUT, outer=AVERAGE, **settings)


NORM = lc.landing.taylor_delay_correction(0.5, mode="norm")
AVERAGED = Channel("params", every=2)
METHODS = {
    "local_sgd": lambda: lc.methods.local_sgd(2),
    "diloco": lambda: lc.methods.diloco(2),
    "codec": lambda: lc.methods.diloco(2, AVERAGE, codec="bf16"),
    "blend": streaming,
    "replace late": lambda: streaming(alpha=0.0),
    "replay": lambda: streaming(2, landing=lc.landing.replay()),
    "rules of their own": lambda: streaming(landing=(None, lc.landing.blend(0.3))),
    "overlaps of their own": lambda: streaming((0, 1, 2, 1)),
    "cocodc": lambda: lc.methods.cocodc(4, 2, 1, pattern=CUT, outer=AVERAGE, taylor=NORM),
    "eager": lambda: lc.methods.eager_diloco(2),
    "delayed": lambda: lc.methods.delayed_diloco(2, AVERAGE),
    "dilocox": lambda: lc.methods.dilocox(2, codec=None, outer=AVERAGE),
    "noloco": lambda: lc.methods.noloco(2),
    "gasloc": lambda: lc.methods.gasloc(2, 0.6, 0.3, 0.8),
    "learners": lambda: decoupled(speeds=SPEEDS, outages=AWAY),
    "learners that blend": lambda: dataclasses.replace(
        decoupled(outages=AWAY), landing=lc.landing.blend(0.5)
    ),
    "async_local_sgd": lambda: lc.methods.async_local_sgd(2, SPEEDS),
    "heloco": lambda: lc.methods.heloco(2, SPEEDS),
    "halos": lambda: lc.methods.halos(2, SPEEDS, ((0, 1), (2, 3))),
    "edit": lambda: lc.methods.edit(2, warm_up=1),
    "partial_updates": lambda: lc.methods.partial_updates(2, lc.roles.Shares("^b/")),
    "spes": lambda: lc.methods.spes(2, "^b/(wide|narrow)", "wide", merge_every=None),
    "restarted": lambda: lc.methods.restarted_diloco(2),
    "snoo": lambda: lc.methods.snoo(2),
    "muloco": lambda: lc.methods.muloco(2),
    "sparseloco": lambda: lc.methods.sparseloco(2),
    "pulseloco": lambda: lc.methods.pulseloco(2),
    "decoupled momentum": lambda: lc.methods.decoupled_momentum(2),
    "ddp": lc.methods.ddp,
    "channel": lambda: lc.methods.Method("all", Never(), None, channels=(AVERAGED,)),
    "channel beside anchors": lambda: dataclasses.replace(
        lc.methods.diloco(6, AVERAGE), channels=(dataclasses.replace(AVERAGED, delay=1),)
    ),
}
QUICK = ("diloco", "blend", "halos", "channel beside anchors")
EACH = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in METHODS]


def loss_fn(params, batch, rng):
    """Its gradient is the batch."""
    del rng
    given = {name: batch[name.partition("/")[0]].mean(axis=0) for name in params}
    return sum((x.astype(jnp.float32) * given[name]).sum() for name, x in params.items())


def engine_of(method, *mesh):
    mesh = lc.make_mesh(*mesh, devices=jax.devices()[: math.prod(mesh)])
    return lc.Engine(loss_fn, optax.sgd(1.0), method, R, mesh=mesh)


def start(narrow=jnp.bfloat16, wide=jnp.float32):
    kinds = {"narrow": narrow, "wide": wide}
    return {f"{k}/{w}": jnp.ones(s, d) for k, s in SHAPES.items() for w, d in kinds.items()}


def moves(steps, most=3):
    """Batches that move every value up by 0 to `most` / 128, other values in every region."""
    rng = np.random.default_rng(0)

    def one(shape):
        drawn = -rng.integers(0, most + 1, (R, 1, *shape)).astype(np.float32) / 128
        return np.repeat(drawn, 2, axis=1)  # samples, one for each device

    return [{k: one(s) for k, s in SHAPES.items()} for _ in range(steps)]


def model(state):
    return {k: np.asarray(x, np.float32) for k, x in lc.global_params(state).items()}


def assert_alike(found):
    for k in SHAPES:
        np.testing.assert_array_equal(found[f"{k}/narrow"], found[f"{k}/wide"], k)
        assert found[f"{k}/wide"].max() < 2


def sent(history):
    """The norm of every region's Delta, of all payloads."""
    sends = [e for e in history.events if e.kind == "send" and "delta_norm" in e.values]
    return np.array([e.values["delta_norm"][e.participants].max() for e in sends])


@pytest.mark.parametrize("name", EACH)
def test_leaves_end_as_those_of_fp32_and_without_steps_nothing_is_sent(name):
    engine = engine_of(METHODS[name]())
    state, _ = engine.run(engine.init(start()), moves(11))
    assert_alike(model(state))
    state = engine.finish(state)
    done = model(state)
    assert_alike(done)
    assert any((x.astype(jnp.bfloat16) != x).any() for x in done.values()), "nothing was rounded"
    state, history = engine.run(state, moves(11, most=0))
    assert (sent(history) == 0).all()
    if AVERAGE in (engine.method.outer, getattr(engine.method.servers, "outer", None)):
        jax.tree.map(np.testing.assert_array_equal, model(state), done)
    assert_alike(model(engine.finish(state)))


@pytest.mark.parametrize("name", ["blend", pytest.param("channel", marks=pytest.mark.slow)])
def test_on_several_devices_with_nothing_compiled_later(name):
    engine = engine_of(METHODS[name](), 2, 1, 2)
    state, _ = engine.run(engine.init(start()), moves(11))
    held = []
    assert compilations(lambda: held.append(engine.run(state, moves(8))[0].inner.rounding)) == 0
    assert {x.sharding.spec[0] for x in held[0].values()} == {"region"}
    assert_alike(model(engine.finish(engine.run(engine.init(start()), moves(11))[0])))


def test_an_anchor_keeps_what_one_region_moves_by_less_than_its_leaf_can_hold():
    engine = engine_of(lc.methods.diloco(period=1, outer=AVERAGE))
    batch = {k: np.zeros((R, 1, *s), np.float32) for k, s in SHAPES.items()}
    for x in batch.values():
        x[0] = -1 / 128
    state, _ = engine.run(engine.init(start()), [batch] * 16)
    for name, x in model(state).items():
        np.testing.assert_array_equal(x, 1.03125, name)


def test_a_rate_of_0_sends_nothing_while_momentum_moves_the_anchor():
    engine = engine_of(lc.methods.diloco(period=1))
    state, _ = engine.run(engine.init(start()), moves(8))
    before = model(state)
    state, history = engine.run(state, moves(8, most=0))
    assert (sent(history) == 0).all()
    assert all((x > before[name]).all() for name, x in model(state).items())


def test_fp16_and_values_near_0():
    """Where fp16 has fewer digits than elsewhere, too."""
    engine = engine_of(streaming())
    params = {k: x * x.dtype.type(1e-6) for k, x in start(jnp.float16).items()}
    tiny = [jax.tree.map(lambda x: x * np.float32(2**-17), batch) for batch in moves(9)]
    state = engine.finish(engine.run(engine.init(params), tiny)[0])
    state, history = engine.run(state, moves(8, most=0))
    assert (sent(history) == 0).all()


@pytest.mark.parametrize("away", [(), (0, 2)])
def test_regions_that_were_absent_send_nothing_without_steps(away):
    engine = engine_of(streaming())
    state = engine.finish(engine.run(engine.init(start()), moves(8))[0])
    done = model(state)
    takes = [r not in away for r in range(R)]
    state, history = engine.run(state, moves(8, most=0), lambda step: takes)
    assert (sent(history) == 0).all()
    jax.tree.map(np.testing.assert_array_equal, model(state), done)


@pytest.mark.parametrize("landing", [None, lc.landing.blend(0.5)], ids=["replace", "blend"])
def test_a_region_that_comes_back_has_made_no_progress(landing):
    method = dataclasses.replace(lc.methods.diloco(2, AVERAGE), landing=landing)
    engine, comes = engine_of(method), np.arange(R) == 2
    state, _ = engine.run(engine.init(start()), moves(5))
    state = rejoin_regions(engine.sync_loop(state), state, engine.init(start()), comes)
    state, history = engine.run(state, moves(1, most=0))
    [delta_R] = [e.values["delta_norm"] for e in history.events if e.kind == "send"]
    assert ((np.asarray(delta_R) == 0) == comes).all()


def test_trainers_that_merge_have_no_progress_of_it():
    rule = lc.methods.adloco(2, 2, 1, inner_batching=lc.batching.Fixed(1))
    rule = dataclasses.replace(rule, outer=AVERAGE)
    mesh = lc.make_mesh(devices=jax.devices()[:1])
    engine = lc.AdaptiveEngine(loss_fn, optax.sgd(1.0), rule, R, mesh=mesh, largest_microbatch=1)

    def moving(trainer, first, count):
        rng = np.random.default_rng([trainer, first])
        sizes = {k: (R, count, *s) for k, s in SHAPES.items()}
        return {k: -rng.integers(0, 4, s).astype(np.float32) / 128 for k, s in sizes.items()}

    def still(trainer, first, count):
        return {k: np.zeros((R, count, *s), np.float32) for k, s in SHAPES.items()}

    state, history = engine.run(engine.init(start()), moving, rounds=1)
    requests = {0: 3, 1: 2}
    asking = {i: t.replace(request=requests[i]) for i, t in state.trainers.items()}
    state, history = engine.run(state.replace(trainers=asking), still, rounds=1)
    assert len(state.trainers) == 1
    assert ["merges" in row for row in history.rows()].count(True) == 1
    assert (sent(history) == 0).all()
    assert_alike(model(state))


@pytest.mark.parametrize(("method", "warns"), [("diloco", 1), ("ddp", 0)])
def test_leaves_that_inner_steps_round_get_a_warning(method, warns, caplog):
    engine = engine_of(METHODS[method]())
    engine.init(start())
    engine.init(start())
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == warns
    assert all("2 of 4 trained leaves are below fp32 (bfloat16)" in line for line in lines)
    caplog.clear()
    engine.init(start(jnp.float32))
    assert not caplog.records
