"""What two trainers become when they merge: residuals, moments, and the counts of schedules."""

import jax
import numpy as np
import optax
import oracle
from adloco.adaptive_cases import MESH, PERIOD, REGIONS, asking, engine, stream
from oracle.jax_problem import loss_fn

import lowcomm_jax as lc
from lowcomm_jax.adloco.merge import merge
from lowcomm_jax.compression.error_feedback import ErrorFeedbackState
from lowcomm_jax.rules.batching import Fixed, NormTest
from lowcomm_jax.state.train_state import with_inner


def trained(inner, codec=None):
    """(engine, state before a merge into trainer 0, of weight 1/4)."""
    policy = NormTest(start=2, cap=64, microbatches=2)
    method = lc.methods.adloco(PERIOD, 2, codec=codec, inner_batching=policy)
    one = lc.AdaptiveEngine(loss_fn, inner, method, REGIONS, largest_microbatch=2, mesh=MESH)
    state, _ = one.run(one.init(oracle.make_params()), stream, rounds=1)
    return one, asking(state, t0=6, t1=2)


def merged(one, state):
    return merge(one.plain, state, *one.trainers.ranked(state.requests)).first.state


def residuals(state):
    found = jax.tree.leaves(state.codec, is_leaf=lambda x: isinstance(x, ErrorFeedbackState))
    return jax.tree.leaves([x.residual for x in found if isinstance(x, ErrorFeedbackState)])


def test_residuals_are_weighted_as_the_parameters_are():
    """What both have not sent yet: without one part of it, that would be lost."""
    codec = lc.compression.make("topk", k=1, block=8, error_feedback=1.0)
    one, state = trained(optax.sgd(0.02), codec)
    kept, gone = (
        [np.array(x) for x in residuals(trainer.state)] for trainer in state.trainers.values()
    )
    assert len(kept) == len(oracle.SHAPES)
    apart = [bool(a.any() and b.any() and (a != b).any()) for a, b in zip(kept, gone)]
    assert sum(apart) >= 2  # a leaf of one value loses nothing
    for a, b, mean in zip(kept, gone, residuals(merged(one, state)), strict=True):
        np.testing.assert_allclose(mean, 0.75 * a + 0.25 * b, rtol=1e-5, atol=1e-7)


def test_moments_are_weighted_and_counts_are_the_survivors():
    """A learning-rate schedule goes on where it was."""
    one, state = trained(optax.adamw(optax.linear_schedule(0.0, 0.02, 50)))
    parts = [jax.tree.map(np.array, t.state.inner.opt) for t in state.trainers.values()]
    opt = merged(one, state).inner.opt
    counts = optax.tree.get_all_with_path(opt, "count")
    assert len(counts) >= 2
    assert all(np.asarray(count).tolist() == [PERIOD] * REGIONS for _, count in counts)
    for name in ("mu", "nu"):
        each = zip(*(jax.tree.leaves(optax.tree.get(x, name)) for x in (*parts, opt)), strict=True)
        for a, b, mean in each:
            assert np.abs(a - b).max() > 0
            np.testing.assert_allclose(mean, 0.75 * a + 0.25 * b, rtol=1e-5, atol=1e-9)


def test_the_last_model_is_the_mean_by_all_requests():
    """Three at once, each by its own request."""
    one = engine(lc.methods.adloco(PERIOD, 3, inner_batching=Fixed(1)))
    state, apart = asking(one.init(oracle.make_params()), t0=5, t1=3, t2=4), (1.0, -2.0, 0.5)
    for (number, trainer), factor in zip(state.trainers.items(), apart, strict=True):
        anchor = jax.tree.map(lambda x: x * factor, trainer.state.anchor)  # noqa: B023
        params = jax.tree.map(lambda x: x + factor, trainer.state.inner.params)  # noqa: B023
        own = with_inner(trainer.state, params=params).replace(anchor=anchor)
        state = state.with_trainer(number, trainer.replace(state=own))
    states = [trainer.state for trainer in state.trainers.values()]
    before = [(x.anchor, x.inner.params) for x in states]
    whole = merge(one.plain, state, *one.trainers.ranked(state.requests))
    assert whole.requests == {0: 5}  # the one that asked for most is left
    after = whole.first.state
    for found, *each in zip(*map(jax.tree.leaves, ((after.anchor, after.inner.params), *before))):
        mean = np.average(np.array(each), axis=0, weights=[5, 3, 4])
        np.testing.assert_allclose(found, mean, rtol=1e-5, atol=1e-6)
