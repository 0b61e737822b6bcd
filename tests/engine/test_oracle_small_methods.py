"""IsoLoCo, restarted DiLoCo, SNOO and HeLoCo against NumPy, in the whole loop."""

import numpy as np
import oracle
import pytest
from engine.test_oracle import (
    ADAMW,
    SGD,
    STEPS,
    absent,
    close,
    compare,
    fragments,
    pattern,
)
from oracle import merging
from oracle_runs import started, stream

import lowcomm_jax as lc
from lowcomm_jax import outer

WEIGHTS = [0.2, 0.5, 0.3]


WHOLE = {"fragments": fragments(1), "period": 4, "alpha": 0.0, "merge": merging.isotropic}


def test_isoloco():
    who = {"participants": absent(STEPS, 3, ((4, 1), (8, 0))), "weights": WEIGHTS}
    method = lc.methods.isoloco(4, outer.nesterov(1.4, 0.7))
    compare(method, oracle.run_streaming, 3, outer=oracle.Nesterov(1.4, 0.7), **who, **WHOLE)


def test_isoloco_has_the_rates_of_its_code():
    given = {"steps": 9, "outer": oracle.Nesterov(1.8, 0.8), **WHOLE}
    compare(lc.methods.isoloco(4), oracle.run_streaming, 3, ADAMW, **given)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_restarted_diloco(every):
    mask = absent(STEPS, 3, ((4, 1), (6, 0), (6, 1), (6, 2)))  # nobody sends at step 6
    method = lc.methods.restarted_diloco(2, every, 0.6, 0.8)
    rule = oracle.Restarting(0.6, 0.8, every)
    compare(method, oracle.run_diloco, 3, participants=mask, period=2, outer=rule)


def test_every_fragment_restarts_by_its_own_rounds():
    keys, rule = fragments(3), outer.restarting(0.6, 0.8, 2)
    compare(
        lc.methods.streaming_diloco(4, 3, 2, 0.3, pattern=pattern(keys), outer=rule),
        oracle.run_streaming,
        3,
        steps=18,
        fragments=keys,
        period=4,
        overlap=2,
        alpha=0.3,
        outer=[oracle.Restarting(0.6, 0.8, 2) for _ in keys],
    )


def test_a_restart_that_falls_on_a_dropped_round_is_made_up_for():
    """Round 2 of 0, 1, 2, ... is not finite anywhere and moves nothing; round 3 starts from 0."""
    rule = outer.restarting(0.5, 0.8, every=2)
    one = {"w": np.ones(3, np.float32)}
    state = rule.init(one)
    for n in (0, 1):
        first, state = rule.update(one, state, round=n)
    restarted, _ = rule.update(one, state, round=3)
    close(restarted["w"], -0.5 * 1.8 * 0.2 * one["w"], "as the first")
    assert np.abs(first["w"] - restarted["w"]).min() > 0.05


@pytest.mark.parametrize("regions", [1, 3])
def test_snoo(regions):
    given = {"finish": False, "period": 3, "lr": 0.6, "momentum": 0.7}
    compare(lc.methods.snoo(3, 0.6, 0.7), oracle.run_snoo, regions, ADAMW, **given)


def test_snoo_alone_sends_nothing():
    engine, state = started(lc.methods.snoo(2), 1, SGD[1])
    state, _ = engine.run(state, stream(4, 1))
    assert int(state.counters.sends[0]) == 2
    assert int(state.counters.bytes_sent[0]) == 0


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (3.33, 1.51, 0.75)], ids=["equal", "uneven"])
@pytest.mark.parametrize("dynamic,rho", [(False, 1.0), (True, 3**-0.5)], ids=["fixed", "dylu"])
def test_heloco(speeds, dynamic, rho):
    corrections = {"enough": 0.6, "removal": 0.4, "turn": 0.8, "confidence": 2.0, "most": 0.3}
    method = lc.methods.heloco(4, speeds, 0.6, 0.8, weight=rho, dynamic=dynamic, **corrections)
    cases = []
    compare(
        method,
        oracle.run_heloco,
        3,
        steps=26,
        period=4,
        speeds=speeds,
        lr=0.6,
        momentum=0.8,
        rho=rho,
        align=noting(cases, merging.align(**corrections), corrections["enough"]),
        dynamic=dynamic,
    )
    assert set(cases) == {"kept", "aside", "against"}, "a case of the rule never occurs"


def noting(cases, align, enough):
    """`align`, which notes for every tensor which of its cases applies."""

    def merge(deltas, weights, momentum):
        for key, m in momentum.items():
            both = np.linalg.norm(deltas[0][key]) * np.linalg.norm(m)
            cosine = float((deltas[0][key] * m).sum() / both) if both else 1.0
            cases.append("kept" if cosine >= enough else "against" if cosine < 0 else "aside")
        return align(deltas, weights, momentum)

    return merge
