"""Jobs of a run as threads of one process, each with an engine and an exchange of its own."""

import threading
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


class Over(threading.Event):
    """What regions are slow for is over: from `set` on they hurry, and all end at one step.

    Attributes:
      last: that step, `more` after the furthest that any has begun; None = not known yet.
    """

    def __init__(self, more=20):
        super().__init__()
        self.last = None
        self._more, self._begun, self._lock = more, 0, threading.Lock()

    def set(self):
        with self._lock:
            if self.last is None:
                self.last = self._begun + self._more
        super().set()

    def begins(self, step):
        """Whether a region still makes this step; the first one is 1."""
        with self._lock:
            if self.last is None:
                self._begun = max(self._begun, step)
            return self.last is None or step <= self.last


def unhurried(data, region, over, done=0, since=0, wait_s=0.1):
    """A region's batches after those of `done` steps, until `over` ends them.

    From number `since` on each takes so long, until `over` is set.
    """
    for number, batch in list(enumerate(data))[done:]:
        if number >= since:
            over.wait(wait_s)
        if not over.begins(number + 1):
            return
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
