"""A lost region that comes back on a mesh, against the same worked out in NumPy."""

import dataclasses

import jax
import numpy as np
import optax
import oracle
import pytest
from oracle.inner import Momentum
from oracle.jax_problem import loss_fn
from oracle.loop import Regions, copy_tree, reduce_over, subtract, zeros_like
from oracle.outer import Nesterov

import lowcomm_jax as lc
from lowcomm_jax.recovery.rejoin import _left_by, rejoin_regions

R, H, TAU, ALPHA, STEPS = 3, 4, 2, 0.3, 15
MESH = lc.make_mesh(devices=jax.devices()[:1])
ABSENT = {8: [2], 12: [0, 2]}  # of what is sent after a step
BACK = {5: [1], 9: [2], 14: [0, 2]}  # 1 while what it has sent is under way
ABSENT_AT_THE_END = [1]


@pytest.fixture(autouse=True)
def standard_promotion():
    """The inner optimizer is Optax's, which promotes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def by_hand(params, batches):
    """Streaming DiLoCo of one fragment, with regions that start anew; (anchors, locals) by step,
    and the last anchor."""
    inner, outer = Momentum(0.05, 0.8), Nesterov(0.6, 0.85)
    regions, anchor, momentum = Regions(params, inner, R), copy_tree(params), zeros_like(params)
    flight, seen = None, []

    def move(mean):
        nonlocal anchor, momentum
        anchor, momentum = outer.step(anchor, mean, momentum)

    def reduced(away):
        deltas = [subtract(anchor, value) for value in regions.values]
        present = [r for r in range(R) if r not in away]
        return reduce_over(deltas, present, (1.0,) * R).mean, present

    for t in range(1, STEPS + 1):
        regions.step(batches, t)
        if flight is not None and t == flight[0] + TAU:
            move(flight[1])
            for r in flight[2]:
                value = regions.values[r]
                regions.values[r] = {
                    k: np.asarray((1 - ALPHA) * anchor[k] + ALPHA * value[k]) for k in anchor
                }
            flight = None
        if t % H == 0:
            flight = (t, *reduced(ABSENT.get(t, ())))
        for r in BACK.get(t, ()):
            regions.values[r], regions.states[r] = copy_tree(anchor), inner.init(params)
            flight = flight and (*flight[:2], [other for other in flight[2] if other != r])
        seen.append((copy_tree(anchor), [copy_tree(value) for value in regions.values]))
    assert flight is None  # nothing is to be drained
    move(reduced(ABSENT_AT_THE_END)[0])
    return seen, anchor


def test_as_worked_out_by_hand():
    params, batches = oracle.make_params(), oracle.make_batches(steps=STEPS, regions=R)
    seen, last = by_hand(params, batches)
    method = lc.methods.streaming_diloco(H, 1, TAU, ALPHA, outer=lc.outer.nesterov(0.6, 0.85))
    one = lc.Engine(loss_fn, optax.sgd(0.05, momentum=0.8), method, R, mesh=MESH)
    state, fresh = one.init(params), one.init(params)
    for t, (anchor, values) in enumerate(seen, 1):
        mask = [r not in ABSENT.get(t, ()) for r in range(R)]
        state, _ = one.step(state, oracle.step_batch(batches, t), mask)
        if t in BACK:
            comes = np.isin(np.arange(R), BACK[t])
            state = rejoin_regions(one.sync_loop(state), state, fresh, comes)
        for name, x in anchor.items():
            close(state.anchor[name][0], x)
            for r in range(R):
                close(state.inner.params[name][r], values[r][name])
    state = one.finish(state, lambda _: [r not in ABSENT_AT_THE_END for r in range(R)])
    for name, x in last.items():
        close(state.anchor[name][0], x)
        close(state.inner.params[name], np.broadcast_to(x, (R, *x.shape)))


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["sparseloco", "cocodc"])
def test_all_that_was_its_own_is_as_at_step_0(name):
    """Residuals and moments of those who come; those of the others stay, and so does what is
    everyone's."""
    method = {
        "sparseloco": lambda: lc.methods.sparseloco(2),
        "cocodc": lambda: lc.methods.cocodc(4, 2, 2, syncs_per_period=2, pattern="balanced"),
    }[name]()
    rate = optax.cosine_decay_schedule(0.01, 20)
    one = lc.Engine(loss_fn, optax.adam(rate), method, R, mesh=MESH)
    state, fresh = one.init(oracle.make_params()), one.init(oracle.make_params())
    batches = oracle.make_batches(steps=5, regions=R)
    for t in range(1, 6):
        state, _ = one.step(state, oracle.step_batch(batches, t))
    comes = np.array([False, True, False])
    before = jax.tree.map(np.array, (state.codec, state.inner.opt, state.landing))
    shared = jax.tree.map(np.array, (state.anchor, state.outer))
    tokens = np.array(state.inner.tokens)
    state = rejoin_regions(one.sync_loop(state), state, fresh, comes)
    corrected = [ratio[1] > 0 for ratio in jax.tree.leaves(before[2])]
    assert any(corrected) == (name == "cocodc")
    assert jax.tree.leaves(before[1]) and (name == "cocodc" or jax.tree.leaves(before[0]))
    differs, (_, schedule) = False, state.inner.opt
    for new, old, first in zip(
        *(jax.tree.leaves(x) for x in ((state.codec, state.inner.opt, state.landing), before)),
        jax.tree.leaves((fresh.codec, fresh.inner.opt, fresh.landing)),
        strict=True,
    ):
        np.testing.assert_array_equal(new[::2], old[::2])
        if new is schedule.count:
            assert new.tolist() == [5, 5, 5]  # that of the run, for a new optimizer, too
            continue
        np.testing.assert_array_equal(new[1], first[1])
        differs |= bool((old[1] != first[1]).any())
    assert differs
    jax.tree.map(np.testing.assert_array_equal, (state.anchor, state.outer), shared)
    for leaf, x in state.inner.params.items():
        np.testing.assert_array_equal(x[1], state.anchor[leaf][0])
    assert state.inner.step.tolist() == [5, 5, 5]
    assert (tokens > 0).all()
    np.testing.assert_array_equal(state.inner.tokens, tokens * ~comes[:, None])
    state, _ = one.step(state, oracle.step_batch(batches, 1))  # and goes on


