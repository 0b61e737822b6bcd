"""Typed PRNG keys (`jax.random.key`) in any part of the state are saved, restored and handed on."""

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint.checkpoint_cases import assert_same, values
from jax.sharding import PartitionSpec as P

import lowcomm_jax as lc
from lowcomm_jax.checkpoint import Checkpoints
from lowcomm_jax.compression import LeafCodec, PerTensor
from lowcomm_jax.compression.grid import Unit
from lowcomm_jax.jobs.given_state import given, start_from_peer
from lowcomm_jax.mesh.arrays import fetch, fetch_boxes, is_key, place_like
from lowcomm_jax.recovery.rejoin import install

SGD = optax.sgd(0.1)
LATE = {"alpha": 0.5, "period": 2, "fragments": 1, "overlap": 1}


@dataclasses.dataclass(frozen=True)
class Dithered(LeafCodec):
    """Keeps a key in its state, and sends the one it has used."""

    name = "dithered"
    layers_apart = False

    def unit_of(self, matrices):
        return Unit(1, 1)

    def init(self, place, seed):
        return jax.random.key(seed)

    def encode(self, x, state, place, params=None):
        state, used = jax.random.split(state)
        return {"x": x + jax.random.uniform(used, x.shape), "used": used}, state

    def decode(self, payload, place):
        return payload["x"] - jax.random.uniform(payload["used"], payload["x"].shape)

    def payload_specs(self, place):
        return {"x": place.array_spec(place.matrices), "used": P()}

    def state_specs(self, place):
        return P()


CODEC = PerTensor(Dithered())


def noisy(then, implementation=None):
    return optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3, impl=implementation)), then)


def loss_fn(params, batch, rng):
    del rng
    loss = jnp.mean((params["w"][None] - batch) ** 2)
    if "key" not in params:
        return loss
    used, key = jax.random.split(params["key"])
    loss += 0.1 * jnp.sum(params["w"] * jax.random.normal(used, params["w"].shape))
    return loss, {"updates": {"key": key}}


def params(*names):
    every = {
        "w": jnp.zeros(4),
        "key": jax.random.key(1),
        "table": jax.random.split(jax.random.key(2)),
    }
    return {name: every[name] for name in ("w", *names)}


def make(inner=SGD, method=None, regions=2, names=(), **settings):
    roles = {"w": "train", "key": "local", "table": "frozen"}
    return lc.Engine(
        loss_fn,
        inner,
        method or lc.methods.diloco(2),
        regions,
        mesh=lc.make_mesh(region=settings.pop("slots", 1)),
        roles={name: roles[name] for name in ("w", *names)},
        **settings,
    )


def trained(engine, state, steps=3):
    for t in range(steps):
        state, _ = engine.step(state, np.full((engine.regions.count, 1, 4), t, np.float32))
    return state


def save(folder, engine, state):
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(state, extra={}, config={}, method=engine.method)


def restore(folder, engine, like, **settings):
    with Checkpoints(folder) as checkpoints:
        return checkpoints.restore(engine, like, **settings).state


CASES = {
    "inner": lambda: make(noisy(SGD)),
    "rbg": lambda: make(noisy(SGD, "rbg")),
    "slots": lambda: make(noisy(SGD), slots=2),
    "vmap": lambda: make(noisy(SGD), replicas="vmap"),
    "gradients": lambda: make(noisy(SGD), lc.methods.ddp()),
    "outer": lambda: make(SGD, lc.methods.diloco(2, noisy(lc.outer.nesterov(0.7, 0.9)))),
    "codec": lambda: make(SGD, lc.methods.diloco(2, codec=CODEC), slots=2),
    "in flight": lambda: make(SGD, lc.methods.streaming_diloco(**LATE, codec=CODEC)),
    "offload": lambda: make(
        SGD, lc.methods.diloco(2, noisy(lc.outer.sgd(0.5)), codec=CODEC), offload=True
    ),
    "leaves": lambda: make(names=("key", "table")),
}


