"""Reduction of payloads: means over senders, two-shot, routes, regions and shards."""

import itertools
import math

import codec_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from lowcomm_jax.compression import (
    DCTTopK,
    PerTensor,
    Statistical,
    TopK,
    error_feedback,
    make,
    make_leaf,
    route,
)
from lowcomm_jax.compression.grid import Unit
from lowcomm_jax.compression.placement import place
from lowcomm_jax.exchange import MeshExchange
from lowcomm_jax.mesh.regions import Regions, make_mesh


def encode_regions(codec, x_RxNxM):
    return jax.jit(jax.vmap(lambda x: codec.encode({"w": x}, ())[0]))(jnp.asarray(x_RxNxM))


def three_regions(seed=0):
    return np.random.default_rng(seed).standard_normal((3, 24, 30)).astype("f4")


def test_mean_per_coefficient_over_its_senders():
    x, weight = three_regions(), np.array([0.3, 1.0, 2.0], "f4")
    codec, like = PerTensor(TopK(k=200, mean="senders")), {"w": x[0]}
    got = codec.aggregate(encode_regions(codec, x), jnp.asarray(weight), like)["w"]
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
    x = three_regions(1)
    codec, like = PerTensor(DCTTopK(k=60)), {"w": x[0]}
    payload_R = encode_regions(codec, x)
    absent = jax.tree.map(lambda a: a.at[1].set(jnp.full(a.shape[1:], 255, a.dtype)), payload_R)
    got = codec.aggregate(absent, jnp.array([1.0, 0.0, 0.4]), like)["w"]

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
    plain = PerTensor(TopK(k=60)).aggregate(payload_R, jnp.ones(3), like)["w"]
    assert np.abs(plain - got).max() > 0.1


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", ["fp32", "int4"])
def test_dealing_out_and_joining_are_inverse(stacked, name):
    shapes = [(), (1,), (7,), (3, 11), (9, 2, 3), (22, 3), (0, 4)]
    shapes = {f"x/{i}": (2, *shape) if stacked else shape for i, shape in enumerate(shapes)}
    x = {k: np.arange(math.prod(s), dtype="f4").reshape(s) + 1 for k, s in shapes.items()}
    codec = make(name, stacked=("x",) if stacked else ()).in_slices(4)

    @jax.jit
    def there_and_back(x):
        payload, _ = codec.encode(x, ())
        slices = codec.deal(payload, x)
        return payload, slices, codec.undeal(slices, x)

    payload, slices, joined = there_and_back(x)
    for key, value in x.items():
        sent = sum(leaf.nbytes for leaf in jax.tree.leaves(slices[key]))
        assert sent == codec.dealt_nbytes({key: value}), key
    assert {leaf.shape[0] for leaf in jax.tree.leaves(slices)} == {4}
    jax.tree.map(np.testing.assert_array_equal, payload, joined)


def test_units_are_dealt_out_in_turn_and_the_last_one_fills_up():
    x = {"w": np.arange(10, dtype="f4")[:, None] * np.ones(2, "f4")}
    codec = make("fp32").in_slices(4)
    slices = codec.deal(codec.encode(x, ())[0], x)["w"]["values"]
    np.testing.assert_array_equal(slices[:, 0, :, 0], [[0, 4, 8], [1, 5, 9], [2, 6, 9], [3, 7, 9]])


