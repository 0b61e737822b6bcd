"""Codecs of one's own: what cannot be sharded or unwrapped is refused, with what is missing."""

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
    in_slices = True

    @property
    def name(self):
        return "own"

    def init(self, like):
        zeros = {k: jnp.zeros(x.shape) for k, x in like.items()}
        flat = jnp.zeros(sum(x.size for x in like.values()))
        return {"by name": zeros, "renamed": {"all": flat}}[self.place], self.codec.init(like)

    def encode(self, tree, state):
        payload, inner = self.codec.encode(tree, state[1])
        return payload, (state[0], inner)


class Unsaid(Feedback):
    in_slices = None


@dataclasses.dataclass(frozen=True)
class Holder(Codec):
    inside: Codec

    name = "holder"

    def init(self, like):
        return self.inside.init(like)

    def encode(self, tree, state):
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


def test_state_under_another_name_is_refused_where_leaves_are_cut():
    params = {"w": jnp.ones((64, 64))}
    with pytest.raises(ValueError, match=r"codec own: its state .*all.* under no leaf's name"):
        engine(Feedback(make("int4"), "renamed")).init(params)
    state = engine(Feedback(make("int4"), "by name")).init(params)
    assert state.codec[0][0]["w"].sharding.shard_shape((4, 64, 64))[1] == 32
    engine(Feedback(make("int4"), "renamed"), fsdp=1).init(params)


def test_a_wrapper_that_does_not_say_whether_slices_work_is_refused():
    with pytest.raises(ValueError, match="Unsaid wraps a codec and does not say"):
        route(Unsaid(make("int4")), [LIKE], 4)
    with pytest.raises(ValueError, match=r"Unsaid wraps a codec.*set in_slices = True"):
        engine(error_feedback(Unsaid(make("int4"))))
    with pytest.raises(ValueError, match="Holder holds another codec in inside"):
        engine(Holder(make("int4")))


def test_a_wrapper_of_ones_own_travels_in_slices():
    own, known = Feedback(make("int4")), error_feedback(make("int4"))
    assert route(own, [LIKE], 4).name == route(known, [LIKE], 4).name == "two_shot"
    assert route(own, [LIKE], 4).two_shot == route(known, [LIKE], 4).two_shot
