"""Two ways to reduce coded payloads, their bytes, and which codec each of them takes.

* all-gather: every region hands its payload to all others, who decode and average. One
  quantisation; each region sends (R - 1) payloads.
* two-shot: slices are exchanged, decoded, averaged in fp32, encoded again and gathered. Each region
  sends 2 (R - 1) / R payloads, but what arrives has been quantised twice, the second time without
  error feedback.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from lowcomm_jax.compression.base import Codec
from lowcomm_jax.compression.error_feedback import ErrorFeedback
from lowcomm_jax.compression.rules import PerTensor
from lowcomm_jax.compression.sliced import Sliced

PyTree = Any


class Route(NamedTuple):
    """How payloads are best reduced.

    Attributes:
      name: `all_gather` or `two_shot`, as in `exchange.traffic`.
      all_gather, two_shot: bytes sent by one of R regions; two_shot is None where encoding the mean
        again makes no sense (sparse, low-rank, sign) or loses track of a copy (EF21).
      codec: what encodes for this route.
    """

    name: str
    all_gather: int
    two_shot: int | None
    codec: Codec


def route(codec: Codec, likes: Sequence[PyTree], regions: int, devices: int = 1) -> Route:
    """Choose how payloads of these shapes travel: by `PerTensor.reduce`, else by fewer bytes.

    The all-gather, quantised once, wins ties.

    Args:
      codec: as the method has it.
      likes: shapes of every fragment.
      devices: of a region, that rows may be cut over.

    Raises:
      ValueError: two-shot is asked for where it makes no sense.
    """
    gather = (regions - 1) * sum(codec.nbytes(like) for like in likes)
    inner = per_tensor(codec)
    wanted = "auto" if inner is None else inner.reduce
    if inner is None or not all(inner.requantizable(like) for like in likes):
        if wanted == "two_shot":
            raise ValueError(f"{codec.name}: reduce='two_shot' cannot encode a mean a second time")
        return Route("all_gather", gather, None, codec)
    cut = _in_slices(codec, regions, devices)
    shot = round(2 * (regions - 1) * sum(cut.nbytes(like) for like in likes) / regions)
    if wanted == "two_shot" or (wanted == "auto" and shot < gather):
        return Route("two_shot", gather, shot, cut)
    return Route("all_gather", gather, shot, codec)


def per_tensor(codec: Codec) -> PerTensor | None:
    """The codec whose payloads travel, out of its error feedback; None when there is none."""
    if isinstance(codec, ErrorFeedback):
        return per_tensor(codec.codec)
    return codec if isinstance(codec, PerTensor) else None


def slices_of(codec: Codec | None) -> Sliced | None:
    """The sliced codec within, if payloads are reduced two-shot."""
    if isinstance(codec, ErrorFeedback):
        return slices_of(codec.codec)
    return codec if isinstance(codec, Sliced) else None


def _in_slices(codec: Codec, parts: int, devices: int) -> Codec:
    if isinstance(codec, ErrorFeedback):
        return dataclasses.replace(codec, codec=_in_slices(codec.codec, parts, devices))
    return Sliced(codec, parts, devices)
