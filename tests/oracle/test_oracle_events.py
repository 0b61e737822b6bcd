"""When things leave and land, who is concerned, and what an absence leaves untouched."""

import numpy as np
import pytest

from oracle import (
    AdamW,
    Average,
    Nesterov,
    Sgd,
    choose_fragment,
    flatten,
    make_batches,
    make_params,
    run_cocodc,
    run_diloco,
    run_eager,
    run_noloco,
    run_streaming,
    syncs_per_period,
)

F64 = np.float64
FRAGMENTS = (["c"], ["a", "s"], ["b"])
OUTER = Nesterov(0.4, 0.9)
ADAM = AdamW(0.03)


def problem(regions=3, steps=21, seed=0, dtype=F64):
    return make_params(seed, dtype), make_batches(seed, steps=steps, regions=regions, dtype=dtype)


def alone(params, batches, inner):
    """The regions' values if nothing is ever exchanged."""
    return run_diloco(params, batches, period=10**6, inner=inner, outer=OUTER)


def test_streaming_lands_tau_steps_after_the_send_and_mixes_with_alpha():
    params, batches = problem(steps=5)
    inner = Sgd(0.05)
    run = run_streaming(
        params, batches, fragments=[["a", "b", "c", "s"]], period=2, overlap=1, alpha=0.3,
        inner=inner, outer=Average(0.6),
    )  # fmt: skip
    assert [(e.step, e.kind, e.staleness) for e in run.events] == [
        (2, "send", 0), (3, "land", 1), (4, "send", 0), (5, "land", 1),
    ]  # fmt: skip
    free = alone(params, batches, inner)
    sent = np.stack([flatten(tree) for tree in free.at(2).locals])
    anchor = flatten(params) - 0.6 * (flatten(params) - sent.mean(0))
    np.testing.assert_allclose(flatten(run.at(3).anchors[0]), anchor, atol=1e-12)
    np.testing.assert_array_equal(flatten(run.at(2).anchors[0]), flatten(params))
    for r in range(3):
        expected = 0.3 * flatten(free.at(3).locals[r]) + 0.7 * anchor
        np.testing.assert_allclose(flatten(run.at(3).locals[r]), expected, atol=1e-12)


def test_next_pseudo_gradient_is_measured_against_the_new_anchor():
    params, batches = problem(1, steps=5)
    inner = Sgd(0.05)
    run = run_streaming(
        params, batches, fragments=[["a", "b", "c", "s"]], period=2, overlap=1, alpha=0.3,
        inner=inner, outer=Average(0.6),
    )  # fmt: skip
    anchor, local = flatten(run.at(3).anchors[0]), flatten(run.at(4).locals[0])
    expected = anchor - 0.6 * (anchor - local)
    np.testing.assert_allclose(flatten(run.at(5).anchors[0]), expected, atol=1e-12)


def test_a_payload_due_at_the_next_send_lands_before_it():
    """tau = H: landing first, then the new send, so nothing is skipped or counted twice."""
    params, batches = problem(steps=9)
    run = run_streaming(
        params, batches, fragments=[["a", "b", "c", "s"]], period=3, overlap=3, alpha=0,
        inner=ADAM, outer=OUTER,
    )  # fmt: skip
    assert [(e.step, e.kind) for e in run.events] == [
        (3, "send"), (6, "land"), (6, "send"), (9, "land"), (9, "send"),
    ]  # fmt: skip


def test_regions_of_different_delay_land_on_the_same_anchor():
    params, batches = problem(steps=14)
    run = run_streaming(
        params, batches, fragments=FRAGMENTS, period=7, overlap=[2, 0, 3], alpha=0.3,
        inner=ADAM, outer=OUTER,
    )  # fmt: skip
    lands = [(e.step, e.fragment, e.staleness, e.regions) for e in run.of("land")]
    assert lands[:4] == [
        (2, 0, 0, (1,)), (4, 0, 2, (0,)), (4, 1, 0, (1,)), (5, 0, 3, (2,)),
    ]  # fmt: skip
    moved = [
        t for t in range(1, 8) if np.any(run.at(t).anchors[0]["c"] != run.at(t - 1).anchors[0]["c"])
    ]
    assert moved == [2]
    assert run.at(3).in_flight == ((0, 2, (0, 2)),)
    assert run.at(4).in_flight == ((0, 2, (2,)), (1, 4, (0, 2)))
    free = alone(params, batches, ADAM)
    expected = 0.3 * free.at(4).locals[0]["c"] + 0.7 * run.at(2).anchors[0]["c"]
    np.testing.assert_allclose(run.at(4).locals[0]["c"], expected, atol=1e-12)