@pytest.mark.parametrize("name", CASES)
def test_a_restored_run_goes_on_as_the_one_that_was_saved(name, tmp_path):
    one, like = CASES[name](), params(*(("key", "table") if name == "leaves" else ()))
    steps = 2 if name == "in flight" else 3
    state = trained(one, one.init(like), steps)
    assert any(map(is_key, jax.tree.leaves(state)))
    assert bool(state.in_flight) == (name == "in flight")
    save(tmp_path, one, state)
    expected = values(state)
    other = CASES[name]()
    found = restore(tmp_path, other, like)
    assert_same(values(found), expected)
    kinds = [(x.dtype, x.sharding) for x in jax.tree.leaves(state) if is_key(x)]
    for x, (dtype, sharding) in zip(filter(is_key, jax.tree.leaves(found)), kinds, strict=True):
        assert x.dtype == dtype
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
        assert x.sharding.memory_kind == sharding.memory_kind
    assert_same(values(trained(other, found)), values(trained(one, state)))


def test_a_new_region_takes_over_the_keys_of_the_first(tmp_path):
    one = make(noisy(SGD))
    save(tmp_path, one, trained(one, one.init(params())))
    three = make(noisy(SGD), regions=3)
    state = restore(tmp_path, three, params(), change_regions=True)
    words = jax.random.key_data(state.inner.opt[0].rng_key)
    assert words.shape == (3, 2) and (words == words[:1]).all()
    assert int(trained(three, state).counters.step) == 6


def test_keys_of_another_kind_are_refused(tmp_path):
    one = make(noisy(SGD, "rbg"))
    save(tmp_path, one, trained(one, one.init(params())))
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.document()["keys"] == {"inner/opt/0/rng_key": "rbg"}
    with pytest.raises(ValueError) as error:
        restore(tmp_path, make(noisy(SGD, "unsafe_rbg")), params())
    line = 'keys.inner/opt/0/rng_key: "rbg" -> "unsafe_rbg"'
    assert str(error.value).splitlines()[1:] == [f"- {line}"]


def test_a_state_without_typed_keys_is_saved_as_before(tmp_path):
    one = make(optax.adam(0.1))
    save(tmp_path, one, trained(one, one.init(params())))
    with Checkpoints(tmp_path) as checkpoints:
        assert "keys" not in checkpoints.document()


def test_words_on_the_host_and_keys_where_they_lay():
    keys = jax.random.split(jax.random.key(5), 3)
    words = np.asarray(jax.random.key_data(keys))
    host = fetch({"key": keys})
    assert_same(host, {"key": words})
    ((first, values),) = fetch_boxes({"key": keys}, leads=True)["key"]
    assert first == (0, 0) and (values == words).all()
    (again,) = place_like([host["key"]], [keys])
    assert again.dtype == keys.dtype and (again == keys).all() and again.sharding == keys.sharding


def test_a_region_that_comes_back_takes_the_keys_of_the_outer_state():
    one = make(SGD, lc.methods.diloco(2, noisy(lc.outer.nesterov(0.7, 0.9))))
    donor = trained(one, one.init(params()))
    _, arrays, document = given(donor, one.method)
    fresh = one.init(params())

    carrier = SimpleNamespace(acting=lambda sends: nullcontext(), reconnect=lambda *_: None)
    loop = SimpleNamespace(carrier=carrier, method=one.method)
    got = install(loop, fresh, arrays, document)
    for found, expected in zip(jax.tree.leaves(got.outer), jax.tree.leaves(donor.outer)):
        assert found.dtype == expected.dtype and (found == expected).all()


def test_a_learner_copies_the_keys_of_a_peer():
    one = make(noisy(SGD), lc.methods.decoupled_diloco(2, 1, 1))
    peer = trained(one, one.init(params()))
    _, arrays, document = given(peer, one.method)
    got = start_from_peer(one.sync_loop(peer), one.init(params()), arrays, document)
    found, expected = got.inner.opt[0].rng_key, peer.inner.opt[0].rng_key
    assert found.dtype == expected.dtype and (found == expected).all()
