"""The experimental names of `compat`: fails when an upgrade of JAX or Orbax moves one."""

import jax
import numpy as np
import pytest
from etils import epath
from orbax.checkpoint import type_handlers

import lowcomm_jax as lc
from lowcomm_jax import compat


def test_all_gather_invariant_is_typed_equal_on_every_device():
    """`out_specs=P()` compiles only when the result is proven equal over the region axis."""
    mesh = lc.make_mesh(region=4, fsdp=2)
    x = np.arange(8, dtype=np.float32)
    gather = jax.shard_map(
        lambda part: compat.all_gather_invariant(part, "region", axis=0),
        mesh=mesh,
        in_specs=jax.P("region"),
        out_specs=jax.P(),
    )
    np.testing.assert_array_equal(jax.jit(gather)(x), x)


def test_jaxprs_inside_an_equation_are_found():
    def body(i, x):
        return jax.lax.cond(x > 0, lambda x: x + i, lambda x: x, x)

    (loop,) = jax.make_jaxpr(lambda x: jax.lax.fori_loop(0, 3, body, x))(1.0).eqns
    inside = list(compat.jaxprs_in_params(loop.params))
    branches = [eqn for jaxpr in inside for eqn in jaxpr.eqns if eqn.primitive.name == "cond"]
    assert len(list(compat.jaxprs_in_params(branches[0].params))) == 2


def test_what_jax_distributed_knows_before_devices_are_settled():
    assert compat.process_count() == jax.process_count() == 1
    with pytest.raises(RuntimeError, match="initialize"):
        compat.coordinator_host()


def test_what_jax_detects_of_a_launcher(monkeypatch):
    for name in ("OMPI_MCA_orte_hnp_uri", "SLURM_STEP_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    assert compat.detected("slurm") is None and compat.detected("ompi") is None
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "4096.0;tcp6://[fd00::7,fd01::7]:34911")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert compat.detected("ompi") == (2, 1, "[fd00::7]:61441")


def test_an_array_of_the_host_is_written_whole(tmp_path):
    info = type_handlers.ParamInfo(
        name="x", path=epath.Path(tmp_path / "x"), parent_dir=epath.Path(tmp_path), use_zarr3=False
    )
    spec = compat.array_write_spec(np.ones((3, 5), np.float32), info)
    assert tuple(spec["metadata"]["shape"]) == (3, 5) and spec["dtype"] == "float32"
