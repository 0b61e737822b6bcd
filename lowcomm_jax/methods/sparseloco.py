"""SparseLoCo (arXiv 2508.15706): the few largest entries, 2 bits each, with decayed feedback.

Every H steps each region sends the k largest entries of every 64 x 64 chunk of its pseudo-gradient
plus decayed residual. What it does not send becomes the residual (`compression.error_feedback`),
which takes the place of outer momentum: DiLoCo's round with `outer.sgd`.

64 of 4096 entries are 1.56 %. With 12 bits of index and 2 of value each they take 0.027 bytes per
parameter, 146 times less than fp32.

Differs from the paper: the learning rate stays out of the residual, so that a schedule of the rate
does not rescale the residual. The authors' code scales what enters the residual. No contribution is
clipped to the median norm (`Engine(outlier_factor=...)` leaves outliers out). Indices are not
entropy-coded.

Differs from the authors' code: that divides an entry's sum by the number of regions that sent it,
as `mean="senders"` does; the sum over R of the paper's formula is the default here. Where few
regions choose the same entries its steps are longer, up to R times. Its k scales with the size of
short tensors; here every chunk keeps `k` entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import optax

from lowcomm_jax.methods.base import Method, published, wire_codec
from lowcomm_jax.methods.diloco import diloco
from lowcomm_jax.rules.outer import sgd
from lowcomm_jax.settings import one_of


@published(law="diloco", period=30)
def sparseloco(
    period: int,
    k: int = 64,
    block: int = 64,
    bits: int = 2,
    decay: float = 0.95,
    outer: optax.GradientTransformation | None = None,
    codec: Any = None,
    inner_batching: Any = None,
    stacked: Sequence[str] = (),
    mean: Literal["regions", "senders"] | None = None,
) -> Method:
    """Send k entries of every chunk of the pseudo-gradient, every `period` inner steps.

    Args:
      k: entries kept per chunk. Chunks of at most k entries, those of vectors among them, are kept
        whole.
      block: largest side of a chunk, in entries, at most 64.
      bits: bits of a kept entry: 2, 4 or 8; 32 = fp32.
      outer: Optax transform of the mean pseudo-gradient; default plain descent of rate 1.0. The
        residual acts as momentum already; an outer rule with momentum adds a second one.
      mean: of an entry over all "regions" that take part, where one that did not send it counts as
        0 (None); or over its "senders" alone, as in the authors' code.
      decay, codec: as in `muloco`.
      stacked: as in `muloco`.
      period, inner_batching: as in `diloco`.
    """
    unknown = one_of(2, 4, 8, 32).problem("bits", bits)
    paper = {
        "name": "topk",
        "k": k,
        "block": block,
        "values": "fp32" if unknown or bits == 32 else f"stat{int(bits)}",
        "mean": "regions" if mean is None else mean,
        "error_feedback": decay,
    }
    settings = {"k": k, "block": block, "bits": bits, "decay": decay, "mean": mean}
    wire, problems = wire_codec(sparseloco, codec, paper, stacked, **settings)
    plain = diloco(period, sgd(1.0) if outer is None else outer, wire, inner_batching)
    return plain.named("sparseloco", problems if unknown is None else (unknown, *problems))
