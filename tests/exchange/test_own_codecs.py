"""Codecs of trees of one's own: what they keep, and how they travel."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import lowcomm_jax as lc
from lowcomm_jax.compression import Codec, error_feedback, make, route
from lowcomm_jax.compression.base import Wrapper

LIKE = {"w": jax.ShapeDtypeStruct((64, 64), np.float32)}


@dataclasses.dataclass(frozen=True)
class Feedback(Wrapper):
    """Error feedback whose state's place is the test's."""

    place: str = "by name"

    @property
    def name(self):
        return "own"

    def init(self, like):
        zeros = {k: jnp.zeros(x.shape) for k, x in like.items()}
        flat = jnp.zeros(sum(x.size for x in like.values()))
        return {"by name": zeros, "renamed": {"all": flat}}[self.place], self.codec.init(like)

    def requantizable(self, like):
        return self.codec.requantizable(like)

    def encode(self, tree, state, params=None):
        payload, inner = self.codec.encode(tree, state[1])
        return payload, (state[0], inner)


@dataclasses.dataclass(frozen=True)
class Holder(Codec):
    """Of whole trees, which it does not know how to find in parts."""

    inside: Codec

    name = "holder"

    def init(self, like):
        return self.inside.init(like)

    def encode(self, tree, state, params=None):
        return self.inside.encode(tree, state)

    def decode(self, payload, like):
        return self.inside.decode(payload, like)

    def nbytes(self, like):
        return self.inside.nbytes(like)


def engine(codec, regions=4, fsdp=2):
    def loss_fn(params, batch, rng):
        return jnp.mean((batch @ params["w"]) ** 2)

    method = lc.methods.diloco(2, codec=codec)
    mesh = lc.make_mesh(region=2, fsdp=fsdp)
    return lc.Engine(
        loss_fn, optax.sgd(0.1), method, regions, mesh=mesh, specs=lambda *_: P("fsdp")
    )


@dataclasses.dataclass(frozen=True)
class Again(Holder):
    """Says that its means may be encoded again, and cannot cut its payloads."""

    def requantizable(self, like):
        return True


@dataclasses.dataclass(frozen=True)
class Sliced(Again):
    def in_slices(self, slices):
        return self


def test_a_codec_that_cannot_cut_what_it_says_is_refused_with_what_it_lacks():
    for codec, name in ((Again, "in_slices"), (Sliced, "dealt_nbytes")):
        line = f"holder is requantizable and has no {name}: write it, or leave requantizable out"
        with pytest.raises(ValueError, match=line):
            route(codec(make("int4")), [LIKE], 4)


def test_state_under_another_name_is_refused_where_leaves_are_cut():
    params = {"w": jnp.ones((64, 64))}
    with pytest.raises(ValueError, match=r"codec own: its state .*all.* under no leaf's name"):
        engine(Feedback(make("int4"), "renamed")).init(params)
    state = engine(Feedback(make("int4"), "by name")).init(params)
    assert state.codec[0][0]["w"].sharding.shard_shape((4, 64, 64))[1] == 32
    engine(Feedback(make("int4"), "renamed"), fsdp=1).init(params)


def test_a_codec_of_whole_trees_is_given_them_on_every_mesh():
    """Its anchor is that of the codec inside, whose parts lie on two devices."""
    batches = [np.full((4, 2, 64), 0.01 * i, np.float32) for i in range(1, 5)]
    anchors = []
    for codec in (Holder(make("int4", reduce="all_gather")), make("int4", reduce="all_gather")):
        one = engine(codec)
        state, _ = one.run(one.init({"w": jnp.ones((64, 64))}), batches)
        anchors.append(np.asarray(lc.global_params(state)["w"]))
    np.testing.assert_allclose(*anchors, atol=1e-6)


def test_a_wrapper_of_ones_own_travels_in_slices():
    own, known = Feedback(make("int4")), error_feedback(make("int4"))
    assert route(own, [LIKE], 4).name == route(known, [LIKE], 4).name == "two_shot"
    assert route(own, [LIKE], 4).two_shot == route(known, [LIKE], 4).two_shot
