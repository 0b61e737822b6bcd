"""A codec that reads the weights is given those that Delta is measured against, at the send."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from own_parts import Relative
from refused_lines import lines_of

import lowcomm_jax as lc
from lowcomm_jax.channels import Channel
from lowcomm_jax.compression import (
    PerTensor,
    compress,
    decoupled_momentum,
    ef21,
    error_feedback,
)
from lowcomm_jax.methods import Method
from lowcomm_jax.rules.topology import Gossip
from lowcomm_jax.schedule import Staggered

REGIONS, PERIOD, RATE, OUTER = 4, 2, 0.25, 0.5
SLOPES = np.array([1.0, -2.0, 0.5, 1.5], np.float32)
SHAPES = {"a": (8, 4), "b": (3, 5, 2), "c": (7,)}


def loss_fn(params, batch, rng):
    """A slope for each region: each inner step moves every value by RATE times it."""
    return jnp.mean(batch) * sum(jnp.sum(x) for x in params.values())


def start():
    rng = np.random.default_rng(0)
    return {k: rng.uniform(0.5, 1.5, shape).astype(np.float32) for k, shape in SHAPES.items()}


def train(method, rounds=3, absent=(), **settings):
    engine = lc.Engine(loss_fn, optax.sgd(RATE), method, REGIONS, **settings)
    state = engine.init(start())
    batch = np.broadcast_to(SLOPES[:, None], (REGIONS, 2))
    for step in range(1, rounds * PERIOD + 1):
        here = np.array([(step, r) not in absent for r in range(REGIONS)])
        state, _ = engine.step(state, batch, here)
    return jax.device_get(state.anchor)


DELTA = PERIOD * RATE * SLOPES  # of every value


def plain(**changes):
    outer = optax.sgd(OUTER)
    return Method("mine", Staggered(PERIOD), outer, codec=PerTensor(Relative()), **changes)


MESHES = {
    "one device": lambda: {"mesh": lc.make_mesh(devices=jax.devices()[:1])},
    "two slots": lambda: {"mesh": lc.make_mesh(region=2)},
    "cut": lambda: {
        "mesh": lc.make_mesh(region=2, fsdp=2),
        "specs": lambda path, leaf: P("fsdp") if leaf.shape == (8, 4) else P(),
    },
    "every slot": lambda: {"mesh": lc.make_mesh(region=4)},
}


@pytest.mark.parametrize("mesh", MESHES)
def test_the_anchor_that_all_regions_share(mesh):
    """Each round multiplies the anchor by 1 - OUTER mean(Delta), of those who take part."""
    got = train(plain(), 2, absent=((4, 1),), **MESHES[mesh]())
    for key, x in start().items():
        for mean in (DELTA.mean(), DELTA[[0, 2, 3]].mean()):
            x = x * (1 - OUTER * mean)
        np.testing.assert_allclose(got[key][0], x, rtol=1e-5, err_msg=key)


def test_an_anchor_for_each_region():
    method = plain(anchors="per_region", topology=Gossip(2, seed=3))
    got = train(method)
    for key, x in start().items():
        theta = np.stack([x] * REGIONS)
        for number in range(3):
            sent = theta * DELTA.reshape(-1, *(1,) * x.ndim)
            for group in lc.topology.Gossip(2, 3).groups(number, REGIONS):
                theta[list(group)] -= OUTER * sent[list(group)].mean(0)
        np.testing.assert_allclose(got[key], theta, rtol=1e-5, err_msg=key)
        assert np.ptp(theta, axis=0).min() > 0.1


def test_the_anchor_that_a_region_received():
    """Arrivals one by one: the later ones of a tick were measured against the older anchor."""
    own = {"speeds": (1.0,) * REGIONS, "learning_rate": OUTER, "momentum": 0.0}
    method = lc.methods.async_local_sgd(PERIOD, **own, codec=PerTensor(Relative()))
    outer = optax.sgd(OUTER)
    got = train(dataclasses.replace(method, outer=outer))
    for key, x in start().items():
        for _ in range(3):
            x = x * (1 - OUTER * DELTA.sum())
        np.testing.assert_allclose(got[key][0], x, rtol=1e-5, err_msg=key)


def test_what_servers_and_their_regions_measure_against():
    """With one server, whose change of every round the global model takes over at once."""
    codec = PerTensor(Relative())
    method = lc.methods.halos(PERIOD, (1.0,) * REGIONS, (tuple(range(REGIONS)),), every=REGIONS)
    servers = dataclasses.replace(method.servers, outer=optax.sgd(OUTER), blend=1.0, codec=codec)
    method = dataclasses.replace(method, outer=optax.sgd(OUTER), servers=servers, codec=codec)
    got = train(method)
    for key, x in start().items():
        server, received = x, [x] * REGIONS
        for _ in range(3):
            merged = server
            for r, delta in enumerate(DELTA):
                server = server - OUTER * received[r] * delta
                received[r] = server
            server = x = x - OUTER * merged * (merged - server)
        np.testing.assert_allclose(got[key][0], x, rtol=1e-5, err_msg=key)


def test_in_an_optax_program():
    rule, params = compress(PerTensor(Relative())), {"w": jnp.array([2.0, -3.0])}
    updates = {"w": jnp.array([1.0, 0.5])}
    sent, _ = rule.update(updates, rule.init(params), params)
    np.testing.assert_array_equal(sent["w"], [2.0, -1.5])
    with pytest.raises(ValueError, match="relative reads the weights: give params"):
        rule.update(updates, rule.init(params))


def test_where_nothing_is_measured_against_weights():
    codec = PerTensor(Relative())
    channel = Channel("values", codec=codec)
    (line,) = lines_of(dataclasses.replace(lc.methods.diloco(4), channels=(channel,)))
    assert "channel values: codec relative compares changes with the weights" in line
    with pytest.raises(ValueError, match=r"relative compares changes .* use error_feedback"):
        ef21(codec)
    assert error_feedback(codec).reads_params and decoupled_momentum(codec).reads_params
