"""PULSELoCo (arXiv 2602.03839): DiLoCo whose entries travel where they change the bf16 weight.

Every H steps each region adds its residual to its pseudo-gradient, p = Delta + e. An entry travels
only where bf16(Theta - p) differs from bf16(Theta): elsewhere the forward pass in bf16 would not
see it. What does not travel is the new residual (`compression.error_feedback`).

Payloads have a static size: k places for each chunk of 64 x 64 entries, fp32 values with indices of
12 bits, 0.34 bytes a parameter by default, 11.6 times less than fp32. Where more entries of a chunk
pass the gate, the k largest travel and the others wait. The metric `sent_share`
(`Engine(codec_error=True)`) says how full the places are.

How many pass depends on the learning rate. The source reports about 99 % of a step's changes to
vanish in bf16 at the rates of post-training. At those of pre-training more of them do not, and a
round adds up H steps.

Sources: the paper's abstract and notes. The order of gate, residual and outer momentum was not
seen, and is our reading:

- Theta is the anchor at the send, before the outer step.
- An entry that travels leaves a residual of 0, since values are fp32.
- The mean is over all regions that take part; an entry that did not travel counts as 0.
- The outer momentum is dense, and moves the anchor everywhere.

The static payload, its places for each chunk and the outer rates are ours. Places for each chunk,
and not for each matrix, let devices that share a matrix code their parts alone: where few entries
pass in one chunk, the places of that chunk stay empty, and entries of another one wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optax

from lowcomm_jax.methods.base import Method, wire_codec
from lowcomm_jax.methods.diloco import diloco


def pulseloco(
    period: int,
    k: int = 256,
    block: int = 64,
    decay: float = 1.0,
    outer: optax.GradientTransformation | None = None,
    codec: Any = None,
    inner_batching: Any = None,
    stacked: Sequence[str] = (),
) -> Method:
    """Send the entries that would change the bf16 anchor, every `period` inner steps.

    Args:
      k: most entries of a chunk that travel. Chunks of at most k entries, those of vectors among
        them, have a place for each, without indices.
      block: largest side of a chunk, in entries, at most 64.
      decay: beta, share of the residual that is kept from round to round, in [0, 1]; 1 loses
        nothing.
      outer: Optax transform of the mean pseudo-gradient; default Nesterov 0.7 / 0.9.
      codec, stacked: as in `muloco`.
      period, inner_batching: as in `diloco`.
    """
    paper = {"name": "bf16_gate", "k": k, "block": block, "error_feedback": decay}
    settings = {"k": k, "block": block, "decay": decay}
    wire, problems = wire_codec(pulseloco, codec, paper, stacked, **settings)
    plain = diloco(period, outer, wire, inner_batching)
    return plain.named("pulseloco", problems)