def test_anchor_waits_for_the_first_region_that_took_part():
    params, batches = problem(steps=7)
    present = np.ones((7, 3), dtype=bool)
    present[1, 1] = False
    run = run_streaming(
        params, batches, fragments=FRAGMENTS, period=7, overlap=[2, 0, 3], alpha=0.3,
        inner=ADAM, outer=OUTER, participants=present,
    )  # fmt: skip
    assert [(e.step, e.regions) for e in run.of("land") if e.fragment == 0] == [
        (4, (0,)),
        (5, (2,)),
    ]


def test_a_fragment_in_flight_is_not_sent_again():
    params, batches = problem(steps=9)
    run = run_cocodc(
        params, batches, fragments=FRAGMENTS, period=6, overlap=4, lam=0.7, inner=ADAM,
        outer=OUTER, schedule={1: [0], 2: [0, 1], 5: [0], 6: [0]},
    )  # fmt: skip
    assert [(e.step, e.fragment) for e in run.of("send")] == [(1, 0), (2, 1), (5, 0)]


@pytest.mark.parametrize("method", ["diloco", "streaming", "cocodc"])
def test_absent_region_keeps_its_values_while_the_anchor_moves(method):
    params, batches = problem(steps=8)
    present = np.ones((8, 3), dtype=bool)
    present[3, 1] = False
    common = dict(period=4, inner=ADAM, outer=OUTER, participants=present)
    whole = dict(fragments=[["a", "b", "c", "s"]], overlap=0)
    if method == "diloco":
        run = run_diloco(params, batches, **common)
    elif method == "streaming":
        run = run_streaming(params, batches, alpha=0.3, **whole, **common)
    else:
        run = run_cocodc(params, batches, lam=0.7, **whole, **common)
    free = alone(params, batches, ADAM)
    np.testing.assert_array_equal(flatten(run.at(4).locals[1]), flatten(free.at(4).locals[1]))
    np.testing.assert_array_equal(flatten(run.at(7).locals[1]), flatten(free.at(7).locals[1]))
    others = [flatten(free.at(4).locals[r]) for r in (0, 2)]
    expected = flatten(params) - 0.4 * 1.9 * (flatten(params) - np.mean(others, axis=0))
    np.testing.assert_allclose(flatten(run.at(4).anchors[0]), expected, atol=1e-12)
    assert run.of("send")[0].regions == (0, 2)
    assert run.of("send")[1].regions == (0, 1, 2)


def test_nobody_present_changes_nothing():
    params, batches = problem(steps=6)
    present = np.zeros((6, 3), dtype=bool)
    free = alone(params, batches, ADAM)
    for run in (
        run_diloco(params, batches, period=2, inner=ADAM, outer=OUTER, participants=present),
        run_streaming(
            params, batches, fragments=FRAGMENTS, period=3, overlap=1, inner=ADAM, outer=OUTER,
            participants=present,
        ),
        run_cocodc(
            params, batches, fragments=FRAGMENTS, period=3, overlap=1, lam=0.7, inner=ADAM,
            outer=OUTER, participants=present,
        ),
        run_eager(params, batches, period=2, inner=ADAM, outer=OUTER, participants=present),
        run_noloco(
            params, batches, period=2, groups=[[(0, 1), (2,)]] * 3, inner=ADAM,
            participants=present,
        ),
    ):  # fmt: skip
        assert {e.kind for e in run.events} <= {"skip", "empty"}
        for r in range(3):
            np.testing.assert_array_equal(flatten(run.last.locals[r]), flatten(free.last.locals[r]))
        for anchor in run.last.anchors:
            np.testing.assert_array_equal(flatten(anchor), flatten(params))


def test_a_contribution_that_is_not_finite_is_left_out_and_healed_by_the_landing():
    params, batches = problem(steps=4)
    batches["y"][1, 2] = np.nan
    run = run_diloco(params, batches, period=2, inner=Sgd(0.05), outer=Average())
    assert run.of("send")[0].excluded == (2,)
    free = alone(params, batches, Sgd(0.05))
    expected = np.mean([flatten(free.at(2).locals[r]) for r in (0, 1)], axis=0)
    for r in range(3):
        np.testing.assert_allclose(flatten(run.at(2).locals[r]), expected, atol=1e-12)
    assert run.of("send")[1].excluded == ()


def test_token_weights_that_change_from_step_to_step():
    params, batches = problem(steps=4)
    weights = np.ones((4, 3))
    weights[1] = [3.0, 1.0, 0.5]
    run = run_diloco(params, batches, period=2, inner=Sgd(0.05), outer=Average(), weights=weights)
    locals_ = [flatten(tree) for tree in alone(params, batches, Sgd(0.05)).at(2).locals]
    expected = (3.0 * locals_[0] + 1.0 * locals_[1] + 0.5 * locals_[2]) / 4.5
    np.testing.assert_allclose(flatten(run.at(2).anchors[0]), expected, atol=1e-12)


