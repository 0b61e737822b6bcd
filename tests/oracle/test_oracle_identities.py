"""Methods that must coincide, NumPy only: each pair is written by two different functions."""

import numpy as np
import pytest

from oracle import (
    AdamW,
    Average,
    HeavyBall,
    Nesterov,
    Sgd,
    flatten,
    make_batches,
    make_params,
    run_cocodc,
    run_ddp,
    run_diloco,
    run_dilocox_dense,
    run_eager,
    run_local_sgd,
    run_noloco,
    run_streaming,
    staggered_sends,
)

F64 = np.float64
FRAGMENTS = (["c"], ["a", "s"], ["b"])
OUTER = Nesterov(0.4, 0.9)
ADAM = AdamW(0.03)


def problem(regions=3, steps=21, seed=0):
    return make_params(seed, F64), make_batches(seed, steps=steps, regions=regions, dtype=F64)


def mask(steps, regions, absent):
    """All present but for the (step, region) pairs given."""
    table = np.ones((steps, regions), dtype=bool)
    for step, region in absent:
        table[step - 1, region] = False
    return table


def assert_same(left, right, *, atol=1e-12, momentum=True):
    assert len(left.snapshots) == len(right.snapshots)
    pairs = list(zip(left.snapshots, right.snapshots, strict=True))
    if left.finished is not None or right.finished is not None:
        pairs.append((left.finished, right.finished))
    for one, two in pairs:
        groups = [(one.locals, two.locals), (one.anchors, two.anchors)]
        if momentum:
            groups.append((one.momentum, two.momentum))
        for mine, theirs in groups:
            assert len(mine) == len(theirs)
            for x, y in zip(mine, theirs, strict=True):
                np.testing.assert_allclose(flatten(x), flatten(y), rtol=0, atol=atol)


def differs(left, right):
    gap = np.max(np.abs(flatten(left.last.anchors[0]) - flatten(right.last.anchors[0])))
    return gap > 1e-4


@pytest.mark.parametrize("regions", [1, 2, 3])
def test_streaming_with_one_fragment_is_diloco_bit_for_bit(regions):
    params, batches = problem(regions)
    absent = mask(21, regions, [(10, 0)] if regions > 1 else [])
    weights = np.asarray([0.2, 0.5, 0.9][:regions])
    common = dict(inner=ADAM, outer=OUTER, participants=absent, weights=weights, finish=True)
    one = run_streaming(
        params, batches, fragments=[["a", "b", "c", "s"]], period=5, overlap=0, alpha=0, **common
    )
    two = run_diloco(params, batches, period=5, **common)
    assert_same(one, two, atol=0)
    assert [e.step for e in one.of("land")] == [5, 10, 15, 20]


def test_streaming_fragments_at_tau_zero_are_diloco_per_fragment():
    """alpha = 0, tau = 0 and every fragment sent at its own offset: not DiLoCo, but K = 3 sends."""
    params, batches = problem()
    run = run_streaming(
        params,
        batches,
        fragments=FRAGMENTS,
        period=7,
        overlap=0,
        alpha=0.3,
        inner=ADAM,
        outer=OUTER,
    )
    assert [(e.step, e.fragment) for e in run.of("send")] == [
        (2, 0), (4, 1), (7, 2), (9, 0), (11, 1), (14, 2), (16, 0), (18, 1), (21, 2),
    ]  # fmt: skip


@pytest.mark.parametrize("regions", [1, 3])
def test_cocodc_without_taylor_at_tau_zero_is_streaming_alpha_zero(regions):
    params, batches = problem(regions)
    schedule = {t: staggered_sends(t, 3, 7) for t in range(1, 22)}
    absent = mask(21, regions, [(4, 1), (16, 2)] if regions > 1 else [])
    common = dict(
        fragments=FRAGMENTS, period=7, overlap=0, inner=ADAM, outer=OUTER, participants=absent
    )
    one = run_cocodc(params, batches, lam=0.0, schedule=schedule, finish=True, **common)
    two = run_streaming(params, batches, alpha=0, finish=True, **common)
    assert_same(one, two)
    assert not differs(one, two)


def test_cocodc_with_n_equal_k_dividing_h_is_round_robin():
    params, batches = problem(steps=24)
    common = dict(fragments=FRAGMENTS, period=6, overlap=1, lam=0.7, inner=ADAM, outer=OUTER)
    adaptive = run_cocodc(params, batches, **common)
    schedule = {t: staggered_sends(t, 3, 6) for t in range(1, 25)}
    fixed = run_cocodc(params, batches, schedule=schedule, **common)
    assert_same(adaptive, fixed, atol=0)
    assert [e.fragment for e in adaptive.of("send")] == [0, 1, 2] * 4


