"""What a step of several trainers logs: one number a region and metric."""

import numpy as np
import pytest

from lowcomm_jax.adloco.history import OverTrainers
from lowcomm_jax.history import History


def trainer(tokens, loss):
    """The history of a trainer's one step, numbers of two regions."""
    history = History()
    metrics = {"tokens": tokens, "loss": loss}
    history.add(0, 1, {name: np.float32(x)[:, None] for name, x in metrics.items()}, [])
    return history


def over(*trainers):
    return {name: np.asarray(OverTrainers(trainers, name)).tolist() for name in ("tokens", "loss")}


def test_a_metric_is_the_mean_by_tokens():
    found = over(trainer([1.0, 5.0], [2.0, 8.0]), trainer([3.0, 5.0], [6.0, 4.0]))
    assert found["tokens"] == [[4.0], [10.0]]
    assert found["loss"] == [[pytest.approx((2.0 + 3 * 6.0) / 4)], [6.0]]


def test_a_trainer_without_tokens_does_not_count():
    """Its loss may be no number; where nobody has tokens there is no mean."""
    nan = float("nan")
    found = over(trainer([0.0, 0.0], [nan, nan]), trainer([3.0, 0.0], [6.0, nan]))
    assert found == {"tokens": [[3.0], [0.0]], "loss": [[6.0], [0.0]]}
