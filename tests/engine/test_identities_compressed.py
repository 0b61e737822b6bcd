"""What compressed methods are without compression, and what they may not lose."""

import functools

import jax
import numpy as np
import optax
import oracle
import pytest
from engine.test_identities import R, assert_close, assert_equal, make, stream, trajectory, values
from refused_lines import lines_of

import lowcomm_jax as lc
from lowcomm_jax.compression import error_feedback
from lowcomm_jax.compression import make as make_codec

ALL = 4096  # entries of a whole chunk


def test_sparseloco_that_sends_all_in_fp32_is_averaging():
    sparse = lc.methods.sparseloco(4, k=ALL, bits=32)
    dense = lc.methods.local_sgd(4, codec={"name": "fp32", "reduce": "all_gather"})
    assert_equal(trajectory(sparse, 12, (10, 12)), trajectory(dense, 12, (10, 12)))


def test_muloco_in_fp32_is_diloco():
    outer = lc.outer.nesterov(0.7, 0.6)
    muloco = lc.methods.muloco(4, codec="fp32")
    dense = lc.methods.diloco(4, outer=outer, codec="fp32")
    assert_equal(trajectory(muloco, 12, (10,)), trajectory(dense, 12, (10,)))


def test_decoupled_momentum_that_sends_all_is_diloco_without_momentum():
    decoupled = lc.methods.decoupled_momentum(4, k=ALL)
    dense = lc.methods.diloco(4, outer=lc.outer.sgd(0.7))
    assert_close(trajectory(decoupled, 12, (10, 12)), trajectory(dense, 12, (10, 12)))


@pytest.mark.parametrize("k", [1, ALL])
def test_decoupled_momentum_as_coded_is_nesterov_for_one_region(k):
    """What is taken out of the momentum comes back, whatever was sent."""
    decoupled = lc.methods.decoupled_momentum(3, "as_coded", k=k, decay=0.8)
    dense = lc.methods.diloco(3, outer=lc.outer.nesterov(0.7, 0.8))
    wanted = trajectory(dense, 11, (11,), regions=1)
    assert_close(trajectory(decoupled, 11, (11,), regions=1), wanted)


def test_demo_that_sends_all_is_the_sign_of_the_mean_gradient():
    """Nothing stays in the momentum: signSGD."""
    inner = optax.sgd(0.02)
    demo = trajectory(lc.methods.demo(codec="fp32"), 7, inner=inner)
    signed = optax.chain(optax.scale_by_sign(), inner)
    assert_equal(demo, trajectory(lc.methods.ddp(codec="fp32"), 7, inner=signed))


def test_demo_keeps_in_its_momentum_what_it_does_not_send():
    """Here the largest entry itself travels, not a cosine coefficient."""
    sends_one = lc.methods.demo(codec=error_feedback(make_codec("topk", k=1), 0.9))
    engine, state = make(sends_one, optax.sgd(0.02), regions=1)
    momentum, params = 0.0, oracle.make_params()
    for batch in stream(5, 1):
        grad = oracle.gradient(params, batch["x"][0], batch["y"][0])["a"]
        momentum = 0.9 * momentum + grad
        largest = np.abs(momentum) == np.abs(momentum).max()
        state, _ = engine.step(state, batch)
        params = {k: np.asarray(x)[0] for k, x in state.anchor.items()}
        momentum = np.where(largest, 0.0, momentum)
        np.testing.assert_allclose(state.codec[0].residual["a"][0], momentum, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["topk_stat2", "stat2", "dct_topk", "sign"])
def test_rounds_lose_nothing_with_decay_1(name):
    """Per region: what was sent in all rounds + residual = sum of the pseudo-gradients."""
    settings = {"k": 2, "block": 4} if "topk" in name else {}
    codec = error_feedback(make_codec(name, **settings), 1.0)
    # One fragment that lands a step after its send: payload and pseudo-gradient can be seen.
    engine, state = make(lc.methods.streaming_diloco(3, 1, 1, 0.0, codec=codec))
    sent, handed = ({k: 0.0 for k in oracle.SHAPES} for _ in range(2))
    for t, batch in enumerate(stream(15), 1):
        mask = np.arange(R) != (1 if t == 6 else -1)
        state, _ = engine.step(state, batch, mask)
        flights = list(state.in_flight.values())
        if not flights or t % 3:
            continue
        payload, like = flights[0].payload, {k: x[0] for k, x in state.anchor.items()}
        decoded = jax.vmap(lambda one, like=like: codec.decode(one, like))(payload)
        for key in sent:
            there = mask.reshape(-1, *(1,) * like[key].ndim)
            delta = np.asarray(state.anchor[key]) - np.asarray(state.inner.params[key])
            sent[key] = sent[key] + np.where(there, decoded[key], 0)
            handed[key] = handed[key] + np.where(there, delta, 0)
    for key, residual in state.codec[0].residual.items():
        np.testing.assert_allclose(sent[key] + residual, handed[key], rtol=1e-4, atol=1e-5)
    assert max(np.abs(x).max() for x in state.codec[0].residual.values()) > 0.01


METHODS = {
    "sparseloco": lambda: lc.methods.sparseloco(4, k=2, block=4),
    "pulseloco": lambda: lc.methods.pulseloco(4, k=2, block=4),
    "muloco": lambda: lc.methods.muloco(4),
    "demo": lambda: lc.methods.demo(k=3),
    "decoupled": lambda: lc.methods.decoupled_momentum(4, k=3),
    "as_coded": lambda: lc.methods.decoupled_momentum(4, "as_coded", k=3),
}


@functools.cache
def made(name):
    return make(METHODS[name]())[0]


@pytest.mark.parametrize("name", METHODS)
def test_finish_synchronises_moves_nothing_twice_and_lets_training_go_on(name):
    engine, batches = made(name), stream(17)
    state, _ = engine.run(engine.init(oracle.make_params()), batches[:10])
    state = engine.finish(state)
    assert not state.in_flight
    for key, local in state.inner.params.items():
        anchor = np.broadcast_to(np.asarray(state.anchor[key]), local.shape)
        np.testing.assert_array_equal(local, anchor)
    once = values(state)
    state = engine.finish(state)
    jax.tree.map(np.testing.assert_array_equal, values(state), once)
    state, _ = engine.run(state, batches[10:])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(values(state)))


# -- refusals -------------------------------------------------------------------------------------


def test_a_codec_in_place_of_the_paper_s_leaves_no_setting_without_effect():
    method = lc.methods.sparseloco(4, k=3, decay=0.5, codec="int4")
    with pytest.raises(ValueError, match=r"k=3, decay=0\.5 would have no effect"):
        make(method)
    assert lines_of(lc.methods.sparseloco(4, codec="int4"), R) == []


def test_what_cannot_work_is_refused():
    personal = lc.methods.decoupled_momentum(4, "as_coded").codec
    for method in (
        lc.methods.diloco(4, codec=personal),
        lc.methods.eager_diloco(4, codec=personal),
    ):
        with pytest.raises(ValueError, match="needs anchors='per_region'"):
            make(method)
    with pytest.raises(ValueError, match="variant='median'"):
        make(lc.methods.decoupled_momentum(4, "median"))
    with pytest.raises(ValueError, match="block=65"):
        make(lc.methods.demo(block=65))
    with pytest.raises(ValueError, match=r"(?s)'int5' is unknown.*so k=3 would have no effect"):
        make(lc.methods.demo(k=3, codec="int5"))
    with pytest.raises(ValueError, match="'int5' is unknown"):
        make(lc.methods.diloco(4, codec="int5"))
