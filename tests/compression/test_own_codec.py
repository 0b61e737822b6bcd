"""Codecs of one's own: the same however a region's devices cut the leaves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
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
