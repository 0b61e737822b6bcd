"""Requested batches become microbatches that fit."""

from lowcomm_jax.adloco.step_plan import Switch


def planned(switch, requested):
    return switch.microbatch(requested), switch.samples(requested)


def test_plans_below_at_and_above_the_cap():
    switch = Switch(cap=24, start=2, threshold=2)
    assert switch.buckets() == (2, 4, 8, 16, 24)
    plans = {1: (2, 1), 2: (2, 1), 3: (4, 1), 16: (16, 1), 17: (24, 1), 24: (24, 1)}
    plans |= {25: (24, 1), 48: (24, 1), 49: (24, 3), 72: (24, 3), 73: (24, 4)}
    for b, (microbatch, count) in plans.items():
        assert planned(switch, b) == (microbatch, count * microbatch)
    eager = Switch(cap=24, start=2, threshold=1)
    assert planned(eager, 25) == (24, 48)


def test_all_measured_microbatches_are_about_one_step():
    switch = Switch(cap=24, start=2, threshold=1)
    sizes = {2: 2, 3: 2, 5: 4, 9: 8, 17: 8, 24: 8, 25: 24, 73: 24, 200: 24}
    assert {b: switch.measured(b, 2) for b in sizes} == sizes


def test_memory_is_bounded_and_samples_are_what_was_asked_for():
    """The published loader took the requested batch itself: b * accum samples at once."""
    switch = Switch(cap=12, start=3)
    for b in range(1, 200):
        microbatch, samples = planned(switch, b)
        assert microbatch <= 12 and microbatch in switch.buckets() and samples % microbatch == 0
        if b > 24:
            assert b <= samples < b + 12
        elif b <= 12:
            assert b <= samples < 2 * max(b, 3)
        else:
            assert samples == 12
