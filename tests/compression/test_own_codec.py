"""Codecs of one's own: the same however a region's devices cut the leaves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from own_parts import RowSign

import lowcomm_jax as lc
from lowcomm_jax.compression import PerTensor, UnitCodec
from lowcomm_jax.compression.grid import Unit

SHAPES = [(3, 8), (5, 4)]
MORE = [(3, 4, 16), (6, 8), (6, 16), (2, 3, 8), (12,), (8, 4)]


@dataclasses.dataclass(frozen=True)
class Triples(UnitCodec):
    """bf16, of which three neighbouring rows share a scale; a mean may be encoded again."""

    name = "triples"
    unit = Unit(3, 1 << 30)

    def encode(self, x, matrix, params=None):
        scale = jnp.max(jnp.abs(x), axis=(3, 4)) + 1e-3
        return {"x": (x / scale[..., None, None]).astype(jnp.bfloat16), "scale": scale}

    def decode(self, payload, unit):
        return payload["x"].astype(jnp.float32) * payload["scale"][..., None, None]


def trained(codec, mesh, shapes):
    """The anchor after two rounds of two regions that are pulled to points of their own."""

    def loss_fn(params, batch, rng):
        return sum(jnp.sum(jnp.square(x - jnp.mean(batch) * x[::-1])) for x in params.values())

    draw = np.random.default_rng(0).standard_normal
    params = {f"w{i}": draw(shape).astype(np.float32) for i, shape in enumerate(shapes)}
    batches = [np.stack([np.full((4, 1), 0.3 * r, np.float32) for r in (1, 2)])] * 4
    method = lc.methods.diloco(2, codec=codec)
    engine = lc.Engine(loss_fn, optax.sgd(0.05), method, 2, mesh=mesh)
    state, _ = engine.run(engine.init(params), batches)
    return jax.device_get(lc.global_params(state))


@pytest.mark.parametrize(
    ("codec", "shapes", "fsdp", "apart"),
    [
        (PerTensor(RowSign()), SHAPES, 2, 0),
        pytest.param(PerTensor(RowSign()), SHAPES + MORE, 4, 0, marks=pytest.mark.slow),
        (PerTensor(Triples(), reduce="two_shot"), [(18, 4)], 2, 0),
    ],
)
def test_anchors_are_the_same_on_every_mesh(codec, shapes, fsdp, apart):
    whole = trained(codec, lc.make_mesh(), shapes)
    for name, x in trained(codec, lc.make_mesh(fsdp=fsdp), shapes).items():
        np.testing.assert_allclose(x, whole[name], rtol=0, atol=apart, err_msg=name)


@dataclasses.dataclass(frozen=True)
class Flags(UnitCodec):
    """The signs as bools, which are none of the wire's numbers."""

    name = "flags"
    unit = Unit(1, 1 << 30)
    requantizable = False

    def encode(self, x, matrix, params=None):
        return {"up": x > 0, "scale": matrix.unit_sums(jnp.abs(x))}

    def decode(self, payload, unit):
        scale = payload["scale"][..., None, None]
        return jnp.where(payload["up"], scale, -scale)


def test_bools_travel_beside_inner_steps_too():
    found = []
    for beside in (False, True):
        method = lc.methods.streaming_diloco(2, 1, 1, 0.5, codec=Flags())
        engine = lc.Engine(
            lambda params, batch, rng: jnp.sum(params["w"] * jnp.mean(batch)),
            optax.sgd(0.05),
            method,
            2,
            mesh=lc.make_mesh(2),
            concurrent_exchange=beside,
        )
        batches = [np.stack([np.full((4, 1), 0.3 * r, np.float32) for r in (1, 2)])] * 5
        state, _ = engine.run(engine.init({"w": np.ones((3, 5), np.float32)}), batches)
        found.append(np.asarray(lc.global_params(state)["w"]))
    np.testing.assert_array_equal(*found)


@pytest.mark.skipif(
    jax.__version_info__[:2] == (0, 11),
    reason="the compiler of jaxlib 0.11.2 crashes where inner steps carry a leaf without values",
)
@pytest.mark.parametrize("codec", [None, "bf16", "topk", "random_k"])
def test_leaves_without_values_and_of_two(codec):
    """A leaf of shape [2] has the shape of random_k's key; one without values has no slices."""

    def loss_fn(params, batch, rng):
        return sum(jnp.sum(x) for x in params.values()) * jnp.mean(batch)

    start = {"bias": np.ones(2, np.float32), "none": np.ones((0, 5), np.float32)}
    start["w"] = np.ones((16, 8), np.float32)
    found = []
    for mesh in (lc.make_mesh(), lc.make_mesh(2), lc.make_mesh(2, fsdp=2)):
        method = lc.methods.diloco(2, codec=codec)
        engine = lc.Engine(loss_fn, optax.sgd(0.1), method, 2, mesh=mesh)
        batches = [np.stack([np.full((2, 1), r, np.float32) for r in (1, 2)])] * 4
        state, _ = engine.run(engine.init(start), batches)
        found.append(jax.device_get(lc.global_params(state)))
    for other in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, found[0], other)


def test_vectors_are_coded_as_they_lie():
    """Groups of random_k and blocks lie within a device's part of a vector."""
    for name in ("random_k", "int4"):
        codec = lc.compression.make(name)
        like = {"v": jax.ShapeDtypeStruct((8192,), np.float32)}
        placed = codec.placed(like, {"v": P("fsdp")}, {"region": 1, "fsdp": 4}, False)
        place = placed.places["v"]
        assert place.axes == ((), (), ("fsdp",)) and not place.gathers and not place.moves


def test_a_stack_that_is_coded_at_once_is_gathered_at_once():
    like = {"w": jax.ShapeDtypeStruct((5, 2500, 3000), np.float32)}
    specs, sizes = {"w": P(None, None, "fsdp")}, {"region": 1, "fsdp": 8}
    with pytest.raises(ValueError, match="more than 128 MiB is not gathered"):
        lc.compression.make("random_k", one_in=48, stacked=("w",)).placed(like, specs, sizes, False)
    placed = lc.compression.make("topk", stacked=("w",)).placed(like, specs, sizes, False)
    assert placed.places["w"].one_by_one
