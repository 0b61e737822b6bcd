"""What a schedule is told of the regions: of those that took part, and of what counted."""

from types import SimpleNamespace

import numpy as np

from lowcomm_jax.sync.measurements import Measurements, _set_entry


def test_seconds_are_those_of_the_slowest_that_took_part():
    one, state, values = Measurements.__new__(Measurements), object(), {}
    one.schedule = SimpleNamespace(statistic="none")
    seconds = np.float32([[1, 9], [2, 3], [50, 60]])
    flight = SimpleNamespace(header={"seconds": seconds}, takes_part=np.zeros(3, bool))
    assert one.landed(state, flight, values) is state and not values
    flight.takes_part = np.array([True, True, False])
    one.landed(state, flight, values)
    assert values["seconds"].tolist() == [2, 9]


def test_a_rate_changes_only_where_somebody_counted():
    given = np.float32([1, 2]), np.int32(1), np.float32(7)
    assert _set_entry(*given, np.float32([0, 3])).tolist() == [1, 7]
    assert _set_entry(*given, np.float32([0, 0])).tolist() == [1, 2]
