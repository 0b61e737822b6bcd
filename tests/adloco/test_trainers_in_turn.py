"""Trainers make their steps one after the other: what each learns, what is compiled and freed."""

import dataclasses
import gc

import jax
import numpy as np
import optax
import oracle
from adloco.adaptive_cases import MESH, PERIOD, REGIONS, asking, same, stream
from compilations import compilations
from mesh import staged_runs
from oracle.jax_problem import loss_fn

import lowcomm_jax as lc
from lowcomm_jax.rules.batching import Fixed, NormTest
from lowcomm_jax.rules.trainers import Trainers


def make(method, **kwargs):
    """As `adaptive_cases.engine`, with moments, and microbatches of 2 and 4."""
    kwargs = {"largest_microbatch": 4, "mesh": MESH, **kwargs}
    return lc.AdaptiveEngine(loss_fn, optax.adamw(0.02), method, REGIONS, **kwargs)


def growing(merge_every=2):
    """Three trainers, merging after rounds 2 and 4, from microbatches of 2 to one of 4."""
    policy = NormTest(start=2, cap=24, microbatches=2)
    return lc.methods.adloco(PERIOD, 3, merge_every, threshold=1.0, inner_batching=policy)


def first_of(one, params, source):
    """What the first trainer has after three rounds in uneven pieces: its arrays, its samples."""
    state = one.init(params)
    for steps in (2, 2, 3 * PERIOD - 4):
        state, history = one.run(state, source, steps=steps)
    kept = state.first.state
    arrays = [np.array(x) for x in jax.tree.leaves((kept.anchor, private(kept.inner)))]
    return arrays, state.first.used, list(history.rows())


def test_a_trainer_learns_what_it_would_alone():
    """Regions have a pace of their own: one that stands still does so in every trainer."""
    paced = lc.methods.async_local_sgd(
        PERIOD, speeds=(2.0, 1.0), dynamic=False, inner_batching=Fixed(4)
    )
    two, one = (dataclasses.replace(paced, trainers=Trainers(n, None)) for n in (2, 1))
    params = oracle.make_params()
    beside, used, rows = first_of(make(two), params, stream)
    apart, used_apart, _ = first_of(make(one), params, stream)
    assert same(beside, apart) and used == used_apart
    assert not all(all(row["active"]) for row in rows)


def test_pipeline_stages():
    """Two trainers in two regions of two stages each."""
    method = lc.methods.diloco(PERIOD, inner_batching=Fixed(4))
    staged = staged_runs.engine_of(lc.methods.diloco(PERIOD), staged_runs.SHAPE)

    def source(trainer, start, count):
        drawn = np.random.default_rng((trainer, start)).standard_normal((REGIONS, count, 6))
        return {"x": drawn.astype(np.float32)}

    found = []
    for count in (1, 2):
        one = lc.AdaptiveEngine(
            staged.setup.loss_fn,
            optax.adamw(0.02),
            dataclasses.replace(method, trainers=Trainers(count, None)),
            REGIONS,
            mesh=staged.regions.mesh,
            specs=staged.setup.specs,
            stacked=("blocks",),
        )
        found.append(first_of(one, staged_runs.start(), source)[0])
    assert same(*found)


def test_nothing_is_compiled_while_batches_grow_and_trainers_merge():
    one = make(growing())
    state, _ = one.run(one.init(oracle.make_params()), stream, rounds=1)

    def rounds(*requests):
        """How many programs rounds compile before which the living trainers ask for these."""

        def go():
            nonlocal state
            for asked in requests:
                named = {f"t{i}": b for i, b in zip(state.trainers, asked)}
                state, history = one.run(asking(state, **named), stream, rounds=1)
                list(history.rows())
            return state.first.state.anchor

        return compilations(go)

    assert rounds((24, 3, 2)) == 0  # both sizes
    assert rounds((24, 3, 2)) == 0 and list(state.trainers) == [0, 1]
    assert rounds((2, 2)) == 0
    assert rounds((24, 3)) == 0 and list(state.trainers) == [0]
    assert rounds((2,), (24,)) == 0


def test_what_is_freed():
    """The state that was given is gone: one copy of every trainer is left."""
    one = make(growing(merge_every=None))
    state, _ = one.run(one.init(oracle.make_params()), stream, steps=1)
    before = [private(trainer.state.inner) for trainer in state.trainers.values()]
    held = live()
    state, _ = one.run(state, stream, steps=1)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    assert live() == held


def private(inner):
    """What a step replaces; how fast the batch is consumed is set anew by the host."""
    return inner.params, inner.opt[0], inner.step


def live():
    """Bytes of all arrays on devices."""
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted())
