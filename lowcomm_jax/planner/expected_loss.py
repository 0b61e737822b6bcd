"""Published figures for a planned run's loss, in nats: scaling laws, and penalties of settings.

`law` gives the loss of the published DiLoCo scaling laws, `domain_reasons` says why a setting lies
outside their domain. The `*_penalty` functions give a setting's loss penalty by published
ablations; their `nats` is None where nothing is published. `plan.expected_loss` combines the two.

The laws: arXiv 2503.09799 (C4, 20 tokens per parameter, sequence length 2048, H = 30, outer
Nesterov 0.9, tuned learning rates). Data parallel: L = 18.129 N^-0.0953. DiLoCo with M replicas:
L = 19.226 N^-0.0985 M^0.0116 (the joint fit, which the paper recommends over the separate ones).
Fitted on 35M to 2.4B. These forms are within 0.03 nats of the paper's own table from 90M
to 2.4B. They are 0.06 low at 35M with M = 8, 0.02 to 0.04 low at 4B and 0.07 to 0.10 low at 10B.
(The paper's better form has an additive constant whose value we do not have.) The domain here
therefore ends at the fitted range.

The penalties: each carries its source and confidence. Figures are upper ends of reported ranges.
`total` adds them, which is itself an assumption: the papers vary one thing at a time.
"""

import math
from dataclasses import dataclass

# -- scaling laws ------------------------------------------------------------------------------

SOURCE = "arXiv 2503.09799, joint fit L(N, M)"
DOMAIN_PARAMS = (35e6, 2.5e9)  # the 2.4B model counts 2.44e9 with its table
DOMAIN_REPLICAS = (1, 8)
TOKENS_PER_PARAM = 20.0
TOKEN_SLACK = 0.1  # 20 tokens per parameter within 10 %
DOMAIN_PERIOD = 30


def law(params: float, replicas: int | None) -> float:
    """Give the law's evaluation loss in nats per token, wherever it may lie (see
    `domain_reasons`).

    Args:
        params: model parameters.
        replicas: M of DiLoCo, or None for data parallel.
    """
    if replicas is None:
        return 18.129 * params**-0.0953
    return 19.226 * params**-0.0985 * replicas**0.0116


def domain_reasons(
    params: float, replicas: int | None, tokens: float, period: int = DOMAIN_PERIOD
) -> list[str]:
    """List why a setting is outside the law's domain, each with the nearest setting inside.

    Args:
        params, replicas: as for `law`.
        tokens: training tokens.
        period: H (DiLoCo only).
    """
    low, high = DOMAIN_PARAMS
    reasons = []
    if not low <= params <= high:
        reasons.append(f"{params:.3g} parameters: the law covers {low:.3g} to {high:.3g}")
    if replicas is not None and not DOMAIN_REPLICAS[0] <= replicas <= DOMAIN_REPLICAS[1]:
        reasons.append(
            f"{replicas} replicas: the law covers {DOMAIN_REPLICAS[0]} to {DOMAIN_REPLICAS[1]}"
        )
    ratio = tokens / params
    if abs(ratio / TOKENS_PER_PARAM - 1.0) > TOKEN_SLACK:
        reasons.append(
            f"{ratio:.3g} tokens per parameter: the law covers {TOKENS_PER_PARAM:g} "
            f"(+-{TOKEN_SLACK:.0%})"
        )
    if replicas is not None and period != DOMAIN_PERIOD:
        reasons.append(f"H = {period}: the law covers H = {DOMAIN_PERIOD}")
    return reasons


# -- penalties ---------------------------------------------------------------------------------


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
EIGHT_BITS = Penalty(0.0, "found", "INTELLECT-1 (arXiv 2412.01152): no visible loss at 10B")
FOUR_BITS = Penalty(0.0, "found", "MuLoCo (arXiv 2505.23725): 4 bit lossless")
CODECS = {
    "fp32": NOTHING,
    "bf16": Penalty(0.0, "found", "fp16 outer gradients without loss (OpenDiLoCo)"),
    "int8": EIGHT_BITS,
    "stat8": EIGHT_BITS,
    "int4": FOUR_BITS,
    "stat4": FOUR_BITS,
    "e3m0": Penalty(0.0, "found", "arXiv 2501.18512: no loss to 4B"),
    "topk64_stat2": Penalty(
        0.0, "second-hand", "SparseLoCo (arXiv 2508.15706): not worse than dense DiLoCo"
    ),
    "low_rank_int4": Penalty(0.18, "recalled", "DiLoCoX ablation at 107B (arXiv 2506.21263)"),
}
"""By name, those of whose loss something is published; of others the penalty is unknown."""


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
