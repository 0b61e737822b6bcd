"""Which two trainers merge, by their requests alone."""

import pytest

from lowcomm_jax.rules.trainers import Trainers


@pytest.mark.parametrize("choose, survivor", [("worst_with_worst", 2), ("best_with_worst", 1)])
def test_the_smallest_request_is_retired(choose, survivor):
    assert Trainers(3, choose=choose).pair({0: 3, 1: 9, 2: 5}) == (survivor, 0)


@pytest.mark.parametrize("choose, survivor", [("worst_with_worst", 1), ("best_with_worst", 0)])
def test_of_equal_requests_the_higher_number_is_retired(choose, survivor):
    trainers = Trainers(3, choose=choose)
    assert trainers.pair({0: 4, 1: 4, 2: 4}) == (survivor, 2)
    assert trainers.pair({2: 4, 0: 4, 1: 4}) == (survivor, 2), "the order they come in is no matter"
