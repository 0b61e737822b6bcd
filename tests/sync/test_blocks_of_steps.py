"""Blocks of steps between two events: who takes part is asked at the last of them."""

import jax
import numpy as np
import optax
import pytest
from params.tiny_runs import LR, R, engine

import lowcomm_jax as lc
from lowcomm_jax import batching

STEPS = 9
START = {"w": np.float32([1.0, -2.0])}
METHODS = {
    "diloco": lambda: lc.methods.diloco(3),
    "streaming": lambda: lc.methods.streaming_diloco(4, 2, 1, 0.3, pattern="balanced"),
    "eager": lambda: lc.methods.eager_diloco(3),
    "ddp": lambda: lc.methods.ddp(),
}


def square_loss(params, batch, rng):
    return sum(((x - batch["x"].mean()) ** 2).sum() for x in jax.tree.leaves(params))


def away(step):
    """Another mask at every step, so that no step of a block can stand for another."""
    return [True, step % 3 == 0, step % 2 == 0]


@pytest.mark.parametrize("name", METHODS)
def test_a_run_equals_its_steps_where_participants_change_inside_a_block(name):
    batches = [{"x": np.float32([[t], [2 * t - 3], [5 - t]])} for t in range(STEPS)]
    start = START if name != "streaming" else {"a": START["w"], "b": START["w"] + 1}
    by_steps, events, losses = engine(square_loss, METHODS[name]()), [], []
    state = by_steps.init(start)
    for step, batch in enumerate(batches, 1):
        state, metrics = by_steps.step(state, batch, away(step))
        events += metrics["events"]
        losses.append(metrics["loss"])
    in_blocks = engine(square_loss, METHODS[name]())
    other, history = in_blocks.run(in_blocks.init(start), batches, away)

    def took_part(events):
        return [(e.kind, e.step, e.participants.tolist()) for e in events]

    assert took_part(history.events) == took_part(events)
    assert len({tuple(who) for _, _, who in took_part(events)}) > 1
    for one, another in ((state.anchor, other.anchor), (state.inner, other.inner)):
        jax.tree.map(np.testing.assert_array_equal, one, another)
    np.testing.assert_array_equal(history["loss"], losses)
    assert state.counters.bytes_sent.tolist() == other.counters.bytes_sent.tolist()
    assert len(away(1)) == R


def test_gradients_that_are_exchanged_at_every_step_are_never_stale():
    one = engine(square_loss, METHODS["ddp"]())
    state, metrics = one.step(one.init(START), {"x": np.float32([[1], [2], [3]])})
    _, land = metrics["events"]
    assert land.staleness.tolist() == [0, 0, 0]
    assert state.inner.step.tolist() == [1] * R
    assert state.counters.staleness.tolist() == [[0, 0, 0]]
    assert state.counters.last_landed.tolist() == [[1, 1, 1]]


def test_steps_whose_batch_a_policy_plans_are_plain_steps_and_donate_the_state():
    x_SxR = np.float32([[t, 2 - t, t * t - 3] for t in range(8)])  # each step takes two samples
    whole = engine(square_loss, lc.methods.diloco(2))
    expected = whole.init(START)
    for first in range(0, 8, 2):
        given = expected.inner.params["w"]
        expected, _ = whole.step(expected, {"x": x_SxR[first : first + 2].T})
        assert given.is_deleted()
    parts = lc.AdaptiveEngine(
        square_loss,
        optax.sgd(LR),
        lc.methods.diloco(2, inner_batching=batching.Fixed(2)),
        R,
        largest_microbatch=2,
        mesh=lc.make_mesh(devices=jax.devices()[:1]),
    )
    state = parts.init(START)
    given = state.trainers[0].state.inner.params["w"]
    state, _ = parts.run(state, lambda _, start, n: {"x": x_SxR[start : start + n].T}, rounds=2)
    found = state.trainers[0].state.anchor["w"]
    np.testing.assert_allclose(found, expected.anchor["w"], rtol=1e-5)
    assert given.is_deleted()
