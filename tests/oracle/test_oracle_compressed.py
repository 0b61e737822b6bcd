"""Compressed methods, NumPy only: codecs by hand, and what each is without compression."""

import numpy as np
import pytest

from oracle import (
    AdamW,
    Average,
    Nesterov,
    flatten,
    gradient,
    make_batches,
    make_params,
    run_decoupled,
    run_decoupled_as_coded,
    run_demo,
    run_diloco,
    run_muloco,
    run_sparseloco,
)
from oracle.codecs import CosineTopK, TopK, codebook, cosine_basis, mean_over_senders, side

F64, ALL = np.float64, 10**6
ADAM = AdamW(0.03)
ABSENT = np.ones((17, 3), bool)
ABSENT[[3, 7], [1, 0]] = False


def problem(regions=3, steps=17):
    return make_params(0, F64), make_batches(0, steps=steps, regions=regions, dtype=F64)


def assert_same(left, right, atol=1e-12):
    for one, two in zip(left.snapshots, right.snapshots, strict=True):
        for mine, theirs in ((one.anchors, two.anchors), (one.locals, two.locals)):
            for x, y in zip(mine, theirs, strict=True):
                np.testing.assert_allclose(flatten(x), flatten(y), rtol=0, atol=atol)
    last, other = left.finished, right.finished
    np.testing.assert_allclose(flatten(last.anchors[0]), flatten(other.anchors[0]), atol=atol)


def test_chunks_and_their_largest():
    assert [side(n, 4) for n in (3, 5, 6, 7, 8)] == [3, 1, 3, 1, 4]
    x = np.array([[1.0, -9, 2, 3], [4, 5, -6, 0.5]])
    message = TopK(k=1, block=2).encode(x)
    np.testing.assert_array_equal(message.values, [[0, -9, 0, 0], [0, 0, -6, 0]])


def test_codebook_takes_bin_means():
    x = np.array([-3.0, -1.0, -0.8, 0.1, 0.3, 4.4])
    # mean 0, std 2.465: step 3.70; codes 1, 2 (from -1.85 on), 2, 2, 2, 3.
    np.testing.assert_allclose(codebook(x, 2), [-3, -0.35, -0.35, -0.35, -0.35, 4.4])


def test_cosine_basis_is_orthonormal():
    basis = cosine_basis(5)
    np.testing.assert_allclose(basis @ basis.T, np.eye(5), atol=1e-15)
    assert basis[1, 0] > 0 > basis[1, 4]


def test_an_entry_is_averaged_over_those_who_sent_it():
    codec, like = TopK(k=1), np.zeros(3)
    messages = [codec.encode(np.array(x)) for x in ([5.0, 1, 1], [3.0, 1, 1], [1.0, 1, -2])]
    mean = mean_over_senders(codec, messages, [0.2, 0.6, 0.7], like)
    np.testing.assert_allclose(mean, [(0.2 * 5 + 0.6 * 3) / 0.8, 0, -2])


@pytest.mark.parametrize("regions", [1, 3])
def test_sparseloco_that_sends_all_is_averaging(regions):
    params, batches = problem(regions)
    common = dict(period=4, inner=ADAM, finish=True)
    one = run_sparseloco(params, batches, k=ALL, bits=None, **common)
    assert_same(one, run_diloco(params, batches, outer=Average(), **common))


def test_muloco_with_many_bits_is_nesterov():
    params, batches = problem()
    common = dict(period=4, inner=ADAM, participants=ABSENT, finish=True)
    one = run_muloco(params, batches, bits=40, **common)
    assert_same(one, run_diloco(params, batches, outer=Nesterov(0.7, 0.6), **common), atol=1e-9)


def test_decoupled_momentum_that_sends_all_is_descent():
    params, batches = problem()
    common = dict(period=4, inner=ADAM, participants=ABSENT, weights=[0.2, 0.5, 0.9], finish=True)
    one = run_decoupled(params, batches, k=ALL, **common)
    assert_same(one, run_diloco(params, batches, outer=Average(0.7), **common))


@pytest.mark.parametrize("k", [1, ALL])
def test_decoupled_momentum_as_coded_is_nesterov_for_one_region(k):
    """What is taken out of the momentum is put back, whatever was sent."""
    params, batches = problem(1)
    common = dict(period=4, inner=ADAM, finish=True)
    one = run_decoupled_as_coded(params, batches, k=k, **common)
    assert_same(one, run_diloco(params, batches, outer=Nesterov(0.7, 0.95), **common))


def test_demo_that_sends_all_has_no_momentum_left():
    params, batches = problem(steps=3)
    run = run_demo(params, batches, lr=0.01, k=ALL)
    for t in range(3):
        local = run.at(t).locals
        grads = [
            flatten(gradient(local[r], batches["x"][t, r], batches["y"][t, r])) for r in range(3)
        ]
        want = flatten(run.at(t).anchors[0]) - 0.01 * np.sign(np.mean(grads, axis=0))
        np.testing.assert_allclose(flatten(run.at(t + 1).anchors[0]), want, atol=1e-12)
        assert max(np.abs(flatten(m)).max() for m in run.at(t + 1).momentum) < 1e-12


def test_demo_momentum_keeps_what_was_not_sent():
    params, batches = problem(1, steps=2)
    run = run_demo(params, batches, lr=0.01, k=2, decay=0.9)
    codec, kept = CosineTopK(2), 0.0
    for t in range(2):
        g = gradient(run.at(t).anchors[0], batches["x"][t, 0], batches["y"][t, 0])["a"]
        m = 0.9 * kept + g
        sent = codec.decode(codec.encode(m).values, m)
        kept = m - sent
        np.testing.assert_allclose(run.at(t + 1).momentum[0]["a"], kept, atol=1e-12)
        np.testing.assert_allclose(run.at(t + 1).extra["direction"]["a"], sent, atol=1e-12)
    assert np.abs(kept).max() > 0.01
