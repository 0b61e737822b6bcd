"""Outer rules written out by hand.

`step(anchor, delta, momentum) -> (anchor, momentum)` on the keys of one fragment; delta is the
mean pseudo-gradient anchor - local, so the anchor moves against it. Momentum starts at 0.
"""

from dataclasses import dataclass

import numpy as np

from oracle.problem import Tree


@dataclass(frozen=True)
class Average:
    """Theta <- Theta - lr Delta; lr = 1 is plain averaging of the regions."""

    lr: float = 1.0

    def step(self, anchor: Tree, delta: Tree, momentum: Tree) -> tuple[Tree, Tree]:
        new = {key: np.asarray(anchor[key] - self.lr * delta[key]) for key in anchor}
        return new, momentum


@dataclass(frozen=True)
class Nesterov:
    """v <- mu v + Delta; Theta <- Theta - lr (Delta + mu v), with the new v."""

    lr: float = 0.7
    momentum: float = 0.9

    def step(self, anchor: Tree, delta: Tree, momentum: Tree) -> tuple[Tree, Tree]:
        new, velocity = {}, {}
        for key in anchor:
            velocity[key] = np.asarray(self.momentum * momentum[key] + delta[key])
            look_ahead = delta[key] + self.momentum * velocity[key]
            new[key] = np.asarray(anchor[key] - self.lr * look_ahead)
        return new, velocity


@dataclass(frozen=True)
class HeavyBall:
    """v <- mu v + Delta; Theta <- Theta - lr v."""

    lr: float = 0.7
    momentum: float = 0.9

    def step(self, anchor: Tree, delta: Tree, momentum: Tree) -> tuple[Tree, Tree]:
        new, velocity = {}, {}
        for key in anchor:
            velocity[key] = np.asarray(self.momentum * momentum[key] + delta[key])
            new[key] = np.asarray(anchor[key] - self.lr * velocity[key])
        return new, velocity


class Restarting:
    """m' = beta m + (1 - beta) Delta; Theta <- Theta - nu ((1 + beta) m' - beta m).

    Every K-th step leaves m at 0 behind (arXiv 2605.28585). Counts its steps: one for a fragment.
    """

    def __init__(self, nu: float, beta: float, every: int):
        self.nu, self.beta, self.every, self.steps = nu, beta, every, 0

    def step(self, anchor: Tree, delta: Tree, momentum: Tree) -> tuple[Tree, Tree]:
        self.steps += 1
        new, after = {}, {}
        for key in anchor:
            m = momentum[key]
            renewed = self.beta * m + (1 - self.beta) * delta[key]
            move = (1 + self.beta) * renewed - self.beta * m
            new[key] = np.asarray(anchor[key] - self.nu * move)
            after[key] = np.asarray(0 * m if self.steps % self.every == 0 else renewed)
        return new, after

    def missed(self, momentum: Tree) -> Tree:
        """A round that nobody takes part in counts, and may be the one to restart after."""
        self.steps += 1
        restarts = self.steps % self.every == 0
        return {key: np.asarray(0 * m if restarts else m) for key, m in momentum.items()}


class HeLoCoServer:
    """Apply pseudo-gradients one arrival at a time; hand out a look-ahead (arXiv 2606.00271).

    G = rho align(Delta, m); m <- mu m + (1 - mu) G; Theta <- Theta - eta (G + mu m).
    """

    def __init__(self, params: Tree, *, lr: float, momentum: float, rho: float, align):
        self.lr, self.mu, self.rho, self.align = lr, momentum, rho, align
        self.theta = {key: value.copy() for key, value in params.items()}
        self.momentum = {key: np.zeros_like(value) for key, value in params.items()}

    def arrive(self, delta: Tree) -> None:
        """Apply one pseudo-gradient (received model - local model)."""
        aligned = self.align([delta], [1.0], self.momentum)
        for key in self.theta:
            g = self.rho * aligned[key]
            self.momentum[key] = np.asarray(self.mu * self.momentum[key] + (1 - self.mu) * g)
            move = g + self.mu * self.momentum[key]
            self.theta[key] = np.asarray(self.theta[key] - self.lr * move)

    def handed_out(self) -> Tree:
        """Theta - eta mu m."""
        return {
            key: np.asarray(value - self.lr * self.mu * self.momentum[key])
            for key, value in self.theta.items()
        }


class DelayedNesterovServer:
    """Apply pseudo-gradients one arrival at a time (arXiv 2401.09135, Algorithm 3).

    Every arrival moves Theta by -lr g / N; the momentum is refreshed from the buffer at every
    N-th arrival only, and its share is paid then (c = 0) or partly at each arrival (c > 0).
    """

    def __init__(self, params: Tree, *, lr: float, momentum: float, buffer: int, c: float = 0.0):
        self.lr, self.beta, self.buffer, self.c = lr, momentum, buffer, c
        self.theta = {key: value.copy() for key, value in params.items()}
        self.momentum = {key: np.zeros_like(value) for key, value in params.items()}
        self.pending = {key: np.zeros_like(value) for key, value in params.items()}
        self.arrivals = 0

    def arrive(self, g: Tree) -> None:
        """Apply one pseudo-gradient (received model - local model)."""
        n, c = self.buffer, self.c
        full = (self.arrivals + 1) % n == 0
        for key in self.theta:
            self.pending[key] = np.asarray(self.pending[key] + g[key])
            if full:
                self.momentum[key] = np.asarray(
                    self.beta * self.momentum[key] + self.pending[key] / n
                )
                self.pending[key] = np.zeros_like(self.pending[key])
                share = 1 - c * n + c
            else:
                share = c
            move = share * self.beta * self.momentum[key] + g[key] / n
            self.theta[key] = np.asarray(self.theta[key] - self.lr * move)
        self.arrivals += 1

    def handed_out(self) -> Tree:
        """Theta itself."""
        return self.theta
