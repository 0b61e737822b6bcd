"""IsoLoCo, restarted DiLoCo, SNOO and HeLoCo against NumPy, in the whole loop."""

import dataclasses

import numpy as np
import oracle
import pytest
from engine.test_oracle import (
    ADAMW,
    SGD,
    STEPS,
    absent,
    anchors,
    check,
    close,
    fragments,
    one_device,
    train,
)
from oracle import merging
from oracle.jax_problem import loss_fn
from refused_lines import lines_between_jobs, lines_of

import lowcomm_jax as lc
from lowcomm_jax import compression, outer
from lowcomm_jax.engine import Engine

WEIGHTS = [0.2, 0.5, 0.3]


def finished(state, run):
    for key, value in anchors(state).items():
        close(value[0], run.finished.anchors[0][key], f"finished {key}")


def test_isoloco():
    mask = absent(STEPS, 3, ((4, 1), (8, 0)))
    state, seen, batches = train(
        lc.methods.isoloco(4, outer.nesterov(1.4, 0.7)),
        SGD[1],
        3,
        participants=mask,
        finish=True,
        weights=WEIGHTS,
    )
    run = oracle.run_streaming(
        oracle.make_params(),
        batches,
        fragments=fragments(1),
        period=4,
        alpha=0.0,
        inner=SGD[0],
        outer=oracle.Nesterov(1.4, 0.7),
        merge=merging.isotropic,
        participants=mask,
        weights=WEIGHTS,
        finish=True,
    )
    check(seen, run)
    finished(state, run)


def test_isoloco_has_the_rates_of_its_code():
    _, seen, batches = train(lc.methods.isoloco(4), ADAMW[1], 3, steps=9)
    run = oracle.run_streaming(
        oracle.make_params(),
        batches,
        fragments=fragments(1),
        period=4,
        alpha=0.0,
        inner=ADAMW[0],
        outer=oracle.Nesterov(1.8, 0.8),
        merge=merging.isotropic,
    )
    check(seen, run)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_restarted_diloco(every):
    mask = absent(STEPS, 3, ((4, 1), (6, 0), (6, 1), (6, 2)))  # nobody sends at step 6
    method = lc.methods.restarted_diloco(2, every, 0.6, 0.8)
    state, seen, batches = train(method, SGD[1], 3, participants=mask, finish=True)
    run = oracle.run_diloco(
        oracle.make_params(),
        batches,
        period=2,
        inner=SGD[0],
        outer=oracle.Restarting(0.6, 0.8, every),
        participants=mask,
        finish=True,
    )
    check(seen, run)
    finished(state, run)


def test_every_fragment_restarts_by_its_own_rounds():
    keys = fragments(3)
    method = lc.methods.streaming_diloco(
        4,
        3,
        2,
        0.3,
        pattern=["|".join(f"^{k}$" for k in part) for part in keys],
        outer=outer.restarting(0.6, 0.8, 2),
    )
    _, seen, batches = train(method, SGD[1], 3, steps=18)
    run = oracle.run_streaming(
        oracle.make_params(),
        batches,
        fragments=keys,
        period=4,
        overlap=2,
        alpha=0.3,
        inner=SGD[0],
        outer=[oracle.Restarting(0.6, 0.8, 2) for _ in keys],
    )
    check(seen, run)


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
    _, seen, batches = train(lc.methods.snoo(3, 0.6, 0.7), ADAMW[1], regions)
    run = oracle.run_snoo(
        oracle.make_params(), batches, period=3, inner=ADAMW[0], lr=0.6, momentum=0.7
    )
    check(seen, run)


def test_snoo_alone_sends_nothing():
    engine = Engine(loss_fn, SGD[1], lc.methods.snoo(2), 1, mesh=one_device())
    batches = oracle.make_batches(steps=4, regions=1)
    steps = [oracle.step_batch(batches, t) for t in range(1, 5)]
    state, _ = engine.run(engine.init(oracle.make_params()), steps)
    assert int(state.counters.sends[0]) == 2
    assert int(state.counters.bytes_sent[0]) == 0


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (3.33, 1.51, 0.75)], ids=["equal", "uneven"])
@pytest.mark.parametrize("dynamic,rho", [(False, 1.0), (True, 3**-0.5)], ids=["fixed", "dylu"])
def test_heloco(speeds, dynamic, rho):
    corrections = {"enough": 0.6, "removal": 0.4, "turn": 0.8, "confidence": 2.0, "most": 0.3}
    method = lc.methods.heloco(4, speeds, 0.6, 0.8, weight=rho, dynamic=dynamic, **corrections)
    state, seen, batches = train(method, SGD[1], 3, steps=26, finish=True)
    cases = []
    run = oracle.run_heloco(
        oracle.make_params(),
        batches,
        period=4,
        inner=SGD[0],
        speeds=speeds,
        lr=0.6,
        momentum=0.8,
        rho=rho,
        align=noting(cases, merging.align(**corrections), corrections["enough"]),
        dynamic=dynamic,
        finish=True,
    )
    check(seen, run)
    finished(state, run)
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


def test_heloco_goes_on_after_finish_as_from_a_fresh_hand_out():
    """All end on the anchor, and what they train on from there is all that counts afterwards."""
    method = lc.methods.heloco(3, (1.0, 0.6, 0.8), 0.6, 0.8)
    engine = Engine(loss_fn, SGD[1], method, 3, mesh=one_device())
    batches = oracle.make_batches(steps=7, regions=3)
    steps = [oracle.step_batch(batches, t) for t in range(1, 8)]
    state = engine.finish(engine.run(engine.init(oracle.make_params()), steps)[0])
    for key, value in anchors(state).items():
        for region in range(3):
            np.testing.assert_array_equal(state.received[key][region], value[0], err_msg=key)
    before = anchors(state)
    again = engine.finish(state)
    for key, value in anchors(again).items():
        np.testing.assert_array_equal(value, before[key], err_msg=key)


def test_settings_that_cannot_work_are_refused_at_once():
    method = lc.methods.heloco(0, (1.0, 0.5), weight=0.0, enough=2.0, turn=-1.0)
    found = "\n".join(lines_of(method, 3))
    for wrong in ("period=0", "speeds: 2 values", "weight=0.0", "enough=2.0", "turn=-1.0"):
        assert wrong in found
    (line,) = lines_of(lc.methods.heloco(12.5, (1.0, 0.5)), 2)
    assert "period=12.5: give a whole number of at least 1" in line
    (line,) = lines_of(lc.methods.halos(4, (1.0, 1.0), ((), (0, 1))), 2)
    assert "in one group, none empty" in line
    coded = lc.methods.isoloco(4, codec=compression.ef21(compression.make("topk", k=3)))
    assert "merge: codec" in "\n".join(lines_of(coded, 3))
    ranked = lc.methods.dilocox(
        4, {"name": "low_rank_int4", "least": 1.0}, 2, adaptive={"window": 1}
    )
    ranked = dataclasses.replace(ranked, merge=lc.merge.RadialDirectional())
    assert "leave the schedule's energy" in "\n".join(lines_of(ranked, 3))
    between_jobs = lines_between_jobs(lc.methods.heloco(4, (1.0, 0.5)), 2)
    assert [line for line in between_jobs if "a pace of their own" in line] == between_jobs
    with pytest.raises(ValueError, match=r"every=2\.5"):
        outer.restarting(every=2.5)
