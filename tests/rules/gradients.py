"""Synthetic microbatch gradients and the published formulas, re-derived in NumPy."""

import numpy as np

from lowcomm_jax.rules.batching import Statistics, pooled


def draw(rng, mean_D, scale_D, count, samples):
    """Mean gradients [count, D] of microbatches: mean + scale * noise / sqrt(samples)."""
    return mean_D + scale_D * rng.standard_normal((count, mean_D.size)) / np.sqrt(samples)


def measure(gradients_MxD, gbar_D=None):
    """What one region measures around its own mean, or around a given one."""
    gbar = gradients_MxD.mean(axis=0) if gbar_D is None else gbar_D
    deviation_MxD = gradients_MxD - gbar
    gbar2 = gbar @ gbar
    return gbar2, np.sum(deviation_MxD**2), np.sum((deviation_MxD @ gbar) ** 2) / gbar2


def statistics(gradients_RxMxD, samples, scope="within") -> Statistics:
    gbar = gradients_RxMxD.mean(axis=(0, 1)) if scope == "across" else None
    rows = np.array([measure(g, gbar) for g in gradients_RxMxD])
    values = dict(zip(("gbar2", "spread", "along"), rows.T))
    return pooled(values, scope, gradients_RxMxD.shape[1], samples)


def published(g_MxD, b, eta, theta, nu):
    """Reference formulas of the distributed form, M nodes with mean gradients over b samples."""
    m = len(g_MxD)
    gbar = g_MxD.mean(axis=0)
    g2 = gbar @ gbar
    inner = g_MxD @ gbar
    rest = g_MxD - np.outer(inner / g2, gbar)
    return {
        "norm": b / (m - 1) * np.sum((g_MxD - gbar) ** 2) / (m * eta**2 * g2),
        "inner": b * inner.var(ddof=1) / (m * theta**2 * g2**2),
        "orthogonal": b / (m - 1) * np.sum(rest**2) / (m * nu**2 * g2),
    }
