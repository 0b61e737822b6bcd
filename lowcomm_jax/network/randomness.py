"""Seeded jitter as a pure function of (seed, stream, step): a resumed run draws the same."""

import functools
import zlib
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

# Steps drawn at once: one generator per block keeps the cost per step below a microsecond.
BLOCK = 256
KINDS = ("none", "lognormal", "uniform")


@dataclass(frozen=True)
class Jitter:
    """Multiplicative factor with median 1 on a duration.

    `lognormal`: exp(scale * z), z standard normal (mean exp(scale**2 / 2)).
    `uniform`: uniform on [1 - scale, 1 + scale], scale < 1.
    `none`: always 1.
    """

    kind: str = "none"
    scale: float = 0.0

    @property
    def active(self) -> bool:
        """Say whether the factor ever differs from 1."""
        return self.kind != "none" and self.scale > 0.0

    @property
    def mean(self) -> float:
        """Give the expected factor."""
        return float(np.exp(self.scale**2 / 2)) if self.kind == "lognormal" else 1.0

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Draw float64 factors of the given shape."""
        if not self.active:
            return np.ones(shape)
        if self.kind == "lognormal":
            return np.exp(self.scale * rng.standard_normal(shape))
        return rng.uniform(1.0 - self.scale, 1.0 + self.scale, shape)

    def violations(self, where: str) -> list[str]:
        """List the violations of this jitter, each with its fix."""
        found = []
        if self.kind not in KINDS:
            found.append(f"{where}.kind {self.kind!r} is unknown: use one of {', '.join(KINDS)}")
        if not 0.0 <= self.scale < np.inf:
            found.append(f"{where}.scale is {self.scale}: use 0 or more")
        if self.kind == "uniform" and self.scale >= 1.0:
            found.append(f"{where}.scale {self.scale} lets durations reach 0: use less than 1")
        return found


def generator(seed: int, stream: Hashable, index: int = 0) -> np.random.Generator:
    """Give the generator of (seed, stream, index); equal arguments give equal draws everywhere."""
    word = (zlib.crc32(repr(stream).encode()) << 32) | (index & 0xFFFFFFFF)
    # An explicit dtype: a plain list of large ints would become float64 and lose the step's bits.
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF, word], np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


@functools.lru_cache(maxsize=64)
def step_factors(seed: int, stream: str, block: int, regions: int, jitter: Jitter) -> np.ndarray:
    """Draw the factors of steps [block * BLOCK, (block + 1) * BLOCK): float64 [BLOCK, regions]."""
    factors_BxR = jitter.draw(generator(seed, stream, block), (BLOCK, regions))
    factors_BxR.setflags(write=False)
    return factors_BxR
