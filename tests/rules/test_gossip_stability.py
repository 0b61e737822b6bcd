"""The consensus theory of gossip against sampling with the transform itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowcomm_jax.rules.consensus import Consensus
from lowcomm_jax.rules.outer import gossip


def sample_moments(alpha, gamma, group_size, regions, variant, rounds, samples=40_000):
    """Sample (p p, p x, x x) after each round: [rounds + 1, 3, samples], independent pairings."""
    rng = np.random.default_rng(3)
    rule = gossip(alpha, 0.7, gamma, variant)
    phi_RxS = jnp.asarray(rng.standard_normal((regions, samples)), jnp.float32)
    state = rule.init(phi_RxS)
    silence = jnp.zeros_like(phi_RxS)
    update = jax.jit(rule.update)
    moments = []
    for _ in range(rounds + 1):
        x = np.asarray(phi_RxS, np.float64)
        p = np.asarray(state.momentum, np.float64)
        x, p = x - x.mean(0), p - p.mean(0)
        moments.append([(p * p).mean(0), (p * x).mean(0), (x * x).mean(0)])
        mean_RxS = draw_group_means(rng, np.asarray(phi_RxS), group_size)
        step, state = update(silence, state, phi_RxS, group_anchor=jnp.asarray(mean_RxS))
        phi_RxS = phi_RxS + step
    return np.array(moments)


def draw_group_means(rng, phi_RxS, group_size):
    order_RxS = np.argsort(rng.random(phi_RxS.shape), axis=0)
    sorted_RxS = np.take_along_axis(phi_RxS, order_RxS, 0)
    for start in range(0, len(phi_RxS) - group_size + 1, group_size):
        members = slice(start, start + group_size)
        sorted_RxS[members] = sorted_RxS[members].mean(0)
    means_RxS = np.empty_like(phi_RxS)
    np.put_along_axis(means_RxS, order_RxS, sorted_RxS, 0)
    return means_RxS


@pytest.mark.parametrize(
    ("alpha", "gamma", "group_size", "regions", "variant"),
    [
        (0.5, 0.7, 2, 4, "heavy_ball"),
        (0.5, 0.7, 2, 4, "nesterov"),
        (0.3, 1.1, 3, 6, "heavy_ball"),
        (0.7, 0.4, 2, 5, "heavy_ball"),
        (0.7, 0.4, 3, 7, "nesterov"),
    ],
)
def test_second_moments_follow_the_recursion(alpha, gamma, group_size, regions, variant):
    moments_TxCxS = sample_moments(alpha, gamma, group_size, regions, variant, rounds=6)
    measured = moments_TxCxS.mean(-1)
    error = moments_TxCxS.std(-1) / np.sqrt(moments_TxCxS.shape[-1])
    matrix = Consensus(alpha, gamma, group_size, variant).second_moments(regions)
    expected = np.array([np.linalg.matrix_power(matrix, t) @ measured[0] for t in range(7)])
    assert (np.abs(measured - expected) <= 4.5 * error + 1e-12).all()
    # The bound above means something: the sampling error is small against the moments.
    assert (error.max(1) < 0.04 * np.abs(expected).max(1)).all()


@pytest.mark.parametrize("variant", ["heavy_ball", "nesterov"])
@pytest.mark.parametrize(("group_size", "regions"), [(2, 2), (2, 4), (2, 5), (3, 6), (2, 1024)])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.9])
def test_the_limit_is_where_the_contraction_passes_one(variant, group_size, regions, alpha):
    limit = Consensus(alpha, 0.7, group_size, variant).gamma_limit(regions)

    def factor(share):
        return Consensus(alpha, share * limit, group_size, variant).contraction(regions)

    assert factor(1.001) > 1
    for share in (0.02, 0.2, 0.5, 0.8, 0.999):
        assert factor(share) < 1


@pytest.mark.parametrize(("alpha", "limit"), [(0.3, 1.82), (0.5, 1.50), (0.9, 0.38)])
def test_pairs_of_very_many_regions_have_the_closed_limit(alpha, limit):
    found = Consensus(alpha, 0.7, 2).gamma_limit(10**9)
    assert found == pytest.approx(limit, abs=5e-3)
    assert found == pytest.approx(2 * (1 - alpha**2), rel=1e-6)


def test_finite_form_with_three_of_nine_written_out():
    k = (3 - 1) * 9 / (3 * (9 - 1))
    limit = Consensus(0.3, 0.7, 3).gamma_limit(9)
    assert limit == pytest.approx(2 * (1 - 0.09) / (1 + 0.3 - 0.6 * k))


@pytest.mark.parametrize(("gamma", "factor"), [(0.3, 0.63), (0.7, 0.70), (1.0, 0.79)])
def test_contraction_figures_at_momentum_one_half(gamma, factor):
    assert Consensus(0.5, gamma, 2).contraction(10**9) == pytest.approx(factor, abs=6e-3)


def test_coefficients_that_let_regions_drift_apart():
    assert not Consensus(0.5, 0.7, 2).violations(16)
    assert not Consensus(0.5, 0.0, 4).violations(4)
    (line,) = Consensus(0.9, 0.7, 2).violations(16)
    assert "0 < gamma < 0.4" in line and "choose gamma" in line
    (line,) = Consensus(0.5, 0.0, 2).violations(4)
    assert "stable range" in line
    (line,) = Consensus(0.5, 1.45, 2, "nesterov").violations(1000)
    assert "nesterov the stable range" in line
