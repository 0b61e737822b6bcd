"""Merge rules written out by hand: `rule(deltas, weights, momentum) -> direction`, key by key.

deltas: one tree a region, of those that count; weights: theirs; momentum: the outer momentum.
"""

import numpy as np

from oracle.problem import Tree


def radial_directional(embeddings: tuple[str, ...] = ()):
    """Mean of norms along the mean of unit vectors (arXiv 2604.21428); embeddings: the mean."""

    def merge(deltas: list[Tree], weights: list[float], momentum: Tree) -> Tree:
        del momentum
        total, out = sum(weights), {}
        for key in deltas[0]:
            mean = sum(w * d[key] for w, d in zip(weights, deltas)) / total
            radius, direction = 0.0, np.zeros_like(mean)
            for w, d in zip(weights, deltas):
                length = np.sqrt((d[key] ** 2).sum())
                radius += w * length / total
                if length > 0:
                    direction = direction + w * d[key] / length / total
            long = np.sqrt((direction**2).sum())
            plain = key in embeddings or long < 1e-6
            out[key] = mean if plain else radius * direction / long
        return out

    return merge


def inverse_norms(deltas: list[Tree], weights: list[float], momentum: Tree) -> Tree:
    """The mean by weights w / ||delta||, key by key."""
    del momentum
    out = {}
    for key in deltas[0]:
        shares = [w / np.sqrt((d[key] ** 2).sum()) for w, d in zip(weights, deltas)]
        out[key] = sum(s * d[key] for s, d in zip(shares, deltas)) / sum(shares)
    return out


def isotropic(deltas: list[Tree], weights: list[float], momentum: Tree) -> Tree:
    """The mean; matrices of two axes with all singular values at their mean (arXiv 2607.03011)."""
    del momentum
    out = {}
    for key in deltas[0]:
        mean = sum(w * d[key] for w, d in zip(weights, deltas)) / sum(weights)
        if mean.ndim == 2:
            mean = mean.astype(np.float64)  # the squares below halve the digits
            values, vectors = np.linalg.eigh(mean.T @ mean)
            kept = [i for i in range(len(values)) if values[i] > 1e-9 * values.max()]
            sides = min(mean.shape)
            size = sum(np.sqrt(values[i]) for i in kept) / sides
            polar = sum(
                np.outer(mean @ vectors[:, i] / np.sqrt(values[i]), vectors[:, i]) for i in kept
            )
            mean = size * polar
        out[key] = mean
    return out


def align(enough=0.2, removal=0.5, turn=1.0, confidence=3.0, most=0.5):
    """Remove what points against the momentum, turn what points aside (arXiv 2606.00271)."""

    def merge(deltas: list[Tree], weights: list[float], momentum: Tree) -> Tree:
        out = {}
        for key in deltas[0]:
            delta = sum(w * d[key] for w, d in zip(weights, deltas)) / sum(weights)
            m = momentum[key]
            length, long = np.linalg.norm(delta), np.linalg.norm(m)
            if length == 0 or long == 0:
                out[key] = delta
                continue
            cosine = float((delta * m).sum() / (length * long))
            certain = length / (length + confidence * long)
            if cosine >= enough:
                out[key] = delta
            elif cosine < 0:
                beta = min(removal * -cosine * certain, most)
                out[key] = delta - beta * cosine * length * (m / long)
            else:
                lam = min(turn * (1 - cosine) * certain, 1.0)
                mixed = (1 - lam) * delta / length + lam * m / long
                out[key] = length * mixed / np.linalg.norm(mixed)
        return out

    return merge
