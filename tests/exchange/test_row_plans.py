"""How leaves, payloads and codec states lie inside a region while they are coded, case by case.

Meshes of two by two devices in each region. Written out by hand, without a codec or a program.
"""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from lowcomm_jax.compression.row_sharding import RowCut
from lowcomm_jax.exchange.rows import Rows
from lowcomm_jax.mesh.regions import Regions, make_mesh

F, T, FT = ("fsdp",), ("tensor",), ("fsdp", "tensor")
TF = ("tensor", "fsdp")


@dataclasses.dataclass(frozen=True)
class Coded:
    """A codec by the rows that it codes together, and whether it splits leaves into units."""

    together: int = 1
    splits: bool = True
    name: str = "own"

    def rows_together(self, name, shape):
        return self.together

    def splits_over(self, name, shape, devices):
        return self.splits


def rows(together=1, splits=True, fsdp=2, tensor=2):
    mesh = make_mesh(region=2, fsdp=fsdp, tensor=tensor)
    return Rows(Regions(2, mesh), Coded(together, splits), ("layers",))


def shape_of(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


@pytest.mark.parametrize(
    ("name", "shape", "spec", "planned", "moves"),
    [
        ("w", (8, 6), P(), P(), ()),
        ("w", (8, 6), P("fsdp"), P(F), ()),
        ("w", (8, 6), P(None, "fsdp"), P(F), ((1, F),)),
        ("w", (8, 6), P("tensor", "fsdp"), P(TF), ((1, F),)),
        ("w", (8, 4, 6), P(None, "fsdp", "tensor"), P(FT), ((1, F), (2, T))),
        ("layers/w", (3, 8, 6), P(None, None, "fsdp"), P(None, F), ((2, F),)),
        ("layers/w", (4, 8, 6), P("fsdp", None, "tensor"), P("fsdp", T), ((2, T),)),
        ("layers/w", (4, 8, 6), P("fsdp"), P("fsdp"), ()),
        ("layer/w", (4, 8, 6), P("fsdp"), P(F), ()),  # of another name
        ("layers", (4, 8, 6), P(None, "fsdp"), P(None, F), ()),
    ],
)
def test_rows_take_over_the_cuts_of_columns(name, shape, spec, planned, moves):
    found = rows()._plan(name, shape, spec)
    assert (found.spec, found.moves, found.windows) == (planned, moves, None)
    assert found.row == name.startswith("layers")


@pytest.mark.parametrize(
    ("together", "name", "shape", "spec"),
    [
        (1, "b", (8,), P("fsdp")),  # of a vector there are no rows
        (1, "layers/b", (3, 8), P(None, "fsdp")),
        (1, "w", (6, 8), P("tensor", "fsdp")),  # six rows over four devices
        (3, "w", (8, 6), P("fsdp")),  # four rows a device, three are coded together
        (3, "layers/w", (3, 8, 6), P(None, None, "fsdp")),
        (3, "w", (4, 4, 12), P("fsdp")),  # as a matrix 16 rows: eight a device
    ],
)
def test_what_does_not_divide_into_rows_is_split_or_gathered(together, name, shape, spec):
    found = rows(together)._plan(name, shape, spec)
    assert found.spec == spec and found.moves == ()
    windows = found.windows
    assert windows.shape == shape and windows.lead is name.startswith("layers")
    cuts = [(dim, (entry,), 2) for dim, entry in enumerate(spec) if entry]
    assert windows.cuts == tuple(cuts) and windows.layers == ()
    found = rows(together, splits=False)._plan(name, shape, spec)
    assert (found.spec, found.moves, found.windows) == (P(), (), None)


def test_rows_of_a_matrix_are_those_that_are_coded_together():
    """Of `[4, 4, 12]` they are 16, and of `[4, 6, 12]` they are 24: twelve a device."""
    assert rows(4)._plan("w", (4, 4, 12), P("fsdp")).windows is None
    assert rows(3)._plan("w", (4, 6, 12), P("fsdp")).windows is None
    assert rows(5)._plan("w", (4, 6, 12), P("fsdp")).windows is not None


def test_a_layer_that_is_split_stays_on_its_devices():
    found = rows(splits=True)._plan("layers/b", (4, 8), P("fsdp", "tensor"))
    assert found.windows.layers == F and found.windows.cuts == ((1, T, 2),)


@pytest.mark.parametrize(
    ("name", "shape", "spec", "stays", "windows"),
    [
        ("w", (8, 6), P(None, "fsdp"), True, False),
        ("w", (5, 6), P("tensor"), True, True),  # as columns
        ("w", (5, 7), P("tensor"), False, False),
        ("layers/w", (2, 5, 7), P(None, "fsdp"), False, False),  # 10 rows are of two layers
        ("layers/w", (3, 5, 6), P(None, "fsdp"), True, True),
        ("w", (5, 6, 9), P(None, "fsdp"), True, True),  # 30 rows, and not five
    ],
)
def test_values_coded_by_themselves_stay_or_become_rows_or_columns(
    name, shape, spec, stays, windows
):
    found = rows(together=0, splits=False)._plan(name, shape, spec)
    assert found.spec == (spec if stays else P()) and found.moves == ()
    assert (found.windows is not None) is windows


@pytest.mark.parametrize(
    ("together", "name", "shape", "spec", "cut"),
    [
        (1, "w", (8, 6), P("fsdp"), RowCut((), F, ())),
        (1, "w", (8, 6), P(None, "fsdp"), RowCut((), F, ())),
        (0, "w", (8, 6), P(None, "fsdp"), RowCut((), (), F)),
        (0, "w", (8, 6), P("tensor", "fsdp"), RowCut((), T, F)),
        (0, "layers/w", (4, 8, 6), P("fsdp", "tensor"), RowCut(F, T, ())),
        (0, "layers/w", (4, 4, 4, 6), P(None, None, None, "fsdp"), RowCut((), (), F)),
        (1, "layers/w", (4, 8, 6), P("fsdp", None, "tensor"), RowCut(F, T, ())),
        (1, "w", (8, 6), P(), RowCut((), (), ())),
    ],
)
def test_how_the_matrices_of_a_leaf_are_cut(together, name, shape, spec, cut):
    made = rows(together)
    assert made._cut(name, shape, made._plan(name, shape, spec)) == cut


@pytest.mark.parametrize(
    ("together", "shape", "spec", "rows_cut", "columns_cut"),
    [
        (1, (6, 8), P("tensor", "fsdp"), TF, ()),  # units
        (0, (5, 6), P("tensor"), (), T),
        (0, (5, 6, 9), P(None, "fsdp"), F, ()),  # 30 rows of nine columns
    ],
)
def test_how_units_or_a_matrix_of_windows_are_cut(together, shape, spec, rows_cut, columns_cut):
    made = rows(together)
    plan = made._plan("w", shape, spec)
    assert made._cut("w", shape, plan) == RowCut((), rows_cut, columns_cut, plan.windows)


def test_one_device_of_an_axis_cuts_nothing():
    made = rows(fsdp=1)
    assert made._plan("w", (8, 6), P("fsdp", "tensor")).moves == ((1, T),)
    assert made._plan("w", (8, 6), P("fsdp")) == (P("fsdp"), 0, (), None)


# -- payloads and states ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("together", "spec", "coded", "lies"),
    [
        (1, P(None, "fsdp"), (1, 8, 6), P(None, F, None)),
        (0, P(None, "fsdp"), (1, 8, 6), P(None, None, F)),
        (0, P("tensor", "fsdp"), (1, 8, 6), P(None, T, F)),
        (0, P(None, "fsdp"), (1, 8, 5), P(None, F)),  # as it divides, behind the layers
        (1, P("fsdp"), (1, 5, 4), P(None, None, F)),
        (1, P("fsdp"), (1, 5, 3), P()),
        (1, P("fsdp"), (1, 16), P(None, F)),
        (1, P("fsdp"), (2,), P()),  # never along the layers
        (1, P("fsdp"), (1, 0, 4), P(None, F, None)),
        (1, P("fsdp"), (1, 0, 4, 2), P(None, None, F)),
        (1, P("tensor", "fsdp"), (1, 6, 4, 2), P(None, None, TF)),
        (1, P(), (1, 8, 6), P(None, None, None)),
        (1, P(), (1, 8), P()),
    ],
)
@pytest.mark.parametrize("lead", [1, 2])
def test_payloads_lie_as_what_they_encode(together, spec, coded, lies, lead):
    payload = {"w": {"codes": shape_of(*(2, 4)[:lead], *coded)}}
    found = rows(together).payload_specs(payload, {"w": shape_of(8, 6)}, {"w": spec}, lead)
    assert found == {"w": {"codes": lies}}


