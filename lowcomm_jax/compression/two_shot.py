"""Two ways to reduce coded payloads, their bytes, and the second quantisation of the cheaper one.

* all-gather: every region hands its payload to all others, who decode and average. One
  quantisation; each region sends (R - 1) payloads.
* two-shot: slices are exchanged, decoded, averaged in fp32, encoded again and gathered. Each region
  sends 2 (R - 1) / R payloads, but what arrives has been quantised twice, the second time without
  error feedback.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from lowcomm_jax.compression.base import Codec
from lowcomm_jax.compression.ef21 import EF21
from lowcomm_jax.compression.error_feedback import ErrorFeedback
from lowcomm_jax.compression.rules import PerTensor

PyTree = Any


class Route(NamedTuple):
    """How a payload is best reduced.

    Attributes:
      name: `all_gather` or `two_shot`, as in `exchange.traffic`.
      all_gather, two_shot: bytes sent by one of R regions; two_shot is None where encoding the mean
        again makes no sense (sparse, low-rank, sign).
    """

    name: str
    all_gather: int
    two_shot: int | None


def _stateless(codec: Codec, like: PyTree) -> Codec | None:
    """The codec that may encode a mean, without wrappers; None when there is none."""
    if isinstance(codec, ErrorFeedback | EF21):
        return _stateless(codec.codec, like)
    if isinstance(codec, PerTensor) and codec.requantizable(like):
        return codec
    return None


def route(codec: Codec, like: PyTree, regions: int) -> Route:
    """Choose the route that sends fewer bytes; the all-gather, quantised once, wins ties."""
    payload = codec.nbytes(like)
    gather = (regions - 1) * payload
    if _stateless(codec, like) is None:
        return Route("all_gather", gather, None)
    shot = round(2 * (regions - 1) * payload / regions)
    return Route("two_shot" if shot < gather else "all_gather", gather, shot)


def two_shot_mean(codec: Codec, payload_R: PyTree, weight_R: jax.Array, like: PyTree) -> PyTree:
    """What every region holds after a two-shot reduction: decode, average, encode, decode.

    The mean is encoded as one tree; codecs with a grid per matrix (`stat*`) would in a sliced
    exchange fit one grid per slice.

    Args:
      codec: whose payloads these are; wrappers with a residual are peeled off for the second
        encoding.
      payload_R, weight_R, like: as in `Codec.aggregate`.

    Returns:
      fp32 leaves in the shapes of `like`.

    Raises:
      ValueError: the codec cannot encode a mean again (sparse, low-rank, sign).
    """
    again = _stateless(codec, like)
    if again is None:
        raise ValueError(
            f"{codec.name} cannot encode a mean a second time: reduce it by all-gather "
            "(`codec.aggregate`)"
        )
    mean = codec.aggregate(payload_R, weight_R, like)
    payload, _ = again.encode(mean, again.init(like))
    return again.decode(payload, like)
