"""Checks the model inside a region's part of the mesh, on eight virtual devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lowcomm_jax.models import TransformerConfig, build

RNG = jax.random.key(0)
AXES = ("region", "stage", "fsdp", "tensor")
pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


def model_of(loop, **changes):
    fields = {
        "vocab_size": 40,
        "layers": 2 if loop == "scan" else 1,
        "width": 16,
        "heads": 8,
        "kv_heads": 4,
        "head_dim": 4,
        "mlp_width": 24,
        "init_std": 0.3,
        "z_loss": 1e-3,
    }
    return build(TransformerConfig(**{**fields, **changes}, layer_loop=loop))


def mesh_of(shape):
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 4)


def over_replicas(kind, one):
    """Applies `one` to every replica that a mesh slot holds."""
    if kind == "vmap":
        return jax.vmap(one)
    if kind == "map":
        return lambda *args: jax.lax.map(lambda a: one(*a), args)
    first = lambda tree: jax.tree.map(lambda leaf: leaf[0], tree)  # noqa: E731
    again = lambda tree: jax.tree.map(lambda leaf: leaf[None], tree)  # noqa: E731
    return lambda *args: again(one(*map(first, args)))


@pytest.mark.parametrize(
    ("shape", "kind", "loop", "vocabulary"),
    [
        ((2, 1, 2, 2), "vmap", "unrolled", 40),
        ((2, 1, 2, 2), "map", "scan", 40),
        ((2, 1, 2, 2), "plain", "scan", 40),
        # Of a device's 8 tokens the rows move, or with a quarter of the table's rows the table.
        ((2, 1, 4, 1), "vmap", "scan", 40),
        ((2, 1, 4, 1), "vmap", "scan", 32),
        ((2, 1, 4, 1), "map", "unrolled", 40),
        ((2, 1, 4, 1), "plain", "unrolled", 40),
        ((2, 1, 4, 1), "plain", "unrolled", 32),
    ],
)
def test_loss_and_gradients_inside_a_region(shape, kind, loop, vocabulary):
    tied = {"tie_embeddings": kind == "map", "vocab_size": vocabulary}
    model, mesh = model_of(loop, **tied), mesh_of(shape)
    regions = 2 if kind == "plain" else 4
    params = jax.jit(jax.vmap(model.init))(jax.random.split(RNG, regions))
    batch = {"tokens": jax.random.randint(RNG, (regions, 4, 9), 0, vocabulary)}

    def one(params, batch):
        (loss, aux), grads = jax.value_and_grad(model.loss_fn, has_aux=True)(params, batch, RNG)
        return loss, aux["accuracy"], grads

    expected = jax.jit(jax.vmap(one))(params, batch)
    inner = model.specs(jax.tree.map(lambda leaf: leaf[0], params), dict(mesh.shape))
    specs = jax.tree.map(lambda spec: PartitionSpec("region", *spec), inner)
    place = lambda tree, specs: jax.device_put(  # noqa: E731
        tree, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    )
    manual = PartitionSpec("region")
    step = jax.shard_map(
        over_replicas(kind, one),
        mesh=mesh,
        in_specs=(manual, manual),
        out_specs=manual,
        axis_names={"region"},
        check_vma=False,
    )
    got = jax.jit(step)(
        place(params, specs), place(batch, {"tokens": PartitionSpec("region", "fsdp")})
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), expected, got)


@pytest.mark.parametrize("loop", ["unrolled", "scan"])
def test_specs_split_every_matrix_over_both_axes(loop):
    model = model_of(loop, qk_norm=True)
    params = jax.eval_shape(model.init, RNG)
    specs = model.specs(params, {})
    leading = (None,) if loop == "scan" else ()
    block = specs["blocks"] if loop == "scan" else specs["blocks"][0]
    assert block["attention"]["query"]["kernel"] == PartitionSpec(*leading, "fsdp", "tensor")
    assert block["attention"]["output"]["kernel"] == PartitionSpec(*leading, "tensor", "fsdp")
    assert block["mlp"]["down"]["kernel"] == PartitionSpec(*leading, "tensor", "fsdp")
    assert specs["embedding"]["table"] == PartitionSpec("tensor", "fsdp")
    assert block["attention"]["key_norm"]["scale"] == PartitionSpec()
    split = [sorted(a for a in spec if a) for spec in jax.tree.leaves(specs) if any(spec)]
    assert split == [["fsdp", "tensor"]] * len(split)


def test_specs_leave_out_axes_that_do_not_divide():
    model = model_of("unrolled", vocab_size=257)
    params = jax.eval_shape(model.init, RNG)
    specs = model.specs(params, {"fsdp": 2, "tensor": 2})
    assert specs["embedding"]["table"] == PartitionSpec(None, "fsdp")
    assert specs["head"]["kernel"] == PartitionSpec("fsdp", None)


def test_specs_refuse_foreign_parameters():
    with pytest.raises(ValueError, match=r"conv"):
        model_of("unrolled").specs({"conv": {"kernel": jnp.ones((3, 3))}}, {})
