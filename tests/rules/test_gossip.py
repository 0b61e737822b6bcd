"""NoLoCo's outer rule against NumPy with the pairings written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowcomm_jax.rules.outer import gossip

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


def test_refusals():
    with pytest.raises(ValueError, match=r"(?s)alpha=1.*beta=-1.*gamma=-2.*variant='x'"):
        gossip(1, -1, -2, "x")
    rule = gossip(0.5, 0.7, 0.7)
    with pytest.raises(ValueError, match="params"):
        rule.update(jnp.ones(2), rule.init(jnp.ones(2)), group_anchor=jnp.ones(2))
