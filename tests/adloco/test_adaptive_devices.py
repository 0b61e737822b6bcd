"""The adaptive engine's devices: how much memory it takes, offloading, several of them a region."""

import functools

import jax
import numpy as np
import oracle
import pytest
from adloco.adaptive_cases import PERIOD, engine, same, stream, values

import lowcomm_jax as lc
from lowcomm_jax.adloco import engine as adaptive
from lowcomm_jax.adloco.step_plan import find_cap


def nbytes(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))


def test_memory_decides_the_largest_microbatch(monkeypatch):
    """The other trainers wait beside the one that makes its steps."""
    monkeypatch.setattr(adaptive, "step_bytes", lambda engine, state, batch, m: 1000 * m)
    method = lc.methods.adloco(
        PERIOD, 3, 2, "norm", start_batch=2, max_batch=128, microbatches=2, threshold=1.0
    )
    run = engine(method)
    state = run.init(oracle.make_params())
    waiting = 2 * nbytes(state.first.state.replace(counters=None))
    needed = run._bytes(state, stream(0, 0, 1))
    assert needed(6) == 6000 + waiting
    assert run.switch.buckets() == (2, 4, 6) and run.plain.block == 22
    assert find_cap(needed, 9999 + waiting, 2, 128) == 8
    # A merge does not change it: a run that goes on with two trainers cuts its batches alike.
    fewer = state.replace(trainers={i: state.trainers[i] for i in (0, 1)})
    assert run._bytes(fewer, stream(0, 0, 1))(6) == needed(6)


def test_memory_is_measured_on_the_compiled_step():
    """What the compiler says of steps of 4 samples is enough for 4, and not for 6."""
    method = lc.methods.adloco(PERIOD, 2, 2, "norm", start_batch=2, max_batch=8, microbatches=2)
    plain = engine(method)
    state = plain.init(oracle.make_params())
    needed = plain._bytes(state, stream(0, 0, 1))
    four, six = needed(4), needed(6)
    assert four < six
    found = engine(method, largest_microbatch=None, memory=four)
    state, _ = found.run(found.init(oracle.make_params()), stream, rounds=1)
    assert found.switch.buckets()[-1] == 4
    assert engine(method, largest_microbatch=None, memory=six)._memory == six


@pytest.fixture(scope="module")
def merging():
    """A method, and what four rounds of it end with on one device: 3, 2 and 1 trainers."""
    method = lc.methods.adloco(PERIOD, 3, 1, "norm", start_batch=2, max_batch=8, microbatches=2)
    with jax.numpy_dtype_promotion("standard"):
        return method, rounds_of(engine(method, regions=4), 4)


def rounds_of(one, regions):
    batches = functools.partial(stream, regions=regions)
    state, _ = one.run(one.init(oracle.make_params()), batches, rounds=4)
    return state


def test_offload_does_not_change_trainers_and_merges(merging):
    method, plain = merging
    state = rounds_of(engine(method, regions=4, offload=True), 4)
    assert list(state.trainers) == list(plain.trainers) and len(state.trainers) == 1
    assert same(values(state), values(plain))


def test_several_devices_a_region_train_the_same_trainers(merging):
    method, plain = merging
    mesh = lc.make_mesh(region=2, fsdp=2)
    state = rounds_of(engine(method, regions=4, mesh=mesh), 4)
    assert state.requests == plain.requests and list(state.trainers) == list(plain.trainers)
    for a, b in zip(values(state), values(plain)):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