def test_local_sgd_is_diloco_with_averaging():
    params, batches = problem()
    absent = mask(21, 3, [(8, 1), (16, 0), (16, 1), (16, 2)])
    weights = np.asarray([0.2, 0.5, 0.9])
    common = dict(period=4, inner=ADAM, participants=absent, weights=weights, finish=True)
    one = run_local_sgd(params, batches, **common)
    two = run_diloco(params, batches, outer=Average(), **common)
    assert_same(one, two)
    assert [e.step for e in one.of("skip")] == [16]


@pytest.mark.parametrize("regions", [1, 3])
def test_local_sgd_with_one_sgd_step_is_ddp(regions):
    params, batches = problem(regions)
    weights = np.asarray([0.2, 0.5, 0.9][:regions])
    one = run_local_sgd(params, batches, period=1, inner=Sgd(0.1), weights=weights)
    two = run_ddp(params, batches, inner=Sgd(0.1), weights=weights)
    assert_same(one, two)
    with_adam = run_local_sgd(params, batches, period=1, inner=ADAM, weights=weights)
    if regions > 1:
        assert differs(with_adam, run_ddp(params, batches, inner=ADAM, weights=weights))


def test_noloco_with_one_group_of_all_is_heavy_ball_diloco():
    params, batches = problem()
    absent = mask(21, 3, [(8, 1), (12, 0)])
    one = run_noloco(
        params,
        batches,
        period=4,
        groups=[[(0, 1, 2)]] * 5,
        alpha=0.45,
        beta=0.6,
        gamma=0.8,
        inner=ADAM,
        participants=absent,
    )
    two = run_diloco(
        params, batches, period=4, inner=ADAM, outer=HeavyBall(0.6, 0.45), participants=absent
    )
    for mine, theirs in zip(one.snapshots, two.snapshots, strict=True):
        for r in range(3):
            anchor, local = flatten(mine.anchors[r]), flatten(mine.locals[r])
            np.testing.assert_allclose(anchor, flatten(theirs.anchors[0]), atol=1e-12)
            np.testing.assert_allclose(local, flatten(theirs.locals[r]), atol=1e-12)


def test_noloco_mean_anchor_is_heavy_ball_on_the_mean_pseudo_gradient():
    """Groups that partition the regions leave the mean free of gamma (equal group sizes)."""
    params, batches = problem(4)
    starts = [make_params(20 + r, F64) for r in range(4)]
    groups = [[(0, 2), (1, 3)], [(0, 1), (2, 3)], [(3, 0), (1, 2)]] * 2
    common = dict(period=4, alpha=0.5, beta=0.6, inner=Sgd(0.1), start_anchors=starts)
    run = run_noloco(params, batches, groups=groups, gamma=0.9, **common)
    velocity = 0.0
    mean = np.mean([flatten(tree) for tree in run.at(0).anchors], axis=0)
    for end in range(4, 21, 4):
        before, after = run.at(end - 1), run.at(end)
        # The local values just before the exchange: one more SGD step from the recorded ones.
        progress = []
        for r in range(4):
            x, y = batches["x"][end - 1, r], batches["y"][end - 1, r]
            theta = flatten(before.locals[r])
            theta = theta - 0.1 * (x.T @ (x @ theta - y)) / len(y)
            progress.append(flatten(before.anchors[r]) - theta)
        velocity = 0.5 * velocity - 0.6 * np.mean(progress, axis=0)
        mean = mean + velocity
        got = np.mean([flatten(tree) for tree in after.anchors], axis=0)
        np.testing.assert_allclose(got, mean, atol=1e-12)
    spread = [np.std([flatten(t) for t in run.at(s).anchors], axis=0).max() for s in (0, 21)]
    assert spread[1] < 0.8 * spread[0]


@pytest.mark.parametrize("regions", [1, 2, 3])
def test_dilocox_without_delay_is_diloco_bit_for_bit(regions):
    params, batches = problem(regions)
    absent = mask(21, regions, [(10, 1)] if regions > 1 else [])
    common = dict(period=5, inner=ADAM, outer=OUTER, participants=absent, finish=True)
    one = run_dilocox_dense(params, batches, delay=0, **common)
    two = run_diloco(params, batches, **common)
    assert_same(one, two, atol=0)


def test_dilocox_with_delay_lands_the_payload_of_the_boundary_before():
    params, batches = problem()
    absent = mask(21, 3, [(8, 1), (12, 0), (12, 1), (12, 2)])
    common = dict(period=4, inner=ADAM, outer=OUTER, participants=absent)
    run = run_dilocox_dense(params, batches, **common)
    assert [(e.step, e.kind) for e in run.of("empty", "land")] == [
        (4, "empty"), (8, "land"), (12, "land"), (16, "empty"), (20, "land"),
    ]  # fmt: skip


