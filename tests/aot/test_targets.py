"""Targets by name, the meshes they allow, and what is said where something is missing."""

import jax
import optax
import pytest
from aot.aot_cases import SMALL_BATCH, M, needs, small_loss, small_params

import lowcomm_jax as lc
from lowcomm_jax.aot import ACCELERATORS, Target, ahead_of_time
from lowcomm_jax.aot.hlo import parse
from lowcomm_jax.aot.programs import compile_engine


@pytest.mark.parametrize(
    "text, size, slices, per_slice",
    [
        ("h100:2x8", 16, 2, 8),
        ("a100-40g:2x10x8", 160, 2, 80),
        ("v5e:4x4", 16, 1, 16),
        ("v5e:4x4x2slices", 32, 2, 16),
        ("v5p:2x2x4", 16, 1, 16),
    ],
)
def test_targets_are_read_and_written(text, size, slices, per_slice):
    target = Target.parse(text)
    assert (target.size, target.slices, target.devices_per_slice) == (size, slices, per_slice)
    assert str(target) == text


@pytest.mark.parametrize(
    "text, said",
    [
        ("h900:2x8", "'h900' is unknown"),
        ("h100", "write h100:2x8"),
        ("h100:0x8", "at least 1"),
        ("h100:2x8slices", "write h100:2x8"),
        ("v5e:4", "write v5e:4x4x2slices"),
        ("h100:2x8@50", "has no such hosts: write h100:2x8"),
        ("v5e:4x4@50", "has no such hosts: write v5e:4x4"),
        ("h100:1x8x8@fast", "'fast' is no rate of a host in GB/s: write h100:1x8x8@400"),
        ("h100:1x8x8@0", "'0' is no rate"),
    ],
)
def test_a_target_that_is_none_is_one_line(text, said):
    with pytest.raises(ValueError, match=said) as caught:
        Target.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "platforms, said",
    [("cpu", r"pip install 'lowcomm_jax\[aot\]'"), ("", "set JAX_PLATFORMS=cpu")],
    ids=["not installed", "no driver"],
)
def test_a_compiler_that_is_not_there_is_one_line(platforms, said, monkeypatch):
    def absent(**kwargs):
        raise NotImplementedError("topology not implemented for cuda\nand more")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", absent)
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    with pytest.raises(RuntimeError, match=said) as caught:
        _ = Target.parse("h100:2x8").devices
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(ACCELERATORS))
def test_every_accelerator_is_compiled_for(name):
    target = needs(f"{name}:2x2")
    one = jax.sharding.SingleDeviceSharding(target.devices[0])
    x = jax.ShapeDtypeStruct((128, 128), jax.numpy.bfloat16, sharding=one)
    compiled = jax.jit(lambda x: x @ x).lower(x).compile()
    assert parse(compiled.as_text()).entry


def test_a_mesh_must_use_every_device():
    with pytest.raises(ValueError, match=r"has 16 devices, and the mesh .* uses 12"):
        needs("h100:2x8").mesh(region=2, fsdp=6)


def test_a_region_stays_in_its_slice():
    with pytest.raises(ValueError, match="a region would span several"):
        needs("h100:2x8").mesh(region=1, fsdp=16)


def test_the_engine_must_be_on_the_target():
    target = needs("h100:2x4")
    engine = lc.Engine(small_loss, optax.sgd(0.1), M.diloco(4), 2)
    with pytest.raises(ValueError, match=r"make the engine with mesh=target\.mesh"):
        ahead_of_time(engine, small_params(), SMALL_BATCH, target)


def test_progress_names_every_program_before_it_is_compiled():
    mesh = lc.make_mesh(region=2, devices=jax.devices()[:2])
    engine = lc.Engine(small_loss, optax.sgd(0.1), M.diloco(4), 2, mesh=mesh, stacked=("blocks",))
    told = []
    found = compile_engine(
        engine, small_params(), SMALL_BATCH, progress=lambda *now: told.append(now)
    )
    assert [name for name, _, _ in told] == [program.name for program in found.programs]
    assert [now[1:] for now in told] == [(done, 4) for done in range(4)]


@pytest.mark.parametrize("codec", [None, "int8"])
def test_the_programs_of_two_levels_are_compiled(codec):
    mesh = lc.make_mesh(region=2, devices=jax.devices()[:2])
    method = M.halos(4, (1.0, 1.0), ((0, 1),), codec=codec, global_codec=codec)
    engine = lc.Engine(small_loss, optax.sgd(0.1), method, 2, mesh=mesh, stacked=("blocks",))
    found = compile_engine(engine, small_params(), SMALL_BATCH)
    assert [program.name for program in found.programs] == [
        "inner step",
        "arrival at a server",
        "update of a server",
        "anchor update",
        "mix of the anchor into a server",
    ]
    # Region 1's worker gets its server's model, in fp32, from the site of region 0.
    size = sum(x.size for x in jax.tree.leaves(small_params()))
    assert found.resident > 0 and found.announced == 4 * size
