"""The gate of bf16 weights against a NumPy rounding of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowcomm_jax.compression import BF16Gate, PerTensor, error_feedback, make

SHAPES = {"scalar": (), "bias": (70,), "odd": (37, 53), "layers/w": (3, 24, 40), "large": (130, 67)}


def bf16(x):
    """fp32 values rounded to bf16, half to even, as fp32."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    up = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return (up & np.uint32(0xFFFF0000)).view(np.float32)


def case(seed=0, size=2.0**-9):
    """Weights, and changes of about half of bf16's spacing."""
    rng = np.random.default_rng(seed)
    theta = {k: rng.standard_normal(s).astype(np.float32) for k, s in SHAPES.items()}
    x = {k: (size * rng.standard_normal(np.shape(w)) * w).astype("f4") for k, w in theta.items()}
    return theta, x


def sent(codec, theta, x):
    @jax.jit
    def run(x, state, theta):
        payload, state = codec.encode(x, state, theta)
        return codec.decode(payload, x), state

    return jax.device_get(run(x, codec.init(x), theta))


@pytest.mark.parametrize("seed", [0, 1])
def test_what_would_change_the_bf16_weight_travels(seed):
    """With a place for everything; a part travels, and a part does not."""
    theta, x = case(seed)
    got, _ = sent(make("bf16_gate", k=4096, stacked=("layers",)), theta, x)
    shares = []
    for key, change in x.items():
        moves = bf16(theta[key] - change) != bf16(theta[key])
        np.testing.assert_array_equal(got[key], np.where(moves, change, 0), err_msg=key)
        kept = np.abs(change[~moves]) <= np.abs(theta[key])[~moves] * 2.0**-7
        assert kept.all()
        shares.append(moves.mean())
    assert 0.1 < np.mean(shares) < 0.9


@pytest.mark.parametrize("k", [1, 5])
def test_of_more_entries_than_places_the_largest_travel(k):
    theta, x = case()
    codec = error_feedback(PerTensor(BF16Gate(k=k, block=8)))
    got, state = sent(codec, theta, x)
    for key, left in state.residual.items():
        np.testing.assert_array_equal(left, x[key] - got[key], err_msg=key)
    theta, x, got = theta["odd"], x["odd"], got["odd"]
    moves = bf16(theta - x) != bf16(theta)
    # 37 rows make five chunks of 8, 53 columns seven; the last ones are padded.
    crowded = 0
    for top in range(0, 37, 8):
        for left in range(0, 53, 8):
            at = np.s_[top : top + 8, left : left + 8]
            size = np.where(moves[at], np.abs(x[at]), 0)
            largest = np.sort(size, axis=None)[::-1][:k]
            travels = np.abs(got[at][got[at] != 0])
            np.testing.assert_array_equal(np.sort(travels)[::-1], largest[largest > 0])
            crowded += (size > 0).sum() > k
    assert crowded > 10


def test_the_residual_travels_when_it_has_grown_enough():
    """Steps of a quarter of the spacing travel by three: two are half of it, a tie or less."""
    theta = {"w": np.full((8, 8), 1.0, np.float32)}
    step = {"w": np.full((8, 8), -(2.0**-9), np.float32)}  # the spacing above 1 is 2^-7
    codec = make("bf16_gate_ef")
    state, total, moved = codec.init(step), 0.0, []
    for _ in range(8):
        payload, state = codec.encode(step, state, theta)
        got = float(codec.decode(payload, step)["w"][0, 0])
        theta = {"w": theta["w"] - np.float32(got)}
        total, moved = total + got, [*moved, got != 0]
    assert moved == [False, False, True, False, False, True, False, False]
    left = float(state.residual["w"][0, 0])
    assert total + left == pytest.approx(8 * -(2.0**-9), abs=1e-9)


def test_without_weights_or_over_senders():
    x = {"w": jnp.ones((4, 4))}
    codec = make("bf16_gate")
    with pytest.raises(ValueError, match="bf16_gate256 reads the weights: give params"):
        codec.encode(x, codec.init(x))
    with pytest.raises(ValueError, match="mean='senders': a place without an entry"):
        make("bf16_gate", mean="senders")
    assert codec.name == "bf16_gate256" and make("bf16_gate", k=8).name == "bf16_gate8"
