"""Resuming with more or fewer regions is an operation of its own, with pinned semantics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint.checkpoint_cases import assert_same, bf16_params, make_engine, train, values

from lowcomm_jax.checkpoint import Checkpoints
from lowcomm_jax.checkpoint.load import differing_leaves, resize


def saved(tmp_path, name, regions, steps, finish=False):
    """Train, save; returns the values saved."""
    engine = make_engine(name, regions)
    state = train(engine, engine.init(bf16_params()), range(1, steps + 1))
    state = engine.finish(state) if finish else state
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, extra={"x": 1}, config={"regions": regions})
    return values(state)


def restore(tmp_path, name, regions, **kwargs):
    """Restore and make sure that training goes on; returns the restored values."""
    engine = make_engine(name, regions)
    with Checkpoints(tmp_path) as checkpoints:
        found = checkpoints.restore(engine, bf16_params(), change_regions=True, **kwargs)
    restored = values(found.state)
    step = found.step
    state = train(engine, found.state, range(step + 1, step + 3))
    assert np.isfinite(np.asarray(state.anchor["a"])).all()
    assert int(state.counters.step) == step + 2
    return restored


def test_more_regions(tmp_path):
    """Six steps of diloco(4) with token weights: two steps into the second round."""
    before = saved(tmp_path, "diloco", 3, 6)
    after = restore(tmp_path, "diloco", 4)
    for name in before:
        if name.startswith(("inner/", "codec/", "landing/")):
            np.testing.assert_array_equal(after[name][:3], before[name], err_msg=name)
            assert after[name].shape[0] == 4, name
    for leaf in "abcs":
        anchor = before[f"anchor/{leaf}"]
        np.testing.assert_array_equal(after[f"anchor/{leaf}"], anchor)
        local = after[f"inner/params/{leaf}"]
        np.testing.assert_array_equal(local[3], anchor[0].astype(local.dtype))
        assert np.any(local[0] != local[3]), leaf
        np.testing.assert_array_equal(
            after[f"inner/opt/0/mu/{leaf}"][3], before[f"inner/opt/0/mu/{leaf}"][0]
        )
    np.testing.assert_array_equal(after["inner/step"], [6, 6, 6, 6])
    np.testing.assert_array_equal(after["inner/tokens"][:3], before["inner/tokens"])
    assert after["inner/tokens"][3] == 0
    np.testing.assert_array_equal(after["counters/last_landed"], [[4, 4, 4, 6]])
    np.testing.assert_array_equal(after["counters/staleness"], [[0, 0, 0, 0]])
    assert after["counters/bytes_sent"][3] == 0 < after["counters/bytes_sent"][2]
    np.testing.assert_array_equal(after["counters/last_sent"], before["counters/last_sent"])


def test_a_new_region_has_made_no_progress_in_leaves_below_fp32(tmp_path):
    """Where all have the anchor's values, all have lost the same to rounding."""
    before = saved(tmp_path, "streaming", 3, 6, finish=True)
    after = restore(tmp_path, "streaming", 4)
    lost = {name: x for name, x in after.items() if name.startswith("inner/rounding/")}
    assert lost and all(np.any(before[name]) for name in lost)
    for name, x in lost.items():
        np.testing.assert_array_equal(x, np.repeat(before[name][:1], 4, axis=0), name)


def test_one_region_alone(tmp_path):
    before = saved(tmp_path, "diloco", 1, 2)
    assert_same(restore(tmp_path, "diloco", 1), before)


def test_fewer_regions(tmp_path):
    before = saved(tmp_path, "diloco", 4, 6)
    after = restore(tmp_path, "diloco", 2)
    for name, value in before.items():
        if name.startswith("inner/"):
            np.testing.assert_array_equal(after[name], value[:2], err_msg=name)
        if name.startswith(("anchor/", "outer/")):
            np.testing.assert_array_equal(after[name], value, err_msg=name)


def test_new_regions_have_no_residual(tmp_path):
    before = saved(tmp_path, "ddp", 2, 3)
    after = restore(tmp_path, "ddp", 3)
    for leaf in "abc":
        old, new = (tree[f"codec/0/residual/{leaf}"] for tree in (before, after))
        assert np.any(old[0] != 0)
        np.testing.assert_array_equal(new[:2], old)
        np.testing.assert_array_equal(new[2], 0 * old[0])


def test_an_anchor_per_region(tmp_path):
    """Eager, drained: a new region starts from the mean over anchors."""
    before = saved(tmp_path, "eager", 3, 6, finish=True)
    after = restore(tmp_path, "eager", 4)
    for leaf in "abcs":
        mean = before[f"anchor/{leaf}"].mean(axis=0)
        np.testing.assert_array_equal(after[f"anchor/{leaf}"][:3], before[f"anchor/{leaf}"])
        np.testing.assert_allclose(after[f"anchor/{leaf}"][3], mean, rtol=1e-6)
        np.testing.assert_allclose(
            after[f"inner/params/{leaf}"][3].astype(np.float32), mean, rtol=1e-2
        )


