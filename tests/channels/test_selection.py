"""Which entries travel: how many, how often each, and in an order that follows from two of them."""

import jax
import numpy as np
import pytest

from lowcomm_jax.channels import Everything, Partitioned, Sampled, Shuffled
from lowcomm_jax.channels.selection import coprimes

# Odd sizes: shorter last strata, a leaf smaller than a stratum, a scalar.
SIZES = (103, 40, 7, 1)
KEY = jax.random.key(3)


def chosen(rule, count, key=KEY, sizes=SIZES):
    """Of each leaf `[exchanges, entries]`: what travels in each exchange."""
    draw = jax.jit(lambda n: rule.indices(key, n, sizes))
    found = [draw(np.int32(n)) for n in range(count)]
    return [np.stack([np.asarray(f[i]) for f in found]) for i in range(len(sizes))]


@pytest.mark.parametrize("rule", [Sampled(0.1), Shuffled(0.1), Partitioned(0.1)])
def test_every_stratum_gives_one_entry(rule):
    for size, found in zip(SIZES, chosen(rule, 25)):
        assert found.dtype == np.int32 and found.shape[1] == rule.count(size) == -(-size // 10)
        np.testing.assert_array_equal(
            found // 10, np.broadcast_to(np.arange(found.shape[1]), found.shape)
        )


@pytest.mark.parametrize("p,stride", [(0.1, 10), (0.3, 3), (0.5, 2), (1 / 7, 7)])
@pytest.mark.parametrize("kind", [Shuffled, Partitioned])
def test_every_entry_travels_once_in_a_cycle(kind, p, stride):
    for size, found in zip(SIZES, chosen(kind(p), 3 * stride)):
        for cycle in np.split(found, 3):
            travelled = np.sort(cycle[cycle < size])
            np.testing.assert_array_equal(travelled, np.arange(size))


def test_a_shuffled_order_stays_and_a_partitioned_one_changes():
    same, other = chosen(Shuffled(0.1), 20)[0], chosen(Partitioned(0.1), 20)[0]
    np.testing.assert_array_equal(same[:10], same[10:])
    assert (other[:10] != other[10:]).mean() > 0.5
    assert (chosen(Shuffled(0.1), 1, jax.random.key(4))[0] != same[:1]).any(), "the seed is unused"


def test_an_order_is_an_affine_permutation():
    """Two entries of a stratum tell all others: b + a k mod g, re-derived in NumPy."""
    offsets = chosen(Shuffled(0.1), 10)[0] % 10
    step = (offsets[1] - offsets[0]) % 10
    assert set(step) == set(coprimes(10)) == {1, 3, 7, 9}
    expected = (offsets[0] + np.arange(10)[:, None] * step) % 10
    np.testing.assert_array_equal(offsets, expected)


def test_sampled_entries_are_uniform_and_independent():
    """4000 strata of 4: counts within five standard deviations, also of pairs in a row."""
    first, second = chosen(Sampled(0.25), 2, sizes=(16_000,))[0] % 4
    counts = np.bincount(first, minlength=4)
    assert np.abs(counts - 1000).max() < 5 * np.sqrt(4000 * 0.25 * 0.75)
    pairs = np.bincount(4 * first + second, minlength=16)
    assert np.abs(pairs - 250).max() < 5 * np.sqrt(4000 / 16)


def test_everything_is_everything():
    (found,) = chosen(Everything(), 2, sizes=(5,))
    np.testing.assert_array_equal(found, [np.arange(5)] * 2)


@pytest.mark.parametrize("p", [0, 0.0, -0.1, 0.6, 1, 1e-6, "0.1", None])
def test_impossible_shares_are_refused(p):
    (line,) = Sampled(p).violations()
    assert repr(p) in line and "0.5" in line
    assert Sampled(0.005).violations() == []
