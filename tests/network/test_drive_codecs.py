"""Bytes announced, bytes of the buffers, and bytes on the virtual links agree for every codec."""

import jax
import numpy as np
import optax
import oracle
import pytest
from oracle.jax_problem import loss_fn

import lowcomm_jax as lc
from lowcomm_jax.compression import make, names
from lowcomm_jax.network import payload_nbytes, replay, uniform

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
    "demo": lambda codec: lc.methods.demo(codec=codec),
    "as_coded": lambda codec: lc.methods.decoupled_momentum(2, "as_coded", codec=codec),
    "async": lambda codec: lc.methods.async_local_sgd(2, (3.0, 2.0, 1.0), codec=codec),
}
# Every codec with one method, every method with one codec: bytes depend on nothing else.
PAIRS = [("diloco", codec) for codec in names()] + [(m, "topk_stat2_ef") for m in METHODS]


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("name,codec", PAIRS)
def test_three_counts_of_the_same_bytes(name, codec):
    coder = make(codec)
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
    cut = engine.trips(state).fragments
    for p in range(len(cut)):
        like = cut.like(p)
        shapes = jax.eval_shape(lambda t: coder.encode(t, coder.init(t))[0], like)
        buffers = sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(shapes))
        sends = [e for e in history.events if e.kind == "send" and e.fragment == p]
        assert sends and {e.nbytes for e in sends} == {buffers} == {coder.nbytes(like)}
    for flight in state.in_flight.values():
        if flight.payload is not None:
            held = payload_nbytes(flight.payload, copies=R)
            assert held == coder.nbytes(cut.like(int(flight.fragment)))
    links = uniform(R, 1.0, delay_s=0.0, compute_s=1.0)
    if name == "async":
        with pytest.raises(ValueError, match="not modelled"):
            replay(links, history.rows())
        return
    clock = replay(links, history.rows())
    np.testing.assert_allclose(clock.report().sent_R, state.clock.bytes_sent, rtol=0.01)
