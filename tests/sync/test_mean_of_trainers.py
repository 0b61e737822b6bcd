"""The mean of an entry is over the regions that train it; without one it is 0."""

import dataclasses

import jax
import numpy as np
import optax
import oracle
import pytest
from engine.test_oracle import ADAMW, SGD, STEPS, absent, train
from oracle.jax_problem import loss_fn
from params.test_region_roles import SHAPES
from sync import test_stacked_equals_unrolled as layered

import lowcomm_jax as lc
from lowcomm_jax.params.roles import Rows, Shares

R = 3


def masked(roles, period=4, **answers):
    return dataclasses.replace(lc.methods.diloco(period), roles=roles, **answers)


SHARES = Shares("^[ab]$")


def test_where_no_trainer_is_present_momentum_goes_on():
    mask = absent(8, R, ((8, 1),))
    state, seen, _ = train(masked(Shares("a")), SGD[1], R, steps=8, participants=mask)
    other, before, _ = train(masked(Shares("a")), SGD[1], R, steps=7, participants=mask)
    old, new = (np.array(optax.tree.get(x.outer[0], "trace")["a"][0]) for x in (other, state))
    np.testing.assert_allclose(new[1], np.float32(0.9) * old[1], rtol=1e-6)
    moved = seen[7][0]["a"][0, 1] - before[6][0]["a"][0, 1]
    np.testing.assert_allclose(moved, -0.7 * 0.9 * new[1], rtol=1e-4)
    assert (np.abs(moved) > 1e-4).all()
    # Region 0 takes the anchor, region 1 goes on from its own values.
    np.testing.assert_array_equal(seen[7][1]["a"][0], seen[7][0]["a"][0])
    assert (seen[7][1]["a"][1, 1] != seen[7][0]["a"][0, 1]).all()


def test_an_entry_that_nobody_trains_does_not_move():
    nobody = Rows(({"b": (1, 1)},) * R)
    _, seen, _ = train(masked(nobody), ADAMW[1], R)
    for anchor, local in seen:
        np.testing.assert_array_equal(anchor["b"][0], oracle.make_params()["b"])
        np.testing.assert_array_equal(local["b"], np.stack([oracle.make_params()["b"]] * R))


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_everyone_training_everything_is_the_method_without_roles(count):
    method = lc.methods.streaming_diloco(5, count, 1, 0.3, pattern="balanced")
    everything = Rows(({k: (0, x.shape[0]) for k, x in SHAPES.items() if x.shape},) * R)
    mask = absent(STEPS, R)
    given = {"participants": mask, "finish": True, "weights": [0.2, 0.5, 0.3]}
    _, seen, _ = train(dataclasses.replace(method, roles=everything), ADAMW[1], R, **given)
    _, expected, _ = train(method, ADAMW[1], R, **given)
    for a, b in zip(jax.tree.leaves(seen), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_of_a_stack_that_is_cut_into_fragments(axis):
    """Layers (axis 0), or rows of every layer (axis 1), as in a model with a leaf a layer."""

    def streaming(roles):
        method = lc.methods.streaming_diloco(4, 2, 1, 0.4, outer=lc.outer.average())
        return dataclasses.replace(method, roles=roles)

    def unrolled(told):
        del told
        if axis == 1:
            return streaming(Shares(r"blocks/\d/w"))
        owners = (0, 1, 2, 2)  # of the four layers
        rows = [{f"blocks/{i}/w": (0, 0) for i in range(4) if owners[i] != r} for r in range(R)]
        return streaming(Rows(rows))

    found = layered.trained(lambda told: streaming(Shares("blocks/w", axis)), True)
    expected = layered.trained(unrolled, False)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "meshes",
    [
        pytest.param([{"fsdp": 3}, {"region": 3, "fsdp": 2}], id="cut"),
        pytest.param([{"region": 3}], id="slots", marks=pytest.mark.slow),
    ],
)
def test_on_a_mesh(meshes):
    """Slots of the mesh, and leaves cut over a region's devices."""
    found = []
    for sizes in ({}, *meshes):

        def specs(name, leaf, sizes=sizes):
            return jax.P("fsdp") if name == "a" and sizes.get("fsdp") == 3 else jax.P()

        placed = lc.make_mesh(**sizes, devices=jax.devices()[: int(np.prod([*sizes.values()]))])
        method = masked(SHARES, 2)
        engine = lc.Engine(loss_fn, optax.adamw(0.02), method, R, mesh=placed, specs=specs)
        table = oracle.make_batches(steps=5, regions=R, batch_size=6)
        stream = [oracle.step_batch(table, t) for t in range(1, 6)]
        state, _ = engine.run(engine.init(oracle.make_params()), stream)
        found.append(jax.tree.map(np.array, (lc.global_params(state), lc.region_params(state))))
    for others in found[1:]:
        for a, b in zip(*map(jax.tree.leaves, (found[0], others)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
