"""What a step of several trainers logs: one number a region and metric."""

import pytest

from lowcomm_jax.adloco.history import _metrics


def row(tokens, loss):
    return {"step": 1, "tokens": tokens, "loss": loss, "events": []}


def test_a_metric_is_the_mean_by_tokens():
    found = _metrics((row([1.0, 5.0], [2.0, 8.0]), row([3.0, 5.0], [6.0, 4.0])))
    assert found == {"tokens": [4.0, 10.0], "loss": pytest.approx([(2.0 + 3 * 6.0) / 4, 6.0])}


def test_a_trainer_without_tokens_does_not_count():
    """Its loss may be no number; where nobody has tokens there is no mean."""
    nan = float("nan")
    found = _metrics((row([0.0, 0.0], [nan, nan]), row([3.0, 0.0], [6.0, nan])))
    assert found == {"tokens": [3.0, 0.0], "loss": [6.0, 0.0]}
