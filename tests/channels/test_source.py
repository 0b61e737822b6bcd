"""Leaves of the inner optimizer's state are found by the name of their field."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowcomm_jax.channels.source import find_source
from lowcomm_jax.state.train_state import Inner

# A leaf of the name of a field, a scalar, and one name that ends like another.
PARAMS = {"mu": jnp.ones((2, 3)), "x": {"mu": jnp.ones(4)}, "s": jnp.ones(())}
SHAPES = {"mu": (2, 3), "x/mu": (4,), "s": ()}
LIKE = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in SHAPES.items()}

OPTIMIZERS = {
    "adamw": optax.adamw(0.1),
    "adopt": optax.contrib.adopt(0.1),
    "behind a clip": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    "with its rate injected": optax.inject_hyperparams(optax.adamw)(learning_rate=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("field", ["mu", "nu"])
def test_a_field_is_found_and_put_back(name, field):
    opt = jax.jit(OPTIMIZERS[name].init)(PARAMS)
    source = find_source(field, opt, LIKE)
    assert sorted(parameter for _, parameter in source.leaves) == sorted(SHAPES)
    inner = Inner(PARAMS, {}, opt, None, None)
    taken, _ = source.take(inner)
    new = source.put(inner, ({k: x + 2 for k, x in taken.items()}, {}))
    changed = jax.tree.map(lambda a, b: float(jnp.sum(jnp.abs(a - b))), new.opt, opt)
    assert sum(jax.tree.leaves(changed)) == 2 * (6 + 4 + 1)
    assert sum(x.size for x in taken.values()) == 6 + 4 + 1


def test_a_parameter_below_the_name_of_a_field():
    """`nu/mu/w` is the second moment of `mu/w`, and not the first one of `w`."""
    params = {"mu": {"w": jnp.ones(3)}, "w": jnp.ones(3)}
    like = {name: jax.ShapeDtypeStruct((3,), np.float32) for name in ("mu/w", "w")}
    source = find_source("mu", optax.adam(0.1).init(params), like)
    assert source.leaves == (("0/mu/mu/w", "mu/w"), ("0/mu/w", "w"))


def test_a_bare_array_is_found():
    opt = optax.adam(0.1).init(jnp.ones(3))
    assert find_source("nu", opt, {"": jax.ShapeDtypeStruct((3,), np.float32)}).leaves == (
        ("0/nu", ""),
    )


@pytest.mark.parametrize(
    "optimizer,has", [(optax.sgd(0.1), "none"), (optax.sgd(0.1, 0.9), "trace")]
)
def test_another_optimizer_is_refused(optimizer, has):
    with pytest.raises(ValueError, match=rf"source='mu'.*it has {has}"):
        find_source("mu", optimizer.init(PARAMS), LIKE)
