"""A Flax NNX module with BatchNorm, trained in four regions.

Shows state that is not trained: variables of type `nnx.BatchStat` take part in no gradient. A step
replaces them by the loss function's `updates`, by leaf name, and regions average them when they
synchronise. Takes about 10 s on a laptop.

    python examples/nnx_batch_norm.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import lowcomm_jax as lc

REGIONS, STEPS = 4, 100


class Regressor(nnx.Module):
    """BatchNorm, then two layers."""

    def __init__(self, rngs):
        self.bn = nnx.BatchNorm(3, momentum=0.9, rngs=rngs)
        self.hidden = nnx.Linear(3, 32, rngs=rngs)
        self.out = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(self.bn(x))))


def samples(step, count=32):
    """Inputs far from 0, at another place in every region; leaves `[regions, count, 3]`."""
    draw = np.random.default_rng(step)
    middle = 50 + np.arange(REGIONS).reshape(-1, 1, 1)
    x = draw.normal(middle, 5, (REGIONS, count, 3))
    y = np.abs(x - 50).sum(axis=-1, keepdims=True) / 10
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


graph, params = nnx.split(Regressor(nnx.Rngs(0)))  # all variables, BatchStat among them


def loss_fn(params, batch, rng):
    """Mean squared error, and the statistics after this batch."""
    del rng
    model = nnx.merge(graph, params)
    loss = jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
    updates = {"bn/mean/value": model.bn.mean[...], "bn/var/value": model.bn.var[...]}
    return loss, {"updates": updates}


engine = lc.Engine(
    loss_fn, inner=optax.adamw(1e-2), method=lc.methods.diloco(period=20), regions=REGIONS
)
state = engine.init(params)  # roles are inferred: nnx.Param is trained, nnx.BatchStat is averaged
state, history = engine.run(state, (samples(step) for step in range(STEPS)))
state = engine.finish(state)

model = nnx.merge(graph, lc.global_params(state))
model.eval()  # with the running statistics
test = jax.tree.map(np.concatenate, samples(STEPS))
error = jnp.mean((model(test["x"]) - test["y"]) ** 2)
print(
    f"loss of the first and the last step: {history['loss'][0].mean():.3f} and "
    f"{history['loss'][-1].mean():.3f}"
)
print(f"error of the anchor with its running statistics: {error:.3f}")
means = ", ".join(f"{mean:.1f}" for mean in model.bn.mean[...])
print(f"running means, averaged over regions: {means} (the inputs': {test['x'].mean():.1f})")
