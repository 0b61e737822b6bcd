"""Gossip in the engine: identities, consensus, bytes; no recompilation."""

import itertools

import jax
import numpy as np
import optax
import oracle
import pytest
from compilations import compilations
from oracle_runs import started, stream

import lowcomm_jax as lc
from lowcomm_jax import compression
from lowcomm_jax.rules.consensus import Consensus
from lowcomm_jax.schedule import Staggered
from lowcomm_jax.state.train_state import with_inner

SGD = optax.sgd(0.05, momentum=0.8)


def make(method, regions, inner=SGD, *problem, **settings):
    """`problem`: a loss and its parameters."""
    return started(method, regions, inner, *problem, **settings)


def train(method, regions, steps, **kwargs):
    engine, state = make(method, regions, **kwargs)
    state, history = engine.run(state, stream(steps, regions))
    return engine, state, history


# -- identities -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "rule"), [("heavy_ball", lc.outer.heavy_ball), ("nesterov", lc.outer.nesterov)]
)
def test_one_group_of_all_is_diloco(variant, rule):
    gossip = lc.methods.noloco(4, group_size=3, alpha=0.4, beta=0.6, gamma=0.9, variant=variant)
    _, grouped, _ = train(gossip, 3, 13)
    _, shared, _ = train(lc.methods.diloco(4, outer=rule(0.6, 0.4)), 3, 13)
    for key, anchor in shared.anchor.items():
        spread = np.broadcast_to(anchor, grouped.anchor[key].shape)
        np.testing.assert_allclose(grouped.anchor[key], spread, rtol=1e-5, atol=1e-6)
    for name, value in lc.global_params(grouped).items():
        np.testing.assert_allclose(value, lc.global_params(shared)[name], rtol=1e-5, atol=1e-6)


def test_momentum_moves_anchors_where_a_group_has_no_news():
    """Regions that agree, and then stand still: the second landing is momentum alone."""
    alpha, beta, lr = 0.5, 0.6, 0.1

    def pushed(params, batch, rng):
        return params["w"].sum() * batch["x"].mean()

    method = lc.methods.noloco(1, group_size=2, alpha=alpha, beta=beta)
    start = {"w": np.float32([1.0, -2.0])}
    engine, state = make(method, 2, optax.sgd(lr), pushed, start)
    for push in (3.0, 0.0):
        state, _ = engine.step(state, {"x": np.full((2, 1), push, np.float32)})
    moved = np.asarray(state.anchor["w"]) - start["w"]
    first = -3.0 * lr * beta
    np.testing.assert_allclose(moved, np.full((2, 2), first * (1 + alpha)), rtol=1e-6)


def seed_where(region, alone, rounds):
    """A seed whose first rounds leave `region` alone, or never do."""

    def lonely(seed, n):
        return (region,) in lc.topology.Gossip(2, seed).groups(n, 3)

    return next(s for s in range(999) if all(lonely(s, n) == alone for n in range(rounds)))


@pytest.mark.parametrize("codec", [None, "bf16"])
def test_with_an_absent_partner_a_region_is_bit_for_bit_alone(codec):
    """Sitting out, a partner who is absent, and nobody else at all: the same, at any weight."""
    codec, region, found = codec and compression.make(codec), 1, []
    for alone, weights in ((True, "equal"), (False, "equal"), (False, [0.3, 0.7, 1.9])):
        seed = seed_where(region, alone, 2)
        method = lc.methods.noloco(3, alpha=0.3, beta=0.6, seed=seed, codec=codec)
        engine, state = make(method, 3, weights=weights)
        only = None if alone else np.arange(3) == region
        state, _ = engine.run(state, stream(7, 3), lambda step, only=only: only)
        found.append({k: np.array(x[region]) for k, x in state.anchor.items()})
    rule = lc.outer.heavy_ball(0.6, 0.3)
    engine, state = make(lc.methods.diloco(3, outer=rule, codec=codec), 3)
    state, _ = engine.run(state, stream(7, 3), lambda step: np.arange(3) == region)
    for key, anchor in state.anchor.items():
        np.testing.assert_array_equal(found[1][key], found[0][key])
        np.testing.assert_array_equal(found[2][key], found[0][key])
        np.testing.assert_allclose(found[0][key], anchor[0], rtol=1e-5, atol=1e-6)


def test_a_nan_region_leaves_its_partner_alone_and_heals():
    steps = stream(4, 4)
    steps[1]["y"][2] *= np.nan
    engine, state = make(lc.methods.noloco(4), 4, skip_nonfinite=False)
    state, history = engine.run(state, steps)
    absent_engine, expected = make(lc.methods.noloco(4), 4)
    here = np.arange(4) != 2
    expected, _ = absent_engine.run(expected, stream(4, 4), lambda step: here)
    assert history.events[0].fetch()["left_out"] == [False, False, True, False]
    for key, anchor in expected.anchor.items():
        np.testing.assert_array_equal(state.anchor[key], anchor)
        assert np.isfinite(np.asarray(state.inner.params[key])).all()


# -- consensus ------------------------------------------------------------------------------------


def still(params, batch, rng):
    del rng
    return 0.0 * (params["w"].sum() * batch["x"].sum())


