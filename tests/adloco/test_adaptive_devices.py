"""The adaptive engine's devices: offloading, and several of them a region."""

import functools

import jax
import numpy as np
import oracle
import pytest
from adloco.adaptive_cases import PERIOD, engine, same, stream, values

import lowcomm_jax as lc
from lowcomm_jax.rules.batching import NormTest


@pytest.fixture(scope="module")
def merging():
    """A method, and what four rounds of it end with on one device: 3, 2 and 1 trainers."""
    policy = NormTest(start=2, cap=8, microbatches=2)
    method = lc.methods.adloco(PERIOD, 3, 1, inner_batching=policy)
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
