"""Roles that differ by region: what a region does not train gets no inner update there."""

import dataclasses

import jax
import numpy as np
import optax
import oracle
import pytest
from oracle.jax_problem import loss_fn
from refused_lines import lines_of

import lowcomm_jax as lc
from lowcomm_jax.params.roles import Rows, Shares, trained_rows

R, STEPS = 3, 5
SHAPES = {k: jax.ShapeDtypeStruct(s, np.float32) for k, s in oracle.SHAPES.items()}
# Region 2 trains nothing of `b`; nobody trains row 1 of `c`; `s` is trained everywhere.
ROWS = Rows(
    (
        {"a": (0, 2), "b": (0, 5), "c": (0, 1)},
        {"b": (4, 7), "c": (0, 1)},
        {"b": (3, 3), "c": (0, 0)},
    )
)


def masked(roles, period=STEPS + 1):
    return dataclasses.replace(lc.methods.diloco(period), roles=roles)


def trained(roles, inner, steps=STEPS, microbatch=None, mesh=(1,), **settings):
    mesh = lc.make_mesh(*mesh, devices=jax.devices()[: int(np.prod(mesh))])
    engine = lc.Engine(loss_fn, inner, masked(roles), R, mesh=mesh, **settings)
    batches = oracle.make_batches(steps=steps, regions=R)
    stream = [oracle.step_batch(batches, t) for t in range(1, steps + 1)]
    return engine.run(engine.init(oracle.make_params()), stream, microbatch=microbatch)


def moved(state):
    """Bool `[R, ...]` by leaf: which entries of a region are not where they started."""
    start = oracle.make_params()
    return {k: np.array(x) != start[k] for k, x in lc.region_params(state).items()}


def full(mask, name):
    return np.broadcast_to(mask, (R, *oracle.SHAPES[name]))


def test_shares_are_cut_in_order_of_the_regions():
    found = trained_rows(Shares("^[ab]$"), SHAPES, R)
    assert sorted(found) == ["a", "b"]
    np.testing.assert_array_equal(found["a"][..., 0], np.eye(3, dtype=bool))
    owners = [np.flatnonzero(found["b"][r]).tolist() for r in range(R)]
    assert owners == [[0, 1], [2, 3], [4, 5, 6]]
    (of_c,) = trained_rows(Shares("c", axis=1), SHAPES, R).values()
    assert of_c.shape == (R, 2, 3, 1)
    np.testing.assert_array_equal(of_c[:, 0, :, 0], np.eye(3, dtype=bool))
    np.testing.assert_array_equal(of_c[:, 1], of_c[:, 0])


@pytest.mark.parametrize("roles", [Shares("a|b"), Shares("c", axis=1), ROWS], ids=str)
@pytest.mark.parametrize(
    "how",
    [{}, {"accumulate": 2}, {"microbatch": 2}, {"mesh": (3,)}, {"replicas": "vmap"}],
    ids=str,
)
def test_what_a_region_does_not_train_stays_where_it_is(roles, how):
    """AdamW's weight decay would move it, and its moments stay 0."""
    state, _ = trained(roles, optax.adamw(0.02, weight_decay=0.1), **how)
    masks = trained_rows(roles, SHAPES, R)
    moments = state.inner.opt[0]
    for name, entries in moved(state).items():
        wanted = full(
            masks.get(name, np.ones((R,), bool).reshape(R, *(1,) * (entries.ndim - 1))), name
        )
        np.testing.assert_array_equal(entries, wanted, name)
        for of_moment in (moments.mu, moments.nu):
            np.testing.assert_array_equal(np.array(of_moment[name]) != 0, wanted, name)


