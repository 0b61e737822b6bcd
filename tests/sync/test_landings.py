"""What a payload lands on: its own bases, its own age, and the rule's state of who lands."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from params.tiny_runs import R, engine

import lowcomm_jax as lc

START = {"w": np.float32([1.0, -2.0])}


def square_loss(params, batch, rng):
    return ((params["w"] - batch["x"].mean()) ** 2).sum()


def test_a_payload_lands_on_the_bases_it_was_coded_on():
    """Two payloads take turns: when one lands, the bases of the next one are already other ones."""
    method = lc.methods.dilocox(2, codec=lc.compression.make("low_rank_shared", rank=1), rank=None)
    one = engine(lambda p, b, rng: ((p["w"] @ b["x"].T) ** 2).mean(), method)
    state = one.init({"w": np.random.default_rng(0).standard_normal((24, 16)).astype("f4")})
    programs, sent, landed = one.sync_loop(state).programs, {}, {}
    make, move = programs.payload_program, programs.outer_program

    def spied_make(*args, **how):
        out = make(*args, **how)
        sent[len(sent)] = jax.tree.map(np.array, out["bases"])
        return out

    def spied_move(*args, **how):
        landed[len(landed)] = jax.tree.map(np.array, args[7])
        return move(*args, **how)

    object.__setattr__(programs, "payload_program", spied_make)
    object.__setattr__(programs, "outer_program", spied_move)
    rng = np.random.default_rng(1)
    for _ in range(10):
        state, _ = one.step(state, {"x": rng.standard_normal((R, 3, 16)).astype("f4")})
    assert len(sent) == 5 and len(landed) == 5
    assert len(state.bases[0]) == 2
    for number in range(4):
        bases = landed[number + 1]  # the first one is empty
        jax.tree.map(np.testing.assert_array_equal, bases, sent[number])
        later = jax.tree.leaves(sent[number + 1])
        assert any((a != b).any() for a, b in zip(jax.tree.leaves(bases), later))


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
