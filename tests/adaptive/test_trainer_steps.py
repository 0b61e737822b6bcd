"""Trainers stacked into one program: what they give by turns, what is compiled, what is freed."""

import dataclasses
import gc

import jax
import numpy as np
import optax
import oracle
import pytest
from adaptive.adaptive_cases import (
    MESH,
    PERIOD,
    REGIONS,
    asking,
    same,
    stream,
    uneven_stream,
    values,
)
from compilations import compilations
from engine.collectives import collectives
from mesh import staged_runs
from oracle.jax_problem import loss_fn

import lowcomm_jax as lc
from lowcomm_jax.adaptive.trainer_steps import StackPrograms
from lowcomm_jax.batching import Fixed, NormTest
from lowcomm_jax.batching.trainers import Trainers
from lowcomm_jax.network import uniform
from lowcomm_jax.train.batch_blocks import BlockStager

SLOW = uniform(REGIONS, 1.0, delay_s=0.01, compute_s=0.5)


def growing(**changes):
    """Three trainers, merging after rounds 2 and 4, from microbatches of 2 to one of 4."""
    settings = {"merge_every": 2, "start_batch": 2, "max_batch": 24, "microbatches": 2}
    return lc.methods.adloco(PERIOD, 3, test="norm", threshold=1.0, **{**settings, **changes})


def make(method=None, **kwargs):
    """As `adaptive_cases.engine`, with moments, and microbatches of 2 and 4."""
    kwargs = {"largest_microbatch": 4, "mesh": MESH, "stack_trainers": True, **kwargs}
    method = growing() if method is None else method
    return lc.AdaptiveEngine(loss_fn, optax.adamw(0.02), method, REGIONS, **kwargs)


def whole(one, rounds=6, source=stream, **kwargs):
    """A run in uneven pieces, two of which end inside a round: the state, and its rows."""
    state, rows = one.init(oracle.make_params()), []
    for steps in (2, 2, PERIOD * rounds - 4):
        state, history = one.run(state, source, steps=steps, **kwargs)
        state = asking(state, t0=7, t1=2, t2=2)  # of a round's first steps nothing is left
        rows += list(history.rows())
    return state, rows


def assert_equal(a, b):
    """Two results of `whole`, bit for bit: arrays, decisions, counters, metrics."""
    (state, rows), (other, wanted) = a, b
    assert list(state.trainers) == list(other.trainers)
    assert same(values(state), values(other))
    for mine, theirs in zip(state.trainers.values(), other.trainers.values()):
        assert (mine.batch, mine.request, mine.policy) == (
            theirs.batch,
            theirs.request,
            theirs.policy,
        )
        assert mine.used_R.tolist() == theirs.used_R.tolist()
        jax.tree.map(np.testing.assert_array_equal, mine.state.counters, theirs.state.counters)
    assert state.bytes_sent.tolist() == other.bytes_sent.tolist()
    np.testing.assert_equal(rows, wanted)


@pytest.fixture(scope="module")
def by_turns():
    """Six rounds of sequential trainers, who is absent now and then, and their virtual clock."""
    with jax.numpy_dtype_promotion("standard"):
        one = make(stack_trainers=False, scaling="sqrt", network=SLOW, schedule=rate)
        return whole(one, participants=absent), one.clock.now_R


def rate(samples):
    return 1 / (1 + samples / 300)


def absent(step):
    return np.array([True, step % 2 == 0])


def test_a_run_equals_one_by_turns_bit_for_bit(by_turns):
    """Growing batches in two microbatch sizes, merges, looks, absent regions, virtual time."""
    one = make(scaling="sqrt", network=SLOW, schedule=rate)
    found = whole(one, participants=absent)
    assert_equal(found, by_turns[0])
    assert one.clock.now_R.tolist() == by_turns[1].tolist()
    _, rows = found
    sizes = [{t["microbatch"] for t in row["trainers"].values()} for row in rows]
    assert {2, 4} in sizes and {4} in sizes  # the stack was run in two sizes at once, and in one
    assert [len(row["trainers"]) for row in rows[:: 2 * PERIOD]] == [3, 2, 1]


def test_batched_replicas_equal_them_closely(by_turns):
    (wanted, _), _ = by_turns
    one = make(scaling="sqrt", schedule=rate, replicas="vmap")
    state, _ = whole(one, participants=absent)
    assert state.requests == wanted.requests
    for a, b in zip(values(state), values(wanted)):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def test_regions_of_uneven_hardware():
    """Shares 3 to 1: the counts of every trainer differ between regions."""
    policy = NormTest(start=1, cap=12, microbatches=2, shares=(3.0, 1.0))
    method = lc.methods.adloco(PERIOD, 2, None, inner_batching=policy)
    runs = [make(method, largest_microbatch=1, stack_trainers=stacked) for stacked in (True, False)]
    together, alone = (whole(one, 3, uneven_stream([])) for one in runs)
    assert_equal(together, alone)
    fast, slow = together[0].first.used_R
    assert fast > 2 * slow


def test_regions_that_step_at_an_uneven_pace():
    """Regions that stand still do so in every trainer."""
    paced = lc.methods.async_local_sgd(
        PERIOD, speeds=(2.0, 1.0), dynamic=False, inner_batching=Fixed(4)
    )
    method = dataclasses.replace(paced, trainers=Trainers(2, None))
    together, alone = (whole(make(method, stack_trainers=stacked), 3) for stacked in (True, False))
    assert_equal(together, alone)
    assert not all(all(row["active"]) for row in together[1])


