"""The pipelined model against the model it was cut from, on eight virtual devices."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import lowcomm_jax as lc
from lowcomm_jax.mesh import stages
from lowcomm_jax.mesh.regions import Regions
from lowcomm_jax.models import Pipeline, TransformerConfig, build

RNG = jax.random.key(0)
pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


def model_of(**changes):
    fields = {
        "vocab_size": 41,
        "layers": 3,
        "width": 16,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 4,
        "mlp_width": 24,
        "init_std": 0.3,
        "z_loss": 1e-3,
        "layer_loop": "scan",
    }
    return build(TransformerConfig(**{**fields, **changes}))


def placed(tree, specs, mesh):
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, P("region", *spec)), specs)
    return jax.device_put(tree, shardings)


# Replicas that take turns in a slot, FSDP within stages; everything divides.
EVEN = (2, 2, 2, 1), 4, {"layers": 4, "vocab_size": 40, "remat": "full", "tie_embeddings": True}
# 5 blocks in 4 stages of 2, 41 tokens in slices of 11, and a width that does not divide.
ODD = (1, 4, 1, 2), 1, {"layers": 5, "width": 15, "qk_norm": True, "remat": "light"}
# One stage, of microbatches all the same.
ALONE = (2, 1, 2, 1), 2, {"layers": 2}


@pytest.mark.parametrize(
    ("schedule", "count", "shape", "regions", "changes"),
    [
        ("gpipe", 4, *EVEN),
        ("gpipe", 4, *ODD),
        ("gpipe", 2, *ALONE),
        # Quick on a toy: tests/models/test_one_f_one_b.py.
        pytest.param("1f1b", 4, *EVEN, marks=pytest.mark.slow),
        pytest.param("1f1b", 8, *ODD, marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients_equal_the_model_in_one_piece(schedule, count, shape, regions, changes):
    model, mesh = model_of(**changes), lc.make_mesh(*shape)
    pipe = Pipeline(model, mesh, count, schedule=schedule)
    params = jax.vmap(model.init)(jax.random.split(RNG, regions))
    batch = {
        "tokens": jax.random.randint(RNG, (regions, 8, 7), 0, model.config.vocab_size),
        "mask": jax.random.bernoulli(RNG, 0.7, (regions, 8, 6)).astype(jnp.float32),
    }

    def gradients(loss_fn):
        return lambda p, b: jax.value_and_grad(loss_fn, has_aux=True)(p, b, RNG)

    (expected, expected_aux), expected_grads = jax.jit(jax.vmap(gradients(model.loss_fn)))(
        params, batch
    )
    cut = jax.vmap(pipe.layout.cut)(params)
    specs = pipe.specs(jax.tree.map(lambda leaf: leaf[0], cut))
    step = jax.jit(Regions(regions, mesh).lift(gradients(pipe.loss_fn), (0, 0)))
    (loss, aux), grads = step(
        placed(cut, specs, mesh), placed(batch, {"tokens": P("fsdp"), "mask": P("fsdp")}, mesh)
    )
    joined = jax.vmap(pipe.layout.join)(grads)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=3e-6)  # noqa: E731
    np.testing.assert_allclose(loss, expected, rtol=2e-6)
    jax.tree.map(close, aux, expected_aux)
    jax.tree.map(close, joined, expected_grads)
    # No gradient reaches the padding.
    jax.tree.map(np.testing.assert_array_equal, grads, jax.vmap(pipe.layout.cut)(joined))


def test_logits_equal_the_model_in_one_piece():
    model = model_of()
    pipe = Pipeline(model, lc.make_mesh(1, 2), microbatches=4)
    params = model.init(RNG)
    tokens = jax.random.randint(RNG, (6, 5), 0, 41)  # in gcd(4, 6) = 2 microbatches
    logits = jax.jit(pipe.logits)(pipe.layout.cut(params), tokens)
    expected = jax.jit(model.logits)(params, tokens)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("schedule", ["gpipe", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_bfloat16_reduces_in_float32(schedule):
    """A bfloat16 reduction in a partly manual program aborts the process (jax 0.10, CPU)."""
    model, mesh = model_of(compute_dtype="bfloat16"), lc.make_mesh(1, 2, 2)
    pipe = Pipeline(model, mesh, microbatches=2, schedule=schedule)
    batch = {"tokens": jax.random.randint(RNG, (4, 7), 0, 41)}
    grads = jax.jit(jax.grad(lambda p: pipe.loss_fn(p, batch, RNG)[0]))(pipe.init(RNG))
    assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(grads))


def test_an_unknown_token_shows_in_the_loss():
    pipe = Pipeline(model_of(), lc.make_mesh(1, 2), microbatches=1)
    batch = {"tokens": np.array([[1, 41, 2, 3]], np.int32)}  # a row of the padding
    assert np.isnan(jax.jit(pipe.loss_fn)(pipe.init(RNG), batch, RNG)[0])


def temporaries(one, batch=16):
    """Bytes a device of a gradient step, beside arguments and results."""
    params = jax.eval_shape(one.init, RNG)
    shape = {"tokens": jax.ShapeDtypeStruct((batch, 65), jnp.int32)}
    if isinstance(one, Pipeline):
        shardings = jax.tree.map(lambda s: NamedSharding(one.mesh, s), one.specs(params))
        params = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, shardings
        )
    step = jax.jit(jax.grad(lambda p, b: one.loss_fn(p, b, RNG)[0]))
    return step.lower(params, shape).compile().memory_analysis().temp_size_in_bytes


DEEP = {"layers": 8, "width": 32, "mlp_width": 128, "vocab_size": 64}


@pytest.mark.parametrize("remat", ["full", pytest.param("none", marks=pytest.mark.slow)])
def test_stages_need_less_memory_for_activations(remat):
    model = model_of(**DEEP, remat=remat)
    whole, staged = temporaries(model), temporaries(Pipeline(model, lc.make_mesh(1, 4), 8))
    # Of 8 x 16 block inputs 2 x 22 remain (idle ticks included): 0.34, and the logits' quarter.
    assert staged < 0.5 * whole


@pytest.mark.slow
def test_1f1b_keeps_fewer_activations():
    model, mesh = model_of(**DEEP, remat="full"), lc.make_mesh(1, 2)
    few, many = (
        temporaries(Pipeline(model, mesh, count, schedule="1f1b"), batch=2 * count)
        for count in (4, 16)
    )
    # Four times the tokens: but for their numbers and masks nothing grows.
    assert many < 1.1 * few
    # GPipe keeps the inputs of 4 blocks, of the stage and of the output layer in 17 ticks; what one
    # block needs at a time, attention first, is in both.
    assert 1.5 * many < temporaries(Pipeline(model, mesh, 16), batch=32)


def test_bubble_and_waste():
    pipe = Pipeline(model_of(), lc.make_mesh(1, 2), microbatches=6)
    assert pipe.bubble == stages.bubble(2, 6) == 1 / 7
    params = jax.eval_shape(pipe.init, RNG)
    held = sum(leaf.size for leaf in jax.tree.leaves(params))
    whole = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model_of().init, RNG)))
    assert pipe.report()["padding"] == 1 - whole / held > 0
    batch = {"tokens": jax.ShapeDtypeStruct((6, 5), jnp.int32)}
    ticks = [
        eqn.params["length"]
        for eqn in equations(jax.make_jaxpr(pipe.loss_fn)(params, batch, RNG).jaxpr)
        if eqn.primitive.name == "scan"
    ]
    # The pipeline's ticks M + S - 1, the stage's blocks, the output layer's microbatches.
    assert sorted(ticks) == [2, 6, 7]


def test_1f1b_goes_forward_and_back_in_as_many_ticks():
    pipe = Pipeline(model_of(layers=4), lc.make_mesh(1, 4), 6, schedule="1f1b")
    batch = {"tokens": jax.ShapeDtypeStruct((6, 5), jnp.int32)}
    loss = jax.grad(lambda p, b: pipe.loss_fn(p, b, RNG)[0])
    found = list(equations(jax.make_jaxpr(loss)(jax.eval_shape(pipe.init, RNG), batch).jaxpr))
    # S - 1 ticks forward, M both ways, S - 1 back: M + S - 1 each way. The stage has one block.
    scans = [eqn.params["length"] for eqn in found if eqn.primitive.name == "scan"]
    assert [length for length in scans if length > 1] == [3, 6, 3]
    # Inputs of 2 S - 1 microbatches of 4 tokens are kept, and nothing of all M.
    shapes = {var.aval.shape for eqn in found for var in eqn.outvars}
    assert (7, 4, 16) in shapes and not any(s[:1] == (6,) and 16 in s[1:] for s in shapes)


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(ValueError, match=r"(?s)4 stages for 3 blocks.*microbatches=0"):
        Pipeline(model_of(), lc.make_mesh(1, 4), microbatches=0)
    with pytest.raises(ValueError, match="need layer_loop='scan'"):
        Pipeline(model_of(layer_loop="unrolled"), lc.make_mesh(1, 2), microbatches=1)
    mesh = lc.make_mesh(1, 2)
    with pytest.raises(ValueError, match="schedule 'zb' is unknown: use gpipe or 1f1b"):
        Pipeline(model_of(), mesh, microbatches=2, schedule="zb")
    with pytest.raises(ValueError, match="random routing with 1f1b"):
        Pipeline(model_of(), mesh, microbatches=2, routed=True, schedule="1f1b")
    pipe = Pipeline(model_of(), mesh, microbatches=3)
    with pytest.raises(ValueError, match="batch of 4 does not divide into 3 microbatches"):
        pipe.loss_fn(pipe.init(RNG), {"tokens": jnp.zeros((4, 5), jnp.int32)}, RNG)


def routed_gradients(pipe, params, batch, *rngs):
    """Loss [R] and gradients [R, ...] of the regions together with each rng.

    Every region has a key of its own.
    """
    regions = pipe.paths.regions

    def one(params, batch, region, rng):
        key = jax.random.fold_in(rng, region)
        return jax.value_and_grad(lambda p: pipe.loss_fn(p, batch, key)[0])(params)

    step = jax.jit(Regions(regions, pipe.mesh).lift(one, (0, 0, 0, None)))
    cut = jax.vmap(pipe.layout.cut)(params)
    specs = pipe.specs(jax.tree.map(lambda leaf: leaf[0], cut))
    where = jax.tree.map(lambda leaf: P(), batch)
    given = placed(cut, specs, pipe.mesh), placed(batch, where, pipe.mesh), jnp.arange(regions)
    return [(loss, jax.vmap(pipe.layout.join)(g)) for loss, g in (step(*given, r) for r in rngs)]


def test_random_routes_are_followed_forward_and_backward():
    """Against mixed models in one piece: lower blocks of one region, upper blocks of another."""
    regions, count = 3, 2
    model, mesh = model_of(layers=2, z_loss=0.0), lc.make_mesh(regions, 2)
    pipe = Pipeline(model, mesh, count, routed=True)
    params = jax.vmap(model.init)(jax.random.split(RNG, regions))
    batch = {
        "tokens": jax.random.randint(RNG, (regions, 4, 7), 0, 41),
        "mask": jax.random.bernoulli(RNG, 0.7, (regions, 4, 6)).astype(jnp.float32),
    }
    ways = list(itertools.permutations(range(regions)))
    # A key whose draw turns one microbatch around all regions and swaps two with the other.
    chosen = [(1, 2, 0), (0, 2, 1)]
    seed = seed_of([ways.index(way) for way in chosen], count + 1, len(ways))

    def one(params, m, source):
        end = jnp.array(chosen)[m, source]
        low, high = (jax.tree.map(lambda x, r=r: x[r], params) for r in (source, end))
        blocks = jax.tree.map(
            lambda a, b: jnp.concatenate([a[:1], b[1:]]), low["blocks"], high["blocks"]
        )
        mixed = {**high, "embedding": low["embedding"], "blocks": blocks}
        part = jax.tree.map(lambda x: x[source].reshape(-1, count, *x.shape[2:])[:, m], batch)
        loss, aux = model.loss_fn(mixed, part, RNG)
        return end, loss * aux["tokens"] / jnp.sum(batch["mask"][source])

    def through(params):
        pairs = jnp.array([(m, r) for m in range(count) for r in range(regions)]).T
        end, loss = jax.vmap(one, (None, 0, 0))(params, *pairs)
        return jnp.sum(loss), jnp.zeros(regions).at[end].add(loss)

    expected_grads, expected = jax.jit(jax.grad(through, has_aux=True))(params)
    ((loss, grads),) = routed_gradients(pipe, params, batch, jax.random.key(seed))
    np.testing.assert_allclose(loss, expected, rtol=3e-6)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=3e-6)  # noqa: E731
    jax.tree.map(close, grads, expected_grads)


def seed_of(rows, ticks, count):
    """A seed whose draw of `ticks` numbers below `count` begins with `rows`."""

    def drawn(seed):
        key = jax.random.fold_in(jax.random.key(seed), 0)
        return jax.random.randint(key, (ticks,), 0, count)

    found = np.asarray(jax.vmap(drawn)(jnp.arange(1000)))[:, : len(rows)]
    return int(np.flatnonzero((found == np.array(rows)).all(1))[0])


def test_routes_that_lead_straight_on_change_nothing():
    model, mesh = model_of(), lc.make_mesh(2, 2)
    params = jax.vmap(model.init)(jax.random.split(RNG, 2))
    batch = {"tokens": jax.random.randint(RNG, (2, 4, 7), 0, 41)}
    straight, swapped = (jax.random.key(seed_of([row] * 2, 3, 2)) for row in (0, 1))
    (plain,) = routed_gradients(Pipeline(model, mesh, 2), params, batch, RNG)
    pipe = Pipeline(model, mesh, 2, routed=True)
    found, other = routed_gradients(pipe, params, batch, straight, swapped)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)  # noqa: E731
    jax.tree.map(close, found, plain)
    assert (abs(other[0] - plain[0]) > 1e-3).all()
