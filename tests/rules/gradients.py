"""Synthetic microbatch gradients and the published formulas, re-derived in NumPy."""

import numpy as np

from lowcomm_jax.rules.batching import Statistics, pooled


def draw(rng, mean_D, scale_D, count, samples):
    """Mean gradients [count, D] of microbatches: mean + scale * noise / sqrt(samples)."""
    return mean_D + scale_D * rng.standard_normal((count, mean_D.size)) / np.sqrt(samples)


def measure(gradients_MxD):
    """What one region measures around its own mean."""
    gbar = gradients_MxD.mean(axis=0)
    deviation_MxD = gradients_MxD - gbar
    gbar2 = gbar @ gbar
    return gbar2, np.sum(deviation_MxD**2), np.sum((deviation_MxD @ gbar) ** 2) / gbar2


def statistics(gradients_RxMxD, samples) -> Statistics:
    rows = np.array([measure(g) for g in gradients_RxMxD])
    return pooled(rows, gradients_RxMxD.shape[1], samples)


def published(g_MxD, b, eta, theta, nu):
    """The published tests of one step's batch, from M microbatches of b samples each."""
    m = len(g_MxD)
    gbar = g_MxD.mean(axis=0)
    g2 = gbar @ gbar
    inner = g_MxD @ gbar
    rest = g_MxD - np.outer(inner / g2, gbar)
    return {
        "norm": b / (m - 1) * np.sum((g_MxD - gbar) ** 2) / (eta**2 * g2),
        "inner": b * inner.var(ddof=1) / (theta**2 * g2**2),
        "orthogonal": b / (m - 1) * np.sum(rest**2) / (nu**2 * g2),
    }
