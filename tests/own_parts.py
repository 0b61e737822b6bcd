"""Parts of methods as a user's module would have them, right and wrong."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from lowcomm_jax import batching
from lowcomm_jax.compression import Codec, LowRank, PerTensor, UnitCodec
from lowcomm_jax.compression.codecs.integer import INT4
from lowcomm_jax.compression.grid import WHOLE_ROW, Unit
from lowcomm_jax.methods import Method
from lowcomm_jax.rules.topology import Gossip
from lowcomm_jax.schedule import Staggered

number = 3


@dataclasses.dataclass(frozen=True)
class RowSign(UnitCodec):
    """One byte a value, its sign, and one fp32 a row, the mean magnitude times `scale`."""

    scale: float = 1.0
    name = "row_sign"
    unit = WHOLE_ROW
    requantizable = False

    def encode(self, x, matrix, params=None):
        mean = matrix.unit_sums(jnp.abs(x)) / matrix.counts(x)
        return {"sign": jnp.sign(x).astype(jnp.int8), "scale": self.scale * mean}

    def decode(self, payload, unit):
        return payload["sign"].astype(jnp.float32) * payload["scale"][..., None, None]


SIGNS, FACTORS = RowSign(0.3), LowRank()


@dataclasses.dataclass(frozen=True)
class Halves(UnitCodec):
    """Codes a share of every value by another codec; the share has no default."""

    half: float
    values: UnitCodec = INT4
    name = "halves"
    requantizable = False

    @property
    def unit(self):
        return self.values.unit

    def encode(self, x, matrix, params=None):
        return self.values.encode(self.half * x, matrix)

    def decode(self, payload, unit):
        return self.values.decode(payload, unit) / self.half


@dataclasses.dataclass(frozen=True)
class Unfinished(UnitCodec):
    """Lacks what every codec has."""


@dataclasses.dataclass(frozen=True)
class Relative(UnitCodec):
    """Sends every value times its weight, so that the anchor tells which weights were read."""

    name = "relative"
    unit = Unit(4, 4)
    reads_params = True

    def encode(self, x, matrix, params=None):
        return {"values": x * params}

    def decode(self, payload, unit):
        return payload["values"]


def whole_codec(stacked=(), seed=0, scale=1.0) -> Codec:
    """A codec of a whole fragment, which is told what the run settles."""
    return PerTensor(RowSign(scale), stacked=stacked, seed=seed)


def drag(rate: float, limit: float | None = None):
    """An outer rule."""
    return optax.chain(optax.clip(limit or 1e9), optax.sgd(rate))


def lion(b1: float):
    """Direction of an inner step: signs."""
    return optax.scale_by_lion(b1)


def steady():
    """An outer rule without settings."""
    return drag(0.7)


def fading(half_life: float = 2.0):
    """A landing rule: the progress made in flight, less of it the longer the payload travelled."""

    def update(progress, state, params=None, *, staleness, **extra):
        keep = jnp.exp2(-staleness / half_life)
        return jax.tree.map(lambda u: keep * u, progress), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def late(period: int, delay: int = 1) -> Staggered:
    """A schedule."""
    return Staggered(period, fragments=2, delay=delay)


def fours() -> Gossip:
    """A topology."""
    return Gossip(4, seed=7)


def thirds(start: int) -> batching.Fixed:
    """A batch policy."""
    return batching.Fixed(3 * start)


def by_numpy(period, rate=1.0):
    """A method whose docstring is not in Google's style.

    Parameters
    ----------
    period : int
        Steps between
        two rounds.
    rate : float, optional
        How fast.
    """
    del rate
    return Method("by_numpy", Staggered(period), lambda like: optax.sgd(1.0))


def plain(period: int, outer=None, **more) -> Method:
    """A method that takes its outer rule from the config, and any other keyword."""
    return Method("plain", Staggered(period), outer=outer, problems=tuple(more))


def text(**settings) -> str:
    """Not what any part is."""
    return "text"
