"""Tensors of every kind of shape, sharded inside a region: nobody gathers one to code it."""

import jax
import numpy as np
import pytest
from engine.collectives import sent_across, sized
from jax.sharding import PartitionSpec as P

from lowcomm_jax.compression import make, route
from lowcomm_jax.exchange import MeshExchange
from lowcomm_jax.regions import Regions, make_mesh

R, DEVICES = 2, 4


def gathered(codec, shape, spec):
    """All-gathers inside a region in one round of one leaf; checks the bytes, too."""
    regions = Regions(R, make_mesh(region=R, fsdp=DEVICES))
    like = {"w": jax.ShapeDtypeStruct(shape, np.float32)}
    codec = route(codec, [like], R, DEVICES).codec
    exchange, specs = MeshExchange(regions, codec), {"w": spec}
    where = regions.sharding("region", *spec)
    delta_R = {"w": jax.ShapeDtypeStruct((R, *shape), np.float32, sharding=where)}
    states = jax.tree.map(lambda s: np.stack([s] * R), codec.init(like))
    bases = codec.bases(like)

    def one_round(delta_R, states, bases):
        payload, states = exchange.encode(delta_R, states, specs, bases)
        weight_R = np.ones(R, np.float32)
        reduced = exchange.reduce(payload, weight_R, like, specs, bases=bases)
        return reduced, payload, states

    program = jax.jit(one_round).lower(delta_R, states, bases)
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(program.out_info[1])]
    assert sum(sizes) == R * exchange.nbytes(like)
    found = sized(program.compile().as_text())
    inside = [c for c in found if not sent_across([c], DEVICES, R).any()]
    return [c for c in inside if c.kind == "all-gather"]


QUICK = [("int4", (256, 36), P("fsdp")), ("sign", (256, 36), P("fsdp"))]
CASES = [
    (name, (256, m), P("fsdp")) for name in ("int8", "e3m0", "stat4", "stat8") for m in (32, 257)
]


@pytest.mark.parametrize(
    "name,shape,spec", QUICK + [pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
)
def test_rows_are_coded_where_they_lie(name, shape, spec):
    found = gathered(make(name, reduce="all_gather"), shape, spec)
    # Books and sums over the devices; less than a bit a value.
    assert max((c.nbytes for c in found), default=0) < np.prod(shape) / 16


BY_COLUMNS = [((255, 256), P(None, "fsdp")), ((6, 64, 256), P(None, None, "fsdp"))]


@pytest.mark.parametrize("shape,spec", [*BY_COLUMNS, ((130, 4), P(None, "fsdp"))])
@pytest.mark.parametrize("name", ["bf16", "low_rank", "low_rank_int4", "low_rank_shared_int4"])
@pytest.mark.parametrize("reduce", ["all_gather", "two_shot"])
def test_columns_stay_where_they_lie(name, shape, spec, reduce):
    """Casts and products with factors need no rows."""
    if reduce == "two_shot" and name != "bf16":
        pytest.skip("factors travel whole")
    rank = {"rank": 4} if name.startswith("low_rank") else {}
    found = gathered(make(name, reduce=reduce, **rank), shape, spec)
    # A factor of r N or r M values in fp32, or of 2 r.
    assert max((c.nbytes for c in found), default=0) <= 4 * 8 * 400 * bool(rank)
