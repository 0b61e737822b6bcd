"""Bytes announced, bytes of the buffers, and bytes on the virtual links agree for every codec and
every method.
"""

import jax
import numpy as np
import optax
import oracle
import pytest
from oracle.jax_problem import loss_fn

import lowcomm_jax as lc
from lowcomm_jax.compression import make, names
from lowcomm_jax.exchange import MeshExchange
from lowcomm_jax.mesh.regions import Regions
from lowcomm_jax.network import VirtualClock, replay, uniform

R, STEPS = 3, 4
METHODS = {
    "ddp": lc.methods.ddp,
    "local_sgd": lambda codec: lc.methods.local_sgd(2, codec=codec),
    "diloco": lambda codec: lc.methods.diloco(2, codec=codec),
    "streaming": lambda codec: lc.methods.streaming_diloco(
        2, 2, 1, 0.3, pattern="balanced", codec=codec
    ),
    "eager": lambda codec: lc.methods.eager_diloco(2, codec=codec),
    "cocodc": lambda codec: lc.methods.cocodc(2, 2, 1, pattern="balanced", codec=codec),
    "noloco": lambda codec: lc.methods.noloco(2, codec=codec),
    "demo": lambda codec: lc.methods.demo(codec=codec),
    "as_coded": lambda codec: lc.methods.decoupled_momentum(2, "as_coded", codec=codec),
    "async": lambda codec: lc.methods.async_local_sgd(2, (3.0, 2.0, 1.0), codec=codec),
}


def buffer_bytes(coder, like):
    """Bytes of what really travels, by the shapes the encoder gives."""
    shapes = jax.eval_shape(lambda t: coder.encode(t, coder.init(t), t)[0], like)
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(shapes))


@pytest.mark.parametrize("codec", names())
def test_a_codec_announces_what_its_buffers_hold(codec):
    coder = make(codec)
    like = {
        name: jax.ShapeDtypeStruct(np.shape(x), np.float32)
        for name, x in oracle.make_params().items()
    }
    regions = Regions(R, lc.make_mesh(devices=jax.devices()[:1]))
    traffic = MeshExchange(regions, coder).traffic(like, np.ones(R, bool))
    assert traffic.nbytes == buffer_bytes(coder, like) == coder.nbytes(like)
    clock = VirtualClock(uniform(R, 1.0, delay_s=0.0, compute_s=1.0))
    clock.send(1, 0, traffic.nbytes, traffic.route)
    np.testing.assert_array_equal(clock.report().sent_R, traffic.sent)


@pytest.mark.parametrize("name", METHODS)
def test_three_counts_of_the_same_bytes(name):
    coder = make("topk_stat2_ef")
    engine = lc.Engine(
        loss_fn,
        optax.sgd(0.01),
        METHODS[name](codec=coder),
        R,
        mesh=lc.make_mesh(devices=jax.devices()[:1]),
    )
    state = engine.init(oracle.make_params())
    batches = oracle.make_batches(steps=STEPS, regions=R)
    state, history = engine.run(state, [oracle.step_batch(batches, t) for t in range(1, STEPS + 1)])
    cut = engine.sync_loop(state).fragments
    for p in range(len(cut)):
        like = cut.like(p)
        buffers = buffer_bytes(coder, like)
        sends = [e for e in history.events if e.kind == "send" and e.fragment == p]
        assert sends and {e.nbytes for e in sends} == {buffers} == {coder.nbytes(like)}
    for flight in state.in_flight.values():
        if flight.payload is not None:
            held = sum(x.nbytes for x in jax.tree.leaves(flight.payload))
            assert held == R * coder.nbytes(cut.like(int(flight.fragment)))
    links = uniform(R, 1.0, delay_s=0.0, compute_s=1.0)
    clock = replay(links, history.rows())
    np.testing.assert_allclose(clock.report().sent_R, state.counters.bytes_sent, rtol=0.01)