def test_finish_drains_in_send_order_with_the_real_staleness_then_synchronises():
    params, batches = problem(steps=11)
    run = run_streaming(
        params, batches, fragments=FRAGMENTS, period=7, overlap=[4, 6, 4], alpha=0.3,
        inner=ADAM, outer=OUTER, finish=True,
    )  # fmt: skip
    assert [(e.fragment, e.staleness, e.regions) for e in run.of("drain")] == [
        (2, 4, (1,)), (0, 2, (0, 1, 2)), (1, 0, (0, 1, 2)),
    ]  # fmt: skip
    assert [e.fragment for e in run.of("final")] == [0, 1, 2]
    for r in range(3):
        np.testing.assert_array_equal(
            flatten(run.finished.locals[r]), flatten(run.finished.anchors[0])
        )


def test_choose_fragment_order():
    busy = [1]
    # Overdue first, the longest waiting of them.
    assert choose_fragment(20, 10, [9, 1, 5, None], [9.0, 9.0, 1.0, 0.0], busy) == 2
    assert choose_fragment(20, 10, [7, 1, 5, None], [9.0, 9.0, 1.0, 0.0], busy) == 2
    # Then never sent.
    assert choose_fragment(12, 10, [9, 1, 5, None], [9.0, 9.0, 1.0, 0.0], busy) == 3
    # Then the largest score; ties to the one sent longest ago; what is in flight never.
    assert choose_fragment(12, 10, [9, 8, 5, 7], [2.0, 9.0, 1.0, 3.0], busy) == 3
    assert choose_fragment(12, 10, [9, 8, 7, 8], [2.0, 9.0, 2.0, 1.0], busy) == 2
    assert choose_fragment(12, 10, [9, 8], [2.0, 9.0], [0, 1]) is None


def test_equal_scores_give_round_robin():
    sent, order = [None, None, None], []
    for t in range(2, 40, 2):
        pick = choose_fragment(t, 12, sent, [1.0, 1.0, 1.0], [])
        sent[pick] = t
        order.append(pick)
    assert order == ([0, 1, 2] * 7)[: len(order)]


def test_scores_steer_the_adaptive_schedule():
    """N = 2K: after the first K slots the choice depends on the measured rates."""
    params, batches = problem(steps=36)
    run = run_cocodc(
        params, batches, fragments=FRAGMENTS, period=12, overlap=1, lam=0.7, inner=ADAM,
        outer=OUTER, syncs=6,
    )  # fmt: skip
    assert [e.step for e in run.of("send")] == list(range(2, 37, 2))
    slot = run.at(8)
    scores = run.at(7).extra["scores"]
    fastest = int(np.argmax(scores))
    assert slot.extra["sent"][fastest] == 8
    delta = run.at(2).anchors[0]["c"] - np.mean([t["c"] for t in run.at(2).locals], axis=0)
    assert np.isclose(scores[0], np.sqrt(np.mean(delta**2)) / 2)
    late = run_cocodc(
        params, batches, fragments=FRAGMENTS, period=12, overlap=1, lam=0.7, inner=ADAM,
        outer=OUTER, syncs=6, scores_from="period",
    )  # fmt: skip
    assert late.at(11).extra["scores"] == (0.0, 0.0, 0.0)
    assert min(late.at(12).extra["scores"]) > 0


def test_syncs_per_period_formula():
    assert syncs_per_period(100, 4, 0.4, 1.0, 5.0) == 8
    assert syncs_per_period(100, 4, 0.1, 1.0, 50.0) == 4
    assert syncs_per_period(7, 3, 1.0, 1.0, 0.01) == 7


def test_float32_stays_float32_and_close_to_float64():
    runs = {}
    for dtype in (np.float32, np.float64):
        params, batches = problem(dtype=dtype)
        runs[dtype] = run_cocodc(
            params, batches, fragments=FRAGMENTS, period=7, overlap=[1, 0, 2], lam=0.7,
            inner=AdamW(lambda n: 0.03 / (1 + n)), outer=OUTER, weights=[0.2, 0.5, 0.9],
            finish=True,
        )  # fmt: skip
    for tree in (*runs[np.float32].finished.anchors, *runs[np.float32].last.locals):
        assert {value.dtype for value in tree.values()} == {np.dtype(np.float32)}
    np.testing.assert_allclose(
        flatten(runs[np.float32].finished.anchors[0]),
        flatten(runs[np.float64].finished.anchors[0]),
        atol=1e-5,
    )
