"""How much of a change its payload misses, as the send reports it."""

import jax
import ml_dtypes
import numpy as np
import optax
import oracle
import pytest
from oracle_runs import one_device, started, stream

import lowcomm_jax as lc
from lowcomm_jax.compression.grid import Unit, grid_of

STEPS, REGIONS = 4, 2
MESHES = [(1, 1), (2, 2)]


def trained(method, mesh=None, codec_error=True):
    """(start, state, history) after `STEPS` steps."""
    settings = {"mesh": mesh or one_device(), "codec_error": codec_error}
    one, state = started(method, REGIONS, **settings)
    state, history = one.run(state, stream(STEPS, REGIONS))
    return oracle.make_params(), state, history


def sent(history):
    [event] = [event for event in history.events if event.kind == "send"]
    return event.fetch()


@pytest.mark.parametrize("region, fsdp", MESHES)
def test_it_is_the_relative_distance_of_what_is_read(region, fsdp):
    mesh = lc.make_mesh(region=region, fsdp=fsdp, devices=jax.devices()[: region * fsdp])
    _, _, history = trained(lc.methods.local_sgd(STEPS, codec="bf16"), mesh)
    start, state, _ = trained(lc.methods.local_sgd(1000), mesh)
    for r, error in enumerate(sent(history)["codec_error"]):
        missed = whole = 0.0
        for name, x in state.inner.params.items():
            delta = np.asarray(start[name], np.float32) - np.asarray(x)[r]
            read = delta.astype(ml_dtypes.bfloat16).astype(np.float32)
            missed += float(np.sum((read - delta).astype(np.float64) ** 2))
            whole += float(np.sum(delta.astype(np.float64) ** 2))
        assert error == pytest.approx(np.sqrt(missed / whole), rel=2e-3)


@pytest.mark.parametrize("region, fsdp", MESHES)
def test_the_share_of_entries_that_travel(region, fsdp):
    mesh = lc.make_mesh(region=region, fsdp=fsdp, devices=jax.devices()[: region * fsdp])
    codec = {"name": "topk", "k": 2, "block": 4}
    start, _, history = trained(lc.methods.local_sgd(STEPS, codec=codec), mesh)
    units = [(grid_of(x.shape, False, Unit(4, 4)), x.size) for x in map(np.asarray, start.values())]
    travel = sum(g.down * g.across * min(g.height * g.width, 2) for g, _ in units)
    share = travel / sum(size for _, size in units)
    assert 0.2 < share < 0.9
    np.testing.assert_allclose(sent(history)["sent_share"], [share] * REGIONS, rtol=1e-6)
    _, _, history = trained(lc.methods.local_sgd(STEPS, codec="bf16"), mesh)
    np.testing.assert_array_equal(sent(history)["sent_share"], [1.0] * REGIONS)


def test_without_a_codec_nothing_is_missed_and_nothing_said():
    _, _, history = trained(lc.methods.local_sgd(STEPS))
    assert "codec_error" not in sent(history)


def test_not_measured_it_is_not_said_and_nothing_else_changes():
    method = lc.methods.local_sgd(STEPS, codec="bf16")
    _, state, history = trained(method, codec_error=False)
    assert "codec_error" not in sent(history)
    _, measured, _ = trained(method)
    for name, x in state.inner.params.items():
        np.testing.assert_array_equal(x, measured.inner.params[name])


def test_of_rank_one_a_part_is_missed():
    """Of a matrix of full rank; what is read is no longer than what was sent."""
    wanted = np.random.default_rng(0).normal(size=(REGIONS, 1, 64, 48)).astype(np.float32)

    def loss(params, batch, rng):
        del rng
        return ((params["w"] - batch["w"][0]) ** 2).sum(), {}

    method = lc.methods.dilocox(2, "low_rank", 1, adaptive=None)
    start, settings = {"w": np.zeros((64, 48), np.float32)}, {"codec_error": True}
    one, state = started(method, REGIONS, optax.sgd(0.1), loss, start, **settings)
    _, history = one.run(state, [{"w": wanted}] * 2)
    assert all(0.5 < error <= 1.0 for error in sent(history)["codec_error"])
