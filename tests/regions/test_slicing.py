"""Payloads cut in slices, averaged slice by slice and put together again."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from refused_lines import lines_of

import lowcomm_jax as lc
from lowcomm_jax.exchange import InSlices, MeshExchange
from lowcomm_jax.mesh.regions import Regions
from lowcomm_jax.rounds.slicing import Slicing, goes_in_slices, named, padded_nbytes
from lowcomm_jax.store import wire
from lowcomm_jax.store.wire import one_slice, owners, shapes_of

R = 3
LIKE = {k: jax.ShapeDtypeStruct(s, "float32") for k, s in {"a": (5, 3), "b": (), "c": (4,)}.items()}
REST = {"weight": np.float32(1)}


def slicing(codec, like, payload):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), payload)
    return Slicing(codec, like, shapes, shapes_of(REST), R)


def reduced(one, payloads, weights):
    """What everyone holds in the end, of all regions' payloads `[1, ...]`."""
    rows = [{k: np.asarray(x)[0] for k, x in named(tree).items()} for tree in payloads]
    arrays = [{**x, "weight": np.float32(w)} for x, w in zip(rows, weights)]
    assert shapes_of(arrays[0]) == one.whole
    split = [one.split(x) for x in arrays]
    rest = {r: rest for r, (rest, _) in enumerate(split)}
    averages = one.average_all({r: x for r, (_, x) in enumerate(split)}, rest)
    assert shapes_of(one_slice(averages, 0)) == one.like
    return one.join(averages).tree


def landed(sums, weights):
    """The mean that a landing makes of dense slices, by name."""
    exchange = MeshExchange(Regions(1, lc.make_mesh(devices=jax.devices()[:1])))
    mean = jax.jit(lambda x, w: exchange.reduce(InSlices(x), w, None).mean)(sums, weights)
    return {name: x[0] for name, x in mean.items()}


def test_the_mean_of_dense_payloads_of_odd_shapes():
    rng = np.random.default_rng(0)
    payloads = [
        {k: rng.normal(size=(1, *x.shape)).astype(np.float32) for k, x in LIKE.items()}
        for _ in range(R)
    ]
    payloads[1]["a"][0, 2, 1] = np.nan
    weights = np.array([2.0, 0.0, 3.0], np.float32)
    found = landed(reduced(slicing(None, LIKE, payloads[0]), payloads, weights), weights)
    for name, leaf in LIKE.items():
        mean = (2 * payloads[0][name][0] + 3 * payloads[2][name][0]) / 5
        assert found[name].shape == leaf.shape
        np.testing.assert_allclose(found[name], mean, rtol=1e-5, atol=1e-7)


def test_a_sum_is_of_those_whose_slices_are_given():
    """Also where more is known of the weights, and where nobody takes part."""
    payload = {"a": np.arange(6, dtype=np.float32)[None]}
    one = slicing(None, {"a": jax.ShapeDtypeStruct((6,), "float32")}, payload)
    rest = {r: {"weight": np.float32(1 + r)} for r in range(R)}
    _, mine = one.split({k: x[0] for k, x in named(payload).items()} | REST)
    slices = {0: mine, 2: {name: 10 * x for name, x in mine.items()}}
    [found] = one.average_all(slices, rest).values()
    np.testing.assert_array_equal(found.reshape(-1), (1 + 3 * 10) * np.arange(6))
    [found] = one.average_all({}, rest).values()
    np.testing.assert_array_equal(found.reshape(-1), np.zeros(6))


def test_payloads_are_cut_alike_in_whatever_order_their_arrays_come():
    """Those that were unpacked come in another one."""
    leaf = np.ones((1, 2), np.float32)
    payload = {f"{i:02}": i * leaf for i in range(12)}
    like = {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in payload.items()}
    one, arrays = slicing(None, like, payload), {k: x[0] for k, x in named(payload).items()} | REST
    job = wire.Job(0, 1)
    arrived = wire.unpack(wire.pack("run", job, 1, arrays), "run", job, like=None)
    assert list(arrived) != list(arrays)
    jax.tree.map(np.testing.assert_array_equal, one.split(arrays), one.split(arrived))


def test_stages_reduce_what_they_would_on_their_own_devices():
    """Jobs against one program of all regions: the payload of the mean, bit for bit."""
    mesh = lc.make_mesh(stage=2, devices=jax.devices()[:2])
    like = {
        "a": jax.ShapeDtypeStruct((4, 16), "float32"),
        "b": jax.ShapeDtypeStruct((5,), "float32"),
    }
    specs, codec = {"a": P("stage"), "b": P()}, lc.compression.make("int4")
    job = MeshExchange(Regions(1, mesh), codec, specs, parts=R, separate=True)
    together = MeshExchange(Regions(R, mesh), codec, specs, parts=R)
    rng = np.random.default_rng(1)
    tree_R = {k: rng.normal(size=(R, *x.shape)).astype("f4") for k, x in like.items()}
    weights = np.array([1.0, 2.0, 0.5], np.float32)
    encode = jax.jit(lambda tree: job.encode(tree, ())[0])
    payloads = [
        jax.tree.map(np.asarray, encode({k: x[r : r + 1] for k, x in tree_R.items()}))
        for r in range(R)
    ]
    found = reduced(slicing(job.whole(like), like, payloads[0]), payloads, weights)
    mean = jax.jit(lambda x, w: job.reduce(InSlices(x), w, like).mean)(found, weights[:1])
    payload_R = jax.jit(lambda tree: together.encode(tree, ())[0])(tree_R)
    expected = jax.jit(lambda p, w: together.reduce(p, w, like).mean)(payload_R, weights)
    jax.tree.map(np.testing.assert_array_equal, mean, expected)


def test_which_payloads_go_in_slices_and_their_bytes():
    regions = Regions(1, lc.make_mesh(devices=jax.devices()[:1]))
    dense = MeshExchange(regions)
    assert not goes_in_slices(dense, 2) and goes_in_slices(dense, 3)
    assert padded_nbytes(dense, LIKE, 3) == 4 * 21  # of 20 values
    int4 = lc.compression.make("int4")
    assert not goes_in_slices(MeshExchange(regions, int4), 3)
    cut = MeshExchange(regions, int4, parts=3, separate=True)
    assert goes_in_slices(cut, 3) and padded_nbytes(cut, LIKE, 3) == cut.nbytes(LIKE)
    assert cut.nbytes(LIKE) == int4.in_slices(3).dealt_nbytes(LIKE)


def test_slices_of_those_who_are_gone_fall_to_those_who_are_there():
    assert owners((0, 1, 2), 3) == [0, 1, 2]
    assert owners((0, 2, 3), 4) == [0, 2, 2, 3]
    assert owners((1,), 3) == [1, 1, 1]


@pytest.mark.parametrize("regions, refused", [(2, 0), (3, 1)])
def test_the_host_is_needed(regions, refused, between, monkeypatch):
    """Two regions hand one another whole payloads."""
    exchange = between(1)(0)
    exchange.count = regions

    def none(backend=None):
        if backend is None:
            return ["an accelerator"]
        raise RuntimeError(f"no {backend} here")

    monkeypatch.setattr(jax, "local_devices", none)
    mesh, method = lc.make_mesh(devices=jax.devices()[:1]), lc.methods.diloco(4)
    found = lines_of(method, regions, mesh=mesh, exchange=exchange)
    assert sum("add cpu to JAX_PLATFORMS" in one for one in found) == len(found) == refused
