"""Every method and codec at the shapes of the 107B model, traced: nothing is counted by int32.

Its stacked leaves have up to 3e10 entries. SPARTA refuses those (`ChannelExchange.violations`), and
is traced on leaves of one layer each.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params

import lowcomm_jax as lc
from lowcomm_jax.aot.programs import call_programs
from lowcomm_jax.compression.registry import names
from lowcomm_jax.models import PRESETS, build

M, LARGEST = lc.methods, 2**31 - 1
GROUPS = {"period": 8, "groups": ((0,), (1,)), "speeds": (1.0, 1.0)}
METHODS = {
    "adloco": lambda: M.adloco(
        8, inner_batching=lc.batching.NormTest(start=4, cap=64, microbatches=2)
    ),
    "async_local_sgd": lambda: M.async_local_sgd(8, (1.0, 2.0)),
    "cocodc": lambda: M.cocodc(8, 2, overlap=2),
    "ddp": M.ddp,
    "decoupled_diloco": lambda: M.decoupled_diloco(8, 2, overlap=2),
    "decoupled_momentum": lambda: M.decoupled_momentum(8),
    "delayed_diloco": lambda: M.delayed_diloco(8),
    "demo": M.demo,
    "des_loc": lambda: M.des_loc(1, 1, 1),
    "diloco": lambda: M.diloco(8),
    "dilocox": lambda: M.dilocox(8, rank=2048),
    "eager_diloco": lambda: M.eager_diloco(8),
    "edit": lambda: M.edit(8),
    "a_edit": lambda: M.a_edit(8.0, 1.0, (1.0, 1.0)),
    "gasloc": lambda: M.gasloc(8, 0.5, 0.3, 1.0),
    "halos": lambda: M.halos(**GROUPS),
    "heloco": lambda: M.heloco(8, (1.0, 2.0)),
    "isoloco": lambda: M.isoloco(8),
    "local_sgd": lambda: M.local_sgd(8),
    "muloco": lambda: M.muloco(8),
    "noloco": lambda: M.noloco(8),
    "partial_updates": lambda: M.partial_updates(8, lc.roles.Shares("mlp", 1)),
    "restarted_diloco": lambda: M.restarted_diloco(8),
    "snoo": lambda: M.snoo(8),
    "sparseloco": lambda: M.sparseloco(8),
    "pulseloco": lambda: M.pulseloco(8),
    "sparta": lambda: M.sparta(0.005),
    "spes": lambda: M.spes(8, "mlp/up", "up"),
    "streaming_diloco": lambda: M.streaming_diloco(8, 2, 2, 0.5, codec="e3m0"),
}


def faults(jaxpr):
    """Operations that count or find entries by int32 where there are more than it can count."""
    for equation in jaxpr.eqns:
        name, shapes = equation.primitive.name, [x.aval.shape for x in equation.invars]
        made = equation.outvars[0].aval if equation.outvars else None
        narrow = made is not None and made.dtype == np.int32
        large = {k for k, n in enumerate(shapes[0] if shapes else ()) if n > LARGEST}
        if name == "iota" and narrow and made.shape[equation.params["dimension"]] > LARGEST:
            yield equation
        elif name in ("reduce_sum", "cumsum", "argmax", "argmin") and narrow:
            axes = equation.params.get("axes", (equation.params.get("axis"),))
            if math.prod(shapes[0][k] for k in axes) > LARGEST:
                yield equation
        elif name in ("sort", "top_k", "approx_top_k"):
            if shapes[0][-1] > LARGEST:
                yield equation
        elif name == "gather":
            taken = equation.params["slice_sizes"]
            at = equation.params["dimension_numbers"].start_index_map
            if any(taken[k] < shapes[0][k] for k in large & {*at}):
                yield equation
        elif name.startswith("scatter"):
            at = equation.params["dimension_numbers"].scatter_dims_to_operand_dims
            if large & {*at}:
                yield equation
        elif name.startswith("dynamic"):
            taken = shapes[1] if "update" in name else equation.params["slice_sizes"]
            if any(taken[k] < shapes[0][k] for k in large):
                yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from faults(inner)


def traced(name, method, layer_loop="scan", **axes):
    """(program, operation) of every fault in the programs of a period of the 107B model."""
    model = build(dataclasses.replace(PRESETS["qwen_107b"], layer_loop=layer_loop))
    loss = model.loss_fn if layer_loop == "scan" else squares
    engine = (lc.AdaptiveEngine if name == "adloco" else lc.Engine)(
        loss, optimizer(name), method, 2, mesh=lc.make_mesh(2, **axes), stacked=()
    )
    found = []

    def record(program, name, host=()):
        def call(*args, **static):
            traced = program.trace(*args, **static)
            found.extend((name, str(x)) for x in faults(traced.jaxpr.jaxpr))
            return traced.out_info

        return call

    batch = {"tokens": jax.ShapeDtypeStruct((4, 129), np.int32)}
    call_programs(engine.plain, shapes(layer_loop), batch, record)
    return found


def squares(params, batch, rng):
    del batch, rng
    return sum((x.astype(np.float32) ** 2).sum() for x in jax.tree.leaves(params))


def optimizer(name):
    return optax.contrib.adopt(1e-4) if name == "des_loc" else optax.adamw(1e-4)


@functools.cache
def shapes(layer_loop):
    model = build(dataclasses.replace(PRESETS["qwen_107b"], layer_loop=layer_loop))
    return jax.eval_shape(model.init, jax.random.key(0))


CUT = {"fsdp": 2, "tensor": 2}


def test_every_method_is_here():
    assert set(METHODS) == set(M.NAMES)


def test_muloco_counts_no_entries_by_int32():
    """Its codec divided by the number of a matrix's values, and indexed them."""
    assert traced("muloco", METHODS["muloco"]()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(METHODS))
def test_no_method_counts_entries_by_int32(name):
    layer_loop = "unrolled" if name == "sparta" else "scan"
    assert traced(name, METHODS[name](), layer_loop) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"sparta"}))
def test_no_method_counts_entries_by_int32_where_leaves_are_cut(name):
    assert traced(name, METHODS[name](), **CUT) == []


@pytest.mark.slow
@pytest.mark.parametrize("codec", names())
@pytest.mark.parametrize("axes", [{}, CUT], ids=["whole", "cut"])
def test_no_codec_counts_entries_by_int32(codec, axes):
    assert traced("diloco", M.diloco(8, codec=codec), **axes) == []


@pytest.mark.parametrize(
    "count",
    [
        lambda x: jnp.arange(x.size)[:5],
        lambda x: jax.lax.dynamic_slice_in_dim(x, x[0].astype(jnp.int32), 5),
        lambda x: jnp.argmax(x),
        lambda x: (x > 0).sum(),
        lambda x: jnp.sort(x),
    ],
)
def test_what_counts_by_int32_is_found(count):
    many, few = (jax.ShapeDtypeStruct((n,), np.float32) for n in (LARGEST + 1, 100))
    assert list(faults(jax.make_jaxpr(count)(many).jaxpr))
    assert not list(faults(jax.make_jaxpr(count)(few).jaxpr))
