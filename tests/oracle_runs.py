"""Runs of the oracles' problem in the engine, for tests that look at more than numbers."""

import jax
import optax
import oracle
from oracle.jax_problem import loss_fn

import lowcomm_jax as lc


def one_device():
    return lc.make_mesh(devices=jax.devices()[:1])


def stream(steps, regions=3, first=1, **given):
    """The batches of steps `first` to `steps`; `given` as in `oracle.make_batches`."""
    batches = oracle.make_batches(steps=steps, regions=regions, **given)
    return [oracle.step_batch(batches, t) for t in range(first, steps + 1)]


def started(method, regions=3, inner=None, loss=loss_fn, params=None, **settings):
    """An engine, on one device where no mesh is given, and its first state."""
    inner = optax.sgd(0.05) if inner is None else inner
    engine = lc.Engine(loss, inner, method, regions, **{"mesh": one_device(), **settings})
    return engine, engine.init(oracle.make_params() if params is None else params)
