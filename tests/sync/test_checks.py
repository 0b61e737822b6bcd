"""What an engine makes of its settings before anything runs."""

from lowcomm_jax.network import uniform
from lowcomm_jax.sync.checks import virtual_clock


def test_the_clock_of_a_network_keeps_bars_for_its_picture_from_the_beginning():
    clock, problems = virtual_clock(uniform(3, 1.0), 3, seed=0)
    assert not problems and clock.timeline() is not None
    assert virtual_clock(None, 3, seed=0) == (None, [])
    clock, (problem,) = virtual_clock(uniform(2, 1.0), 3, seed=0)
    assert clock is None and "network has 2 regions, the engine 3" in problem
