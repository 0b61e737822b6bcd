"""What every exchange owes a method: the same on the mesh, through a store and between peers.

Each against a NumPy re-derivation, with different data in every region and regions that sit out.
What can be asked of exchanges between jobs alone is in tests/regions/test_remote_exchange.py.
"""

import numpy as np
import oracle
import pytest
from regions import party
from regions.together import CUT, batches, engine, in_jobs, train

import lowcomm_jax as lc

STEPS = 13
INNER, OUTER = oracle.Momentum(0.05, 0.8), oracle.Nesterov(0.4, 0.9)
KINDS = {"mesh": None, **party.KINDS}


@pytest.fixture(params=KINDS)
def ends(request, between):
    """`ends(method, regions, mask)`: every region's (anchor, parameters) at the end.

    `mask`: who takes part, bool `[steps, R]`.
    """
    kind = KINDS[request.param]

    def on_mesh(method, regions, mask):
        one, data = engine(method, regions), batches(STEPS, regions)
        (anchors, params), _ = train(one, data, lambda step: mask[step - 1])
        own = [{k: x[r % len(x)] for k, x in anchors.items()} for r in range(regions)]
        return [(own[r], {k: x[r] for k, x in params.items()}) for r in range(regions)]

    def in_several_jobs(method, regions, mask):
        make = between(regions, kind=kind)
        jobs = in_jobs(make, method, regions, STEPS, lambda step: mask[step - 1])
        return [tuple({k: x[0] for k, x in tree.items()} for tree in before) for before, _ in jobs]

    return on_mesh if kind is None else in_several_jobs


def check(found, run):
    want = run.at(STEPS)
    for region, (anchor, params) in enumerate(found):
        expected = want.anchors[region % len(want.anchors)], want.locals[region]
        for got, tree in zip((anchor, params), expected, strict=True):
            for name, x in got.items():
                np.testing.assert_allclose(x, tree[name], rtol=2e-5, atol=2e-6, err_msg=name)


def absent(regions, *places):
    """Everyone but these (step, region)."""
    mask = np.ones((STEPS, regions), bool)
    for step, region in places:
        mask[step - 1, region] = False
    return mask


def given(regions):
    return oracle.make_params(), oracle.make_batches(steps=STEPS, regions=regions)


def test_who_sits_out_counts_for_nothing_and_gets_the_mean(ends):
    mask = absent(3, (4, 1), (8, 0), (8, 2))
    method = lc.methods.diloco(4, lc.outer.nesterov(0.4, 0.9))
    run = oracle.run_diloco(*given(3), period=4, inner=INNER, outer=OUTER, participants=mask)
    check(ends(method, 3, mask), run)


def test_several_payloads_are_under_way_and_land_when_they_are_due(ends):
    mask = absent(2, (4, 1))
    method = lc.methods.streaming_diloco(
        5, 3, 3, 0.3, pattern=CUT, outer=lc.outer.nesterov(0.4, 0.9)
    )
    cut = {"fragments": [["a", "s"], ["b"], ["c"]], "period": 5, "overlap": 3, "alpha": 0.3}
    run = oracle.run_streaming(*given(2), **cut, inner=INNER, outer=OUTER, participants=mask)
    check(ends(method, 2, mask), run)


def test_groups_exchange_without_the_others(ends):
    method = lc.methods.noloco(3, 2, seed=5, alpha=0.3, beta=0.6, gamma=0.8)
    groups = [lc.topology.Gossip(2, 5).groups(n, 3) for n in range(STEPS // 3 + 1)]
    rule = {"alpha": 0.3, "beta": 0.6, "gamma": 0.8}
    run = oracle.run_noloco(*given(3), period=3, groups=groups, inner=INNER, **rule)
    check(ends(method, 3, absent(3)), run)
