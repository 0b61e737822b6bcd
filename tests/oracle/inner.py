"""Inner optimizers written out by hand.

Each has `init(params) -> state` and `step(params, grads, state) -> (params, state)`. `lr` is a
number or a function of the number of inner steps already made (0 at the first one).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from oracle.problem import Tree

Rate = float | Callable[[int], float]


def rate_at(lr: Rate, count: int) -> float:
    """Return the learning rate of the step that follows `count` steps."""
    return float(lr(count)) if callable(lr) else lr


@dataclass(frozen=True)
class Sgd:
    """w <- w - lr g."""

    lr: Rate

    def init(self, params: Tree) -> dict:
        return {"count": 0}

    def step(self, params: Tree, grads: Tree, state: dict) -> tuple[Tree, dict]:
        lr = rate_at(self.lr, state["count"])
        new = {key: np.asarray(params[key] - lr * grads[key]) for key in params}
        return new, {"count": state["count"] + 1}


@dataclass(frozen=True)
class Momentum:
    """v <- mu v + g; w <- w - lr v."""

    lr: Rate
    momentum: float = 0.9

    def init(self, params: Tree) -> dict:
        return {"count": 0, "v": {key: np.zeros_like(value) for key, value in params.items()}}

    def step(self, params: Tree, grads: Tree, state: dict) -> tuple[Tree, dict]:
        lr = rate_at(self.lr, state["count"])
        new, velocity = {}, {}
        for key in params:
            velocity[key] = np.asarray(self.momentum * state["v"][key] + grads[key])
            new[key] = np.asarray(params[key] - lr * velocity[key])
        return new, {"count": state["count"] + 1, "v": velocity}


def _no_moments(params: Tree) -> dict:
    return {
        "count": 0,
        "m": {key: np.zeros_like(value) for key, value in params.items()},
        "v": {key: np.zeros_like(value) for key, value in params.items()},
    }


@dataclass(frozen=True)
class AdamW:
    """Adam with bias correction and decoupled weight decay, every leaf decayed.

    m <- b1 m + (1 - b1) g; v <- b2 v + (1 - b2) g^2;
    w <- w - lr (m / (1 - b1^n) / (sqrt(v / (1 - b2^n)) + eps) + decay w), n = 1, 2, ...
    """

    lr: Rate
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-4

    def init(self, params: Tree) -> dict:
        return _no_moments(params)

    def step(self, params: Tree, grads: Tree, state: dict) -> tuple[Tree, dict]:
        lr = rate_at(self.lr, state["count"])
        n = state["count"] + 1
        new, first, second = {}, {}, {}
        for key in params:
            g = grads[key]
            first[key] = np.asarray(self.b1 * state["m"][key] + (1 - self.b1) * g)
            second[key] = np.asarray(self.b2 * state["v"][key] + (1 - self.b2) * g * g)
            m_hat = first[key] / (1 - self.b1**n)
            v_hat = second[key] / (1 - self.b2**n)
            direction = m_hat / (np.sqrt(v_hat) + self.eps) + self.weight_decay * params[key]
            new[key] = np.asarray(params[key] - lr * direction)
        return new, {"count": n, "m": first, "v": second}


@dataclass(frozen=True)
class Adopt:
    """ADOPT (arXiv 2411.02853) with Optax's clip; the first step only fills v.

    u = clip(g / max(sqrt(v), eps), n^(1/4)); m <- b1 m + (1 - b1) u; w <- w - lr m;
    v <- b2 v + (1 - b2) g^2, n = 1, 2, ... At n = 0: u and m are 0, and v <- g^2.
    """

    lr: Rate
    b1: float = 0.9
    b2: float = 0.9999
    eps: float = 1e-6

    def init(self, params: Tree) -> dict:
        return _no_moments(params)

    def step(self, params: Tree, grads: Tree, state: dict) -> tuple[Tree, dict]:
        lr, n = rate_at(self.lr, state["count"]), state["count"]
        b1, b2 = (self.b1, self.b2) if n else (1.0, 0.0)
        new, first, second = {}, {}, {}
        for key in params:
            g, v, bound = grads[key], state["v"][key], n**0.25
            u = np.clip(g / np.maximum(np.sqrt(v), self.eps), -bound, bound)
            first[key] = np.asarray(b1 * state["m"][key] + (1 - b1) * u)
            second[key] = np.asarray(b2 * v + (1 - b2) * g * g)
            new[key] = np.asarray(params[key] - lr * first[key])
        return new, {"count": n + 1, "m": first, "v": second}
