"""`run` is `step` many times, compiled once; nothing recompiles, nothing waits for a device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import oracle_runs
import pytest
from compilations import compilations
from oracle.jax_problem import loss_fn

import lowcomm_jax as lc

STEPS, R = 23, 3
METHODS = {
    "ddp": lambda: lc.methods.ddp(),
    "local_sgd": lambda: lc.methods.local_sgd(4),
    "diloco": lambda: lc.methods.diloco(5),
    "streaming": lambda: lc.methods.streaming_diloco(5, 2, 2, 0.3, pattern="balanced"),
    "eager": lambda: lc.methods.eager_diloco(4),
    "delayed": lambda: lc.methods.delayed_diloco(4),
    "dilocox": lambda: lc.methods.dilocox(4, codec="low_rank", rank=1),
    "cocodc": lambda: lc.methods.cocodc(6, 3, 2, pattern="balanced"),
    "noloco": lambda: lc.methods.noloco(4),
    "gasloc": lambda: lc.methods.gasloc((3, 2, 4), 0.6, 0.3, 0.8),
    "sparseloco": lambda: lc.methods.sparseloco(5, k=2, block=4),
    "pulseloco": lambda: lc.methods.pulseloco(5, k=2, block=4),
    "muloco": lambda: lc.methods.muloco(5, bits=2),
    "demo": lambda: lc.methods.demo(k=3),
    "heloco": lambda: lc.methods.heloco(4, (1.0, 0.6, 0.8)),
    "isoloco": lambda: lc.methods.isoloco(5),
    "edit": lambda: lc.methods.edit(4, warm_up=1, outlier=0.8, decay=0.3),
    "a_edit": lambda: lc.methods.a_edit(2.0, 0.5, (2.0, 1.0, 0.3), warm_up=1),
    "partial_updates": lambda: lc.methods.partial_updates(4, lc.roles.Shares("^[ab]$")),
    "spes": lambda: lc.methods.spes(2, "^a$", "a", share=0.3, merge_every=4, until=40, donors=1),
    "restarted": lambda: lc.methods.restarted_diloco(4, 2),
    "snoo": lambda: lc.methods.snoo(5),
    "as_coded": lambda: lc.methods.decoupled_momentum(5, "as_coded", k=3),
    "learners": lambda: lc.methods.decoupled_diloco(
        3, 3, 2, 1, 0.8, (1.0, 0.62, 0.8), ((0, 5, 9), (2, 8, 12)), pattern="balanced"
    ),
    "halos": lambda: lc.methods.halos(4, (1.0, 0.6, 0.8), ((0, 2), (1,)), 3, 0.3, travel=(2, 4)),
}


def make(name):
    return lc.Engine(
        loss_fn, optax.adamw(0.02), METHODS[name](), R, mesh=oracle_runs.one_device(), block=4
    )


def start(engine):
    return engine.init(oracle.make_params())


def stream(first=1, last=STEPS):
    return oracle_runs.stream(last, R, first)


def leaves(state):
    return [np.asarray(x) for x in jax.tree.leaves(state)]


@pytest.mark.parametrize("name", METHODS)
def test_run_equals_steps_bit_for_bit(name):
    engine = make(name)
    state, logged = start(engine), []
    for batch in stream():
        state, metrics = engine.step(state, batch)
        logged.append(np.asarray(metrics["loss"]))
    fast, history = engine.run(start(engine), stream())
    assert len(history) == STEPS
    np.testing.assert_array_equal(history["loss"], np.stack(logged))
    for a, b in zip(leaves(fast), leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)


def reused(batches):
    """A stream that writes every batch into the same arrays."""
    arrays = jax.tree.map(np.array, batches[0])
    for batch in batches:
        jax.tree.map(np.copyto, arrays, batch)
        yield arrays


def test_a_stream_may_reuse_its_arrays():
    engine = make("diloco")
    expected, wanted = engine.run(start(engine), stream())
    found, history = engine.run(start(engine), reused(stream()))
    np.testing.assert_array_equal(history["loss"], wanted["loss"])
    for a, b in zip(leaves(found), leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_arrays_of_a_step_may_be_reused():
    """JAX on CPUs does not copy a large aligned array to several devices; the step runs later."""
    n, steps, devices = 1 << 16, 6, 2
    mesh = lc.make_mesh(devices=jax.devices()[:devices])

    def slow_loss(params, batch, rng):
        del rng
        x = jax.lax.fori_loop(0, 200, lambda _, x: x + jnp.sin(x) * 1e-9, batch["x"])
        return params["w"] * x.mean()

    one = lc.Engine(slow_loss, optax.sgd(1.0), lc.methods.diloco(50), devices, mesh=mesh)
    raw = np.zeros(4 * devices * n + 64, np.uint8)
    arrays = raw[-raw.ctypes.data % 64 :][: 4 * devices * n].view(np.float32).reshape(devices, n)
    state = one.init({"w": np.float32(0.0)})
    for t in range(steps):
        arrays[:] = 10.0**t
        state, _ = one.step(state, {"x": arrays})
    moved_R = -np.asarray(state.inner.params["w"])
    np.testing.assert_allclose(moved_R, sum(10.0**t for t in range(steps)), rtol=1e-4)


def test_a_history_knows_its_names():
    engine = make("diloco")
    _, history = engine.run(start(engine), stream())
    names = list(history)
    assert names == history.keys() and set(names) == set(next(history.rows())) - {"step", "events"}
    assert "loss" in history and "los" not in history and 0 not in history
    assert set(dict(history)) == set(names)
    assert repr(history).startswith(f"<History: {STEPS} steps of ") and "loss" in repr(history)
    with pytest.raises(KeyError, match=r"'los' is unknown \(did you mean loss\?\): use .*tokens"):
        history["los"]
    with pytest.raises(KeyError, match=r"metric 0 is unknown: use .*rows\(\)"):
        history[0]
    _, empty = engine.run(start(engine), [])
    assert list(empty) == [] and empty["loss"].shape == (0, 0) and "nothing" in repr(empty)


@pytest.mark.parametrize("name", METHODS)
def test_nothing_compiles_after_warm_up(name):
    engine = make(name)
    state, _ = engine.run(start(engine), stream())
    state, _ = engine.step(state, stream(1, 1)[0])

    def warm():
        again, _ = engine.run(state, stream())
        for batch in stream():
            again, _ = engine.step(again, batch)
        return again.anchor

    def cold():
        engine = make(name)
        return engine.run(start(engine), stream()[:2])[0].anchor

    assert compilations(warm) == 0
    assert compilations(cold) > 0, "the counter sees nothing, so this test could not fail"


def test_history_rows_carry_the_events_of_their_step():
    engine = make("streaming")
    state, history = engine.run(start(engine), stream())
    rows = list(history.rows())
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    kinds = {(e["step"], e["kind"], e["fragment"]) for row in rows for e in row["events"]}
    # H = 5, K = 2: first sends after floor(5/2) = 2 and 5, then every 5 steps; landings 2 later.
    expected = {(t, "send", 0) for t in range(2, 24, 5)} | {(t, "send", 1) for t in range(5, 24, 5)}
    landed = {(t + 2, "land", p) for t, _, p in expected if t + 2 <= STEPS}
    assert kinds == expected | landed
    land = next(e for row in rows for e in row["events"] if e["kind"] == "land")
    assert land["staleness"] == [2] * R
    assert set(state.in_flight) == {"0@22"}


def test_resuming_from_a_copied_state_is_the_same_run():
    engine = make("cocodc")
    state, _ = engine.run(start(engine), stream(1, 9))
    copied = jax.tree.map(lambda x: np.array(x), state)
    state, _ = engine.run(state, stream(10))
    other = make("cocodc")
    start(other)
    resumed, _ = other.run(copied, stream(10))
    for a, b in zip(leaves(resumed), leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)
