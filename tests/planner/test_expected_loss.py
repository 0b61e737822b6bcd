"""Expected loss: the law in its domain, published penalties, and nothing beyond either."""

import pytest

from lowcomm_jax import methods
from lowcomm_jax.planner.expected_loss import (
    codec_penalty,
    domain_reasons,
    gradient_penalty,
    law,
    overlap_penalty,
    period_penalty,
    total,
)
from lowcomm_jax.planner.methods import PlanMethod, planned
from lowcomm_jax.planner.plan import expected_loss

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
LATE = {"period": 30, "overlap": 5, "codec": "fp32"}


def test_loss_law_against_its_own_table():
    for params, row in TABLE.items():
        for replicas, theirs in zip((None, 1, 2, 4, 8), row, strict=True):
            if theirs is not None and 90e6 <= params <= 2.4e9:
                assert law(params, replicas) == pytest.approx(theirs, abs=0.03)
    assert law(35e6, 8) == pytest.approx(3.621, abs=0.065)
    assert law(10e9, 2) < 2.086 - 0.05  # too low outside its domain


def test_the_domain_of_the_law():
    assert domain_reasons(1.3e9, 4, 26e9) == []
    reasons = "; ".join(domain_reasons(107e9, 16, 1e12, period=125))
    for part in ("parameters", "replicas", "tokens per parameter", "H = 125"):
        assert part in reasons
    assert domain_reasons(1.3e9, None, 26e9, period=1) == []  # data parallel has no H


@pytest.mark.parametrize(
    ("method", "by_law", "with_penalty", "why"),
    [
        (planned("allreduce"), True, 0.0, "inside"),
        (planned("diloco", period=30), True, 0.0, "inside"),
        (planned("diloco"), False, 0.0199, "H = 100: the law covers H = 30"),
        (planned("diloco", period=30, codec="int4"), False, 0.0, "codec = int4"),
        (
            planned("streaming_diloco", fragments=1, **LATE),
            False,
            0.005,
            "tau = 5: the law",
        ),
        (planned("sparseloco"), False, 0.0, "codec = topk64_stat2"),
        (planned("diloco", period=5000), False, None, "H = 5000"),
        (planned("diloco", period=1), False, None, "H = 1"),
        (planned("allreduce", codec="int4"), False, None, "codec = int4"),
        (planned("local_sgd"), False, None, "no scaling law is published for local_sgd"),
        (planned("noloco"), False, None, "no scaling law is published for noloco"),
        (planned("cocodc"), False, None, "no scaling law"),
        (planned("muloco"), False, None, "no scaling law"),
        (
            PlanMethod("mine", methods.diloco(30)),
            False,
            None,
            "is published for mine",
        ),
    ],
    ids=lambda value: value.name if isinstance(value, PlanMethod) else "",
)
def test_loss_by_the_law_alone_and_with_penalties(method, by_law, with_penalty, why):
    found = expected_loss(method, 1.3e9, 4, 26e9)
    figure = law(1.3e9, None if method.law == "data_parallel" else 4)
    assert found.law == (figure if by_law else None) and why in found.law_label
    if with_penalty is None:
        assert found.total is None and "unknown" in found.total_label
    else:
        assert found.total == pytest.approx(figure + with_penalty, abs=1e-4)
    assert (method.penalty().nats is None) == (with_penalty is None)


def test_outside_the_domain_no_figure_at_all():
    found = expected_loss(planned("diloco", period=30), 107e9, 4, 26e9)
    assert found.law is found.total is None
    assert "1.07e+11 parameters" in found.law_label and "outside" in found.total_label


def test_penalties_know_what_they_do_not_know():
    assert period_penalty(30).nats == 0 and period_penalty(1).nats is None
    assert gradient_penalty("bf16").nats == 0 and gradient_penalty("int4").nats is None
    assert period_penalty(100).nats == pytest.approx(0.02, abs=1e-3)
    assert period_penalty(5000).nats is None
    assert overlap_penalty(5, 100).nats == 0.005 and overlap_penalty(50, 100).nats is None
    assert overlap_penalty(100, 100, eager=True).nats < overlap_penalty(100, 100).nats
    assert codec_penalty("magic").nats is None
    assert codec_penalty("low_rank_int4").confidence == "recalled"
    mixed = total([period_penalty(100), codec_penalty("low_rank_int4")])
    assert mixed.nats == pytest.approx(0.2, abs=2e-3) and mixed.confidence == "recalled"
    assert total([period_penalty(100), codec_penalty("magic")]).nats is None
