"""Selected entries, taken and put on every mesh as NumPy indexing does it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowcomm_jax as lc
from lowcomm_jax.exchange import entries
from lowcomm_jax.exchange.entries import put_entries, take_entries
from lowcomm_jax.mesh.regions import Regions

R = 2
LEAVES = {
    "both": ((4, 6), jax.P("fsdp", "tensor")),
    "rows": ((3, 2, 8), jax.P(None, None, ("tensor", "fsdp"))),
    "whole": ((5, 3), jax.P()),
    "scalar": ((), jax.P()),
}


def problem():
    rng = np.random.default_rng(0)
    values = [rng.standard_normal((R, *shape)).astype(np.float32) for shape, _ in LEAVES.values()]
    indices = [np.array(x, np.int32) for x in ([1, 7, 8, 23], [0, 13, 47, 48], [2, 14, 15], [0])]
    return values, indices


@pytest.mark.parametrize("largest", [entries.LARGEST, 24])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (2, 1, 1, 1), (1, 1, 2, 1), (1, 1, 2, 2), (2, 1, 2, 2)]
)
def test_entries_on_every_mesh(shape, largest, monkeypatch):
    """48 and 15 lie behind the ends of their leaves: taken as 0, put nowhere.

    In bands of at most 24 entries `rows` has three, of 16 entries each.
    """
    monkeypatch.setattr(entries, "LARGEST", largest)
    mesh = lc.make_mesh(*shape, devices=jax.devices()[: int(np.prod(shape))])
    regions, specs = Regions(R, mesh), [spec for _, spec in LEAVES.values()]
    values, indices = problem()
    in_bands = list(indices)
    if largest == 24:
        in_bands[1:2] = [np.array(x, np.int32) for x in ([0, 13], [], [15, 16])]
    lie = [regions.sharding("region", *spec) for spec in specs]
    placed = [jax.device_put(x, where) for x, where in zip(values, lie)]
    taken = jax.jit(lambda xs: take_entries(regions, xs, in_bands, specs))(placed)
    flat = [np.concatenate([x.reshape(R, -1), np.zeros((R, 1))], axis=1) for x in values]
    expected = np.concatenate([x[:, i] for x, i in zip(flat, indices)], axis=1)
    np.testing.assert_array_equal(taken, expected.astype(np.float32))

    new = np.arange(200, 224, dtype=np.float32).reshape(R, 12)
    adopts = np.ones((R, 12), bool)
    adopts[0], adopts[1, 5] = False, False
    put = jax.jit(lambda xs: put_entries(regions, xs, in_bands, specs, jnp.asarray(new), adopts))
    same = jax.jit(lambda xs: put_entries(regions, xs, in_bands, specs, new[0], adopts[:, 0]))
    for got, x, i in zip(same(placed), flat, indices):
        inside = i[i < x.shape[1] - 1]
        row = np.asarray(got).reshape(R, -1)[:, inside]
        assert (row[0] == x[0, inside]).all() and (row[1] >= 200).all() and (row[1] < 212).all()
    start = 0
    for got, x, i, where in zip(put(placed), flat, indices, lie):
        part = slice(start, start + i.size)
        x[1, i] = np.where(adopts[1, part], new[1, part], x[1, i])
        start += i.size
        np.testing.assert_array_equal(np.asarray(got).reshape(R, -1), x[:, :-1].astype(np.float32))
        assert got.sharding.is_equivalent_to(where, got.ndim), "a leaf was moved"


def test_an_empty_place_of_a_band_is_not_the_next_bands(monkeypatch):
    monkeypatch.setattr(entries, "LARGEST", 16)
    regions, x = Regions(1, lc.make_mesh()), jnp.arange(48.0).reshape(1, 3, 16)
    indices = [jnp.array(i, jnp.int32) for i in ([3, 16], [0, 17], [15, 16])]
    found = take_entries(regions, [x], indices, [jax.P()])
    np.testing.assert_array_equal(found, [[3, 0, 16, 0, 47, 0]])
    (new,) = put_entries(regions, [x], indices, [jax.P()], -jnp.ones(6), jnp.ones(1, bool))
    np.testing.assert_array_equal(np.flatnonzero(new == -1), [3, 16, 47])