@pytest.mark.parametrize(
    ("regions", "size", "rounds", "alpha", "gamma", "variant"),
    [
        (4, 2, 4, 0.5, 0.7, "heavy_ball"),
        (5, 2, 3, 0.3, 1.1, "heavy_ball"),
        (8, 4, 2, 0.4, 0.5, "nesterov"),
    ],
)
def test_noise_contracts_as_the_closed_form_says(regions, size, rounds, alpha, gamma, variant):
    """Over all sequences of draws the mean variance is that of the recursion: no sampling error."""
    method = lc.methods.noloco(1, size, alpha, 0.7, gamma, variant=variant)
    noise = np.random.default_rng(1).standard_normal((regions, 50)).astype(np.float32)
    engine, state = make(method, regions, optax.sgd(0.0), still, {"w": noise[0]}, block=1)
    start = with_inner(jax.tree.map(np.array, state), params={"w": noise})
    batch = {"x": np.ones((regions, 1, 1), np.float32)}
    gossip = method.topology
    drawn = {gossip.draw(n, regions): n for n in range(200)}  # a round for every partition
    assert len(drawn) == gossip.count(regions)
    measured, estimated = [], []
    for sequence in itertools.product(drawn.values(), repeat=rounds):
        state = jax.tree.map(np.copy, start.replace(anchor={"w": noise}))
        anchors, pulls = [noise], []
        for number in sequence:
            state.counters.sends[0] = number
            state, metrics = engine.step(state, batch)
            pulls.append(gossip.consensus.variance(metrics["events"][1].values["pull_norm"]))
            anchors.append(np.array(state.anchor["w"]))
        x = np.array(anchors, np.float64)
        measured.append(((x - x.mean(axis=1, keepdims=True)) ** 2).sum(axis=2).mean(axis=1))
        estimated.append(pulls)
    matrix = Consensus(alpha, gamma, size, variant).second_moments(regions)
    begin = [0.0, 0.0, measured[0][0]]
    powers = [np.linalg.matrix_power(matrix, t) for t in range(rounds + 1)]
    expected = [(power @ begin)[2] for power in powers]
    assert expected[-1] < 0.7 * expected[0]
    np.testing.assert_allclose(np.mean(measured, axis=0), expected, rtol=1e-5)
    # What the regions see of it in their groups: on average the same, without any message.
    np.testing.assert_allclose(np.mean(estimated, axis=0), expected[:-1], rtol=1e-5)


# -- what travels ---------------------------------------------------------------------------------


def test_bytes_are_those_of_the_pairs():
    """5 regions, 3 rounds, bf16: Delta of 2 bytes a parameter, the anchors of 4 ahead."""
    codec = compression.make("bf16")
    _, state, history = train(lc.methods.noloco(4, seed=2, codec=codec), 5, 13)
    size, sent = oracle.SIZE, np.zeros(5, int)
    for n in range(3):
        for nbytes, number in ((2 * size, n), (4 * size, n + 1)):
            for group in lc.topology.Gossip(2, 2).groups(number, 5):
                sent[list(group)] += nbytes * (len(group) - 1)
    assert (
        state.counters.bytes_sent.tolist()
        == state.counters.bytes_received.tolist()
        == sent.tolist()
    )
    assert len(set(sent.tolist())) > 1, "who sits out sends less"
    booked = np.sum([e.bytes_sent for e in history.events], axis=0)
    assert booked.tolist() == sent.tolist()
    send, land = history.events[:2]
    assert (send.route, send.nbytes, land.ahead) == ("pair", 2 * size, 4 * size)
    assert send.groups == lc.topology.Gossip(2, 2).groups(0, 5)
    assert land.groups == lc.topology.Gossip(2, 2).groups(1, 5)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("slots", [1, 6])
def test_nothing_compiles_once_every_program_has_run(size, slots):
    mesh = lc.make_mesh(region=slots, devices=jax.devices()[:slots])
    engine, state = make(lc.methods.noloco(2, size), 6, mesh=mesh)
    batches = stream(30, 6)
    state, _ = engine.run(state, batches[:4])
    drawn = {lc.topology.Gossip(size).draw(n, 6) for n in range(2, 15)}
    assert drawn == set(range(5)), "every partition must occur"
    assert compilations(lambda: engine.run(state, batches[4:])[0].anchor) == 0


@pytest.mark.parametrize("slots", [1, 2])
def test_a_rule_that_reads_its_own_pseudo_gradient(slots):
    """The anchor of a region that takes no part stays; without `reads_own` it would move."""

    def update(mean, state, params=None, *, group_anchor, own, **extra):
        return jax.tree.map(lambda m, o: -0.5 * o - 0.25 * m, mean, own), state

    def pushed(params, batch, rng):
        return params["w"].sum() * batch["x"].mean()

    method = lc.methods.Method(
        "own",
        Staggered(1),
        optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update),
        anchors="per_region",
        topology=lc.topology.Gossip(2, reads_own=True),
    )
    mesh = lc.make_mesh(region=slots, devices=jax.devices()[:slots])
    start = {"w": np.float32([1.0, -2.0])}
    engine, state = make(method, 2, optax.sgd(0.1), pushed, start, mesh=mesh)
    push = {"x": np.float32([[1.0], [3.0]])}
    state, _ = engine.step(state, push)  # Delta = 0.1 and 0.3, their mean 0.2
    moved = np.asarray(state.anchor["w"]) - start["w"]
    np.testing.assert_allclose(moved, [[-0.1] * 2, [-0.2] * 2], rtol=1e-5)
    state, _ = engine.step(state, push, [True, False])  # alone: Delta and mean are 0.1
    moved = np.asarray(state.anchor["w"]) - start["w"]
    np.testing.assert_allclose(moved, [[-0.175] * 2, [-0.2] * 2], rtol=1e-5)
    values = np.asarray(lc.region_params(state)["w"]) - start["w"]
    np.testing.assert_allclose(values, [[-0.175] * 2, [-0.5] * 2], rtol=1e-5)
    state, _ = engine.step(state, push)  # Delta = 0.1 and 0.6 of two steps, their mean 0.35
    moved = np.asarray(state.anchor["w"]) - start["w"]
    np.testing.assert_allclose(moved, [[-0.3125] * 2, [-0.5875] * 2], rtol=1e-5)
