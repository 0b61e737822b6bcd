"""What a setting costs in loss (nats) according to published ablations; None where nothing is
published.

Each entry carries its source and confidence. Figures are upper ends of what was reported and add
up, which is itself an assumption: the papers vary one thing at a time.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Penalty:
    """A loss penalty in nats.

    Attributes:
        nats: None = nothing published for this setting.
        confidence: "found", "derived" (interpolated from found figures) or "recalled".
        source: where from.
    """

    nats: float | None
    confidence: str
    source: str


NOTHING = Penalty(0.0, "found", "reference setting")
PERIOD_SLOPE = 0.038  # nats per decade of H: +0.02 from H = 30 to 100 at 1B

CODECS = {
    "fp32": NOTHING,
    "bf16": Penalty(0.0, "found", "fp16 outer gradients without loss (OpenDiLoCo)"),
    "int8": Penalty(0.0, "found", "INTELLECT-1 (arXiv 2412.01152): no visible loss at 10B"),
    "int4": Penalty(0.0, "found", "MuLoCo (arXiv 2505.23725): 4 bit lossless"),
    "e3m0": Penalty(0.0, "found", "arXiv 2501.18512: no loss to 4B"),
    "topk_2bit": Penalty(
        0.0, "second-hand", "SparseLoCo (arXiv 2508.15706): not worse than dense DiLoCo"
    ),
    "low_rank_int4": Penalty(0.18, "recalled", "DiLoCoX ablation at 107B (arXiv 2506.21263)"),
}


def period_penalty(period: int) -> Penalty:
    """Give the cost of H beside H = 30, for 10 <= H <= 1000."""
    if not 10 <= period <= 1000:
        return Penalty(None, "found", "no published figure outside H = 10 to 1000")
    nats = max(0.0, PERIOD_SLOPE * math.log10(period / 30))
    return Penalty(
        nats, "derived", "arXiv 2501.18512, table 5 at 1B (+0.02 for H = 100), log-linear in H"
    )


def overlap_penalty(tau: int, period: int, eager: bool = False) -> Penalty:
    """Give the cost of landing `tau` inner steps late; tau = period is one whole round."""
    if tau == 0:
        return NOTHING
    if tau <= 10 and tau < period:
        return Penalty(0.005, "found", "arXiv 2501.18512: loss change below 0.2 % up to tau = 10")
    if tau == period and eager:
        return Penalty(0.02, "found", "arXiv 2502.12996: 2.69 against 2.67 at 500M")
    if tau == period:
        return Penalty(
            0.06,
            "found",
            "arXiv 2502.12996: one round late with a lower outer rate, 2.73 against 2.67",
        )
    return Penalty(None, "found", "no published figure for this overlap")


def codec_penalty(codec: str) -> Penalty:
    """Give the cost of a codec on the pseudo-gradient."""
    return CODECS.get(codec, Penalty(None, "found", f"no published figure for codec {codec!r}"))


def gradient_penalty(codec: str) -> Penalty:
    """Give the cost of a codec on the gradients of data parallel training."""
    if codec in ("fp32", "bf16"):
        return NOTHING
    return Penalty(None, "found", f"no published figure for gradients in codec {codec!r}")


def total(penalties: list[Penalty]) -> Penalty:
    """Add penalties; unknown if any is unknown, as trusted as the least trusted."""
    order = ("found", "second-hand", "derived", "recalled")
    worst = max((p.confidence for p in penalties), key=order.index)
    known = all(p.nats is not None for p in penalties)
    sources = "; ".join(dict.fromkeys(p.source for p in penalties if p is not NOTHING))
    return Penalty(
        sum(p.nats for p in penalties) if known else None, worst, sources or "reference setting"
    )
