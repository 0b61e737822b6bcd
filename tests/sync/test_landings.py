"""What a payload lands on: its own age, and the rule's state of who lands."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
from params.tiny_runs import R, engine

import lowcomm_jax as lc

START = {"w": np.float32([1.0, -2.0])}


def square_loss(params, batch, rng):
    return ((params["w"] - batch["x"].mean()) ** 2).sum()


def test_a_landing_rules_state_is_that_of_who_landed_something():
    """Who was left out adopts the anchor itself: its rule has landed nothing."""
    count = optax.GradientTransformationExtraArgs(
        lambda params: {"landings": jnp.int32(0)},
        lambda updates, state, params, **_: (updates, {"landings": state["landings"] + 1}),
    )
    method = dataclasses.replace(lc.methods.streaming_diloco(2, 1, 1, 0.0), landing=count)
    one = engine(square_loss, method, skip_nonfinite=False)
    state = one.init(START)
    for third in (3.0, np.nan, 1.0, 2.0, 0.5):
        state, _ = one.step(state, {"x": np.float32([[1.0], [2.0], [third]])})
    assert np.asarray(state.landing[0]["landings"]).tolist() == [2, 2, 1]


def test_an_asynchronous_payload_is_as_old_as_the_anchor_it_was_measured_against():
    one = engine(square_loss, lc.methods.async_local_sgd(4, (1.0, 1.0, 0.5), dynamic=False))
    state, ages = one.init(START), []
    for t in range(8):
        state, metrics = one.step(state, {"x": np.full((R, 1), t, np.float32)})
        ages += [(e.step, e.staleness.tolist()) for e in metrics["events"] if e.kind == "land"]
    assert ages == [
        (4, [4, -1, -1]),
        (4, [-1, 4, -1]),
        (8, [4, -1, -1]),
        (8, [-1, 4, -1]),
        (8, [-1, -1, 8]),
    ]
