"""Jobs of a run as threads of one process, each with an engine and an exchange of its own."""

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import optax
import oracle
from oracle.jax_problem import loss_fn

import lowcomm_jax as lc
from lowcomm_jax.mesh.arrays import whole

CUT = ["^a$|^s$", "^b$", "^c$"]


def one_device():
    return lc.make_mesh(devices=jax.devices()[:1])


def engine(method, regions, exchange="mesh", mesh=None, **kwargs):
    mesh = one_device() if mesh is None else mesh
    inner = optax.sgd(0.05, momentum=0.8)
    return lc.Engine(loss_fn, inner, method, regions, mesh=mesh, exchange=exchange, **kwargs)


def batches(steps, regions, shapes=oracle.SHAPES):
    table = oracle.make_batches(steps=steps, regions=regions, shapes=shapes)
    return [oracle.step_batch(table, t) for t in range(1, steps + 1)]


def rows(batch, region):
    return jax.tree.map(lambda x: x[region : region + 1], batch)


def unhurried(data, region, over, since=0, wait_s=0.1):
    """A region's batches; from number `since` on each takes so long, until `over` is set."""
    for number, batch in enumerate(data):
        if number >= since:
            over.wait(wait_s)
        yield rows(batch, region)


def train(one, data, participants=None, shapes=oracle.SHAPES, narrow=()):
    """(anchors, own parameters) at the end, and after `finish`; leaves of `narrow` are bf16."""
    with jax.numpy_dtype_promotion("standard"):
        params = oracle.make_params(shapes=shapes)
        state = one.init(params | {k: params[k].astype(jax.numpy.bfloat16) for k in narrow})
        state, _ = one.run(state, data, participants)
        before = values(state)
        return before, values(one.finish(state))


def values(state):
    return jax.tree.map(lambda x: np.array(whole(x)), (state.anchor, state.inner.params))


def in_jobs(
    make_exchange,
    method,
    regions,
    steps,
    participants=None,
    meshes=None,
    shapes=oracle.SHAPES,
    narrow=(),
    **kwargs,
):
    """What every job of a run ends with, in order of the regions; each on its own mesh."""
    meshes = meshes or [one_device()] * regions
    data = batches(steps, regions, shapes)

    def job(region):
        exchange = make_exchange(region)
        try:
            one = engine(method, regions, exchange, meshes[region], **kwargs)
            own = [rows(batch, region) for batch in data]
            return train(one, own, participants, shapes, narrow)
        finally:
            exchange.close()

    with ThreadPoolExecutor(regions) as pool:
        return [future.result() for future in [pool.submit(job, r) for r in range(regions)]]
