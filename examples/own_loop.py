"""A training loop of your own: checkpoints, Ctrl-C, and resuming bit for bit.

Run it, stop it whenever you like (Ctrl-C, or kill it), and run it again. It ends with the anchor of
a run that was never stopped, bit for bit, payloads in flight included. Takes about 10 s.

    python examples/own_loop.py runs/own_loop
"""

import argparse
import hashlib
import sys

import jax.numpy as jnp
import numpy as np
import optax

import lowcomm_jax as lc
from lowcomm_jax.checkpoint import Checkpoints
from lowcomm_jax.interrupt import EXIT_INTERRUPTED, Interrupt

REGIONS, EVERY = 3, 12
SETTINGS = {"regions": REGIONS, "learning_rate": 0.05}  # a checkpoint of others is refused


def loss_fn(params, batch, rng):
    """Mean squared error of a linear model."""
    del rng
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def samples(step):
    """The batch of a step is a function of its number: whoever resumes needs no position."""
    x = np.random.default_rng(step).standard_normal((REGIONS, 16, 8)).astype(np.float32)
    return {"x": x, "y": x @ np.linspace(-1, 1, 8, dtype=np.float32)}


arguments = argparse.ArgumentParser(description=__doc__)
arguments.add_argument("folder", help="of the run's checkpoints")
arguments.add_argument("--steps", type=int, default=120, help="of the whole run")
given = arguments.parse_args()

params = {"w": jnp.zeros(8)}
method = lc.methods.streaming_diloco(
    period=10, fragments=1, overlap=5, alpha=0.5, outer=lc.outer.nesterov(0.7, 0.5)
)
engine = lc.Engine(loss_fn, optax.adamw(SETTINGS["learning_rate"]), method, REGIONS)
with Checkpoints(given.folder, keep_best="loss") as checkpoints, Interrupt() as interrupt:
    restored = checkpoints.restore(engine, params, config=SETTINGS)
    if restored is None:
        state, done = engine.init(params), 0
    else:
        state, done = restored.state, restored.step
        print(f"goes on at step {done}, when the loss was {restored.extra['loss']:.4f}")
    while done < given.steps and not interrupt.requested:
        until = min(done + EVERY, given.steps)
        state, history = engine.run(state, (samples(step) for step in range(done, until)))
        done, loss = until, float(history["loss"][-1].mean())
        checkpoints.save(  # copies the state; the files are written while training goes on
            state, extra={"loss": loss}, config=SETTINGS, metrics={"loss": loss}, method=method
        )
        print(f"step {done}: loss {loss:.4f}, {len(state.in_flight)} payloads in flight")
if done < given.steps:
    print("stopped; the same command goes on")
    sys.exit(EXIT_INTERRUPTED)
anchor = np.asarray(lc.global_params(state)["w"])
print(
    f"the anchor's digest after {done} steps: {hashlib.sha256(anchor.tobytes()).hexdigest()[:16]}"
)