def test_a_late_landing_is_the_outer_step_along_the_mean_of_the_round_before():
    """arXiv 2502.12996, Algorithm 2, by hand."""
    params, batches = problem(steps=8)
    run = run_dilocox_dense(params, batches, period=4, inner=ADAM, outer=OUTER)
    alone = run_diloco(params, batches, period=99, inner=ADAM, outer=OUTER).at(4).locals
    mean = {k: np.mean([params[k] - one[k] for one in alone], axis=0) for k in params}
    moved, _ = OUTER.step(params, mean, {k: np.zeros_like(x) for k, x in params.items()})
    np.testing.assert_allclose(flatten(run.at(8).anchors[0]), flatten(moved), atol=1e-12)


def test_dilocox_first_boundary_restarts_everybody_from_the_unmoved_anchor():
    params, batches = problem(steps=9)
    run = run_dilocox_dense(params, batches, period=4, inner=ADAM, outer=OUTER)
    for r in range(3):
        np.testing.assert_array_equal(flatten(run.at(4).locals[r]), flatten(params))
    blocking = run_dilocox_dense(
        params, batches, period=4, inner=ADAM, outer=OUTER, first_round="blocking"
    )
    plain = run_diloco(params, batches, period=4, inner=ADAM, outer=OUTER)
    np.testing.assert_array_equal(
        flatten(blocking.at(4).anchors[0]), flatten(plain.at(4).anchors[0])
    )
    np.testing.assert_array_equal(
        flatten(blocking.at(8).anchors[0]), flatten(blocking.at(4).anchors[0])
    )


def test_dilocox_rounds_of_different_length():
    params, batches = problem()
    run = run_dilocox_dense(params, batches, period=[6, 4, 3], inner=ADAM, outer=OUTER)
    assert [(e.step, e.staleness) for e in run.of("land")] == [(10, 4), (13, 3), (16, 3), (19, 3)]


def test_eager_with_one_region_is_diloco():
    params, batches = problem(1)
    common = dict(period=4, inner=ADAM, outer=OUTER)
    assert_same(run_eager(params, batches, **common), run_diloco(params, batches, **common))


def test_eager_first_round_uses_own_part_only():
    params, batches = problem(steps=4)
    alone = run_diloco(params, batches, period=99, inner=ADAM, outer=OUTER).last.locals
    run = run_eager(params, batches, period=4, inner=ADAM, outer=Nesterov(0.4, 0.8))
    for r in range(3):
        own = flatten(params) - flatten(alone[r])
        expected = flatten(params) - 0.4 * 1.8 * own / 3
        np.testing.assert_allclose(flatten(run.last.anchors[r]), expected, atol=1e-12)


@pytest.mark.parametrize("absent", [[], [(4, 2), (20, 0), (24, 0), (40, 1)]])
def test_eager_disagreement_telescopes(absent):
    """With outer SGD, Theta_m - mean(Theta) is -lr times own part in flight minus its mean."""
    params, batches = problem(3, steps=240)
    run = run_eager(
        params,
        batches,
        period=4,
        inner=Sgd(0.05),
        outer=Average(0.4),
        participants=mask(240, 3, absent),
        finish=True,
    )
    for t in range(4, 241, 4):
        snapshot = run.at(t)
        anchors = np.stack([flatten(tree) for tree in snapshot.anchors])
        own = np.stack([flatten(tree) for tree in snapshot.extra["own_in_flight"]])
        np.testing.assert_allclose(
            anchors - anchors.mean(0), -0.4 * (own - own.mean(0)), atol=1e-12
        )
    final = np.stack([flatten(tree) for tree in run.finished.anchors])
    np.testing.assert_allclose(final, np.broadcast_to(final[0], final.shape), atol=1e-12)


def test_one_period_method_counts_no_progress_twice_around_an_absence():
    """Absent at 8: values kept while the payload of 4 lands. Present at 12: sent, so reset."""
    params, batches = problem(1, steps=20)
    common = dict(period=4, inner=Sgd(0.05), outer=Average())
    run = run_dilocox_dense(params, batches, participants=mask(20, 1, [(8, 0)]), **common)
    start = flatten(run.at(8).locals[0])
    theta = flatten(run.at(7).locals[0])
    x, y = batches["x"][7, 0], batches["y"][7, 0]
    np.testing.assert_allclose(start, theta - 0.05 * (x.T @ (x @ theta - y)) / len(y), atol=1e-12)
    np.testing.assert_array_equal(flatten(run.at(12).locals[0]), flatten(run.at(12).anchors[0]))
