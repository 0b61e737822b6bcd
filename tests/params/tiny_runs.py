"""Runs of a few scalars in three regions, for tests that work them out by hand."""

import jax
import numpy as np
import optax

import lowcomm_jax as lc

R, LR = 3, 0.1


def engine(loss, method, inner=None, **kwargs):
    mesh = lc.make_mesh(devices=jax.devices()[:1])
    inner = optax.sgd(LR) if inner is None else inner
    return lc.Engine(loss, inner, method, R, mesh=mesh, **kwargs)


def train(one, params, batches, participants=None):
    state = one.init(params)
    for t, batch in enumerate(batches, 1):
        state, _ = one.step(state, batch, participants and participants(t))
    return state


def scalars(values):
    """Batches {"x": [R, 1]} from a table [steps, R]."""
    return [{"x": np.asarray(row, np.float32)[:, None]} for row in values]


X = scalars([[1.0, 2.0, 4.0], [0.5, -1.0, 3.0], [2.0, 0.3, -0.7], [1.5, 1.0, 0.2], [0.1, 0.9, 2.2]])
