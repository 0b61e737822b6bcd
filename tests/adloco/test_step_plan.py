"""Requested batches become microbatches that fit; the cap is found by asking."""

import math

import pytest

from lowcomm_jax.adloco.step_plan import Plan, Switch, find_cap


def test_plans_below_at_and_above_the_cap():
    switch = Switch(cap=24, start=2, threshold=2)
    assert switch.buckets() == (2, 4, 8, 16, 24)
    plans = {1: (2, 1), 2: (2, 1), 3: (4, 1), 16: (16, 1), 17: (24, 1), 24: (24, 1)}
    plans |= {25: (24, 1), 48: (24, 1), 49: (24, 3), 72: (24, 3), 73: (24, 4)}
    for b, (microbatch, count) in plans.items():
        assert switch.plan(b) == Plan(b, microbatch, (count,))
    eager = Switch(cap=24, start=2, threshold=1)
    assert eager.plan(25) == Plan(25, 24, (2,))


def test_memory_is_bounded_and_samples_are_what_was_asked_for():
    """The published loader took the requested batch itself: b * accum samples at once."""
    switch = Switch(cap=12, start=3)
    for b in range(1, 200):
        plan = switch.plan(b)
        assert plan.microbatch <= 12 and plan.microbatch in switch.buckets()
        if b > 24:
            assert b <= plan.total < b + 12
        elif b <= 12:
            assert b <= plan.total < 2 * max(b, 3)
        else:
            assert plan.total == 12


def test_uneven_regions_share_whole_microbatches():
    def counts(accumulate, shares, regions):
        return Switch(2, 2, 1.0, shares, regions).plan(2 * accumulate).counts_R

    assert counts(4, None, 3) == (4, 4, 4)
    assert counts(4, (1, 2, 5), 3) == (2, 3, 8)  # 12 microbatches: 1.5, 3, 7.5
    assert counts(1, (1.0, 9.0), 2) == (1, 2)
    assert Switch(2, 2, 1.0, (1, 2, 5), 3).most(8) == 8


@pytest.mark.parametrize("start,limit", [(1, 4096), (3, 4096), (1, 50)])
def test_the_cap_is_the_largest_that_fits(start, limit):
    asked = []

    def nbytes(m):
        asked.append(m)
        return 1000 + 7 * m

    for budget in (1007 + 14 * start, 1500, 2000, 10**9):
        asked.clear()
        cap = find_cap(nbytes, budget, start, limit)
        fits = min((budget - 1000) // 7, limit)
        assert cap == fits // start * start
        assert len(asked) <= math.log2(limit / start) + 1
        assert max(asked) <= limit
    with pytest.raises(ValueError, match=f"microbatch of {start} needs"):
        find_cap(nbytes, 1000, start, limit)
