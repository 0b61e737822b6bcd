"""Real training in virtual time: what is waited for, and that learning does not look at it."""

import jax
import numpy as np
import optax
import oracle
import pytest
from oracle.jax_problem import loss_fn

import lowcomm_jax as lc
from lowcomm_jax.network import replay, uniform

R, STEPS, STEP_SECONDS = 3, 24, 0.5
SIZE = 4 * oracle.SIZE


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def rows(method, regions=R, steps=STEPS):
    engine = lc.Engine(
        loss_fn, optax.sgd(0.01), method, regions, mesh=lc.make_mesh(devices=jax.devices()[:1])
    )
    state = engine.init(oracle.make_params())
    batches = oracle.make_batches(steps=steps, regions=regions)
    stream = [oracle.step_batch(batches, t) for t in range(1, steps + 1)]
    _, history = engine.run(state, stream)
    return list(history.rows())


def network(sync_seconds):
    """Equal links on which one two-shot exchange of the whole model takes `sync_seconds`."""
    moved_bits = 8 * 2 / R * SIZE  # over each of a region's R - 1 links
    return uniform(R, moved_bits / sync_seconds / 1e9, delay_s=0.0, compute_s=STEP_SECONDS)


def test_diloco_waits_the_whole_transfer_once_a_round():
    clock = replay(network(3.0), rows(lc.methods.diloco(6)))
    rounds = STEPS // 6
    assert clock.now_R == pytest.approx([STEPS * STEP_SECONDS + rounds * 3.0] * R)


@pytest.mark.parametrize("tau", [1, 4, 5])
def test_overlap_leaves_only_what_tau_steps_do_not_cover(tau):
    clock = replay(network(2.2), rows(lc.methods.streaming_diloco(6, 1, tau, 0.3)))
    landed = sum(1 for t in range(6, STEPS + 1, 6) if t + tau <= STEPS)
    stall = max(0.0, 2.2 - tau * STEP_SECONDS)
    assert clock.now_R == pytest.approx([STEPS * STEP_SECONDS + landed * stall] * R)


def test_ddp_waits_at_every_step_and_eager_hardly_ever():
    slow = network(2.0)
    ddp = replay(slow, rows(lc.methods.ddp()))
    assert ddp.now_R == pytest.approx([STEPS * (STEP_SECONDS + 2.0)] * R)
    eager = replay(slow, rows(lc.methods.eager_diloco(6)))
    assert eager.now_R == pytest.approx([STEPS * STEP_SECONDS] * R)


def pair_network(sync_seconds, regions):
    """Equal links that carry the whole model to one partner in `sync_seconds`."""
    return uniform(regions, 8 * SIZE / sync_seconds / 1e9, delay_s=0.0, compute_s=STEP_SECONDS)


def test_gossip_waits_for_the_pseudo_gradient_and_not_for_the_anchors():
    """A round computes for 3 s: anchors that need as long are hidden, Delta is waited for."""
    found = rows(lc.methods.noloco(6), regions=4)
    clock = replay(pair_network(2.9, 4), found)
    assert clock.now_R == pytest.approx([STEPS * STEP_SECONDS + 4 * 2.9] * 4)
    # Of 5 s of anchors 2 are left at the boundary. Both share the link until those are through,
    # after 4 s; the other 3 s of Delta follow. Only in the first round no anchors travel.
    slow = replay(pair_network(5.0, 4), found)
    assert slow.now_R == pytest.approx([STEPS * STEP_SECONDS + 5 + 3 * 7] * 4)


def test_gossip_waits_for_its_partner_and_for_nobody_else():
    found = rows(lc.methods.noloco(6, seed=1), regions=4, steps=6)
    clock = replay(pair_network(1.0, 4).with_compute(np.array([0.5, 2.0, 0.5, 0.5])), found)
    (partner,) = next(set(g) - {1} for g in lc.topology.groups(0, 1, 4, 2) if 1 in g)
    expected = [6 * 2.0 + 1 if r in (1, partner) else 6 * 0.5 + 1 for r in range(4)]
    assert clock.now_R == pytest.approx(expected)


def test_records_written_before_there_was_gossip_can_be_replayed():
    new = ("groups", "ahead")
    found = rows(lc.methods.diloco(6))
    for row in found:
        row["events"] = [{k: v for k, v in e.items() if k not in new} for e in row["events"]]
    assert replay(network(3.0), found).now_R[0] == pytest.approx(STEPS * STEP_SECONDS + 4 * 3.0)


def test_an_engine_with_a_network_keeps_the_same_clock():
    method = lc.methods.streaming_diloco(6, 2, 2, 0.3, pattern="balanced")
    links = network(2.2)
    engine = lc.Engine(
        loss_fn,
        optax.sgd(0.01),
        method,
        R,
        network=links,
        mesh=lc.make_mesh(devices=jax.devices()[:1]),
    )
    state = engine.init(oracle.make_params())
    batches = oracle.make_batches(steps=STEPS, regions=R)
    state, history = engine.run(state, [oracle.step_batch(batches, t) for t in range(1, 25)])
    replayed = replay(links, history.rows())
    assert engine.clock.now_R.tolist() == replayed.now_R.tolist()
    assert engine.clock.now_R[0] > STEPS * STEP_SECONDS


def test_a_network_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="network has 3 regions, the engine 4"):
        lc.Engine(loss_fn, optax.sgd(0.01), lc.methods.diloco(6), 4, network=network(1.0))


def test_the_clock_books_the_bytes_the_engine_counted():
    engine = lc.Engine(
        loss_fn,
        optax.sgd(0.01),
        lc.methods.diloco(6),
        R,
        mesh=lc.make_mesh(devices=jax.devices()[:1]),
    )
    state = engine.init(oracle.make_params())
    batches = oracle.make_batches(steps=STEPS, regions=R)
    state, history = engine.run(state, [oracle.step_batch(batches, t) for t in range(1, 25)])
    clock = replay(network(1.0), history.rows())
    report = clock.report()
    counted = report.sent_R
    np.testing.assert_allclose(counted, state.clock.bytes_sent, rtol=0.01)
