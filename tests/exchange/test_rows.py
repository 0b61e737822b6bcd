"""Tensors of every kind of shape, sharded inside a region: nobody gathers one to code it."""

import jax
import numpy as np
import pytest
from engine.collectives import sent_across, sized
from jax.sharding import PartitionSpec as P

from lowcomm_jax.compression import make, route
from lowcomm_jax.exchange import MeshExchange
from lowcomm_jax.mesh.regions import Regions, make_mesh

R, DEVICES = 2, 4
BOTH = {"fsdp": 2, "tensor": 2}


def values_of(shape, far=0.0):
    return far + np.random.default_rng(0).standard_normal((R, *shape)).astype("f4")


def one_round(codec, shape, spec, mesh=None, name="w", slices=DEVICES, far=0.0):
    """What a round of one leaf gives, and the collectives inside a region; checks the bytes, too.

    Args:
      far: from zero, the values.
      mesh: None = one device a region, with the very codec that four devices share.
      slices: devices that the slices of a two-shot reduction are cut for.

    """
    regions = Regions(R, make_mesh(region=R, **(mesh or {})))
    like = {name: jax.ShapeDtypeStruct(shape, np.float32)}
    codec = route(codec, [like], R, slices).codec
    exchange = MeshExchange(regions, codec, ("layers",))
    specs = {name: spec if mesh else P()}
    delta_R = {
        name: jax.device_put(values_of(shape, far), regions.sharding("region", *specs[name]))
    }
    states = jax.tree.map(lambda s: np.stack([s] * R), codec.init(like))

    def run(delta_R, states):
        payload, states = exchange.encode(delta_R, states, specs)
        weight_R = np.ones(R, np.float32)
        reduced = exchange.reduce(payload, weight_R, like, specs)
        return payload, reduced.mean, states

    program = jax.jit(run).lower(delta_R, states).compile()
    out = program(delta_R, states)
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(out[0])]
    assert sum(sizes) == R * exchange.nbytes(like)
    found = sized(program.as_text())
    return out, [c for c in found if not sent_across([c], DEVICES, R).any()]


def gathered(codec, shape, spec):
    """All-gathers inside a region in one round of one leaf."""
    found = one_round(codec, shape, spec, {"fsdp": DEVICES})[1]
    return [c for c in found if c.kind == "all-gather"]


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
@pytest.mark.parametrize("name", ["bf16", "low_rank", "low_rank_int4"])
@pytest.mark.parametrize("reduce", ["all_gather", "two_shot"])
def test_columns_stay_where_they_lie(name, shape, spec, reduce):
    """Casts and products with factors need no rows."""
    if reduce == "two_shot" and name != "bf16":
        pytest.skip("factors travel whole")
    rank = {"rank": 4} if name.startswith("low_rank") else {}
    found = gathered(make(name, reduce=reduce, **rank), shape, spec)
    # A factor of r N or r M values in fp32, or of 2 r.
    assert max((c.nbytes for c in found), default=0) <= 4 * 8 * 400 * bool(rank)


CODECS = ["int8", "int4_affine", "e3m0", "stat4", "stat8", "sign", "topk", "topk_stat2_ef"]
CODECS += ["dct_topk", "random_k", "bf16", "low_rank"]
VECTOR = ((4096,), P("fsdp"), {"fsdp": 4})
ODD = ((1255, 64), P(None, "fsdp"), {"fsdp": 4})
NARROW = ((2048, 6), P("fsdp"), {"fsdp": 4})
MIDDLE = ((3, 128, 67), P(None, "fsdp"), {"fsdp": 4})
LAYERS = ((2, 6, 64, 64), P(None, None, "fsdp", "tensor"), BOTH)
SHAPES = [VECTOR, ODD, NARROW, MIDDLE, LAYERS]
# Fewer rows of chunks than devices: one, of even fewer rows; two, whose columns do not divide; and
# two of two chunks.
FLAT = ((3, 4096), P(None, "fsdp"), {"fsdp": 4})
WIDE = ((100, 333), P("fsdp"), {"fsdp": 4})
SQUARE = ((128, 128), P("fsdp"), {"fsdp": 4})
HEADS = ((2, 4, 64, 320), P(None, None, "tensor", "fsdp"), BOTH)
STRIPS = [("topk", FLAT), ("dct_topk", SQUARE), ("topk_stat2_ef", SQUARE), ("dct_topk", HEADS)]
QUICKLY = [("int8", ODD), ("stat4", NARROW), ("topk_stat2_ef", ODD), ("random_k", LAYERS)]
QUICKLY += [("dct_topk", WIDE)]
SLICED = [("int8", ODD, "two_shot"), ("stat4", VECTOR, "two_shot")]
REST = [(name, case) for name in CODECS for case in SHAPES if (name, case) not in QUICKLY]
REST += STRIPS
TWICE = [(n, case, "two_shot") for n in ("int8", "stat4", "bf16") for case in SHAPES]


