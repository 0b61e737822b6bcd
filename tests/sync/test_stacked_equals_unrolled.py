"""A model whose layers are one stacked leaf trains as the same model with a leaf for each layer.

What a user sees is compared: `lc.global_params` and `lc.region_params` in the middle of a run,
after `Engine.finish`, and after more steps.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowcomm_jax as lc

R, LAYERS, WIDTH = 3, 4, 5
STACKED = ("blocks",)
MIDDLE, LAST = 8, 11


def unrolled_params():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return (0.6 * rng.standard_normal(shape)).astype(np.float32)

    blocks = {str(i): {"bias": draw(WIDTH), "w": draw(WIDTH, WIDTH)} for i in range(LAYERS)}
    return {"blocks": blocks, "embed": draw(7, WIDTH), "head": draw(WIDTH)}


def stack(params):
    """Layers `[..., ]` of their own -> leaves with an axis of layers in front."""
    layers = [params["blocks"][str(i)] for i in range(LAYERS)]
    return {**params, "blocks": jax.tree.map(lambda *xs: np.stack(xs), *layers)}


def unstack(params, axis):
    blocks = {
        str(i): jax.tree.map(lambda x, i=i: np.take(x, i, axis), params["blocks"])
        for i in range(LAYERS)
    }
    return {**params, "blocks": blocks}


def loss_of(layers):
    """A loss over `layers(params)`, each layer's leaves in turn."""

    def loss_fn(params, batch, rng):
        del rng
        x = batch["x"] @ params["embed"]
        for layer in layers(params):
            x = x + jnp.tanh(x @ layer["w"]) * layer["bias"][None]
        return jnp.mean((x @ params["head"] - batch["y"]) ** 2)

    return loss_fn


def layer_of(blocks, i):
    return jax.tree.map(lambda x: x[i], blocks)


FORMS = {
    False: (lambda p: [p["blocks"][str(i)] for i in range(LAYERS)], ()),
    True: (lambda p: [layer_of(p["blocks"], i) for i in range(LAYERS)], STACKED),
}


def batches(first, last, count):
    for step in range(first, last + 1):
        rng = np.random.default_rng([3, step])
        x = rng.standard_normal((R, 4, 7)).astype(np.float32)
        y = rng.standard_normal((R, 4)).astype(np.float32) + np.arange(R, dtype="f4")[:, None]
        yield {"x": x[:count], "y": y[:count]}


def seen(state, stacked):
    found = jax.tree.map(np.array, (lc.global_params(state), lc.region_params(state)))
    return (unstack(found[0], 0), unstack(found[1], 1)) if stacked else found


def trained(method, stacked):
    """What a user reads in the middle, at the end, and after training on."""
    layers, told = FORMS[stacked]
    inner = optax.adam(0.01) if method is METHODS["des_loc"] else optax.sgd(0.02, momentum=0.5)
    mesh = lc.make_mesh(devices=jax.devices()[:1])
    count = 1 if method is METHODS["snoo"] else R  # its only region's own progress
    engine = lc.Engine(loss_of(layers), inner, method(told), count, mesh=mesh, stacked=told)
    params = unrolled_params()
    state = engine.init(stack(params) if stacked else params)
    state, _ = engine.run(state, batches(1, MIDDLE, count))
    found = [seen(state, stacked)]
    state, _ = engine.run(state, batches(MIDDLE + 1, LAST, count))
    state = engine.finish(state)
    found.append(seen(state, stacked))
    state, _ = engine.run(state, batches(LAST + 1, LAST + 3, count))
    return [*found, seen(state, stacked)]


def average():
    return lc.outer.average()


METHODS = {
    "streaming_diloco, no delay": lambda told: lc.methods.streaming_diloco(
        4, 2, 0, 0.0, outer=average()
    ),
    "streaming_diloco": lambda told: lc.methods.streaming_diloco(5, 3, 2, 0.3),
    "cocodc": lambda told: lc.methods.cocodc(6, 3, 2, taylor=0.5, syncs_per_period=5),
    "decoupled_diloco": lambda told: lc.methods.decoupled_diloco(4, 3, 1),
    "ddp": lambda told: lc.methods.ddp(),
    "local_sgd": lambda told: lc.methods.local_sgd(4),
    "diloco": lambda told: lc.methods.diloco(4),
    "eager_diloco": lambda told: lc.methods.eager_diloco(4),
    "delayed_diloco": lambda told: lc.methods.delayed_diloco(4),
    "noloco": lambda told: lc.methods.noloco(4),
    "gasloc": lambda told: lc.methods.gasloc((4, 2, 3), 0.6, 0.3, 0.8),
    "dilocox": lambda told: lc.methods.dilocox(4, {"name": "int4", "stacked": told}),
    "sparseloco": lambda told: lc.methods.sparseloco(4, k=2, block=4, stacked=told),
    "pulseloco": lambda told: lc.methods.pulseloco(4, k=2, block=4, stacked=told),
    "muloco": lambda told: lc.methods.muloco(4, stacked=told),
    "des_loc": lambda told: lc.methods.des_loc(2, 4, 4),
    "demo": lambda told: lc.methods.demo(k=3, stacked=told),
    "decoupled_momentum": lambda told: lc.methods.decoupled_momentum(4, k=3, stacked=told),
    "isoloco": lambda told: lc.methods.isoloco(4),
    "edit": lambda told: lc.methods.edit(4, warm_up=1, outlier=0.8, decay=0.3),
    "a_edit": lambda told: lc.methods.a_edit(2.0, 0.5, (1.0, 0.6, 0.8), clip=0.1),
    # Rows of every layer: behind the axis of layers where there is one.
    "partial_updates": lambda told: lc.methods.partial_updates(
        4, lc.roles.Shares("blocks/", 1 if told else 0)
    ),
    "spes": lambda told: lc.methods.spes(
        2, "blocks/", "w$", 1 if told else 0, share=0.4, merge_every=4, until=40, donors=2
    ),
    "restarted_diloco": lambda told: lc.methods.restarted_diloco(2),
    "snoo": lambda told: lc.methods.snoo(4),
    "heloco": lambda told: lc.methods.heloco(4, (1.0, 0.6, 0.8), weight=0.6),
    "async_local_sgd": lambda told: lc.methods.async_local_sgd(4, (1.0, 0.6, 0.8)),
    "halos": lambda told: lc.methods.halos(4, (1.0, 0.6, 0.8), ((0,), (1, 2)), every=2),
}


# Whose fragments share a leaf: landing at once, with a rule after a delay, at a pace of their own.
QUICK = ("streaming_diloco, no delay", "cocodc", "decoupled_diloco")
ALL = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]


def test_every_method_is_here():
    """Save SPARTA, which draws entries leaf by leaf, and AdLoCo's trainers."""
    here = {name.split(",")[0] for name in METHODS}
    assert here | {"sparta", "adloco"} == set(lc.methods.NAMES)


@pytest.mark.parametrize("name", ALL)
def test_stacked_equals_unrolled(name):
    one, other = (trained(METHODS[name], stacked) for stacked in (False, True))
    for when, unrolled, stacked in zip(("middle", "finished", "after"), one, other, strict=True):
        jax.tree.map(
            lambda x, y, when=when: np.testing.assert_allclose(
                y, x, rtol=2e-4, atol=2e-5, err_msg=when
            ),
            unrolled,
            stacked,
        )