@pytest.mark.parametrize("stacked", [False, True])
def test_a_matrix_of_fewer_rows_than_slices_has_units_for_each(stacked):
    """Every slice gets one block of a fourth of the values, and its scale; nothing else is sent."""
    rng = np.random.default_rng(1)
    shapes = {"w/0": (128,), "w/1": (2, 64), "w/2": (3, 130)}
    lead = (2,) if stacked else ()
    x = {k: rng.standard_normal((*lead, *shape)).astype("f4") for k, shape in shapes.items()}
    codec = make("int4", stacked=("w",) if stacked else ()).in_slices(4)

    @jax.jit
    def dealt(x):
        """The payload, its slices, joined again, and the values."""
        payload = codec.encode(x, ())[0]
        slices = codec.deal(payload, x)
        return payload, slices, codec.undeal(slices, x), codec.decode(payload, x)

    @jax.jit
    def recoded(slices, number):
        """A slice of four alike."""
        alike = jax.tree.map(lambda v: jnp.stack([v[number]] * 4), slices)
        return codec.recode(alike, jnp.ones(4), number, x)

    payload, slices, joined, once = dealt(x)
    again = [recoded(slices, np.int32(number)) for number in range(4)]
    again = jax.tree.map(lambda *v: np.stack(v), *again)
    mean = jax.jit(lambda slices: codec.decode(codec.undeal(slices, x), x))(again)
    for key, shape in shapes.items():
        sent = sum(v.nbytes for v in jax.tree.leaves(slices[key]))
        each = -(-math.prod(shape) // 4)
        expected = (1 + stacked) * 4 * (-(-each // 2) + 4)
        assert codec.dealt_nbytes({key: x[key]}) == sent == expected, key
    jax.tree.map(np.testing.assert_array_equal, payload, joined)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), mean, once)


def test_a_slice_has_statistics_of_its_own_and_filling_counts_for_nothing():
    """10 rows in 4 slices, of which two hold a row twice: as if they held it once."""
    x = {"w": np.random.default_rng(0).standard_normal((10, 16)).astype("f4")}
    codec, weight = make("stat4").in_slices(4), jnp.ones(4)

    @jax.jit
    def dealt(x):
        payload = codec.encode(x, ())[0]
        return codec.deal(payload, x), codec.decode(payload, x)["w"]

    @jax.jit
    def recoded(slices, number):
        one = jax.tree.map(lambda leaf: jnp.stack([leaf[number]] * 4), slices)
        return codec.recode(one, weight, number, x)

    alone = jax.jit(lambda rows: codec.encode({"w": rows}, ())[0])
    slices, decoded = jax.device_get(dealt(x))
    for number in range(4):
        pair = recoded(slices, np.int32(number)), alone(decoded[number::4])
        books = [np.asarray(coded["w"]["book"]).reshape(-1) for coded in pair]
        np.testing.assert_allclose(*books, atol=1e-6)


@pytest.mark.parametrize("mesh", [{"region": 1}, {"region": 2}, {"region": 2, "fsdp": 2}])
def test_two_shot_quantises_the_mean_of_every_slice_again(mesh):
    regions = Regions(4, make_mesh(**mesh, devices=jax.devices()[: math.prod(mesh.values())]))
    x_R = np.random.default_rng(3).standard_normal((4, 24, 30)).astype("f4")
    like = {"w": jax.ShapeDtypeStruct((24, 30), jnp.float32)}
    codec = error_feedback(make("int4", block=None))
    assert route(codec, [like], 4).name == "two_shot"
    specs, weight = {"w": P(None, "fsdp")}, np.array([1.0, 0.3, 0.0, 2.0], "f4")
    exchange = MeshExchange(regions, codec, specs, parts=4)

    @jax.jit
    def mean(x_R):
        states = jax.vmap(lambda _: codec.init(like))(jnp.arange(4))
        payload, _ = exchange.encode({"w": x_R}, states)
        return payload, exchange.reduce(payload, jnp.asarray(weight), like).mean

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
    assert route(make("fp32"), [like], 2) == ("all_gather", 4 * n, 4 * n)
    assert route(make("bf16"), [like], 5) == ("two_shot", 4 * 2 * n, round(8 / 5 * 2 * n))
    assert route(make("bf16", reduce="all_gather"), [like], 5).name == "all_gather"
    sparse = make("topk_stat2_ef")
    assert route(sparse, [like], 5) == ("all_gather", 4 * sparse.nbytes(like), None)


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
    specs = {"layers/w": P(None, None, "fsdp"), "heads": P("fsdp")}
    exchange = MeshExchange(regions, codec, specs)
    trees = [codec_cases.tree(seed) for seed in range(4)]
    x_R = jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
    state_R = jax.tree.map(lambda s: jnp.stack([s] * 4), codec.init(like))
    weight = jnp.array([1.0, 0.0, 0.3, 2.0])

    @jax.jit
    def everything(x_R, state_R):
        payload, _ = exchange.encode(x_R, state_R)
        return exchange.reduce(payload, weight, like).mean

    got = {k: x[0] for k, x in everything(x_R, state_R).items()}
    program = codec_cases.compiled(name)
    each = [program.decode(program.encode(x, codec.init(like))[0]) for x in trees]
    for key in like:
        want = sum(w * np.asarray(y[key]) for w, y in zip(weight, each)) / 3.3
        np.testing.assert_allclose(got[key], want, rtol=1e-3, atol=1e-4, err_msg=key)


@pytest.mark.parametrize("name", ["int4", "e3m0", "topk", "dct_topk", "bf16"])
def test_sharded_rows_are_encoded_where_they_lie(name):
    regions = Regions(1, make_mesh(fsdp=4))
    like, spec = {"x": jax.ShapeDtypeStruct((512, 256), jnp.float32)}, P("fsdp")
    exchange = MeshExchange(regions, make(name), {"x": spec})
    lies = regions.sharding("region", *spec)
    x = {"x": jax.ShapeDtypeStruct((1, 512, 256), jnp.float32, sharding=lies)}
    program = jax.jit(lambda x: exchange.encode(x, ())[0]).lower(x).compile().as_text()
    assert "all-gather" not in program and "all-to-all" not in program
    assert exchange.placed(like).places["x"].moves == ()


@pytest.mark.parametrize("name", ["topk_stat2", "dct_topk", "bf16_gate"])
@pytest.mark.parametrize(
    "shape, stacked, spec, mesh, expected",  # of dct_topk and bf16_gate two are quick ones
    [
        ((576, 96), False, P(None, "fsdp"), {"fsdp": 4}, ("across", 3, 9)),
        ((128, 192), False, P("fsdp"), {"fsdp": 8}, ("across", 1, 3)),
        ((3, 192, 134), True, P(None, None, "fsdp"), {"fsdp": 2}, ("across", 2, 3)),
        ((134, 96), False, P(None, "fsdp"), {"fsdp": 4}, ("across", 1, 3)),  # padded rows
        ((192, 5, 60), False, P(None, None, "fsdp"), {"fsdp": 4}, ("across", 1, 3)),  # inside M
        ((5, 60, 192), False, P(None, "fsdp"), {"fsdp": 4}, ("across", 1, 3)),  # inside N
        ((61, 1048), False, P(None, "fsdp"), {"fsdp": 8}, ("along", 3, 17)),  # padded
        ((2, 1544, 40), True, P(None, "fsdp"), {"fsdp": 8}, ("along", 4, 25)),
        ((21, 40, 57), False, P(None, "fsdp"), {"fsdp": 8}, ("along", 2, 14)),  # inside N
        ((60, 15, 28), False, P(None, None, "fsdp"), {"fsdp": 4}, ("along", 2, 7)),  # inside M
        ((1560,), False, P(("tensor", "fsdp")), {"fsdp": 2, "tensor": 4}, ("along", 4, 26)),
        ((130, 68), False, P("fsdp", "tensor"), {"fsdp": 2, "tensor": 4}, ("across", 2, 5)),
        ((1, 72, 57), False, P(None, "fsdp"), {"fsdp": 8}, ("gathered", 1, 2)),
    ],
)
def test_units_in_shares_come_to_the_same_bits(name, shape, stacked, spec, mesh, expected):
    """A leaf that no device holds whole units of."""
    codec = error_feedback(make(name, stacked=("x",) if stacked else ()), 0.9)
    shares = on_one_and_many(codec, shape, spec, mesh).shares
    assert (shares.way, shares.each, shares.count) == expected


def on_one_and_many(codec, shape, spec, mesh):
    """Compares payload, residual and mean of a leaf on 1 and n devices; where n hold its units."""
    like = {"x": jax.ShapeDtypeStruct(shape, jnp.float32)}
    rng = np.random.default_rng(0)
    x, w = ({"x": jnp.asarray(rng.standard_normal((1, *shape)), "f4")} for _ in range(2))
    found = []
    for sizes in ({}, mesh):
        exchange = MeshExchange(Regions(1, make_mesh(**sizes)), codec, {"x": spec})

        @jax.jit
        def round_(x, state, exchange=exchange):
            weights = w if codec.reads_params else None
            payload, state = exchange.encode(x, state, params_A=weights)
            return payload, state, exchange.reduce(payload, jnp.ones(1), like).mean

        state = jax.tree.map(lambda s: np.asarray(s)[None], codec.init(like))
        # From the host both times: one program for two rounds.
        _, state, _ = jax.device_get(round_(x, state))
        found.append(round_(x, state))
    jax.tree.map(np.testing.assert_array_equal, *found)
    return exchange.placed(like).places["x"]


def test_coefficients_do_not_depend_on_how_many_units_a_device_codes():
    """6 of 48: a library's product of so many rows may sum in another order."""
    on_one_and_many(make("dct_topk"), (48, 3, 31), P("fsdp"), {"fsdp": 8})


@pytest.mark.parametrize(
    "name, shape",
    [
        *itertools.product(["topk", "topk_stat2"], [(320, 192), (60, 192), (1048, 60)]),
        ("int4", (1100, 3)),  # rows are joined
        ("stat4", (1100, 3)),
        ("stat4", (1051 * 4,)),  # padded
    ],
)
def test_units_in_shares_of_a_two_shot_come_to_the_same_bits(name, shape):
    """Payloads and mean of two regions of four devices, and of one."""
    like = {"x": jax.ShapeDtypeStruct(shape, jnp.float32)}
    codec, found = make(name, reduce="two_shot"), []
    x = {"x": np.random.default_rng(1).standard_normal((2, *shape)).astype(np.float32)}
    for sizes, spec in (({"region": 1}, P()), ({"region": 2, "fsdp": 4}, P("fsdp"))):
        exchange = MeshExchange(Regions(2, make_mesh(**sizes)), codec, {"x": spec})
        both = np.array([1.0, 2.0], np.float32)

        @jax.jit
        def round_(x, exchange=exchange, both=both):
            payload, _ = exchange.encode(x, ())
            return payload, exchange.reduce(payload, both, like).mean

        found.append(round_(x))
    assert exchange.placed(like).places["x"].shares is not None
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.parametrize("values", ["fp32", "stat4"])
@pytest.mark.parametrize(
    "shape, stacked, spec, mesh",
    [
        ((3, 40, 40), True, P(None, None, "fsdp"), {"fsdp": 8}),  # 25 groups
        ((1064,), False, P(("fsdp", "tensor")), {"fsdp": 2, "tensor": 4}),  # 17, padded
        ((25, 40), False, P(None, "fsdp"), {"fsdp": 8}),  # 16 of odd rows
        ((1064,), False, P(("tensor", "fsdp")), {"fsdp": 2, "tensor": 4}),
    ],
)
def test_random_groups_in_shares_come_to_the_same_bits(values, shape, stacked, spec, mesh):
    given = {"one_in": 64 if values == "fp32" else 3, "values": make_leaf(values)}
    codec = make("random_k", stacked=("x",) if stacked else (), **given)
    like = {"x": jax.ShapeDtypeStruct(shape, jnp.float32)}
    x = {"x": np.random.default_rng(0).standard_normal((1, *shape)).astype(np.float32)}
    found = []
    for sizes in ({}, mesh):
        exchange = MeshExchange(Regions(1, make_mesh(**sizes)), codec, {"x": spec})

        @jax.jit
        def round_(x, state, exchange=exchange):
            payload, state = exchange.encode(x, state)
            mean = exchange.reduce(payload, jnp.ones(1), like).mean
            return payload, state, mean, exchange.decode(payload, like)

        found.append(round_(x, jax.tree.map(lambda s: s[None], codec.init(like))))
    assert exchange.placed(like).places["x"].shares is not None
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_books_of_rows_in_shares_take_the_bytes_that_are_announced():
    codec, like = PerTensor(Statistical(4, scope="row")), {"x": jnp.zeros((9, 512))}
    exchange = MeshExchange(Regions(1, make_mesh(fsdp=4)), codec, {"x": P(None, "fsdp")})
    assert exchange.placed(like).places["x"].shares.side == 1
    payload, _ = jax.jit(lambda x: exchange.encode({"x": x}, ()))(jnp.ones((1, 9, 512)))
    assert sum(x.nbytes for x in jax.tree.leaves(payload)) == exchange.nbytes(like)


def in_slices(name, shape, spec, regions=2, devices=4, stacked=()):
    """The placement on regions of several devices; bytes and mean are those of one device."""
    like = {"x": jax.ShapeDtypeStruct(shape, jnp.float32)}
    codec, found, nbytes = make(name, reduce="two_shot", stacked=stacked), [], []
    x = {"x": np.random.default_rng(1).standard_normal((regions, *shape)).astype(np.float32)}
    for sizes, lies in (({"region": 1}, P()), ({"region": regions, "fsdp": devices}, spec)):
        mesh = make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])
        exchange = MeshExchange(Regions(regions, mesh), codec, {"x": lies}, parts=regions)

        @jax.jit
        def mean(x, exchange=exchange):
            payload, _ = exchange.encode(x, ())
            weights = np.ones(exchange.regions.count, np.float32)
            return payload, exchange.reduce(payload, weights, like).mean

        payload, values = mean(x)
        found.append(values)
        buffers = sum(v.nbytes for v in jax.tree.leaves(payload))
        nbytes += [exchange.nbytes(like), buffers // regions]
    assert len(set(nbytes)) == 1
    jax.tree.map(np.testing.assert_array_equal, *found)
    return exchange.placed(like).places["x"]


@pytest.mark.parametrize("name", ["int4", "stat4"])
@pytest.mark.parametrize(
    "shape, spec, how",
    [
        ((12, 1024), P("fsdp"), "moves"),
        ((12, 768), P("fsdp"), "gathers"),
        ((12, 600), P(None, "fsdp"), "gathers"),  # the rows that are dealt out are in shares
    ],
)
def test_slices_of_few_rows_a_device_are_not_filled_up(name, shape, spec, how):
    """Of two slices, 3 rows of each of 4 devices would be 4."""
    assert getattr(in_slices(name, shape, spec), how)


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_single_values_are_dealt_out_along_the_side_that_devices_fill_up_least(name):
    """3 columns a device would be 4: the 6 rows are dealt out, and nothing moves."""
    place = in_slices(name, (6, 12), P(None, "fsdp"))
    assert place.axes == ((), (), ("fsdp",)) and not place.moves


@pytest.mark.parametrize("rows", [8, 24, 40, 64, 100, 512])
@pytest.mark.parametrize("devices", [2, 4, 8, 32])
@pytest.mark.parametrize("slices", [2, 3, 5, 16])
@pytest.mark.parametrize("name, spec", [("int4", P("fsdp")), ("bf16", P(None, "fsdp"))])
def test_devices_fill_up_slices_by_less_than_a_sixteenth(rows, devices, slices, name, spec):
    like, sizes = {"x": jax.ShapeDtypeStruct((rows, 768), jnp.float32)}, {"fsdp": devices}
    codec = make(name).in_slices(slices)
    there = codec.placed(like, {"x": spec}, sizes, False).dealt_nbytes(like)
    assert there < 17 / 16 * codec.dealt_nbytes(like)


@pytest.mark.parametrize(
    "name, leaf, shape, spec, devices, slices, before",
    [
        ("fp32", "w", (512, 768), P(None, "fsdp"), 8, 5, 1_597_440),
        ("bf16", "w", (768, 50304), P(None, "fsdp"), 32, 16, 77_266_944),
        ("int8", "w", (768, 50304), P("fsdp"), 32, 16, 39_438_336),
        ("int4", "w", (768, 50304), P(None, "fsdp"), 32, 16, 20_121_600),
        ("stat4", "w", (768, 50304), P("fsdp"), 32, 16, 19_317_760),
        ("int8", "layers/w", (80, 8192), P(None, "fsdp"), 4, 3, 667_920),
        ("int4", "layers/w", (80, 8192), P(None, "fsdp"), 8, 3, 339_840),
        ("stat4", "layers/w", (80, 8192), P(None, "fsdp"), 16, 3, 343_680),
        ("stat4", "layers/w", (80, 8192), P(None, "fsdp"), 8, 5, 355_200),
        ("int4_affine", "layers/w", (8, 3, 1000), P(None, None, "fsdp"), 2, 8, 13_056),
        ("int4_affine", "w", (50304,), P("fsdp"), 32, 8, 27_392),
        ("int4_affine", "w", (640, 12), P(), 1, 12, 4_176),
        ("int8_affine", "w", (1024, 13), P(), 1, 8, 13_776),
        ("fp32", "w", (5, 4096), P(), 1, 12, 81_936),
    ],
)
def test_slices_take_no_more_than_before_the_grid(name, leaf, shape, spec, devices, slices, before):
    """`before`: bytes at commit 656db1e2, whose codecs did not code units of a grid yet."""
    codec, like = make(name, stacked=("layers",)), {leaf: jax.ShapeDtypeStruct(shape, jnp.float32)}
    placed = codec.in_slices(slices).placed(like, {leaf: spec}, {"fsdp": devices}, False)
    assert placed.dealt_nbytes(like) <= before


@pytest.mark.parametrize("name, width, each", [("int8", 249, 253), ("int4", 228, 118)])
def test_slices_of_a_row_have_one_block_more_each_where_that_takes_fewer_bytes(name, width, each):
    """8192 values in 3 slices are 11 blocks of 249 each or, in whole bytes of 4 bits, 12 of 228."""
    place = in_slices(name, (4, 8192), P(None, "fsdp"), 3, 2, stacked=("x",))
    across = place.grid.across
    assert place.moves and place.grid.width == width and across == 3 * -(-8192 // (3 * width))
    like = {"x": jax.ShapeDtypeStruct((4, 8192), jnp.float32)}
    nbytes = make(name, stacked=("x",)).in_slices(3).dealt_nbytes(like)
    assert nbytes == 4 * across * each


def test_slices_of_a_codebook_have_narrower_units_where_that_takes_fewer_bytes():
    """1064 values in 2 slices are units of 133 values, 67 bytes, or of 76, 38 bytes."""
    place = in_slices("stat4", (1064,), P("fsdp"))
    assert place.gathers and place.sides == (1, 76)
    like = {"x": jax.ShapeDtypeStruct((1064,), jnp.float32)}
    assert make("stat4").in_slices(2).dealt_nbytes(like) == 2 * (7 * 38 + 16 * 4)


@pytest.mark.parametrize(
    "name, shape, stacked, slices, cut, nbytes",  # as before there was a grid
    [
        ("fp32", (12, 64), False, 6, 0, 3072),
        ("bf16", (16, 12, 64), True, 6, 1, 24576),
        ("int8", (50304,), False, 2, 0, 51352),
        ("stat2", (50304,), False, 5, 0, 12660),
        ("stat2", (8, 3, 1000), True, 4, 2, 6528),
    ],
)
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_slices_of_small_leaves_take_equal_bytes_on_any_devices(
    name, shape, stacked, slices, cut, nbytes, devices
):
    like = {"x": jax.ShapeDtypeStruct(shape, jnp.float32)}
    codec = make(name, stacked=("x",) if stacked else ()).in_slices(slices)
    sizes, spec = {"region": slices, "fsdp": devices}, P(*[None] * cut, "fsdp")
    assert codec.placed(like, {"x": spec}, sizes, False).dealt_nbytes(like) == nbytes


def test_slices_of_a_matrix_without_entries_take_no_bytes():
    like = {"x": jax.ShapeDtypeStruct((3, 0), jnp.float32)}
    assert make("int4").in_slices(4).dealt_nbytes(like) == 0


def test_a_matrix_without_entries_has_no_shares():
    given = Unit(64, 64), (3, 5, 0, 2), False, P(None, None, None, "f"), {"f": 2}
    assert place(*given, in_shares=True) == place(*given)


def test_a_matrix_that_is_factored_is_gathered_and_not_shared():
    like = {"x": jax.ShapeDtypeStruct((63, 5, 48), jnp.float32)}
    codec, sizes = make("low_rank", rank=2), {"region": 1, "fsdp": 2}
    place = codec.placed(like, {"x": P(None, None, "fsdp")}, sizes, False).places["x"]
    assert place.gathers and place.shares is None