@pytest.mark.parametrize(
    ("shape", "spec", "state", "lies"),
    [
        ((8, 6), P(None, "fsdp"), (8, 6), P(F)),  # a residual lies by rows
        ((8, 6), P(None, "fsdp"), (1, 6, 3), P(None, F)),  # a basis, for each column
        ((8, 6), P(None, "fsdp"), (1, 8, 3), P(None, F)),
        ((8, 6), P(None, "fsdp"), (1, 4, 3), P()),  # neither rows nor columns
        ((8, 6), P(None, "fsdp"), (2, 8, 3), P()),
        ((8, 6), P(None, "fsdp"), (1, 8), P()),
        ((8, 6), P(None, "fsdp"), (1, 8, 3, 2), P()),
        ((6, 8), P("tensor", "fsdp"), (1, 6, 3), P()),  # six over four devices
        ((6, 8), P("tensor", "fsdp"), (1, 8, 3), P(None, TF)),
        ((8, 6), P(), (1, 8, 3), P()),
    ],
)
def test_states_of_a_leaf_lie_like_it(shape, spec, state, lies):
    made, like = rows(), {"w": shape_of(*shape)}
    found = made.state_specs({"basis": {"w": shape_of(*state)}}, like, {"w": spec})
    assert found == {"basis": {"w": lies}}


