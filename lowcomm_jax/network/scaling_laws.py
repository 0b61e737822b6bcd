"""Expected evaluation loss from the published DiLoCo scaling laws, inside their stated domain only.

Source: arXiv 2503.09799 (C4, 20 tokens per parameter, sequence length 2048, H = 30, outer Nesterov
0.9, tuned learning rates). Data parallel: L = 18.129 N^-0.0953. DiLoCo with M replicas: L = 19.226
N^-0.0985 M^0.0116 (the joint fit, which the paper recommends over the separate ones). Fitted on 35M
to 2.4B.

Against the paper's own table (`TABLE`) these forms are within 0.03 nats from 90M to 2.4B, 0.06 low
at 35M with M = 8, 0.02 to 0.04 low at 4B and 0.07 to 0.10 low at 10B (the paper's better form has
an additive constant whose value we do not have). The domain here therefore ends at the fitted
range.
"""

SOURCE = "arXiv 2503.09799, joint fit L(N, M)"
DOMAIN_PARAMS = (35e6, 2.6e9)  # the 2.4B model counts 2.5e9 with its embeddings
DOMAIN_REPLICAS = (1, 8)
TOKENS_PER_PARAM = 20.0
TOKEN_SLACK = 0.1  # 20 tokens per parameter within 10 %
DOMAIN_PERIOD = 30

# Published evaluation losses: {parameters: (data parallel, M = 1, 2, 4, 8)}; None = not run.
TABLE = {
    35e6: (3.485, 3.482, 3.508, 3.554, 3.621),
    90e6: (3.167, 3.162, 3.182, 3.213, 3.265),
    180e6: (2.950, 2.943, 2.957, 2.981, 3.019),
    335e6: (2.784, 2.777, 2.788, 2.808, 2.841),
    550e6: (2.653, 2.645, 2.657, 2.673, 2.698),
    1.3e9: (2.460, 2.451, 2.464, 2.472, 2.493),
    2.4e9: (2.326, 2.317, 2.323, 2.332, 2.351),
    4e9: (2.224, 2.219, 2.220, 2.230, None),
    10e9: (2.090, 2.086, 2.086, 2.096, None),
}


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
