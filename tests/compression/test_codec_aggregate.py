"""Reduction of payloads: means over senders, two-shot, routes, regions and shards."""

import math

import codec_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lowcomm_jax.compression import DCTTopK, Sliced, TopK, error_feedback, make, route
from lowcomm_jax.exchange import MeshExchange
from lowcomm_jax.mesh.regions import Regions, make_mesh


def encode_regions(codec, x_RxNxM):
    return jax.jit(jax.vmap(lambda x: codec.encode(x[None], ())[0]))(jnp.asarray(x_RxNxM))


def three_regions(seed=0):
    return np.random.default_rng(seed).standard_normal((3, 24, 30)).astype("f4")


def test_mean_per_coefficient_over_its_senders():
    x, weight = three_regions(), np.array([0.3, 1.0, 2.0], "f4")
    codec, shape = TopK(k=200, mean="senders"), (1, 24, 30)
    got = codec.aggregate(encode_regions(codec, x), jnp.asarray(weight), shape)[0]
    total, count = np.zeros((24, 30)), np.zeros((24, 30))
    for x_NxM, w in zip(x, weight):
        edge = np.sort(np.abs(x_NxM).reshape(-1))[-200]
        sent = np.abs(x_NxM) >= edge
        total += w * np.where(sent, x_NxM, 0)
        count += w * sent
    assert {0.0, 0.3, 3.3} <= set(np.round(np.unique(count), 3))
    want = np.where(count > 0, total / np.where(count > 0, count, 1), 0)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_dct_senders_mean_in_the_coefficient_domain():
    x, shape = three_regions(1), (1, 24, 30)
    codec = DCTTopK(k=60)
    payload_R = encode_regions(codec, x)
    absent = jax.tree.map(lambda a: a.at[1].set(jnp.full(a.shape[1:], 255, a.dtype)), payload_R)
    got = codec.aggregate(absent, jnp.array([1.0, 0.0, 0.4]), shape)[0]

    def basis(n):
        rows = np.cos(np.pi * np.arange(n)[:, None] * (np.arange(n) + 0.5)[None] / n)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    down, across = basis(24), basis(30)
    total, count = np.zeros((24, 30)), np.zeros((24, 30))
    for r, w in ((0, 1.0), (2, 0.4)):
        c = down @ x[r] @ across.T
        sent = np.abs(c) >= np.sort(np.abs(c).reshape(-1))[-60]
        total, count = total + w * c * sent, count + w * sent
    want = down.T @ (total / np.where(count > 0, count, 1)) @ across
    np.testing.assert_allclose(got, want, atol=2e-5)
    plain = TopK(k=60).aggregate(payload_R, jnp.ones(3), shape)
    assert np.abs(plain[0] - got).max() > 0.1


def test_slices_are_encoded_on_their_own():
    codec, x = make("int4", block=None), np.asarray(three_regions(2)[0][:, :7])  # 24 x 7
    sliced = Sliced(codec, 5)
    like = {"w": jax.ShapeDtypeStruct((24, 7), jnp.float32)}
    payload, _ = sliced.encode({"w": jnp.asarray(x)}, ())
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(payload)) == sliced.nbytes(like)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(payload)} == {5}
    # A row is a block either way, so slices along rows change nothing.
    whole, _ = codec.encode({"w": jnp.asarray(x)}, ())
    np.testing.assert_array_equal(sliced.decode(payload, like)["w"], codec.decode(whole, like)["w"])


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 11), (9, 2, 3), (22, 3), (0, 4)])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("devices", [1, 2])
def test_cutting_and_joining_are_inverse(shape, stacked, devices):
    shape = (2, *shape) if stacked else shape
    x = np.arange(math.prod(shape), dtype="f4").reshape(shape) + 1
    sliced = Sliced(make("fp32", stacked=("blocks",) if stacked else ()), 4, devices)
    tree = {"blocks": jnp.asarray(x)}
    payload, _ = sliced.encode(tree, ())
    np.testing.assert_array_equal(sliced.decode(payload, tree)["blocks"], x)
    assert sliced.slice_like(tree)["blocks"].shape[:1] == ((2,) if stacked else ()) or not stacked


def test_rows_are_dealt_out_within_each_device():
    """10 rows a device in 3 slices: 4 each, of which the last repeats where there are but 3."""
    x = np.arange(40, dtype="f4")[:, None] * np.ones(2, "f4")
    sliced = Sliced(make("fp32"), 3, devices=4)
    payload, _ = sliced.encode({"w": jnp.asarray(x)}, ())
    of_a_device = np.array([[0, 3, 6, 9], [1, 4, 7, 9], [2, 5, 8, 9]])
    want = [np.concatenate([row + 10 * d for d in range(4)]) for row in of_a_device]
    np.testing.assert_array_equal(payload["w"][:, 0, :, 0], want)
    np.testing.assert_array_equal(sliced.decode(payload, {"w": x})["w"], x)
    # 4 rows a device would be padded to 6, so that slices take all 16 in turn, padded to 18.
    few = {"w": jax.ShapeDtypeStruct((16, 2), jnp.float32)}
    assert sliced.nbytes(few) == 4 * 18 * 2


