"""NoLoCo's outer rule against NumPy with the pairings written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowcomm_jax.rules.outer import gossip, heavy_ball, nesterov

PAIRINGS = {
    2: [[(0, 1)], [(0, 1)], [(1, 0)]],
    4: [[(0, 1), (2, 3)], [(0, 3), (1, 2)], [(0, 2), (1, 3)]],
    5: [[(0, 1), (2, 3), (4,)], [(0, 4), (1,), (2, 3)], [(0,), (1, 2), (3, 4)]],
}
ALPHA, BETA, GAMMA = 0.3, 0.7, 0.4


def group_mean(values_RxM, groups):
    means_RxM = np.zeros_like(values_RxM)
    for group in groups:
        means_RxM[list(group)] = values_RxM[list(group)].mean(0)
    return means_RxM


def run(rule, phi_RxM, deltas_TxRxM, rounds_of_groups):
    update = jax.jit(jax.vmap(lambda d, s, p, g: rule.update(d, s, p, group_anchor=g)))
    phi_RxM = jnp.asarray(phi_RxM, jnp.float32)
    state = jax.vmap(rule.init)(phi_RxM)
    for delta_RxM, groups in zip(deltas_TxRxM, rounds_of_groups, strict=True):
        step, state = update(
            jnp.asarray(group_mean(delta_RxM, groups), jnp.float32),
            state,
            phi_RxM,
            jnp.asarray(group_mean(np.asarray(phi_RxM), groups)),
        )
        phi_RxM = phi_RxM + step
    return np.asarray(phi_RxM)


@pytest.mark.parametrize("regions", [2, 4, 5])
@pytest.mark.parametrize("variant", ["heavy_ball", "nesterov"])
def test_three_rounds_with_written_pairings(regions, variant):
    rng = np.random.default_rng(regions)
    phi_RxM = rng.standard_normal((regions, 7))
    deltas_TxRxM = rng.standard_normal((3, regions, 7))
    actual = run(gossip(ALPHA, BETA, GAMMA, variant), phi_RxM, deltas_TxRxM, PAIRINGS[regions])
    momentum = np.zeros((regions, 7))
    expected = phi_RxM.copy()
    for t, groups in enumerate(PAIRINGS[regions]):
        before = expected.copy()
        for group in groups:
            members = list(group)
            for i in members:
                force = -BETA * deltas_TxRxM[t, members].mean(0)
                force = force - GAMMA * (before[i] - before[members].mean(0))
                momentum[i] = ALPHA * momentum[i] + force
                ahead = ALPHA * momentum[i] + force
                expected[i] = before[i] + (momentum[i] if variant == "heavy_ball" else ahead)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("variant", "rule"),
    [("heavy_ball", heavy_ball(BETA, ALPHA)), ("nesterov", nesterov(BETA, ALPHA))],
)
def test_one_group_of_all_and_equal_anchors_is_the_global_rule(variant, rule):
    rng = np.random.default_rng(1)
    phi_M = rng.standard_normal(7)
    deltas_TxRxM = rng.standard_normal((4, 3, 7))
    everyone = [[(0, 1, 2)]] * 4
    phi_RxM = run(
        gossip(ALPHA, BETA, GAMMA, variant), np.stack([phi_M] * 3), deltas_TxRxM, everyone
    )
    anchor = jnp.asarray(phi_M, jnp.float32)
    state = rule.init(anchor)
    for delta_RxM in deltas_TxRxM:
        step, state = rule.update(jnp.asarray(delta_RxM.mean(0), jnp.float32), state)
        anchor = anchor + step
    np.testing.assert_allclose(phi_RxM, np.stack([anchor] * 3), rtol=1e-5, atol=1e-5)


def test_the_mean_over_regions_moves_as_without_gossip():
    rng = np.random.default_rng(2)
    phi_RxM = rng.standard_normal((4, 7))
    deltas_TxRxM = rng.standard_normal((3, 4, 7))
    pulled = run(gossip(ALPHA, BETA, GAMMA), phi_RxM, deltas_TxRxM, PAIRINGS[4])
    free = run(gossip(ALPHA, BETA, 0.0), phi_RxM, deltas_TxRxM, PAIRINGS[4])
    np.testing.assert_allclose(pulled.mean(0), free.mean(0), rtol=1e-5, atol=1e-5)
    assert np.abs(pulled - free).max() > 0.1


def test_refusals():
    with pytest.raises(ValueError, match=r"(?s)alpha=1.*beta=-1.*gamma=-2.*variant='x'"):
        gossip(1, -1, -2, "x")
    rule = gossip(0.5, 0.7, 0.7)
    with pytest.raises(ValueError, match="params"):
        rule.update(jnp.ones(2), rule.init(jnp.ones(2)), group_anchor=jnp.ones(2))