def counted(monkeypatch):
    """Shapes of the staged batches of every call of a stacked program from here on."""
    calls, build = [], StackPrograms.__init__

    def spied(self, *args):
        build(self, *args)
        steps = self.steps

        def called(*given):
            calls.append(jax.tree.leaves(given[2])[0].shape[:3])
            return steps(*given)

        self.steps = called

    monkeypatch.setattr(StackPrograms, "__init__", spied)
    return calls


def test_one_call_steps_all_trainers(monkeypatch):
    """A round is one call while one size of microbatches serves all, two calls with two sizes."""
    calls = counted(monkeypatch)
    one = make(growing(merge_every=None))
    state, _ = one.run(one.init(oracle.make_params()), stream, rounds=1)
    del calls[:]
    state, history = one.run(asking(state, t0=8, t1=4, t2=3), stream, rounds=1)
    assert calls == [(3 * REGIONS, one.engine.block, 4)]
    assert [t["samples"] for t in next(history.rows())["trainers"].values()] == [16, 8, 8]
    one.run(asking(state, t0=8, t1=2, t2=3), stream, rounds=1)
    assert [size for *_, size in calls[1:]] == [2, 4]


@pytest.mark.parametrize("stacked,per_merge", [(True, 2), (False, 0)])
def test_what_is_compiled(stacked, per_merge):
    """Nothing while batches grow; at a merge each size of microbatches once, if at all."""
    one = make(stack_trainers=stacked)
    state, _ = one.run(one.init(oracle.make_params()), stream, rounds=1)

    def rounds(*requests):
        """How many programs rounds compile before which the living trainers ask for these."""

        def go():
            nonlocal state
            for asked in requests:
                named = {f"t{i}": b for i, b in zip(state.trainers, asked)}
                state, history = one.run(asking(state, **named), stream, rounds=1)
                list(history.rows())
            return values(state)

        return compilations(go)

    assert rounds((24, 3, 2)) == 0  # both sizes
    assert rounds((24, 3, 2)) == per_merge and list(state.trainers) == [0, 1]
    assert rounds((2, 2)) == 0
    assert rounds((24, 3)) == per_merge and list(state.trainers) == [0]
    assert rounds((2,), (24,)) == 0


def test_what_is_freed():
    """The state that was given is gone, and so is the stack: one copy of every trainer is left."""
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


@pytest.mark.parametrize("shape", [{"region": 2}, {"region": 2, "fsdp": 2}])
def test_devices_of_a_region_keep_its_trainers(shape):
    """No program over the stack moves anything between regions."""
    mesh = lc.make_mesh(**shape)
    one = make(mesh=mesh)
    state = one.init(oracle.make_params())
    programs = one._trainer_steps._programs(state.first.state, 3)
    inners = [trainer.state.inner for trainer in state.trainers.values()]
    stack = programs.join(inners)
    staged = {k: np.repeat(v, 3, axis=0)[:, None] for k, v in stream(0, 0, 4).items()}
    staged = {k: np.repeat(v, one.engine.block, axis=1) for k, v in staged.items()}
    batches, numbers = one.engine.place(staged, 3), [np.ones(3 * REGIONS, np.int32)] * 3
    given = (stack, {}, batches, programs.region_keys, None, *numbers)
    lowered = (
        programs.join.lower(inners),
        programs.steps.lower(*given),
        programs.split.lower(stack),
    )
    devices = mesh.size // 2
    for program in lowered:
        for kind, groups in collectives(program.compile().as_text()):
            assert devices > 1, kind
            for group in groups:
                assert len({device // devices for device in group}) == 1, kind


def test_pipeline_stages():
    """Two trainers in two regions of two stages each."""
    policy = lc.methods.diloco(PERIOD, inner_batching=Fixed(4))
    method = dataclasses.replace(policy, trainers=Trainers(2, None))
    staged = staged_runs.engine_of(lc.methods.diloco(PERIOD), staged_runs.SHAPE)

    def source(trainer, start, count):
        drawn = np.random.default_rng((trainer, start)).standard_normal((REGIONS, count, 6))
        return {"x": drawn.astype(np.float32)}

    found = []
    for stacked in (True, False):
        one = lc.AdaptiveEngine(
            staged.setup.loss_fn,
            optax.adamw(0.02),
            method,
            REGIONS,
            mesh=staged.regions.mesh,
            specs=staged.setup.specs,
            stacked=("blocks",),
            stack_trainers=stacked,
        )
        state, _ = one.run(one.init(staged_runs.start()), source, rounds=2)
        found.append(values(state))
    assert same(*found)


def test_a_block_has_room_for_the_trainer_of_the_largest_batch(monkeypatch):
    """Steps of 4 microbatches and of 1 run together: as many as there is room for the former."""
    taken = []
    take = BlockStager.take

    def spied(self, steps, *room):
        block = take(self, steps, *room)
        taken.append((block.steps, block.stride))
        return block

    monkeypatch.setattr(BlockStager, "take", spied)
    one = make(growing(merge_every=None), block=8)
    state = asking(one.init(oracle.make_params()), t0=16, t1=4, t2=4)
    one.run(state, stream, rounds=1)
    strides = {stride for _, stride in taken}
    assert {1, 4} <= strides, taken
    assert all(steps <= 8 // max(strides) for steps, _ in taken), taken
