"""Trees and compiled codecs that the codec tests share."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax import compression

SHAPES = {
    "scalar": (),
    "bias": (7,),
    "odd": (37, 53),
    "heads": (4, 10, 36),
    "layers/w": (3, 24, 40),
}


def tree(seed: int = 0, shapes=SHAPES) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}


def build(name: str, **settings) -> compression.Codec:
    """The codec `name`, layers stacked, with a rank small enough for the shapes above."""
    if name.startswith("low_rank"):
        settings = {"rank": 3, **settings}
    return compression.make(name, stacked=("layers",), **settings)


class Compiled(NamedTuple):
    codec: compression.Codec
    encode: object
    decode: object
    aggregate: object


@functools.cache
def compiled(name: str) -> Compiled:
    """The codec with its functions jitted for `tree()`, once for all tests of a file."""
    codec, like = build(name), tree()
    return Compiled(
        codec,
        # Weights for codecs that read them: next to these every value would change something.
        jax.jit(lambda x, state: codec.encode(x, state, x)),
        jax.jit(lambda payload: codec.decode(payload, like)),
        jax.jit(lambda payload_R, weight_R: codec.aggregate(payload_R, weight_R, like)),
    )


def leaf_round_trip(codec, x, seed: int = 0):
    """Decoded value of one leaf by a codec of leaves, and its payload."""
    tree = {"x": jnp.asarray(x, jnp.float32)}
    whole = compression.PerTensor(codec, seed=seed)

    @jax.jit
    def run(tree):
        payload, _ = whole.encode(tree, whole.init(tree))
        return whole.decode(payload, tree), payload

    y, payload = run(tree)
    return np.asarray(y["x"]), payload["x"]


def parts_of(codec, likes, regions: int) -> int | None:
    """`MeshExchange.parts` for payloads of these shapes."""
    return regions if compression.route(codec, likes, regions).name == "two_shot" else None
