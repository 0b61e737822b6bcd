"""What one send and one landing compute, by hand, on a few numbers: who counts and what moves."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowcomm_jax as lc
from lowcomm_jax.compression import Codec
from lowcomm_jax.exchange import MeshExchange
from lowcomm_jax.loops.gradient_exchange import by_optimizer
from lowcomm_jax.mesh.regions import Regions
from lowcomm_jax.rules.topology import Gossip
from lowcomm_jax.setup import Setup
from lowcomm_jax.sync.gossip_step import gossip_step
from lowcomm_jax.sync.round_functions import (
    Adoption,
    AnchorState,
    Contributions,
    LandingTarget,
    RegionState,
    RoundFunctions,
    Senders,
    Values,
)

R = 3
REGIONS = Regions(R, lc.make_mesh(devices=jax.devices()[:1]))
COUNT = optax.GradientTransformationExtraArgs(
    lambda params: jnp.int32(0), lambda updates, state, params=None, **_: (updates, state + 1)
)
TOLD = {"fragment": np.int32(0), "round": np.int32(0), "step": np.int32(0)}


@dataclasses.dataclass(frozen=True)
class Counted(Codec):
    """Sends values as they are; its state counts sends and what was received."""

    name = "counted"
    personal = True

    def init(self, like):
        return {"sent": jnp.int32(0), "received": jnp.int32(0)}

    def encode(self, tree, state):
        return tree, {**state, "sent": state["sent"] + 1}

    def decode(self, payload, like):
        return payload

    def nbytes(self, like):
        return 4 * sum(x.size for x in jax.tree.leaves(like))

    def receive(self, mean, state, took_part):
        return mean, {**state, "received": state["received"] + 1}


def functions(codec=None, landing=None, outer=COUNT, **settings):
    method = dataclasses.replace(lc.methods.diloco(2, outer), landing=landing)
    setup = Setup(None, optax.sgd(0.1), method, R, mesh=REGIONS.mesh, **settings)
    return RoundFunctions(setup, MeshExchange(REGIONS, codec), method, ((outer, landing),))


def rows(*values):
    """One number of each region, or of the anchor."""
    return {"w": np.float32(values)[:, None]}


def found(tree):
    return np.asarray(tree["w"])[:, 0].tolist()


TAKES, WEIGHT = np.array([True, True, False]), np.float32([1, 1, 1])


def test_a_send_is_of_those_who_take_part_and_are_finite():
    """Neither the residual of the absent nor that of a region left out moves."""
    state = jax.tree.map(lambda x: jnp.full(R, x), Counted().init(None))
    send = jax.jit(functions(Counted()).make_payload, static_argnames="with_snapshot")
    theta = rows(1, np.nan, 5)
    senders = Senders(TAKES, np.float32([2, 3, 4]))
    out = send(Values(theta, {}), rows(4), state, {}, senders, with_snapshot=True)
    assert found(out["payload"])[0] == 4 - 1
    assert out["accepted"].tolist() == [True, False, False]
    assert out["weight"].tolist() == [2, 0, 0]
    assert out["left_out"].tolist() == [False, True, False]
    assert out["codec_state"]["sent"].tolist() == [1, 0, 0]
    np.testing.assert_array_equal(out["snapshot"]["w"], theta["w"])


@pytest.mark.parametrize(
    ("weight", "if_news", "moves"),
    [((1, 3, 0), False, True), ((0, 0, 0), False, False), ((1, 3, 0), True, True)],
)
def test_an_anchor_and_all_states_move_only_where_somebody_counts(weight, if_news, moves):
    state = jax.tree.map(lambda x: jnp.full(R, x), Counted().init(None))
    outer = optax.chain(COUNT, optax.scale(-1.0))
    act = jax.jit(functions(Counted(), outer=outer).outer_step, static_argnames="if_news")
    start, payload = rows(*[10] * R), rows(2, 4, np.nan)
    held, weight = AnchorState(start, jax.vmap(outer.init)(start), state), np.float32(weight)
    new, values = act(held, Contributions(payload, weight), {}, TOLD, if_news=if_news)
    assert found(new.anchor) == [10 - 3.5 * moves] * R
    assert new.outer[0].tolist() == [int(moves)] * R
    assert new.codec["received"].tolist() == [int(moves)] * R
    assert values["update_norm"].tolist() == [3.5 * moves] * R
    new, _ = act(held, Contributions(rows(0, 0, 0), weight), {}, TOLD, if_news=True)
    assert found(new.anchor) == [10] * R and not new.outer[0].any(), "no news"


def test_a_landing_is_of_those_who_land_and_were_accepted():
    """The rule adds all that was trained since the send: 2 in each region."""
    land = optax.GradientTransformationExtraArgs(
        lambda params: jnp.int32(0), lambda u, s, params=None, **_: (u, s + 1)
    )
    act = jax.jit(functions(landing=land).landing_step)
    theta, snapshot = rows(3, 5, 7), rows(1, 3, 5)
    lands, accepted = np.array([True, True, False]), np.array([True, False, True])
    target, who = (
        LandingTarget(rows(20), None, snapshot),
        Adoption(accepted, lands, np.int32([1, 1, 1])),
    )

    def landed(theta):
        own = RegionState(Values(theta, {}), jnp.zeros(R, jnp.int32))
        return act(own, target, who, {}, TOLD)

    new = landed(theta)
    assert found(new.values.params) == [20 + 2, 20, 7] and new.landing.tolist() == [1, 0, 0]
    new = landed(rows(np.inf, 5, 7))
    assert found(new.values.params) == [20, 20, 7], "what is not finite is replaced"


def test_what_regions_received_is_that_of_those_who_land():
    act = functions().mark_received
    assert found(act(rows(1, 2, 3), rows(9), None, {}, np.array([True, False, True]))) == [9, 2, 9]
    assert found(functions().restart(rows(1, 2, 3), rows(9), {}, {})[0]) == [9] * R


@pytest.mark.parametrize(
    ("values", "weight", "takes", "expected"),
    [
        ((1, 3, 9), (1, 5, 0), (1, 1, 1), (2, 2, 2)),  # each that counts once
        ((1, np.nan, 3), (1, 1, 1), (1, 1, 0), (2, 2, 3)),
        ((1, 3, 9), (0, 0, 0), (1, 1, 1), (1, 3, 9)),
    ],
)
def test_leaves_that_are_averaged(values, weight, takes, expected):
    average = jax.jit(functions().average_buffers)
    got = average(rows(*values), np.float32(weight), np.array(takes, bool))
    assert found(got) == list(expected)


def test_measurements_of_regions_that_count_have_the_same_weight():
    header = np.float32([[1, 2], [3, 6], [np.nan, np.inf]])
    act, before = jax.jit(functions().mean_header), np.float32([7, 8])
    assert act(header, np.float32([1, 9, 0]), before).tolist() == [2, 4]
    assert act(header, np.float32([0, 0, 0]), before).tolist() == [7, 8]


def test_drift_is_the_distance_from_the_anchor_over_age_and_size():
    params = {"a": np.float32([[1, 2], [3, 4], [5, 0]]), "b": np.float32([[1], [2], [3]])}
    anchor = {"a": np.float32([[2, 2]]), "b": np.float32([[5]])}
    drift = functions().drift
    scale, names = np.float32([0.5, 0.1]), (("a",), ("b",))
    got = drift(params, anchor, {}, [{}, {}], scale, names_K=names)
    np.testing.assert_allclose(got, [[0.5, 0.4], [1.5, 0.3], [2.5, 0.2]], rtol=1e-6)


def test_a_clipped_update_has_the_norm_that_is_told():
    updates, norm = functions(max_update_norm=2.0).clip(rows(8, 1), np.float32([8, 1]))
    assert found(updates) == [2, 1] and norm.tolist() == [2, 1]


def test_the_median_is_that_of_accepted_contributions():
    accepts = functions(outlier_factor=2.0).accepts
    takes = np.array([True, True, True, False, False])
    norm_R = np.float32([1, 2, np.nan, 90, 90])
    assert accepts(norm_R, takes).tolist() == [True, True, False, False, False]
    norm_R = np.float32([1, 4, 1, 90, 90])
    assert accepts(norm_R, takes).tolist() == [True, False, True, False, False]


def test_an_outlier_exceeds_the_bound():
    """Regions that did not move are none, though all norms and their median are 0."""
    accepts, everyone = functions(outlier_factor=2.0).accepts, np.ones(R, bool)
    for norm_R in ((0, 0, 0), (1, 2, 1)):
        assert accepts(np.float32(norm_R), everyone).all()


@pytest.mark.parametrize(("weight", "moves"), [((1, 0, 1), True), ((0, 0, 0), False)])
def test_an_optimizer_stands_still_where_no_gradient_counts(weight, moves):
    layout = SimpleNamespace(tree=lambda tree: tree, select=lambda updates, role: updates)
    step = SimpleNamespace(setup=SimpleNamespace(optimizer=COUNT), layout=layout, init=COUNT.init)
    sent = Contributions(rows(2, np.nan, 4), np.float32(weight))
    start = AnchorState(rows(10), jnp.zeros(1, jnp.int32))
    held, values = by_optimizer(step, functions()).outer_step(start, sent, {})
    assert found(held.anchor) == [10 + 3 * moves] and held.outer.tolist() == [int(moves)]
    assert values["update_norm"].tolist() == [3 * moves]


def test_of_groups_in_which_nobody_counts_neither_anchors_nor_states_move():
    """An anchor is pulled from where it was before it moves."""
    mean, group, moves_R = rows(2, 2, 4), rows(9, 9, 9), jnp.array([True, True, False])
    groups = SimpleNamespace(means=lambda *_: (mean, group, moves_R), topology=Gossip())
    draw, start = SimpleNamespace(anchors=None, members=None), jnp.zeros(R, jnp.int32)
    held, sent = AnchorState(rows(10, 20, 30), start), Contributions(None, None, draw=draw)
    new, values = gossip_step(functions(), groups, held, sent, {}, TOLD)
    assert found(new.anchor) == [12, 22, 30] and new.outer.tolist() == [1, 1, 0]
    assert values["pull_norm"].tolist() == [1, 11, 0]
    assert values["update_norm"].tolist() == [2, 2, 0]