def test_the_norm_of_the_gradient_is_that_of_what_is_trained():
    everything, nothing = Rows(({},) * R), Rows(({"a": (0, 0), "b": (0, 0), "c": (0, 0)},) * R)
    _, whole = trained(everything, optax.sgd(0.0), steps=1)
    _, alone = trained(nothing, optax.sgd(0.0), steps=1)
    params, batches = oracle.make_params(), oracle.make_batches(steps=1, regions=R)
    grads = [oracle.gradient(params, batches["x"][0, r], batches["y"][0, r]) for r in range(R)]
    of_s = [np.abs(g["s"]) for g in grads]
    total = [np.sqrt(sum((x**2).sum() for x in g.values())) for g in grads]
    np.testing.assert_allclose(alone["grad_norm"][0], of_s, rtol=1e-5)
    np.testing.assert_allclose(whole["grad_norm"][0], total, rtol=1e-5)


def test_a_bad_gradient_of_what_is_not_trained_skips_no_step():
    def loss(params, batch, rng):
        return jax.numpy.sqrt(params["b"]).sum() + params["a"].sum() * batch["x"].mean()

    engine = lc.Engine(loss, optax.sgd(0.1), masked(Shares("b")), R, mesh=lc.make_mesh())
    start = {"a": np.ones(2, np.float32), "b": np.float32([1, 4, 0])}  # 1 / 0 in region 2's row
    state, history = engine.run(engine.init(start), [{"x": np.ones((R, 2), np.float32)}])
    assert history["skipped"][0].tolist() == [0, 0, 1]
    local = np.array(lc.region_params(state)["b"])
    np.testing.assert_allclose(local, [[0.95, 4, 0], [1, 3.975, 0], [1, 4, 0]], rtol=1e-6)


def test_everyone_training_everything_changes_no_bit():
    inner = optax.adamw(0.02)
    state, _ = trained(Rows(({},) * R), inner)
    other, _ = trained(None, inner)
    assert jax.tree.structure(state.inner) == jax.tree.structure(other.inner)
    for a, b in zip(jax.tree.leaves(state.inner), jax.tree.leaves(other.inner), strict=True):
        np.testing.assert_array_equal(a, b)


def refused(roles):
    with pytest.raises(ValueError, match="these settings do not fit the parameters") as error:
        trained(roles, optax.sgd(0.1))
    return str(error.value)


def test_roles_that_do_not_fit_the_leaves():
    assert "'x' matches none of 4 trained leaves, as 'a': correct it" in refused(Shares("x"))
    text = refused(Shares(""))
    assert "'c' has 2 rows along axis 0 for 3 regions" in text
    assert "'s' is [] and has no axis 0: leave it out" in text
    text = refused(Rows(({"a": (0, 4), "x": (0, 1)}, {}, {"b": (0, 1)}), axis=0))
    assert "region 0 has rows 0 to 4 of 'a', which has 3 along axis 0: give at most 3" in text
    assert "leaf 'x' is unknown" in text


@dataclasses.dataclass(frozen=True)
class Own(lc.roles.RegionRoles):
    """A mask of one's own, entry by entry."""

    shape: tuple[int, ...]

    def masks(self, shapes, regions):
        return {"a": np.arange(np.prod(self.shape)).reshape(self.shape) % 2 == 0}


def test_masks_of_ones_own():
    state, _ = trained(Own((R, 3, 5)), optax.sgd(0.1))
    (wanted,) = Own((R, 3, 5)).masks({}, R).values()
    np.testing.assert_array_equal(moved(state)["a"], wanted)
    assert "the mask of 'a' is [3, 5]: give [3, 3, 5], with 1" in refused(Own((3, 5)))


def test_settings_that_cannot_work():
    found = "\n".join(lines_of(masked(Rows(({"a": (2, 1)}, {"a": 3}), axis=-1)), R))
    for wrong in ("axis=-1", "2 mappings for 3 regions", "region 0 has 'a': (2, 1)", "'a': 3;"):
        assert wrong in found
    (line,) = lines_of(masked(Shares("(")), R)
    assert "'(' is no regular expression" in line
    (line,) = lines_of(masked("share"), R)
    assert "roles='share' is unknown (did you mean shares?): use rows, shares" in line
    (line,) = lines_of(masked({"name": "shares", "leafs": "a"}), R)
    assert "roles: shares has the settings leaves, axis" in line
    assert masked({"name": "shares", "leaves": "a", "axis": 1}).roles == Shares("a", 1)