@pytest.mark.parametrize(
    "name,case,reduce",
    [(*one, "all_gather") for one in QUICKLY]
    + SLICED
    + [pytest.param(*one, "all_gather", marks=pytest.mark.slow) for one in REST]
    + [pytest.param(*one, marks=pytest.mark.slow) for one in TWICE if one not in SLICED],
)
def test_nobody_gathers_a_tensor_and_the_devices_change_nothing(name, case, reduce):
    check(make(name, stacked=("layers",), reduce=reduce), case, DEVICES)


def test_what_fills_up_a_block_widens_no_range_in_windows():
    """As `test_edge_padding.py` for whole leaves: rows of 257 in blocks of 129."""
    shape, spec, mesh = (3, 128, 257), P(None, "fsdp"), {"fsdp": 4}
    codec = make("int8_affine", reduce="all_gather")
    (_, mean, _), _ = one_round(codec, shape, spec, mesh, far=100.0)
    wanted = values_of(shape, 100.0).mean(axis=0)
    # 256 levels over 129 normal values, 9 apart at most; from zero they would be 109 apart.
    np.testing.assert_allclose(np.asarray(mean["w"])[0], wanted, atol=9 / 255)


# Fewer rows than slices of four devices take; and slices that do not depend on devices, as jobs
# have, of vectors, and of tensors cut by columns, by rows, and behind the axis of the layers.
FEW = [("int8", 4, ((12, 4096), P("fsdp"), {"fsdp": 4}))]
EXCHANGES = [
    ("stat4", 1, ((255, 64), P(None, "fsdp"), {"fsdp": 4})),
    ("int8", 1, VECTOR),
    ("bf16", 1, VECTOR),
    ("bf16", 1, ((252, 64), P("fsdp"), {"fsdp": 4})),
    ("int8", 1, ((252, 64), P("fsdp"), {"fsdp": 4})),
    ("int8", 1, ((2, 6, 43, 64), P(None, None, "tensor", "fsdp"), {"fsdp": 4})),
]


@pytest.mark.parametrize(
    "name,slices,case",
    FEW + EXCHANGES[:1] + [pytest.param(*one, marks=pytest.mark.slow) for one in EXCHANGES[1:]],
)
def test_nobody_gathers_a_tensor_whose_rows_do_not_divide_over_slices(name, slices, case):
    check(make(name, stacked=("layers",), reduce="two_shot"), case, slices)


def check(codec, case, slices):
    shape, spec, mesh = case
    leaf = "layers/w" if len(shape) == 4 else "w"
    alone = one_round(codec, shape, spec, name=leaf, slices=slices)[0]
    shared, found = one_round(codec, shape, spec, mesh, leaf, slices)
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(shared)):
        # Codes may differ by one where a statistic differs in its last bit.
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.mean(np.abs(a - b) > 1e-5) < 1e-3
    whole = 4 * np.prod(shape)
    for one in found:
        # Scales, books, and statistics over the devices, padded a little; else about a device's own
        # shard.
        together = one.kind in ("all-gather", "all-reduce")
        assert one.nbytes <= whole / (15.9 if together else 2), one


@pytest.mark.parametrize("name", ["int8", pytest.param("stat4", marks=pytest.mark.slow)])
def test_rows_that_do_not_divide_over_the_devices_that_cut_them(name):
    """Two of the four devices that slices are cut for."""

    shape, spec, codec = (255, 64), P(None, "fsdp"), make(name, reduce="two_shot")
    alone = one_round(codec, shape, spec)[0]
    shared, found = one_round(codec, shape, spec, BOTH)
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(shared)):
        np.testing.assert_allclose(*np.asarray([a, b], np.float64), atol=1e-5 * (name == "stat4"))
    # A device's own part of the payload, which two others have as well; and its own shard.
    payload = sum(x.nbytes for x in jax.tree.leaves(shared[0])) / R
    for one in found:
        limit = payload if one.kind == "all-gather" else 4 * np.prod(shape)
        assert one.nbytes <= 1.01 * limit / 2, one


@pytest.mark.parametrize(
    "name,small,larger",
    [("int8", (600,), (2400,)), ("topk", (2, 128), (2, 512))],
)
def test_only_what_is_small_is_gathered(name, small, larger):
    """Three blocks of 200 values, or two chunks, over four devices; four times as many."""
    codec, spec = make(name, reduce="all_gather"), P(*(None,) * (len(small) - 1), "fsdp")
    for shape in (small, larger):
        largest = max((c.nbytes for c in gathered(codec, shape, spec)), default=0)
        assert (largest >= 4 * np.prod(shape)) == (shape == small)
