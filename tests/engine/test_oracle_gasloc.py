"""GASLoC against its NumPy re-derivation: three and five regions, different data, absences."""

import numpy as np
import oracle
import pytest
from engine.test_oracle import ADAMW, SGD, STEPS, absent, anchors, close, compare, train

import lowcomm_jax as lc

SETTINGS = {"alpha": 0.6, "gamma": 0.3, "rate": 0.8}
CASES = {
    # regions, peers, periods, inner, absences, weights
    "pairs": (4, 1, (3,) * 4, SGD, None, None),
    "odd": (3, 1, (3,) * 3, ADAMW, ((3, 1), (6, 0), (6, 2), (9, 0), (9, 1), (9, 2)), None),
    "two peers": (5, 2, (3,) * 5, SGD, ((6, 4), (9, 2)), [0.1, 0.3, 0.2, 0.15, 0.25]),
    "own paces": (3, 1, (5, 2, 3), SGD, ((5, 0),), None),
    "all": (3, 2, (4,) * 3, ADAMW, ((8, 1),), None),
}


@pytest.mark.parametrize("case", CASES)
def test_gasloc(case):
    regions, peers, periods, inner, rounds, weights = CASES[case]
    period = periods if len(set(periods)) > 1 else periods[0]
    count = STEPS // max(periods) + 1
    groups = [lc.topology.Gossip(peers + 1, 5).groups(n, regions) for n in range(count)]
    state, run, _ = compare(
        lc.methods.gasloc(period, peers=peers, seed=5, **SETTINGS),
        oracle.run_gasloc,
        regions,
        inner,
        participants=None if rounds is None else absent(STEPS, regions, rounds),
        weights=weights,
        periods=periods,
        groups=groups,
        last_groups=groups[-1],
        **SETTINGS,
    )
    for key, before in state.outer[0].before.items():
        for r, tree in enumerate(run.finished.momentum):
            close(before[r], tree[key], f"u of region {r} {key}")
    if peers + 1 < regions:
        assert max(np.ptp(x, axis=0).max() for x in anchors(state).values()) > 1e-3


def test_one_group_of_all_without_momentum_is_averaging():
    """One group of all, alpha = 1 and gamma = 0."""
    method = lc.methods.gasloc(4, 1.0, 0.0, 1.0, peers=2)
    _, seen, _ = train(method, SGD[1], 3, steps=8)
    _, averaged, _ = train(lc.methods.local_sgd(4), SGD[1], 3, steps=8)
    for (anchor, _), (expected, _) in zip(seen, averaged):
        for key, value in expected.items():
            for r in range(3):
                close(anchor[key][r], value[0], key)
