"""What is not what its name says gets one line with the fix, not a traceback of the inside."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowcomm_jax as lc


def loss_fn(params, batch, rng):
    del rng
    return jnp.mean((batch["x"] @ params["w"]) ** 2)


def engine(loss=loss_fn, inner=None, method=None):
    return lc.Engine(loss, inner or optax.sgd(0.1), method or lc.methods.diloco(3), 2)


PARAMS = {"w": np.ones(3, np.float32)}


def test_all_arguments_of_another_type_are_listed():
    with pytest.raises(TypeError) as error:
        engine(loss=3, inner="adam", method="dilocco")
    lines = str(error.value).splitlines()
    assert len(lines) == 4
    assert "loss_fn=3: give a function" in lines[1]
    assert "inner='adam': give an Optax optimizer" in lines[2]
    assert "method='dilocco' is no Method: call its factory, as lc.methods.diloco(...)" in lines[3]


def test_a_factory_that_was_not_called_is_named():
    with pytest.raises(TypeError, match=r"call its factory, as lc.methods.noloco\(...\)"):
        engine(method=lc.methods.noloco)


@pytest.mark.parametrize(
    "batch, shown",
    [
        ({"x": np.ones((4, 3))}, r"\['x'\] \[4, 3\]"),
        ({"x": np.ones((2, 4, 3)), "n": np.ones(2)}, r"\['n'\] \[2\], \['x'\] \[2, 4, 3\]"),
        ([1.0], r"\[0\] \[\]"),
        ({}, "no leaf"),
    ],
)
def test_a_batch_of_another_shape_is_shown(batch, shown):
    one = engine()
    expected = rf"\[2 regions, per-region batch, ...\]; this one has {shown}"
    with pytest.raises(ValueError, match=expected):
        one.step(one.init(PARAMS), batch)
    with pytest.raises(ValueError, match=expected):
        one.run(one.init(PARAMS), [batch])


def test_run_takes_a_stream():
    one = engine()
    with pytest.raises(ValueError, match="a stream of batches, not one"):
        one.run(one.init(PARAMS), {"x": np.ones((2, 4, 3), np.float32)})


def test_leaves_that_are_no_arrays_are_named_together():
    with pytest.raises(ValueError) as error:
        engine().init({**PARAMS, "act": jnp.tanh, "kind": "relu"})
    assert "'act': a PjitFunction is no array: keep it out" in str(error.value)
    assert "'kind': a str is no array" in str(error.value)


def test_a_loss_for_each_sample():
    one = engine(loss=lambda params, batch, rng: batch["x"] @ params["w"])
    with pytest.raises(ValueError, match=r"a loss of shape \[4\]: give a scalar"):
        one.step(one.init(PARAMS), {"x": np.ones((2, 4, 3), np.float32)})


def test_a_state_that_is_none():
    with pytest.raises(ValueError, match="state is a dict, no TrainState: start with engine"):
        engine().step(PARAMS, {"x": np.ones((2, 4, 3), np.float32)})


def test_a_state_that_was_donated_is_refused():
    one, batch = engine(), {"x": np.ones((2, 4, 3), np.float32)}
    old = one.init(PARAMS)
    one.step(old, batch)
    for again in (
        lambda: one.step(old, batch),
        lambda: one.run(old, [batch]),
        lambda: one.warm(old, batch),
        lambda: one.finish(old),
    ):
        with pytest.raises(ValueError, match=r"was donated.*use the state that was returned"):
            again()
    ended = one.init(PARAMS)
    one.finish(ended)
    with pytest.raises(ValueError, match="was donated"):
        one.finish(ended)


def test_trainers_that_were_donated_are_refused():
    method = lc.methods.adloco(2, 2, 1, "norm", start_batch=2, max_batch=4, microbatches=2)
    one = lc.AdaptiveEngine(loss_fn, optax.sgd(0.1), method, 2, mesh=lc.make_mesh())
    state = one.init(PARAMS)
    state.trainers[1].state.inner.step.delete()
    for call in (lambda: one.run(state, lambda *_: None, steps=1), lambda: one.finish(state)):
        with pytest.raises(ValueError, match=r"was donated.*use the state that was returned"):
            call()
