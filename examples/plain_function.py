"""A model that is a plain function of a dict of arrays, trained in four regions.

Shows all that a model needs: `loss_fn(params, batch, rng)` and a pytree of parameters. Each region
sees its own quarter of a curve; the anchor learns the whole of it. Takes about 10 s on a laptop.

    python examples/plain_function.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowcomm_jax as lc

REGIONS, STEPS = 4, 400


def loss_fn(params, batch, rng):
    """Mean squared error of a network with one hidden layer."""
    del rng  # a key of its own for every step and region, for dropout and the like
    hidden = jnp.tanh(batch["x"] @ params["in"] + params["shift"])
    return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)


def samples(step, regions=range(REGIONS), count=32):
    """Samples of every region, leaves `[regions, count, 1]`: region r knows its quarter alone."""
    position = np.random.default_rng(step).random((len(regions), count, 1))
    x = (position + np.reshape(regions, (-1, 1, 1))) / REGIONS
    return {"x": x.astype(np.float32), "y": np.sin(9 * x).astype(np.float32)}


draw = np.random.default_rng(0)
params = {
    "in": jnp.asarray(draw.normal(0, 4, (1, 64)), jnp.float32),
    "shift": jnp.asarray(draw.normal(0, 2, 64), jnp.float32),
    "out": jnp.zeros((64, 1)),
}
engine = lc.Engine(
    loss_fn, inner=optax.adamw(1e-2), method=lc.methods.diloco(period=20), regions=REGIONS
)
state = engine.init(params)
state, history = engine.run(state, (samples(step) for step in range(STEPS)))
state = engine.finish(state)

everywhere = jax.tree.map(jnp.concatenate, samples(STEPS))
print(f"loss on the whole curve before: {loss_fn(params, everywhere, None):.3f}")
print(f"loss on the whole curve after:  {loss_fn(lc.global_params(state), everywhere, None):.3f}")
rounds = sum(event.kind == "send" for event in history.events)
print(f"each region sent {int(state.counters.bytes_sent[0]):,} bytes in {rounds} rounds")
