"""Memory of a device: exact state, estimates apart; parameters by hand and from any tree."""

import math
from dataclasses import replace

import jax
import optax
import pytest
from jax.sharding import PartitionSpec as P

from lowcomm_jax import Engine, make_mesh
from lowcomm_jax import methods as M
from lowcomm_jax.aot.programs import compile_engine
from lowcomm_jax.models import PRESETS, TransformerConfig, build
from lowcomm_jax.models.protocol import abstract_params
from lowcomm_jax.network import uniform
from lowcomm_jax.params.fragments import path_name
from lowcomm_jax.planner.memory import MemoryPlan, activation_estimate
from lowcomm_jax.planner.methods import PlanMethod, planned
from lowcomm_jax.planner.plan import Workload, plan
from lowcomm_jax.planner.shapes import Shapes, decoder_shapes


def leaf(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def laid_out(tree, specs, layers=1, stacked=(), **sizes):
    return Shapes(tree, lambda mesh: (tree, specs), layers, stacked, **sizes)


def test_shards_and_stages_are_exact():
    tree = {"a": leaf(10, 6), "b": leaf(7), "c": leaf(9, 4), "layers": {"w": leaf(3, 10, 6)}}
    specs = {
        "a": P("fsdp", "tensor"),
        "b": P(),
        "c": P(("fsdp", "tensor")),
        "layers": {"w": P("stage", "fsdp")},
    }
    model, mesh = laid_out(tree, specs, 3, ("layers",)), {"fsdp": 4, "tensor": 2}
    assert model.held({}) == model.size == 60 + 7 + 36 + 180
    assert model.held(mesh) == 3 * 3 + 7 + 2 * 4 + 3 * (3 * 6)
    assert model.held({**mesh, "stage": 2}) == 3 * 3 + 7 + 2 * 4 + 2 * (3 * 6)
    assert Shapes(tree, None, 3).held(mesh) == model.size
    # Experts of two layers, which a mesh axis cuts, are no layers.
    tree = {f"block{i}": {"experts": leaf(8, 4, 6)} for i in range(2)}
    prefixes = tuple(f"{name}/experts" for name in tree)
    assert Shapes.of(tree, None, prefixes, otherwise=5).layers == 5
    assert laid_out(tree, jax.tree.map(lambda _: P("tensor", "fsdp"), tree)).held(mesh) == 48
    whole = MemoryPlan({"master": 96, "momentum": 48}, {"payload": 100, "more": 50})
    assert whole.state_total == 144 and whole.estimate_total == 150


@pytest.mark.parametrize(("layers", "stages"), [(44, 22), (10, 4), (7, 3), (5, 1)])
@pytest.mark.parametrize("inside", [{}, {"fsdp": 2}, {"fsdp": 2, "tensor": 2}])
@pytest.mark.parametrize("tied", [False, True])
def test_stages_hold_what_the_pipeline_puts_there(layers, stages, inside, tied):
    """ceil(L / S) blocks, parts of embedding and head, and a final norm that may not divide."""
    mesh = {"fsdp": 1, "tensor": 1, **inside, "stage": stages}
    sizes = {"layers": layers, "width": 32, "heads": 4, "kv_heads": 2}
    config = TransformerConfig(
        **sizes,
        vocab_size=8 * stages - min(3, stages - 1),  # 8 rows a stage, of which some are padding
        head_dim=8,
        mlp_width=48,
        tie_embeddings=tied,
        layer_loop="scan",
    )
    matrices = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48  # of attention, and of a gated MLP
    blocks = -(-layers // stages)
    cut = blocks * matrices + 8 * 32 * (1 if tied else 2)
    whole = blocks * 2 * 32 + (32 if 32 % stages else 32 // stages)  # norms
    parts, held = math.prod(inside.values()), decoder_shapes(config).held(mesh)
    assert cut / parts + whole / parts <= held <= cut / parts + whole
    assert inside or held == cut + whole


def four_layers():
    """Two stages hold 2 and 2 layers of 1000 elements; "fsdp" halves them."""
    tree, specs = {"blocks": {"w": leaf(4, 2, 500)}}, {"blocks": {"w": P("stage", "fsdp")}}
    return laid_out(tree, specs, 4, ("blocks",), width=10, vocab=100)


def streaming(tau, fragments=1, codec=None):
    return M.streaming_diloco(10, fragments, tau, 0.5, codec=codec)


@pytest.mark.parametrize(
    ("method", "estimated"),
    [
        # A device of a stage holds 1000 of 4000 elements: a quarter of every payload.
        (M.diloco(10), {"payloads sent and received": 2 * 4}),
        # Of three regions, slices are filled up by a value a stack.
        (M.diloco(10, codec="bf16"), {"payloads sent and received": 2 * 2.004}),
        (M.eager_diloco(10, codec="bf16"), {"payloads sent and received": 3 * 2}),
        (M.delayed_diloco(10), {"payloads sent and received": 2 * 4}),  # one period: no snapshot
        (streaming(3), {"payloads sent and received": 2 * 4, "snapshots in flight": 4}),
        # Two of four fragments are under way at a time.
        (
            streaming(4, 4),
            {"payloads sent and received": 2 * 4 / 2, "snapshots in flight": 4 / 2},
        ),
        (streaming(0, 4), {"payloads sent and received": 2 * 4 / 4}),
    ],
)
def test_memory_is_that_of_a_stage_and_keeps_estimates_apart(method, estimated):
    mesh = {"stage": 2, "fsdp": 2}
    work = Workload(four_layers(), 1e6, 1e3, uniform(3, 1.0, compute_s=9.0), mesh)
    memory = plan(work, [PlanMethod("mine", method, stalls=True)])[0].memory
    assert memory.state_total == (16 + 8) * 1000
    assert {k: v for k, v in memory.estimates.items() if k != "activations"} == {
        k: v * 1000 for k, v in estimated.items()
    }


def test_abstract_memory_equals_what_the_compiler_says():
    abstract = {"w": leaf(12, 20), "b": leaf(20)}
    sines = jax.jit(lambda t: jax.tree.map(jax.numpy.sin, t))
    compiled = sines.lower(abstract).compile().memory_analysis()
    held = laid_out(abstract, {"w": P("fsdp"), "b": P()}).held({})
    assert compiled.argument_size_in_bytes == 4 * held == (12 * 20 + 20) * 4
    with pytest.raises(ValueError, match="another structure"):
        Workload.of(abstract, uniform(2, 1.0), tokens=1, tokens_per_step=1, specs={"w": P()})
    work = Workload.of(abstract, uniform(2, 1.0), tokens=1, tokens_per_step=1, mesh={"stage": 2})
    work = replace(work, model=replace(work.model, layers=2))
    assert any("no specs say what a stage holds" in line for line in work.violations())


def test_activation_estimate_falls_with_remat_and_stages():
    full = activation_estimate(12, 512, 32000, 4096, {}, remat=False)
    remat = activation_estimate(12, 512, 32000, 4096, {}, remat=True)
    staged = activation_estimate(12, 512, 32000, 4096, {"stage": 4}, remat=True)
    assert full > remat > staged > 0
    assert remat == 12 * 2 * 4096 * 512 + 34 * 4096 * 512 + 6 * 4096 * 32000
    # Every stage has a slice of the vocabulary.
    assert staged == 3 * 2 * 4096 * 512 + 34 * 4096 * 512 + 6 * 4096 * 8000


def test_parameter_counts_by_hand():
    small = TransformerConfig(
        layers=2, width=8, mlp_width=24, heads=4, kv_heads=2, head_dim=2, vocab_size=100
    )
    block = 2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 24 + 2 * 8
    assert decoder_shapes(small).size == 2 * block + 2 * 100 * 8 + 8
    changed = replace(small, tie_embeddings=True, mlp="gelu")
    assert decoder_shapes(changed).size == 2 * (block - 8 * 24) + 100 * 8 + 8
    sizes = {
        "scaling_35m": 35.7e6,
        "scaling_1_3b": 1.275e9,
        "scaling_10b": 9.8e9,
        "scaling_100b": 98.8e9,
        "qwen_107b": 108.5e9,
    }
    for name, size in sizes.items():
        assert decoder_shapes(PRESETS[name]).size == pytest.approx(size, rel=5e-3)


def test_the_state_of_a_plan_is_what_the_compiled_step_holds():
    mesh, config = {"fsdp": 2, "tensor": 2}, PRESETS["nano"]
    network = uniform(2, 1.0, compute_s=1.0)
    work = Workload(decoder_shapes(config), 1e6, 1e3, network, mesh)
    (row,) = plan(work, [planned("diloco")])
    held = sum(row.memory.state[name] for name in ("parameters", "inner optimizer"))
    model, here = build(replace(config, layer_loop="scan")), make_mesh(1, **mesh)
    params = abstract_params(model)
    specs = model.specs(params, dict(here.shape))
    by_name = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(specs)}
    engine = Engine(
        model.loss_fn,
        optax.adamw(1e-4),
        M.diloco(100),
        1,
        mesh=here,
        specs=lambda name, leaf: by_name[name],
        stacked=model.stacked,
    )
    batch = {"tokens": jax.ShapeDtypeStruct((4, 257), "int32")}
    with jax.numpy_dtype_promotion("standard"):  # what users run
        step = compile_engine(engine, params, batch).programs[0]
    # Also 2 sequences of 257 tokens, and some numbers, as steps so far.
    assert 0 <= step.memory["arguments"] - held - 2 * 257 * 4 < 64
