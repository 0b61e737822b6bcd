"""A Flax NNX module with dropout, trained in four regions.

Shows how `nnx.split` and `nnx.merge` turn a module into parameters and a loss function, and what
the step's own random key is for. Takes about 10 s on a laptop.

    python examples/flax_nnx.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import lowcomm_jax as lc

REGIONS, STEPS = 4, 120


class Classifier(nnx.Module):
    """Two layers with dropout between them."""

    def __init__(self, rngs):
        self.hidden = nnx.Linear(2, 64, rngs=rngs)
        self.dropout = nnx.Dropout(0.1)
        self.scores = nnx.Linear(64, 3, rngs=rngs)

    def __call__(self, x, rngs=None):
        return self.scores(self.dropout(nnx.relu(self.hidden(x)), rngs=rngs))


def samples(step, count=32):
    """Three arms of a spiral, leaves `[regions, count, ...]`; every region has its own samples."""
    draw = np.random.default_rng(step)
    radius, label = draw.random((REGIONS, count)), draw.integers(3, size=(REGIONS, count))
    angle = 4 * radius + label * 2 * np.pi / 3 + draw.normal(0, 0.1, radius.shape)
    x = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)
    return {"x": 3 * x.astype(np.float32), "label": label}


graph, params = nnx.split(Classifier(nnx.Rngs(0)), nnx.Param)


def loss_fn(params, batch, rng):
    """Mean cross-entropy, and the share of right guesses, which the history then has, too."""
    model = nnx.merge(graph, params)
    scores = model(batch["x"], nnx.Rngs(dropout=rng))
    loss = optax.softmax_cross_entropy_with_integer_labels(scores, batch["label"]).mean()
    return loss, {"accuracy": jnp.mean(scores.argmax(-1) == batch["label"])}


method = lc.methods.streaming_diloco(period=20, fragments=2, overlap=5, alpha=0.5)
engine = lc.Engine(loss_fn, inner=optax.adamw(1e-2), method=method, regions=REGIONS)
state = engine.init(params)
state, history = engine.run(state, (samples(step) for step in range(STEPS)))
state = engine.finish(state)

model = nnx.merge(graph, lc.global_params(state))
model.eval()  # without dropout
test = jax.tree.map(np.concatenate, samples(STEPS, 512))
right = jnp.mean(model(test["x"]).argmax(-1) == test["label"])
print(
    f"accuracy in training, first and last 20 steps: {history['accuracy'][:20].mean():.0%} and "
    f"{history['accuracy'][-20:].mean():.0%}"
)
print(f"accuracy of the anchor on new samples: {right:.0%}")
