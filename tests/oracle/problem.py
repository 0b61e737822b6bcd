"""State the tiny least-squares problem that every oracle trains.

Each region r has its own hidden weights and its own inputs, so regions really pull apart. The
parameters are a dict of odd-shaped arrays, flattened in sorted key order into one vector of
length d; the loss of a batch {"x": [B, d], "y": [B]} is 0.5 * mean((x @ flat - y)^2).
"""

import math

import numpy as np

Tree = dict[str, np.ndarray]

SHAPES: dict[str, tuple[int, ...]] = {"a": (3, 5), "b": (7,), "c": (2, 3, 2), "s": ()}
SIZE = sum(math.prod(shape) for shape in SHAPES.values())


def make_params(seed: int = 0, dtype=np.float32, shapes=SHAPES) -> Tree:
    """Draw the initial parameters: one array per entry of `shapes`."""
    rng = np.random.default_rng([seed, 101])
    return {
        key: np.asarray(0.5 * rng.standard_normal(shape), dtype=dtype)
        for key, shape in shapes.items()
    }


def make_batches(
    seed: int = 0,
    *,
    steps: int,
    regions: int,
    batch_size: int = 4,
    dtype=np.float32,
    shapes=SHAPES,
) -> dict[str, np.ndarray]:
    """Draw {"x": [steps, R, B, d], "y": [steps, R, B]} for parameters of `shapes`.

    The sample of (seed, region, step) depends on nothing else: asking for more steps or more
    regions leaves the earlier ones as they were.
    """
    size = sum(math.prod(shape) for shape in shapes.values())
    x = np.zeros((steps, regions, batch_size, size), dtype=dtype)
    y = np.zeros((steps, regions, batch_size), dtype=dtype)
    for r in range(regions):
        truth = np.random.default_rng([seed, 202, r]).standard_normal(size)
        for t in range(steps):
            rng = np.random.default_rng([seed, 303, r, t])
            inputs = 0.5 * rng.standard_normal((batch_size, size))
            x[t, r] = inputs
            y[t, r] = inputs @ truth + 0.1 * rng.standard_normal(batch_size) + 0.2 * r
    return {"x": x, "y": y}


def step_batch(batches: dict[str, np.ndarray], step: int) -> dict[str, np.ndarray]:
    """Return the batch of 1-based `step` for all regions: leaves [R, B, ...]."""
    return {key: value[step - 1] for key, value in batches.items()}


def flatten(params: Tree) -> np.ndarray:
    """Concatenate all arrays, raveled, in sorted key order."""
    return np.concatenate([np.ravel(params[key]) for key in sorted(params)])


def unflatten(flat: np.ndarray, like: Tree) -> Tree:
    """Undo `flatten`."""
    tree, start = {}, 0
    for key in sorted(like):
        size = like[key].size
        tree[key] = flat[start : start + size].reshape(like[key].shape)
        start += size
    return tree


def loss(params: Tree, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return 0.5 * mean((x @ flat - y)^2)."""
    residual = x @ flatten(params) - y
    return 0.5 * np.mean(residual * residual)


def gradient(params: Tree, x: np.ndarray, y: np.ndarray) -> Tree:
    """Return the gradient of `loss`, by hand: x^T (x @ flat - y) / B."""
    residual = x @ flatten(params) - y
    return unflatten(x.T @ residual / len(y), params)
