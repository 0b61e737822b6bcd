"""Who takes part, with which weight, and what a step's batch is."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from oracle.jax_problem import loss_fn
from oracle_runs import one_device, started, stream

import lowcomm_jax as lc

R = 3


def host(tree):
    return jax.tree.map(np.array, tree)


# -- absent regions -------------------------------------------------------------------------------


def test_an_absent_region_keeps_its_values_while_its_anchor_moves():
    engine, state = started(lc.methods.diloco(2))
    for t, batch in enumerate(stream(4), 1):
        before = host(state.anchor)
        state, metrics = engine.step(state, batch, [True, t != 2, True])
        if t == 2:
            for key, anchor in state.anchor.items():
                assert np.abs(np.asarray(anchor) - before[key]).max() > 1e-5
                local = np.asarray(state.inner.params[key])
                np.testing.assert_array_equal(local[0], anchor[0])
                assert np.abs(local[1] - np.asarray(anchor)[0]).max() > 1e-5
            send, land = metrics["events"]
            assert send.participants.tolist() == land.participants.tolist() == [True, False, True]
            assert land.staleness.tolist() == [0, -1, 0]
            assert send.bytes_sent[1] == 0 < send.bytes_received[1]
            assert state.counters.last_landed.tolist() == [[2, -1, 2]]
            assert state.counters.staleness.tolist() == [[0, -1, 0]]
    assert state.counters.last_landed.tolist() == [[4, 4, 4]]


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["ddp", "demo"])
def test_a_region_that_returns_takes_its_gradient_at_the_anchor(name, dtype):
    """Two regions with targets of their own; region 1 is away for 3 of 6 steps, and returns.

    Meanwhile region 0 moves the anchor far, so that an old gradient would turn the mean around.
    """
    rate, decay = 0.25, 0.5
    method = {
        "ddp": lambda: lc.methods.ddp(),
        "demo": lambda: lc.methods.demo(k=4096, decay=decay),  # all coefficients travel
    }[name]()

    def square(params, batch, rng):
        return jnp.sum((params["w"].astype(jnp.float32) - batch[0]) ** 2) / 2

    engine = lc.Engine(square, optax.sgd(rate), method, 2, mesh=one_device())
    start = np.random.default_rng(0).normal(size=8).astype(np.float32)
    state = engine.init({"w": jnp.asarray(start, dtype)})
    anchor = np.asarray(state.anchor["w"][0], np.float64)
    for t in range(6):
        who = [True, not 1 <= t < 4]
        apart = np.random.default_rng(t + 1).normal(size=(2, 1, 8))
        apart = {0: apart, 4: np.array([[[-1.25]], [[1.0]]])}.get(t, apart + 8)
        at = np.asarray(jnp.asarray(anchor, jnp.float32).astype(dtype), np.float64)
        targets = (at + apart).astype(np.float32)
        state, _ = engine.step(state, targets, who)
        grads = (at - targets[:, 0]).astype(dtype).astype(np.float64)
        mean = grads[who].mean(axis=0)
        anchor = anchor - rate * (mean if name == "ddp" else np.sign(mean))
        np.testing.assert_allclose(state.anchor["w"][0], anchor, rtol=1e-3, atol=1e-5)
        if name == "demo":  # with all of it sent, no momentum is left
            residual = jax.tree.leaves(state.codec[0].residual)[0]
            np.testing.assert_allclose(residual, 0.0, atol=1e-5)


@pytest.mark.parametrize("name", ["streaming", "eager", "ddp"])
def test_nobody_takes_part(name):
    method = {
        "streaming": lambda: lc.methods.streaming_diloco(2, 2, 1, 0.3, pattern="balanced"),
        "eager": lambda: lc.methods.eager_diloco(2),
        "ddp": lambda: lc.methods.ddp(),
    }[name]()
    engine, state = started(method, inner=optax.adamw(1e-2))  # of `ddp` the outer state is its own
    before = host((state.anchor, state.outer))
    for batch in stream(4):
        state, metrics = engine.step(state, batch, [False] * R)
        assert not [e for e in metrics["events"] if e.participants.any()]
    jax.tree.map(np.testing.assert_array_equal, (state.anchor, state.outer), before)
    assert state.counters.bytes_sent.sum() == 0
    assert not any(flight.takes_part.any() for flight in state.in_flight.values())


def test_a_payload_in_flight_lands_at_a_boundary_at_which_nobody_takes_part():
    """Each boundary lands the payload of the one before, without the own part landed already."""
    engine, state = started(lc.methods.eager_diloco(2, outer=optax.sgd(1.0)))
    for t, batch in enumerate(stream(4), 1):
        state, metrics = engine.step(state, batch, [t < 4] * R)
        if t == 3:
            (flight,) = state.in_flight.values()
            late, before = host(flight.payload), host(state.anchor)
    assert [event.kind for event in metrics["events"]] == ["send", "land"]
    assert not any(event.participants.any() for event in metrics["events"])
    assert list(state.in_flight) == ["0@4"], "that of nobody"
    for key, payload in late.items():
        moved = before[key] - np.asarray(state.anchor[key])
        np.testing.assert_allclose(moved, payload.mean(0) - payload / R, rtol=1e-4, atol=1e-6)


# -- weights --------------------------------------------------------------------------------------


def token_loss(params, batch, rng):
    return loss_fn(params, {k: batch[k] for k in ("x", "y")}, rng), {"tokens": batch["n"].sum()}


def with_tokens(batches, table):
    return [
        b | {"n": np.asarray(row, np.float32)[:, None]}
        for b, row in zip(batches, table, strict=True)
    ]


TOKENS = [[10, 1, 5], [20, 2, 5], [7, 3, 40], [9, 3, 1], [2, 2, 2], [4, 6, 8]]


def reference(weights, period, steps=6, participants=None):
    return oracle.run_diloco(
        oracle.make_params(),
        oracle.make_batches(steps=steps, regions=R),
        period=period,
        inner=oracle.Sgd(0.05),
        outer=oracle.Nesterov(0.7, 0.9),
        weights=weights,
        participants=participants,
    )


def check(state, run, step):
    for key, tree in run.at(step).anchors[0].items():
        np.testing.assert_allclose(state.anchor[key][0], tree, rtol=2e-5, atol=2e-6)


def test_an_absent_region_brings_the_tokens_of_all_its_progress():
    """Its pseudo-gradient holds two rounds of steps, so its weight holds two rounds of tokens."""
    engine, state = started(lc.methods.diloco(2), loss=token_loss, weights="tokens")
    mask = np.ones((6, R), bool)
    mask[1, 1] = False
    for t, batch in enumerate(with_tokens(stream(6), TOKENS)):
        state, _ = engine.step(state, batch, mask[t])
    weights = np.repeat(np.asarray(TOKENS).reshape(3, 2, R).sum(axis=1), 2, axis=0)
    weights[3, 1] += 1 + 2  # the two steps of the round it missed
    check(state, reference(weights, 2, participants=mask), 6)


def test_token_counters_start_anew_at_every_send():
    """An fp32 counter of the whole run would stop seeing steps after 2^24 tokens."""
    engine, state = started(lc.methods.diloco(2), loss=token_loss, weights="tokens")
    for batch in with_tokens(stream(4), [[4, 8, 4]] * 4):
        state, metrics = engine.step(state, batch)
    assert np.asarray(metrics["events"][0].values["weight"]).tolist() == [8, 16, 8]
    assert np.asarray(state.inner.tokens).tolist() == [[0.0]] * R


def test_tokens_weigh_gradients_too():
    engine, state = started(lc.methods.ddp(), loss=token_loss, weights="tokens")
    for batch in with_tokens(stream(6), TOKENS):
        state, _ = engine.step(state, batch)
    batches = oracle.make_batches(steps=6, regions=R)
    check(
        state,
        oracle.run_ddp(oracle.make_params(), batches, inner=oracle.Sgd(0.05), weights=TOKENS),
        6,
    )


# -- averaged state -------------------------------------------------------------------------------


def test_state_is_averaged_once_a_period_beside_the_first_fragment():
    """Two fragments leave in turn; the second one takes nothing along."""

    def loss(params, batch, rng):
        x = batch["x"].mean()
        updates = {"mean": params["mean"] + x}
        return (params["a"].sum() + params["b"].sum()) * x, {"updates": updates}

    method = lc.methods.streaming_diloco(4, 2, 0, 0.0, pattern=["a", "b"])
    roles = {"a": "train", "b": "train", "mean": "average"}
    engine = lc.Engine(loss, optax.sgd(0.1), method, R, mesh=one_device(), roles=roles)
    shapes = {"a": (3,), "b": (5,), "mean": ()}
    state = engine.init({name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
    x, mean, sent = np.float32([1, 2, 4]), np.zeros(R), []
    for _ in range(8):
        state, metrics = engine.step(state, {"x": x[:, None]})
        mean, sends = mean + x, [e for e in metrics["events"] if e.kind == "send"]
        sent += [(e.fragment, e.nbytes) for e in sends]
        if any(e.fragment == 0 for e in sends):
            mean[:] = mean.mean()
        np.testing.assert_allclose(state.inner.buffers["mean"], mean, rtol=1e-6)
    assert sent == [(0, 4 * (3 + 1)), (1, 4 * 5)] * 2
    assert np.ptp(mean) > 0, "no step is left after the last mean"


# -- accumulation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name,n", [("diloco", 3), ("ddp", 2)])
def test_accumulated_microbatches_equal_one_batch(name, n):
    results = []
    for accumulate in (1, n):
        method = lc.methods.diloco(2) if name == "diloco" else lc.methods.ddp()
        engine, state = started(method, accumulate=accumulate)
        losses = []
        for batch in stream(3, batch_size=6):
            state, metrics = engine.step(state, batch)
            losses.append(np.asarray(metrics["loss"]))
        results.append((losses, host(state.inner.params), np.asarray(state.inner.tokens)))
    (losses, params, tokens), (other, others, count) = results
    np.testing.assert_allclose(other, losses, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6), others, params
    )
    assert tokens.tolist() == count.tolist()


def test_a_batch_that_cannot_be_cut_says_so():
    engine, state = started(lc.methods.diloco(2), accumulate=3)
    with pytest.raises(ValueError, match="accumulate=3"):
        engine.step(state, stream(1, batch_size=4)[0])


def test_microbatch_gradients_are_added_in_fp32():
    """256 and seven times 1: bf16 partial sums would stay at 256."""

    def loss(params, batch, rng):
        return jnp.mean(batch["x"].astype(jnp.bfloat16) * params["w"][None]).astype(jnp.float32)

    x = np.ones((R, 8, 1), np.float32)
    x[:, 0] = 256.0
    engine = lc.Engine(
        loss, optax.sgd(1.0), lc.methods.diloco(9), R, mesh=one_device(), accumulate=8
    )
    state, _ = engine.step(engine.init({"w": jnp.zeros(1, jnp.bfloat16)}), {"x": x})
    local = np.asarray(state.inner.params["w"], np.float32)
    expected = float(jnp.bfloat16(-(256.0 + 7.0) / 8))
    np.testing.assert_array_equal(local, np.full((R, 1), expected, np.float32))
