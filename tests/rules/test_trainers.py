"""Which two trainers merge, by their requests alone."""

from lowcomm_jax.rules.trainers import Trainers


def test_the_smallest_request_is_retired_into_the_second_smallest():
    assert Trainers(3).ranked({0: 3, 1: 9, 2: 5}) == [1, 2, 0]


def test_of_equal_requests_the_higher_number_is_retired():
    assert Trainers(3).ranked({0: 4, 1: 4, 2: 4}) == [0, 1, 2]
    assert Trainers(3).ranked({2: 4, 0: 4, 1: 4}) == [0, 1, 2], (
        "the order they come in is no matter"
    )
