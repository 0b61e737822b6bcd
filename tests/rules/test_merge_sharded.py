"""Merge rules where devices share a region's leaves, and where regions lie apart: same numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowcomm_jax as lc
from lowcomm_jax.methods import Method
from lowcomm_jax.schedule import Staggered

R = 2
SHAPES = {"w": (8, 6), "embed": (10, 4), "blocks/w": (3, 6, 8), "odd": (7, 5), "norm": (8,)}
SPECS = {
    "w": jax.P("fsdp"),
    "embed": jax.P(None, "fsdp"),
    "blocks/w": jax.P(None, None, "fsdp"),
    "norm": jax.P("fsdp"),
}
BOTH = "2 slots x fsdp 2"
MESHES = {"fsdp 2": (1, 1, 2), "2 slots": (2,), BOTH: (2, 1, 2)}


def streaming(rule):
    return Method(
        name="with a rule",
        schedule=Staggered(2, 2, 1),
        outer=lc.outer.nesterov(0.6, 0.8),
        landing=lc.landing.blend(0.3),
        merge=rule,
    )


METHODS = {
    "radial": lambda: streaming(lc.merge.RadialDirectional()),
    "isotropic": lambda: streaming(lc.merge.Isotropic()),
    "edit": lambda: lc.methods.edit(2, 0.5, 0.4, outlier=0.5, decay=0.3, warm_up=1),
    "heloco": lambda: lc.methods.heloco(2, (1.0, 0.6), 0.6, 0.8, enough=0.9),
}


def loss_fn(params, batch, rng):
    """Every region is pulled to targets of its own, of full rank."""
    del rng
    return 0.5 * sum(jnp.sum((params[k] - jnp.mean(batch[k], axis=0)) ** 2) for k in params)


def draw(*seed, lead=()):
    rng = np.random.default_rng(seed)
    return {k: rng.standard_normal((*lead, *s)).astype(np.float32) for k, s in SHAPES.items()}


@functools.cache
def train(name, shape):
    mesh = lc.make_mesh(*shape, devices=jax.devices()[: int(np.prod(shape))])
    specs = (lambda name, leaf: SPECS.get(name, jax.P())) if "fsdp" in mesh.shape else None
    method, inner = METHODS[name](), optax.sgd(0.2, momentum=0.7)
    engine = lc.Engine(loss_fn, inner, method, R, mesh=mesh, specs=specs, stacked=("blocks",))
    batches = [draw(step, lead=(R, 2)) for step in range(7)]
    state, _ = engine.run(engine.init(draw(99)), batches)
    return lc.global_params(state), lc.region_params(state)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "mesh",
    [name if name == BOTH else pytest.param(name, marks=pytest.mark.slow) for name in MESHES],
)
def test_numbers_do_not_depend_on_the_mesh(mesh, name):
    for found, wanted in zip(train(name, MESHES[mesh]), train(name, (1,)), strict=True):
        for key, value in wanted.items():
            np.testing.assert_allclose(found[key], value, rtol=1e-5, atol=1e-6, err_msg=key)
