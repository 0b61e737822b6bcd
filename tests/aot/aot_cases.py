"""Engines on absent devices for these tests, and what keeps such tests from running."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowcomm_jax as lc
from lowcomm_jax.aot import Target, ahead_of_time
from lowcomm_jax.aot.programs import call_programs
from lowcomm_jax.models import build, preset
from lowcomm_jax.params.fragments import path_name

M = lc.methods
BLOCKS = ("blocks",)
METHODS = {
    "a_edit": lambda: M.a_edit(4.0, 0.5, (1.0, 2.0)),
    "adloco": lambda: M.local_sgd(8),  # between merges each of its trainers is local SGD
    "async_local_sgd": lambda: M.async_local_sgd(8, (1.0, 2.0)),
    "cocodc": lambda: M.cocodc(8, 2, overlap=2),
    "ddp": M.ddp,
    "decoupled_momentum": lambda: M.decoupled_momentum(8, stacked=BLOCKS),
    "delayed_diloco": lambda: M.delayed_diloco(8),
    "demo": lambda: M.demo(stacked=BLOCKS),
    "des_loc": lambda: M.des_loc(1, 1, 1),
    "diloco": lambda: M.diloco(8),
    "dilocox": lambda: M.dilocox(
        8, codec={"name": "low_rank_int4", "stacked": BLOCKS}, rank=16, adaptive=False
    ),
    "eager_diloco": lambda: M.eager_diloco(8),
    "edit": lambda: M.edit(8),
    "gasloc": lambda: M.gasloc(8, 0.5, 0.3, 1.0),
    "heloco": lambda: M.heloco(8, (1.0, 2.0)),
    "isoloco": lambda: M.isoloco(8),
    "local_sgd": lambda: M.local_sgd(8),
    "muloco": lambda: M.muloco(8, stacked=BLOCKS),
    "noloco": lambda: M.noloco(8),
    "partial_updates": lambda: M.partial_updates(8, lc.roles.Shares("blocks/", 1)),
    "restarted_diloco": lambda: M.restarted_diloco(8),
    "snoo": lambda: M.snoo(8),
    "sparseloco": lambda: M.sparseloco(8, stacked=BLOCKS),
    "pulseloco": lambda: M.pulseloco(8, stacked=BLOCKS),
    "sparta": lambda: M.sparta(0.125),
    "spes": lambda: M.spes(8, "blocks/up", "up", 1, merge_every=8),
    "streaming_diloco": lambda: M.streaming_diloco(8, 2, 2, 0.5),
}


DELAYED = ("cocodc", "delayed_diloco", "dilocox", "eager_diloco", "streaming_diloco")


@functools.cache
def why_not(target: str) -> str | None:
    """Why nothing can be compiled for a target here; None = it can."""
    try:
        return None if Target.parse(target).devices else "no devices"
    except RuntimeError as error:
        return str(error)


def needs(target: str) -> Target:
    """The target; the test is skipped where its compiler is not installed."""
    reason = why_not(target)
    if reason:
        pytest.skip(reason)
    return Target.parse(target)


def small_params():
    """Shapes of a model of which every program compiles in a second."""

    def leaf(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    return {
        "blocks": {"up": leaf(2, 128, 256), "scale": leaf(2, 128)},
        "table": leaf(256, 128),
    }


def small_loss(params, batch, rng):
    del rng
    x = lc.shard_batch(batch["x"])
    for layer in range(2):
        scale = params["blocks"]["scale"][layer][None]
        x = jnp.tanh(x * scale @ params["blocks"]["up"][layer])[:, :128] + x
    return jnp.mean((x @ params["table"].T) ** 2)


SMALL_BATCH = {"x": jax.ShapeDtypeStruct((16, 128), np.float32)}


def small_engine(target: Target, method, regions: int, fsdp: int):
    """The engine of the small model with a method."""
    mesh = target.mesh(region=regions, fsdp=fsdp)
    return lc.Engine(small_loss, optax.adamw(1e-3), method, regions, mesh=mesh, stacked=BLOCKS)


def small(target: Target, method, regions: int, fsdp: int):
    """`AheadOfTime` of the small model with a method."""
    engine = small_engine(target, method, regions, fsdp)
    with jax.numpy_dtype_promotion("standard"):
        return ahead_of_time(engine, small_params(), SMALL_BATCH, target)


def small_announced(target: Target, method, regions: int, fsdp: int) -> int:
    """`AheadOfTime.announced` of the small model with a method; nothing is compiled."""

    def record(program, name, host=()):
        del name, host
        return lambda *args, **static: program.trace(*args, **static).out_info

    engine = small_engine(target, method, regions, fsdp)
    with jax.numpy_dtype_promotion("standard"):
        return call_programs(engine, small_params(), SMALL_BATCH, record)[1]


def transformer(target: Target, name: str, method, batch: int, length: int, mesh=None, **changes):
    """`AheadOfTime` of a preset, of `batch` sequences of this length a region."""
    mesh = target.mesh(**(mesh or {}))
    fields = {"compute_dtype": "bfloat16", "remat": "full", **changes}
    model = build(preset(name, **fields), mesh.devices.flat[0])
    params = jax.eval_shape(model.init, jax.random.key(0))
    paths = jax.tree_util.tree_leaves_with_path(model.specs(params, dict(mesh.shape)))
    specs = {path_name(path): spec for path, spec in paths}
    engine = lc.Engine(
        model.loss_fn,
        optax.adamw(1e-4),
        method,
        mesh.shape["region"],
        mesh=mesh,
        specs=lambda name, leaf: specs[name],
        stacked=BLOCKS,
    )
    tokens = {"tokens": jax.ShapeDtypeStruct((batch, length + 1), np.int32)}
    with jax.numpy_dtype_promotion("standard"):
        return ahead_of_time(engine, params, tokens, target)


@functools.cache
def of_method(target: str, name: str):
    """`small` of a method in `METHODS`: two regions of four devices."""
    return small(needs(target), METHODS[name](), regions=2, fsdp=4)


@functools.cache
def of_150m(target: str, sequences: int, attention: str):
    """`transformer` of 150M with DiLoCo, of sequences of 1,024 tokens."""
    method = METHODS["diloco"]()
    return transformer(needs(target), "diloco_150m", method, sequences, 1024, attention=attention)


def assert_beside(report):
    """All payloads cross regions while all products of an inner step run."""
    crossing = {
        program.name: [one for one in program.collectives if one.crosses and not one.is_control]
        for program in report.programs
    }
    beside = crossing.pop("inner steps and exchange")
    work = report.programs[0].work
    products = work["product"].seconds + work["attention"].seconds
    assert beside and all(one.beside >= 0.999 * products > 0 for one in beside)
    assert not any(crossing.values())
