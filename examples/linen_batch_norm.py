"""A Flax Linen module with BatchNorm, trained in four regions.

Shows state that is not trained: the collection `batch_stats` takes part in no gradient. A step
replaces it by the loss function's `updates`, by leaf name, and regions average it when they
synchronise. Takes about 10 s on a laptop.

    python examples/linen_batch_norm.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen
from flax.traverse_util import flatten_dict

import lowcomm_jax as lc

REGIONS, STEPS = 4, 100


class Regressor(linen.Module):
    """BatchNorm, then two layers."""

    @linen.compact
    def __call__(self, x, train):
        x = linen.BatchNorm(use_running_average=not train, momentum=0.9, name="norm")(x)
        x = linen.relu(linen.Dense(32)(x))
        return linen.Dense(1)(x)


def samples(step, count=32):
    """Inputs far from 0, at another place in every region; leaves `[regions, count, 3]`."""
    draw = np.random.default_rng(step)
    middle = 50 + np.arange(REGIONS).reshape(-1, 1, 1)
    x = draw.normal(middle, 5, (REGIONS, count, 3))
    y = np.abs(x - 50).sum(axis=-1, keepdims=True) / 10
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def loss_fn(params, batch, rng):
    """Mean squared error; `params` are all collections of the module."""
    del rng
    out, moved = Regressor().apply(params, batch["x"], True, mutable=["batch_stats"])
    updates = flatten_dict(dict(moved), sep="/")  # {"batch_stats/norm/mean": ..., ...}
    return jnp.mean((out - batch["y"]) ** 2), {"updates": updates}


params = Regressor().init(jax.random.key(0), samples(0)["x"][0], False)
engine = lc.Engine(
    loss_fn, inner=optax.adamw(1e-2), method=lc.methods.diloco(period=20), regions=REGIONS
)
state = engine.init(params)  # roles are inferred: `params` is trained, `batch_stats` is averaged
state, history = engine.run(state, (samples(step) for step in range(STEPS)))
state = engine.finish(state)

final, test = lc.global_params(state), jax.tree.map(np.concatenate, samples(STEPS))
error = jnp.mean((Regressor().apply(final, test["x"], False) - test["y"]) ** 2)
print(
    f"loss of the first and the last step: {history['loss'][0].mean():.3f} and "
    f"{history['loss'][-1].mean():.3f}"
)
print(f"error of the anchor with its running statistics: {error:.3f}")
means = ", ".join(f"{mean:.1f}" for mean in final["batch_stats"]["norm"]["mean"])
print(f"running means, averaged over regions: {means} (the inputs': {test['x'].mean():.1f})")
