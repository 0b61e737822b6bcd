"""Callbacks to the host inside a loss function: they run, or one line says why they cannot."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import lowcomm_jax as lc

R = 4
PARAMS = {"w": np.float32([1.0, -2.0, 0.5, 0.25])}
BATCHES = [{"x": np.random.default_rng(t).normal(size=(R, 4, 4)).astype("float32")} for t in (0, 1)]
METHODS = {
    "diloco": lambda: lc.methods.diloco(2),
    "ddp": lc.methods.ddp,
    "des_loc": lambda: lc.methods.des_loc(2, 2),
}


def loss_fn(params, batch, rng):
    del rng
    return jnp.mean(jnp.abs(batch["x"] @ params["w"]))


def printing(params, batch, rng):
    loss = loss_fn(params, batch, rng)
    jax.debug.print("printed {}", loss)
    return loss


def calling(seen):
    def loss(params, batch, rng):
        value = loss_fn(params, batch, rng)
        jax.debug.callback(lambda v: seen.append(float(v)), value)
        return value

    return loss


def through_the_host(params, batch, rng):
    kept = {"w": jax.lax.stop_gradient(params["w"])}
    given = loss_fn(kept, batch, rng)
    like = jax.ShapeDtypeStruct((), jnp.float32)
    same = jax.pure_callback(np.asarray, like, given, vmap_method="sequential")
    return loss_fn(params, batch, rng), {"same": same}


def trained(loss, method="diloco", slots=R, fsdp=1, **settings):
    inner = optax.contrib.adopt(0.1) if method == "des_loc" else optax.sgd(0.1)
    mesh = lc.make_mesh(region=slots, fsdp=fsdp)
    one = lc.Engine(loss, inner, METHODS[method](), R, mesh=mesh, **settings)
    state, history = one.run(one.init(PARAMS), BATCHES)
    jax.effects_barrier()
    return np.asarray(lc.region_params(state)["w"]), history


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_prints_in_every_region_and_changes_nothing(method, capfd):
    expected, plain = trained(loss_fn, method)
    found, history = trained(printing, method)
    np.testing.assert_array_equal(found, expected)
    lines = [x for x in capfd.readouterr().out.splitlines() if x.startswith("printed")]
    assert len(lines) == R * len(BATCHES)
    printed = sorted(float(x.split()[1]) for x in lines)
    np.testing.assert_allclose(printed, sorted(plain["loss"].ravel()), rtol=1e-6)
    np.testing.assert_array_equal(history["loss"], plain["loss"])


@pytest.mark.parametrize(
    "settings",
    [
        {"slots": 1},
        {"slots": 2},
        {"slots": 2, "replicas": "vmap"},
        {"accumulate": 2},
    ],
    ids=["one device", "replicas", "vmap", "microbatches"],
)
def test_callbacks_on_every_mesh_of_one_device_a_region(settings):
    seen = []
    _, plain = trained(loss_fn, **settings)
    _, history = trained(calling(seen), **settings)
    np.testing.assert_array_equal(history["loss"], plain["loss"])
    assert len(seen) == R * len(BATCHES) * settings.get("accumulate", 1)
    _, history = trained(through_the_host, **settings)
    np.testing.assert_allclose(history["same"], plain["loss"], rtol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_callbacks_in_regions_of_several_devices_are_refused(method):
    for loss, name in [(printing, "debug_print"), (through_the_host, "pure_callback")]:
        with pytest.raises(ValueError) as error:
            trained(loss, method, slots=2, fsdp=2)
        (line,) = str(error.value).splitlines()
        assert line.startswith(f"{name} in a loss_fn, optimizer or codec")
        assert "(fsdp=2)" in line and "return the value in the loss_fn's aux" in line


def constrained(params, batch, rng):
    x = jax.lax.with_sharding_constraint(batch["x"], P("fsdp"))
    return loss_fn(params, {"x": x}, rng)


def test_sharding_constraints_work_where_nothing_calls_the_host():
    expected, _ = trained(loss_fn)
    np.testing.assert_array_equal(trained(constrained)[0], expected)


def test_sharding_constraints_beside_callbacks_say_what_to_do():
    def both(params, batch, rng):
        jax.debug.print("printed {}", params["w"][0])
        return constrained(params, batch, rng)

    with pytest.raises(ValueError, match="with_sharding_constraint") as error:
        trained(both)
    assert "debug_print" in "".join(error.value.__notes__)


@pytest.mark.parametrize("method", METHODS)
def test_without_jit_one_line_says_what_to_do(method):
    with jax.disable_jit(), pytest.raises(ValueError, match=r"leave jax.disable_jit\(\) out"):
        trained(loss_fn, method)