@pytest.mark.parametrize("regions,anchors", [((1, 4), 4), ((4, 1), 1), ((1, 4), 1)])
def test_anchors_of_one_region(regions, anchors):
    old, new = regions
    values = {
        "anchor/a": np.arange(old * 6, dtype=np.float32).reshape(old, 2, 3),
        "outer/0/count": np.full(old, 7, np.int32),
        "inner/params/a": np.ones((old, 2, 3), np.float32),
        "counters/step": np.int64(3),
    }
    out = resize(values, {}, regions, anchors)
    assert out["anchor/a"].shape == (anchors, 2, 3)
    for row in out["anchor/a"]:
        np.testing.assert_array_equal(row, values["anchor/a"][0])
    np.testing.assert_array_equal(out["outer/0/count"], np.full(anchors, 7))
    assert out["outer/0/count"].dtype == np.int32
    assert out["inner/params/a"].shape == (new, 2, 3)


def test_refused_without_the_flag_and_with_payloads_in_flight(tmp_path):
    saved(tmp_path, "streaming", 3, 6)
    engine = make_engine("streaming", 4)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match=r"regions: 3 -> 4.*change_regions=True"):
            checkpoints.restore(engine, bf16_params())
        with pytest.raises(ValueError, match=r"in flight \['2@5', '0@6'\]: .*engine.finish"):
            checkpoints.restore(engine, bf16_params(), change_regions=True)
        # The way out, as the message says.
        old = make_engine("streaming", 3)
        state = old.finish(checkpoints.restore(old, bf16_params()).state)
        checkpoints.save(state, extra={}, config={})
        found = checkpoints.restore(engine, bf16_params(), change_regions=True)
    for leaf in "abcs":
        local = np.asarray(found.state.inner.params[leaf])
        np.testing.assert_array_equal(local[3], local[0])


def test_a_history_of_every_region_is_not_that_of_more(tmp_path):
    saved(tmp_path, "edit", 3, 4)
    refusal = pytest.raises(ValueError, match=r"merge/0/a/mean: float32\[3\] -> float32\[4\]")
    with Checkpoints(tmp_path) as checkpoints, refusal:
        checkpoints.restore(make_engine("edit", 4), bf16_params(), change_regions=True)


def test_a_running_mean_of_the_regions_is_not_that_of_more(tmp_path):
    before = saved(tmp_path, "ef21", 3, 2)
    assert_same(restore(tmp_path, "ef21", 3), before)
    engine = make_engine("ef21", 4)
    refusal = pytest.raises(ValueError, match="keeps a running mean of 3 of them")
    with Checkpoints(tmp_path) as checkpoints, refusal:
        checkpoints.restore(engine, bf16_params(), change_regions=True)


def test_what_other_regions_have_measured_decides_on_no_batch(tmp_path):
    """Two steps into a round of four; else the numbers of its start decide at its end."""
    saved(tmp_path, "adloco", 3, 2)
    for regions, measured in ((3, 3), (2, 0), (4, 0)):
        engine = make_engine("adloco", regions)
        with Checkpoints(tmp_path) as checkpoints:
            found = checkpoints.restore(engine, bf16_params(), change_regions=True).state
        assert all(len(t.measured or ()) == measured for t in found.trainers.values())
        before = found.requests
        state = train(engine, found, range(3, 6))
        assert state.step == 5 and (state.requests == before) == (not measured)


def test_anchors_are_one_or_one_a_region():
    def lines(old, new):
        shapes = ({"anchor/a": jax.ShapeDtypeStruct((n, 5), np.float32)} for n in (old, new))
        return differing_leaves(*shapes, regions=(2, 3))

    assert lines(1, 1) == lines(2, 3) == []
    assert lines(1, 3) == ["anchor/a: float32[5] in 1 anchors -> float32[5] in 3 anchors"]
    assert len(lines(2, 1)) == len(lines(1, 2)) == 1


def test_what_a_channel_has_in_flight_is_dropped():
    saved = {"channels/x/payload/values": np.ones((2, 3, 7), np.float16)}
    (flight,) = resize(saved, {}, (2, 4), anchors=1).values()
    np.testing.assert_array_equal(flight, np.zeros((4, 3, 7), np.float16))
    assert flight.dtype == np.float16


def test_a_new_region_has_the_mean_in_bfloat16_too():
    rows = np.array([[1.0, 1.0], [3.0, 3.0]], jnp.bfloat16)
    found = resize({"inner/params/a": rows}, {}, (2, 3), anchors=1)["inner/params/a"]
    np.testing.assert_array_equal(found[2], np.array([2.0, 2.0], jnp.bfloat16))