@pytest.mark.parametrize(
    ("size", "spec", "fine"),
    [(64, P("fsdp"), True), (65, P("fsdp"), False), (65, P(), True), (65, P(None, "fsdp"), False)],
)
def test_only_small_states_may_be_of_no_leaf_where_leaves_are_cut(size, spec, fine):
    given = {"key": shape_of(size)}, {"w": shape_of(8, 6)}, {"w": spec}
    if fine:
        assert rows().state_specs(*given) == {"key": P()}
    else:
        with pytest.raises(ValueError, match=r"codec own: its state \['key'\] \[65\] stands under"):
            rows().state_specs(*given)


# -- leaves that move -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "spec"),
    [
        ("w", (8, 6), P("tensor", "fsdp")),
        ("w", (8, 4, 6), P(None, "fsdp", "tensor")),
        ("layers/w", (2, 8, 4, 6), P(None, None, "tensor", "fsdp")),
    ],
)
def test_leaves_by_rows_are_the_same_leaves_and_come_back(name, shape, spec):
    made = rows()
    values = np.random.default_rng(0).standard_normal((2, *shape)).astype(np.float32)
    where = made.regions.sharding("region", *spec)

    def there_and_back(x):
        by_rows = made.to_rows({name: x}, {name: spec})
        return by_rows[name], made.from_rows(by_rows, {name: spec})[name]

    by_rows, back = jax.jit(there_and_back)(jax.device_put(values, where))
    np.testing.assert_array_equal(by_rows, values)
    np.testing.assert_array_equal(back, values)
    planned = made.specs({name: shape_of(*shape)}, {name: spec})[name]
    assert by_rows.sharding.is_equivalent_to(
        made.regions.sharding("region", *planned), by_rows.ndim
    )
    assert back.sharding.is_equivalent_to(where, back.ndim)


def test_a_layout_of_rows_is_chosen_where_every_device_then_codes_its_own_part():
    made, asked = rows(together=4, splits=True), []
    spec = made.first(lambda name, leaf: asked.append(name) or P("tensor"))
    assert spec("w", shape_of(8, 6)) == P("fsdp")
    assert spec("layers/w", shape_of(3, 8, 6)) == P(None, "fsdp") and not asked
    for name, shape in (("w", (6, 6)), ("b", (8,)), ("layers/b", (3, 8))):
        assert spec(name, shape_of(*shape)) == P("tensor"), name
    assert asked == ["w", "b", "layers/b"]