@pytest.mark.parametrize("mesh", [{"region": 1}, {"region": 2}, {"region": 2, "fsdp": 2}])
def test_two_shot_quantises_the_mean_of_every_slice_again(mesh):
    regions = Regions(4, make_mesh(**mesh, devices=jax.devices()[: math.prod(mesh.values())]))
    x_R = np.random.default_rng(3).standard_normal((4, 24, 30)).astype("f4")
    like = {"w": jax.ShapeDtypeStruct((24, 30), jnp.float32)}
    choice = route(error_feedback(make("int4", block=None)), [like], 4)
    assert choice.name == "two_shot"
    exchange, weight = MeshExchange(regions, choice.codec), np.array([1.0, 0.3, 0.0, 2.0], "f4")
    specs = {"w": P(None, "fsdp")}

    @jax.jit
    def mean(x_R):
        states = jax.vmap(lambda _: choice.codec.init(like))(jnp.arange(4))
        payload, _ = exchange.encode({"w": x_R}, states, specs)
        return payload, exchange.mean(payload, jnp.asarray(weight), like, specs)

    payload, got = mean(jax.device_put(x_R, regions.sharding("region", *specs["w"])))
    assert exchange.traffic(like, np.ones(4)).nbytes == sum(
        leaf.nbytes // 4 for leaf in jax.tree.leaves(payload)
    )

    def quantised(x):
        step = np.abs(x).max(-1, keepdims=True) / 7
        return np.floor(x / step + 0.5) * step

    once = np.einsum("r,rnm->nm", weight / weight.sum(), quantised(x_R))
    np.testing.assert_allclose(got["w"][0], quantised(once), atol=2e-5)
    assert np.abs(once - np.asarray(got["w"][0])).max() > 0.01
    # The owner of a slice takes the value that the others decode, not its own exact sum.
    assert len(got["w"].addressable_shards) == regions.mesh.size
    for shard in got["w"].addressable_shards:
        np.testing.assert_array_equal(shard.data, np.asarray(got["w"])[shard.index])


def test_two_shot_is_refused_where_a_mean_cannot_be_encoded_again():
    like = {"w": jax.ShapeDtypeStruct((24, 30), jnp.float32)}
    for name in ("topk", "sign", "random_k"):
        assert route(make(name), [like], 5).two_shot is None
        with pytest.raises(ValueError, match="second time"):
            route(make(name, reduce="two_shot"), [like], 5)
    with pytest.raises(ValueError, match="reduce='gather'"):
        make("int4", reduce="gather")


def test_route_takes_the_fewer_bytes():
    like = {"w": jax.ShapeDtypeStruct((64, 65), jnp.float32)}
    n = 64 * 65
    assert route(make("fp32"), [like], 2)[:3] == ("all_gather", 4 * n, 4 * n)
    padded = 5 * 13 * 65
    assert route(make("bf16"), [like], 5)[:3] == ("two_shot", 4 * 2 * n, round(8 / 5 * 2 * padded))
    assert route(make("bf16", reduce="all_gather"), [like], 5).name == "all_gather"
    sparse = make("topk_stat2_ef")
    assert route(sparse, [like], 5)[:3] == ("all_gather", 4 * sparse.nbytes(like), None)


@pytest.mark.parametrize(
    "name, replicas",
    [
        ("int4", "vmap"),
        ("topk_stat2_ef", "map"),
        pytest.param("stat4", "map", marks=pytest.mark.slow),
        pytest.param("random_k", "vmap", marks=pytest.mark.slow),
        pytest.param("low_rank_int4", "map", marks=pytest.mark.slow),
    ],
)
def test_lifted_over_regions_with_shards(name, replicas):
    """The engine's use: every device codes what it holds of a region, and all regions decode."""
    regions = Regions(4, make_mesh(region=2, fsdp=2), replicas)
    codec, like = codec_cases.build(name), codec_cases.tree()
    exchange = MeshExchange(regions, codec, stacked=("layers",))
    specs = {k: P() for k in like} | {"layers/w": P(None, None, "fsdp"), "heads": P("fsdp")}
    trees = [codec_cases.tree(seed) for seed in range(4)]
    x_R = jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
    state_R = jax.tree.map(lambda s: jnp.stack([s] * 4), codec.init(like))
    weight = jnp.array([1.0, 0.0, 0.3, 2.0])

    @jax.jit
    def everything(x_R, state_R):
        payload, _ = exchange.encode(x_R, state_R, specs)
        return exchange.reduce(payload, weight, like, specs).mean

    got = {k: x[0] for k, x in everything(x_R, state_R).items()}
    program = codec_cases.compiled(name)
    each = [program.decode(program.encode(x, codec.init(like))[0]) for x in trees]
    for key in like:
        want = sum(w * np.asarray(y[key]) for w, y in zip(weight, each)) / 3.3
        np.testing.assert_allclose(got[key], want, rtol=1e-3, atol=1e-4, err_msg=key)


@pytest.mark.parametrize("name", ["int4", "e3m0", "topk", "dct_topk", "bf16"])
def test_sharded_rows_are_encoded_where_they_lie(name):
    mesh = make_mesh(fsdp=4)
    rows = NamedSharding(mesh, P("fsdp"))
    codec = make(name)
    x = jax.ShapeDtypeStruct((512, 256), jnp.float32, sharding=rows)
    program = jax.jit(lambda x: codec.encode(x, ())[0]).lower(x).compile().as_text()
    assert "all-gather" not in program and "all-to-all" not in program
