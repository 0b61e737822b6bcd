"""Leaves split into whole units inside a region: every value where NumPy puts it."""

import jax
import numpy as np
import pytest
from engine.collectives import sent_across, sized

from lowcomm_jax.compression.windows import UnitSplit, Windows, cut_strips, join_strips, strips_work
from lowcomm_jax.mesh.regions import Regions, make_mesh

R, FSDP = 2, dict(region=2, fsdp=4)
BOTH = dict(region=2, fsdp=2, tensor=2)
CASES = [
    ((64,), False, ((0, ("fsdp",), 4),), 5, FSDP),
    ((255, 8), False, ((1, ("fsdp",), 4),), 24, FSDP),
    # The device order of the windows is not the mesh's.
    ((6, 8, 12), False, ((1, ("tensor",), 2), (2, ("fsdp",), 2)), 19, BOTH),
]
SLOW = [
    ((64,), False, ((0, ("fsdp",), 4),), 4, FSDP),
    ((3, 8, 10), False, ((1, ("fsdp",), 4),), 7, FSDP),
    ((6, 8, 12), False, ((1, ("fsdp",), 2), (2, ("tensor",), 2)), 19, BOTH),
    ((3, 7, 12), True, ((2, ("fsdp", "tensor"), 4),), 5, BOTH),
]


@pytest.mark.parametrize(
    "shape,lead,cuts,unit,mesh", CASES + [pytest.param(*c, marks=pytest.mark.slow) for c in SLOW]
)
def test_units_are_those_of_the_flat_leaf(shape, lead, cuts, unit, mesh):
    regions, windows = Regions(R, make_mesh(**mesh)), Windows(shape, lead, (), cuts)
    x_R = np.random.default_rng(0).standard_normal((R, *shape)).astype("f4")
    layers, size = shape[0] if lead else 1, windows.size
    count = -(-size // unit)

    def there_and_back(x):
        flat = windows.flatten(x)
        units = windows.to_units(flat, unit)
        sent = windows.drop_filling(units, unit)
        again = windows.unflatten(windows.from_units(windows.restore_filling(sent, unit)))
        return flat, units, windows.real(unit), sent, again

    placed = jax.device_put(x_R, regions.sharding("region", *windows.spec))
    program = jax.jit(regions.lift(there_and_back, (0,))).lower(placed).compile()
    flat, units, real, sent, again = map(np.asarray, program(placed))
    expected = x_R.reshape(R, layers, size)
    np.testing.assert_array_equal(flat, expected)
    np.testing.assert_array_equal(again, x_R)
    filling = np.repeat(expected[..., -1:], count * unit - size, axis=-1)
    whole = np.concatenate([expected, filling], axis=-1).reshape(R, layers, count, unit)
    np.testing.assert_array_equal(sent, whole)
    # Room on every device for as many units as the fullest has.
    assert units.shape[2] == 4 * -(-count // 4)
    np.testing.assert_array_equal(units[:, :, real[0]], expected)
    found = sized(program.as_text())
    assert not sent_across(found, 4, R).any()
    # `sent` may be whole everywhere, as its rows here are few and narrow.
    assert (
        max((c.nbytes for c in found if c.kind != "all-gather"), default=0) <= 4 * size * layers / 2
    )
    if unit % 4 == 0:
        assert all(c.kind != "all-gather" for c in found)


# Chunks of 3 x w, rows of chunks below one another: as many rows as devices or more, then fewer.
STRIPS = [((6, 28), ((1, ("fsdp",), 4),), 4, FSDP), ((3, 36), ((1, ("fsdp",), 4),), 6, FSDP)]
SLOW_STRIPS = [
    ((12, 6), ((0, ("fsdp",), 4),), 2, FSDP),  # fewer strips than devices
    ((12, 35), ((0, ("fsdp",), 4),), 7, FSDP),  # columns do not divide
    ((6, 40), ((0, ("tensor",), 2), (1, ("fsdp",), 2)), 4, BOTH),
]


@pytest.mark.parametrize(
    "shape,cuts,width,mesh",
    STRIPS + [pytest.param(*c, marks=pytest.mark.slow) for c in SLOW_STRIPS],
)
def test_strips_are_columns_of_chunks_that_travel_row_by_row(shape, cuts, width, mesh):
    regions, windows = Regions(R, make_mesh(**mesh)), Windows(shape, False, (), cuts)
    x_R = np.random.default_rng(0).standard_normal((R, *shape)).astype("f4")
    rows, columns = shape
    matrix, down, across = (1, *shape), rows // 3, columns // width
    assert strips_work(matrix, width, 4)

    def there_and_back(x):
        found = cut_strips(windows, windows.flatten(x), matrix, width)
        chunks = found.reshape(1, -1, 3 * width)
        sent = windows.drop_filling(chunks, rows * width, turned=True)
        again = windows.restore_filling(sent, rows * width, turned=True).reshape(found.shape)
        return found, sent, windows.unflatten(join_strips(windows, again, matrix))

    placed = jax.device_put(x_R, regions.sharding("region", *windows.spec))
    program = jax.jit(regions.lift(there_and_back, (0,))).lower(placed).compile()
    found, sent, again = map(np.asarray, program(placed))
    expected = x_R.reshape(R, rows, across, width).transpose(0, 2, 1, 3)
    np.testing.assert_array_equal(found[:, 0, windows.split(rows * width).filled], expected)
    chunks = x_R.reshape(R, down, 3, across, width).swapaxes(2, 3)
    np.testing.assert_array_equal(sent[:, 0], chunks.reshape(R, -1, 3 * width))
    np.testing.assert_array_equal(again, x_R)
    assert not sent_across(sized(program.as_text()), 4, R).any()


@pytest.mark.parametrize("rows", [11, pytest.param(13, marks=pytest.mark.slow)])
def test_shares_are_filled_up_with_their_own_last_unit(rows):
    """Eleven units over eight shares, of which each of four devices has two."""
    regions = Regions(R, make_mesh(**FSDP))
    windows, shares = Windows((rows, 8), False, (), ((1, ("fsdp",), 4),)), UnitSplit(8 * rows, 8, 8)
    x_R = np.random.default_rng(0).standard_normal((R, rows, 8)).astype("f4")

    def there_and_back(x):
        found = windows.regroup(windows.to_units(windows.flatten(x), 8), shares)
        return found, windows.unflatten(windows.from_units(windows.ungroup(found, shares)))

    placed = jax.device_put(x_R, regions.sharding("region", *windows.spec))
    found, again = map(np.asarray, jax.jit(regions.lift(there_and_back, (0,)))(placed))
    parts = [list(range(s * rows // 8, (s + 1) * rows // 8)) for s in range(8)]
    filled = [i for part in parts for i in (part + part[-1:])[:2]]
    np.testing.assert_array_equal(found[:, 0], x_R[:, filled])
    np.testing.assert_array_equal(again, x_R)
