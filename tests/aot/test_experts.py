"""The example's mixture of experts, compiled for two regions of eight GPUs, experts on `fsdp`.

Tokens go to the devices of their experts and back inside a region: all-to-alls of an inner step, in
the loss and in its gradient. Nothing of them crosses regions.
"""

import jax
import numpy as np
import optax
import pytest
from aot.aot_cases import M, needs

import lowcomm_jax as lc
from examples.mixture_of_experts import Mixture
from lowcomm_jax.params.fragments import path_name

METHODS = {
    "diloco": lambda: M.diloco(8),
    "spes": lambda: M.spes(8, "experts/", "up$", merge_every=8),
}


@pytest.mark.parametrize("name", METHODS)
def test_tokens_reach_their_experts_inside_a_region(name):
    target = needs("h100:2x8")
    mesh = target.mesh(region=2, fsdp=8)
    model = Mixture(256, layers=2, width=64, heads=4, hidden=128, experts=8, over="fsdp")
    params = jax.eval_shape(model.init, jax.random.key(0))
    paths = jax.tree_util.tree_leaves_with_path(model.specs(params, dict(mesh.shape)))
    specs = {path_name(path): spec for path, spec in paths}
    engine = lc.Engine(
        model.loss_fn,
        optax.adamw(1e-3),
        METHODS[name](),
        2,
        mesh=mesh,
        specs=lambda name, leaf: specs[name],
        stacked=model.stacked,
    )
    batch = {
        "tokens": jax.ShapeDtypeStruct((16, 65), np.int32),
        "mask": jax.ShapeDtypeStruct((16, 64), np.float32),
    }
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        report = lc.ahead_of_time(engine, params, batch, target)
    (step,) = (program for program in report.programs if program.name == "inner step")
    swaps = [one for one in step.collectives if one.kind == "all-to-all"]
    # There and back, and both again for the gradient: 2 sequences a device, 24 places an expert.
    shapes = sorted({tuple(array.shape) for one in swaps for array in one.arrays})
    assert shapes == [(8, 1, 2, 24, 64), (8, 2, 1, 24, 64)] and len(swaps) == 4
    assert {one.axes for one in swaps} == {("fsdp",)}
    assert not any(one.crosses for one in step.collectives)
    assert report.crossing_bytes == report.announced > 0
