"""Reading compiled programs, on programs of this machine's own CPU devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import lowcomm_jax as lc
from lowcomm_jax.aot.arithmetic import matrix_flops
from lowcomm_jax.aot.collectives import MixedGroupsError, across_regions, collectives, device_groups
from lowcomm_jax.aot.hlo import HloArray, Instruction, parse

SHAPE = (2, 1, 2, 2)


def program(fn, *shapes):
    return parse(jax.jit(fn).lower(*shapes).compile().as_text())


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def over(axes, fn):
    """What `fn` moves over these axes of 2 regions x 2 fsdp x 2 tensor, of 64 floats a device."""
    mesh = lc.make_mesh(2, fsdp=2, tensor=2)
    whole = P(("region", "fsdp", "tensor"))
    run = jax.shard_map(fn, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    found = program(run, floats(8 * 64))
    return collectives(found, SHAPE, 8)


@pytest.mark.parametrize(
    "axes, fn, kind, nbytes",
    [
        (("region",), lambda x: jax.lax.psum(x, "region"), "all-reduce", 256),
        (("fsdp",), lambda x: jax.lax.all_gather(x, "fsdp", tiled=True)[:64], "all-gather", 256),
        (
            ("fsdp", "tensor"),
            lambda x: jax.lax.psum(x, ("fsdp", "tensor")),
            "all-reduce",
            384,
        ),
        (
            ("region",),
            lambda x: jax.lax.ppermute(x, "region", [(0, 1), (1, 0)]),
            "collective-permute",
            256,
        ),
        (
            ("tensor",),
            lambda x: jax.lax.all_to_all(x, "tensor", 0, 0, tiled=True),
            "all-to-all",
            128,
        ),
        (
            ("region",),
            lambda x: jnp.tile(jax.lax.psum_scatter(x, "region", tiled=True), 2),
            "reduce-scatter",
            128,
        ),
    ],
)
def test_a_collective_has_its_kind_axes_and_bytes(axes, fn, kind, nbytes):
    (one,) = over(axes, fn)
    assert (one.kind, one.axes, one.nbytes) == (kind, axes, nbytes)
    assert one.crosses == ("region" in axes)


def test_groups_that_mix_regions_with_devices_inside_are_refused():
    found = over(("region", "fsdp"), lambda x: jax.lax.psum(x, ("region", "fsdp")))
    with pytest.raises(MixedGroupsError, match=r"region\+fsdp"):
        across_regions(found)


def test_microbatches_that_are_routed_are_told_from_payloads():
    """Pairs of devices are no groups: an axis inside a region may vary along a pair."""
    mesh, whole = lc.make_mesh(2, stage=2), P(("region", "stage"))
    hop = [(0, 3), (1, 2), (2, 1), (3, 0)]
    run = jax.shard_map(
        lambda x: jax.lax.ppermute(x, ("region", "stage"), hop),
        mesh=mesh,
        in_specs=whole,
        out_specs=whole,
    )
    (one,) = collectives(program(run, floats(4 * 64)), (2, 2, 1, 1), 4)
    assert one.is_routed and one.crosses and one.nbytes == 256
    (own,) = over(("region",), lambda x: jax.lax.ppermute(x, "region", [(0, 1), (1, 0)]))
    assert not own.is_routed


@pytest.mark.parametrize(
    "attributes, groups",
    [
        ("replica_groups={{0,1},{2,3}}, x", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[4], x", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0), x", [[0, 2], [1, 3]]),
        ("replica_groups={}, x", [[0, 1, 2, 3]]),
        ("source_target_pairs={{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ('_xla_megascale_target="{1,2}x{0:3}"', [[0, 1]]),
        ("_xla_megascale_target={{100000,200000},{100001,200001}}", [[0, 1]]),
    ],
)
def test_all_ways_to_write_groups_are_read(attributes, groups):
    one = Instruction("x", "all-reduce", "f32[4]", (), attributes, False)
    assert device_groups(one, 4) == groups


def test_products_in_loops_count_as_often_as_they_run():
    def fn(x, w):
        x = jax.lax.fori_loop(0, 5, lambda i, x: jnp.tanh(x @ w), x)
        return jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=3)[0]

    found = program(fn, floats(64, 64), floats(64, 64))
    assert matrix_flops(found) == 8 * 2 * 64**3


def test_products_by_cublas_count():
    """As the compiler writes them where a GPU is there: without one it leaves `dot`."""
    line = (
        "  %custom-call.9 = (bf16[48,16]{1,0}, s8[1024]{0}) custom-call(%x, %w), "
        'custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":'
        '{"beta":0,"dot_dimension_numbers":{"lhs_batch_dimensions":[],'
        '"lhs_contracting_dimensions":["1"],"rhs_batch_dimensions":[],'
        '"rhs_contracting_dimensions":["0"]},"epilogue":"DEFAULT"}}'
    )
    text = f"""HloModule m

ENTRY %main (x: bf16[48,32], w: bf16[32,16]) -> (bf16[48,16], s8[1024]) {{
  %x = bf16[48,32]{{1,0}} parameter(0)
  %w = bf16[32,16]{{1,0}} parameter(1)
{line.replace("%custom", "ROOT %custom")}
}}
"""
    assert matrix_flops(parse(text)) == 2 * 48 * 32 * 16


def test_a_loop_with_a_traced_number_of_rounds_counts_once():
    def fn(x, n):
        return jax.lax.fori_loop(0, n, lambda i, x: jnp.tanh(x @ x), x)

    found = program(fn, floats(32, 32), jax.ShapeDtypeStruct((), jnp.int32))
    assert matrix_flops(found) == 2 * 32**3


def test_of_a_conditional_the_branch_that_moves_most_counts():
    mesh = lc.make_mesh(2, fsdp=2, tensor=2)

    def fn(x, n):
        def few(x):
            return x.at[:8].set(jax.lax.psum(x[:8], "region"))

        return jax.lax.switch(n, [lambda x: jax.lax.psum(x, "region"), few], x)

    whole = P(("region", "fsdp", "tensor"))
    run = jax.shard_map(fn, mesh=mesh, in_specs=(whole, P()), out_specs=whole, check_vma=False)
    found = collectives(program(run, floats(512), jax.ShapeDtypeStruct((), jnp.int32)), SHAPE, 8)
    assert [one.nbytes for one in found] == [256]


def test_arrays_have_their_bytes():
    assert HloArray("bf16", (3, 5)).nbytes == 30
    assert HloArray("s4", (3,)).nbytes == 2
    assert HloArray("pred", ()).nbytes == 1


def test_what_a_kernel_of_a_tpu_writes_on_several_lines_is_one_instruction():
    text = """HloModule m

ENTRY %main (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  %k = f32[2]{0} custom-call(%p), custom_call_target="x", frontend_attributes={kernel_metadata={
    "a": 1
}}
  ROOT %r = f32[2]{0} copy(%k)
}
"""
    assert [one.opcode for one in parse(text).computations["main"]] == [
        "parameter",
        "custom-call",
        "copy",
    ]
    assert np.isclose(matrix_flops(parse(text)), 0)
