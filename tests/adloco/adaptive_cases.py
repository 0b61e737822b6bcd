"""Small adaptive engines over the oracle's streams, and what tells two of their states apart."""

import jax
import numpy as np
import optax
import oracle
from oracle.jax_problem import loss_fn

import lowcomm_jax as lc

REGIONS, PERIOD = 2, 3
MESH = lc.make_mesh(devices=jax.devices()[:1])


def stream(trainer, start, count, regions=REGIONS):
    return oracle.make_stream(7, trainer, start, count, regions)


def engine(method, regions=REGIONS, **kwargs):
    kwargs = {"largest_microbatch": 2, "mesh": MESH, **kwargs}
    return lc.AdaptiveEngine(loss_fn, optax.sgd(0.02), method, regions, **kwargs)


def asking(state, **requests):
    """The state with other requests, `t0=...`."""
    asked = {int(name[1:]): b for name, b in requests.items()}
    trainers = {i: t.replace(request=asked.get(i, t.request)) for i, t in state.trainers.items()}
    return state.replace(trainers=trainers)


def values(state):
    """What tells two states apart, on the host."""
    parts = {i: (t.state.anchor, t.state.inner) for i, t in state.trainers.items()}
    return [np.array(x) for x in jax.tree.leaves(parts)]


def same(a, b):
    return len(a) == len(b) and all(x.tobytes() == y.tobytes() for x, y in zip(a, b))
