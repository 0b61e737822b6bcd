"""Expected loss of a planned method: by a scaling law alone, and with published penalties added."""

from dataclasses import dataclass

from lowcomm_jax.network.plan_methods import DATA_PARALLEL, PlanMethod
from lowcomm_jax.network.scaling_laws import SOURCE, domain_reasons, law


@dataclass(frozen=True)
class ExpectedLoss:
    """Evaluation losses in nats per token; None = unknown, and the label says why.

    Attributes:
        law, law_label: the scaling law's figure for exactly this setting.
        total, total_label: the law's figure for its own setting (H = 30, dense, no overlap) plus
            the published penalty of what differs from it.
    """

    law: float | None
    law_label: str
    total: float | None
    total_label: str


def expected_loss(method: PlanMethod, params: float, regions: int, tokens: float) -> ExpectedLoss:
    """Give what published figures say about a method, and nothing beyond their domain.

    Args:
        method: what is planned.
        params: parameters of the model.
        regions: replicas M.
        tokens: training tokens over all regions.
    """
    if method.law is None:
        unknown = f"unknown: no scaling law is published for {method.name}"
        return ExpectedLoss(None, unknown, None, unknown)
    replicas = None if method.law == DATA_PARALLEL else regions
    outside = domain_reasons(params, replicas, tokens)
    own = domain_reasons(params, replicas, tokens, method.period) + _differences(method)
    figure, penalty = law(params, replicas), method.penalty()
    by_law, with_penalty = None, None
    law_label = "unknown: " + "; ".join(own)
    if not own:
        by_law, law_label = figure, f"inside the domain of {SOURCE}"
    if outside:
        total_label = "unknown: outside the law's domain: " + "; ".join(outside)
    elif penalty.nats is None:
        total_label = f"unknown penalty: {penalty.source}"
    else:
        with_penalty = figure + penalty.nats
        total_label = f"{SOURCE} + penalty ({penalty.confidence}: {penalty.source})"
    return ExpectedLoss(by_law, law_label, with_penalty, total_label)


def _differences(method: PlanMethod) -> list[str]:
    """List what sets a method apart from the runs the law was fitted to, the period aside."""
    settings = (
        ("codec", method.codec, "fp32"),
        ("fragments", method.fragments, 1),
        ("tau", method.tau, 0),
    )
    return [f"{name} = {is_}: the law covers {was}" for name, is_, was in settings if is_ != was]