def test_it_has_received_the_anchor_and_the_others_keep_what_they_had():
    """Its next pseudo-gradient is what it has gone from there."""
    method = lc.methods.async_local_sgd(4, (1.0, 1.0, 1.0))
    one = lc.Engine(loss_fn, optax.sgd(0.05), method, R, mesh=MESH)
    state, fresh = one.init(oracle.make_params()), one.init(oracle.make_params())
    # The anchor has moved on from what regions received.
    state = state.replace(anchor=jax.tree.map(lambda x: x + 1, state.anchor))
    before = jax.tree.map(np.array, state.received)
    comes = np.array([False, True, False])
    state = rejoin_regions(one.sync_loop(state), state, fresh, comes)
    assert before.keys() == oracle.SHAPES.keys()
    for name, x in state.received.items():
        np.testing.assert_array_equal(x[1], state.anchor[name][0])
        np.testing.assert_array_equal(x[::2], before[name][::2])
        assert (before[name] != state.anchor[name]).all()


@dataclasses.dataclass
class Sent:
    """What is asked of a payload in flight."""

    takes_part: np.ndarray
    anchor_updated: bool


@pytest.mark.parametrize(
    ("anchor_updated", "comes", "waiting"),
    [
        (False, [True, True], [False, False]),  # it has yet to move the anchor
        (True, [True, True], None),
        (True, [True, False], [False, True]),
        (True, [False, True], [True, False]),
    ],
)
def test_a_payload_stays_until_it_has_landed_for_all_that_wait_and_in_the_anchor(
    anchor_updated, comes, waiting
):
    left = _left_by(Sent(np.array([True, True]), anchor_updated), np.array(comes))
    assert (left is None) == (waiting is None)
    if left is not None:
        assert left.takes_part.tolist() == waiting and left.anchor_updated == anchor_updated
