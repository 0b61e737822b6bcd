"""An Equinox module, trained in four regions.

Shows `eqx.partition`: the engine takes the arrays of a module and nothing else. Needs
`pip install equinox`. Takes about 10 s on a laptop.

    python examples/equinox_module.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowcomm_jax as lc

REGIONS, STEPS = 4, 100

module = eqx.nn.MLP(in_size=2, out_size="scalar", width_size=32, depth=2, key=jax.random.key(0))
params, rest = eqx.partition(module, eqx.is_inexact_array)  # `rest`: functions and sizes


def loss_fn(params, batch, rng):
    """Mean squared error of the module, which takes one sample at a time."""
    del rng
    model = eqx.combine(params, rest)
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)


def samples(step, count=32):
    """A saddle, leaves `[regions, count, ...]`."""
    x = np.random.default_rng(step).uniform(-1, 1, (REGIONS, count, 2)).astype(np.float32)
    return {"x": x, "y": x[..., 0] * x[..., 1]}


method = lc.methods.sparseloco(period=10)  # 2 bits for each of the few values that are sent
engine = lc.Engine(loss_fn, inner=optax.adamw(5e-3), method=method, regions=REGIONS)
state = engine.init(params)
state, history = engine.run(state, (samples(step) for step in range(STEPS)))
state = engine.finish(state)

trained = eqx.combine(lc.global_params(state), rest)  # an Equinox module again
print(
    f"loss of the first and the last step: {history['loss'][0].mean():.4f} and "
    f"{history['loss'][-1].mean():.4f}"
)
print(f"the saddle at (0.5, -0.5), where it is -0.25: {trained(jnp.array([0.5, -0.5])):.2f}")
