"""MuLoCo (arXiv 2505.23725): DiLoCo's round around Muon, quantised with error feedback.

Every H steps (30 in the paper) each region sends its decayed residual
(`compression.error_feedback`) in 4 or 2 bits, with a codebook of +- 3 sigma.

The inner optimizer is the engine's: Muon for matrices, AdamW for the rest
(`lowcomm_jax.optimizers`, `optimizer="muon"`; `configs/muloco.py`).

As in the authors' code the reduction is two-shot, and the mean of every slice is quantised a second
time. That holds where two-shot sends fewer bytes: from three regions on, unless leaves are so small
that codebooks outweigh their values. With two regions, or a codec with `reduce="all_gather"`, every
region decodes all payloads and averages in fp32.

Differs from the paper: two-shot cuts a leaf into slices before it is quantised at all, so that the
first quantisation, too, has a codebook a slice, and not one a leaf. The learning rate stays out of
the residual (the authors' code scales what enters it and steps with the rate again). Norms,
embeddings and vectors are quantised like all other leaves; the settings that we found in the code
leave norms and embeddings out. For that give a codec with rules, wrapped in error feedback, as
`codec`.

Sources: abstracts, the published code and notes of others; they disagree on the outer rates. 0.7 /
0.6 is from notes on the second version of the paper. Settings in the code have 0.9 / 0.8, and
1.0 / 0.9 in a job of 15B parameters. Neither was compared with the paper's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import optax

from lowcomm_jax.methods.base import Method, published, wire_codec
from lowcomm_jax.methods.diloco import diloco
from lowcomm_jax.rules.outer import nesterov
from lowcomm_jax.settings import one_of


@published(period=30)
def muloco(
    period: int,
    bits: Literal[8, 4, 2] = 4,
    decay: float = 0.95,
    outer: optax.GradientTransformation | None = None,
    codec: Any = None,
    inner_batching: Any = None,
    stacked: Sequence[str] = (),
) -> Method:
    """Synchronise in 8, 4 or 2 bits every `period` inner steps; made for Muon as inner optimizer.

    Args:
      bits: bits of an entry: 8, 4 or 2.
      decay: beta, share of the residual that is kept from round to round, in [0, 1].
      outer: Optax transform of the mean pseudo-gradient; default Nesterov 0.7 / 0.6.
      codec: another codec in place of this one, used as it is (wrap it in error feedback yourself).
      stacked: path prefixes of leaves with a leading layer axis, as the engine is given.
      period, inner_batching: as in `diloco`.
    """
    unknown = one_of(8, 4, 2).problem("bits", bits)
    paper = {"name": "stat4" if unknown else f"stat{int(bits)}", "error_feedback": decay}
    wire, problems = wire_codec(muloco, codec, paper, stacked, bits=bits, decay=decay)
    plain = diloco(period, nesterov(0.7, 0.6) if outer is None else outer, wire, inner_batching)
    return plain.named("muloco", problems if unknown is None else (unknown, *problems))
