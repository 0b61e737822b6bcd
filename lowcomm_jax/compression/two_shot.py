"""Chooses between two ways to reduce coded payloads.

`route` takes a codec and the shapes of the fragments, and returns the way that sends fewer bytes.
It refuses two-shot where it is asked for and impossible.

* all-gather: every region sends its payload to all others, which decode and average. One
  quantisation; each region sends (R - 1) payloads.
* two-shot: regions exchange slices (`Codec.deal`), decode, average in fp32, encode again
  (`Codec.recode`) and gather. Each region sends 2 (R - 1) / R payloads. Values are quantised twice,
  the second time without error feedback: the errors of both add up. Codebooks and scales of a
  matrix are those of the matrix at first, and then those of a slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lowcomm_jax.compression.base import Codec, Wrapper
from lowcomm_jax.compression.rules import PerTensor
from lowcomm_jax.refused import refuse

PyTree = Any


class Route(NamedTuple):
    """The way in which payloads are reduced.

    Attributes:
      name: `all_gather` or `two_shot`, as in `exchange.mesh`.
      all_gather, two_shot: bytes sent by one of R regions. two_shot is None where the mean cannot
        be encoded again: sparse, low-rank and sign codecs, and EF21, whose copies would differ.
    """

    name: str
    all_gather: int
    two_shot: int | None


def route(codec: Codec, likes: Sequence[PyTree], regions: int) -> Route:
    """Choose how payloads of these shapes travel: by `PerTensor.reduce`, else by fewer bytes.

    With equal bytes it is the all-gather, which quantises once.

    Args:
      codec: of the method.
      likes: shapes of every fragment.

    Raises:
      Refused: two-shot is asked for and impossible.
    """
    gather = (regions - 1) * sum(codec.nbytes(like) for like in likes)
    inner = per_tensor(codec)
    wanted = "auto" if inner is None else inner.reduce
    if not all(codec.requantizable(like) for like in likes):
        if wanted == "two_shot":
            why = "reduce='two_shot' cannot encode a mean a second time; leave it out"
            refuse("codec", [f"{codec.name}: {why}"])
        return Route("all_gather", gather, None)
    cut = codec.in_slices(regions)
    dealt = sum(cut.dealt_nbytes(like) for like in likes)
    shot = round(2 * (regions - 1) * dealt / regions)
    by_slices = wanted == "two_shot" or (wanted == "auto" and shot < gather)
    return Route("two_shot" if by_slices else "all_gather", gather, shot)


def per_tensor(codec: Codec) -> PerTensor | None:
    """The `PerTensor` codec inside wrappers; None when there is none."""
    while isinstance(codec, Wrapper):
        codec = codec.codec
    return codec if isinstance(codec, PerTensor) else None
