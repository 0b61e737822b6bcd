"""Codecs against NumPy re-derivations that share no code with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codec_cases import leaf_round_trip

from lowcomm_jax.compression import (
    E3M0,
    Cast,
    DCTTopK,
    Integer,
    LowRank,
    PerTensor,
    RandomK,
    Sign,
    Statistical,
    TopK,
    make,
)
from lowcomm_jax.compression.codecs.low_rank import Parts, rank_of_products
from lowcomm_jax.compression.grid import Unit
from lowcomm_jax.compression.placement import Placement


def noise(shape, seed=0, shift=0.3):
    """Skewed and heavy-tailed, so that no symmetry can hide a mistake."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(rng.standard_normal(shape)) + shift).astype("f4")


class Rounds:
    """A codec of one leaf `[L, N, M]`, round after round."""

    def __init__(self, codec, shape, seed=0):
        self.codec, self.like = PerTensor(codec, stacked=("x",), seed=seed), {"x": np.zeros(shape)}
        self.state = self.codec.init(self.like)
        self.encode = jax.jit(self.codec.encode)
        self.decode = jax.jit(lambda payload: self.codec.decode(payload, self.like)["x"])

    def send(self, x):
        """(payload, decoded values)."""
        payload, self.state = self.encode({"x": jnp.asarray(x)}, self.state)
        return payload["x"], np.asarray(self.decode(payload))


def test_fp16_saturates_at_both_ends():
    y, _ = leaf_round_trip(Cast("fp16"), np.array([-1e30, 1e30, 0.5], "f4"))
    np.testing.assert_array_equal(y, [-65504, 65504, 0.5])


@pytest.mark.parametrize("bits, sigmas", [(2, 6.0), (4, 6.0), (4, 4.4), (8, 6.0)])
@pytest.mark.parametrize("shape", [(37, 131), (301,), (3, 5000)])
def test_statistical(bits, sigmas, shape):
    x = noise(shape)
    y, _ = leaf_round_trip(Statistical(bits, sigmas), x)
    bins, wide = 2**bits, x.astype(np.float64)
    step = sigmas * wide.std(ddof=1) / bins
    code = np.clip(np.floor((wide - wide.mean()) / step + bins / 2 + 0.5), 0, bins - 1)
    want = np.empty_like(wide)
    for b in np.unique(code):
        inner = bits == 8 and 0 < b < bins - 1
        centre = wide.mean() + (b - bins / 2) * step
        want[code == b] = centre if inner else wide[code == b].mean()
    # A value on an edge may fall to the other side, and moves two bin means a little.
    assert np.mean(np.isclose(y, want, rtol=1e-3, atol=1e-4 * wide.std())) > 0.995


def test_statistical_rows_have_their_own_grid():
    x = np.stack([noise(200, 1), 1000 * noise(200, 2), np.full(200, 0.7, "f4")])
    y, _ = leaf_round_trip(Statistical(4, scope="row"), x)
    for row, got in zip(x, y):
        alone, _ = leaf_round_trip(Statistical(4), row)
        np.testing.assert_allclose(got, alone, rtol=1e-3, atol=1e-5 * np.abs(row).max())
    np.testing.assert_allclose(y[2], 0.7, rtol=1e-6)


@pytest.mark.parametrize("shape", [(5, 256), (7, 67), (3, 257), (9, 36), (1000,)])
def test_e3m0_takes_the_nearest_magnitude(shape):
    x = noise(shape, 3)
    y, payload = leaf_round_trip(E3M0(), x)
    rows, got = x.reshape(-1, shape[-1]), y.reshape(-1, shape[-1])
    blocks = payload["scale"].shape[2]
    assert payload["scale"].shape == (1, len(rows), blocks), "a row's blocks are its own"
    width = -(-shape[-1] // blocks)
    levels = np.concatenate([[0.0], 2.0 ** np.arange(-2, 5)])
    levels = np.concatenate([-levels[::-1], levels])
    for row, found in zip(rows, got):
        for b in range(blocks):
            part = row[b * width : (b + 1) * width].astype(np.float64)
            scale = np.abs(part).max() / 16
            want = levels[np.abs(part[:, None] / scale - levels[None]).argmin(1)] * scale
            np.testing.assert_allclose(found[b * width : (b + 1) * width], want, rtol=1e-5)


def test_e3m0_relative_error():
    x = np.linspace(1e-3, 16, 4001, dtype="f4")  # the largest magnitude is 16 s, so that s = 1
    y, _ = leaf_round_trip(E3M0(block=x.size), x)
    error = np.abs(y - x) / x
    assert 0.33 < error[x >= 3 / 16].max() <= 1 / 3 + 1e-6
    between = (x >= 1 / 8) & (x < 3 / 16)
    assert (y[between] == 0.25).all() and 0.9 < error[between].max() <= 1
    assert (y[x < 1 / 8] == 0).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("affine", [False, True])
def test_integer_error_is_half_a_step_of_its_block(bits, affine):
    x = noise((6, 130), 4)
    y, payload = leaf_round_trip(Integer(bits, affine, block=65), x)
    pieces = x.reshape(-1, 65)
    if affine:
        step = (pieces.max(1) - pieces.min(1)) / (2**bits - 1)
    else:
        step = np.abs(pieces).max(1) / (2 ** (bits - 1) - 1)
    np.testing.assert_allclose(payload["scale"].reshape(-1), step, rtol=1e-6)
    error = np.abs(y - x).reshape(-1, 65)
    assert np.all(error <= 0.5001 * step[:, None])
    assert np.max(error / step[:, None]) > 0.45


def largest(x, k):
    """x with all but the k largest magnitudes zeroed."""
    out, order = np.zeros(x.size, x.dtype), np.argsort(-np.abs(x.reshape(-1)))[:k]
    out[order] = x.reshape(-1)[order]
    return out.reshape(x.shape)


def per_chunk(x, height, width, fn):
    out = np.zeros_like(x)
    for i in range(0, x.shape[0], height):
        for j in range(0, x.shape[1], width):
            out[i : i + height, j : j + width] = fn(x[i : i + height, j : j + width])
    return out


@pytest.mark.parametrize(
    "shape, chunk",
    [
        ((128, 96), (64, 48)),
        ((50, 134), (50, 45)),  # three chunks a row, the last one padded
        ((257, 30), (52, 30)),
        ((6, 21), (6, 21)),
    ],
)
def test_top_k_per_chunk(shape, chunk):
    x = noise(shape, 5)
    y, _ = leaf_round_trip(TopK(k=11), x)
    np.testing.assert_array_equal(y, per_chunk(x, *chunk, lambda c: largest(c, 11)))


def test_top_k_of_vectors_with_k_of_a_whole_chunk_is_dense():
    x = noise(96, 6)
    y, payload = leaf_round_trip(TopK(k=64), x)
    np.testing.assert_array_equal(y, x)
    assert set(payload) == {"values"}  # and no indices travel


@pytest.mark.parametrize("format", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["topk", "dct_topk", "random_k"])
def test_chosen_values_may_be_cast(name, format):
    """Each of them, and not only the first of a unit."""
    x = {"w": np.random.default_rng(3).standard_normal((64, 64)).astype("f4")}
    exact, narrow = make(name), make(name, values=format)
    payload, wide = (jax.jit(codec.encode)(x, codec.init(x))[0] for codec in (narrow, exact))
    cast = make(format)
    kept = cast.decode(cast.encode(wide["w"]["values"], ())[0], wide["w"]["values"])
    np.testing.assert_array_equal(payload["w"]["bits"].reshape(-1), _bits(kept, format))
    assert exact.nbytes(x) - narrow.nbytes(x) == 2 * kept.size
    values = (
        np.asarray(jax.jit(lambda sent, codec=codec: codec.decode(sent, x))(sent)["w"])
        for codec, sent in ((narrow, payload), (exact, wide))
    )
    apart = np.abs(np.subtract(*values)).max()
    assert 0 < apart < 2.0**-8 * np.abs(kept).max() * (4 if name == "dct_topk" else 1)


def _bits(x, format):
    narrow = jnp.asarray(x).astype({"bf16": jnp.bfloat16, "fp16": jnp.float16}[format])
    return np.asarray(jax.lax.bitcast_convert_type(narrow, jnp.uint16)).reshape(-1)


def test_dct_top_k():
    x = noise((96, 40), 7)

    def basis(n):
        rows = [np.cos(np.pi * f * (np.arange(n) + 0.5) / n) for f in range(n)]
        return np.stack([r / np.linalg.norm(r) for r in rows])

    def keep(chunk):
        down, across = basis(chunk.shape[0]), basis(chunk.shape[1])
        return down.T @ largest(down @ chunk @ across.T, 13) @ across

    want = per_chunk(x.astype(np.float64), 48, 40, keep)
    y, _ = leaf_round_trip(DCTTopK(k=13), x)
    np.testing.assert_allclose(y, want, atol=2e-5 * np.abs(x).max())
    whole, _ = leaf_round_trip(DCTTopK(k=48 * 40), x)
    np.testing.assert_allclose(whole, x, atol=2e-6 * np.abs(x).max())


def test_sign():
    x = noise((3, 67), 8)
    y, _ = leaf_round_trip(Sign(), x)
    np.testing.assert_allclose(y, np.sign(x) * np.abs(x).mean(), rtol=1e-6)


def test_random_k_sends_one_value_of_each_group_and_new_ones_next_round():
    x = noise((5, 61), 9)
    codec = RandomK(one_in=8)
    y, _ = leaf_round_trip(codec, x)
    sent = y.reshape(-1) != 0
    padded = np.pad(sent, (0, -sent.size % 8)).reshape(-1, 8)
    assert np.all(padded.sum(1) <= 1) and np.all(padded[:-1].sum(1) == 1)
    np.testing.assert_array_equal(y.reshape(-1)[sent], x.reshape(-1)[sent])
    rounds, masks = Rounds(codec, (1, 5, 61)), []
    for _ in range(2):
        payload, got = rounds.send(x[None])
        assert payload["values"].size == padded.shape[0]
        masks.append(got != 0)
    assert np.any(masks[0] != masks[1])
    dense, _ = leaf_round_trip(RandomK(one_in=1), x)
    np.testing.assert_array_equal(dense, x)


def test_random_k_chooses_anew_in_every_layer():
    shape, codec = (3, 8, 8), RandomK(one_in=8)
    sent = Rounds(codec, shape).send(np.ones(shape))[1] != 0
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.any(sent[one] != sent[other])


def test_unbiased_random_k_has_the_input_as_its_mean():
    """One of four values is sent, at random, four times as large."""
    x, seen = noise((2, 32), 9)[None], []
    rounds = Rounds(RandomK(one_in=4, unbiased=True), x.shape)
    for _ in range(20):
        seen.append(rounds.send(x)[1])
    sent = np.array(seen) != 0
    np.testing.assert_allclose(np.array(seen)[sent], np.broadcast_to(4 * x, sent.shape)[sent])
    assert sent.mean() == 0.25


def test_low_rank_is_one_power_iteration():
    rng = np.random.default_rng(10)
    x = rng.standard_normal((1, 60, 44)).astype("f4")
    rounds = Rounds(LowRank(rank=5), x.shape, 3)
    q = np.asarray(rounds.state[0]["q"][0], np.float64)
    for _ in range(3):
        got = rounds.send(x)[1]
        p = np.linalg.qr(x[0] @ q)[0]
        q = x[0].T @ p
        np.testing.assert_allclose(got[0], p @ q.T, atol=2e-4)


@pytest.mark.parametrize("rank", [4, 6])
def test_low_rank_is_exact_after_one_warm_step_when_the_rank_suffices(rank):
    rng = np.random.default_rng(11)
    x = (rng.standard_normal((2, 50, 4)) @ rng.standard_normal((2, 4, 70))).astype("f4")
    rounds = Rounds(LowRank(rank=rank), x.shape)
    rounds.send(x)
    np.testing.assert_allclose(rounds.send(x)[1], x, atol=1e-4)
    assert np.abs(Rounds(LowRank(rank=3), x.shape).send(x)[1] - x).max() > 0.1


def test_low_rank_keeps_its_basis_through_a_round_of_zeros():
    rounds = Rounds(LowRank(rank=3), (1, 40, 40))
    before = rounds.state[0]["q"]
    rounds.send(np.zeros((1, 40, 40)))
    np.testing.assert_array_equal(rounds.state[0]["q"], before)


def test_the_rank_of_a_product_counts_energy():
    rng = np.random.default_rng(12)
    u, v = (np.linalg.qr(rng.standard_normal((n, 5)))[0] for n in (30, 20))
    values = np.array([8.0, 4.0, 2.0, 0.1, 0.01])  # squares: 64 + 16 + 4 of 84.01
    p, q = jnp.asarray(u * values, jnp.float32), jnp.asarray(v, jnp.float32)
    factors = p.T[None], q.T[None]
    parts = Parts(Placement((30, 20), False, Unit(1, 1)))
    found = [rank_of_products(*factors, e, parts).item() for e in (0.7, 0.9, 0.99, 0.99999)]
    assert found == [1, 2, 3, 4]
    assert rank_of_products(0 * factors[0], factors[1], 0.99, parts).item() == 0


def test_the_rank_of_a_mean_counts_regions_by_their_weight():
    """Two regions send matrices of rank 1 that are orthogonal to each other."""
    codec, like = PerTensor(LowRank(rank=2)), {"x": jnp.zeros((16, 16))}
    x_R = {"x": jnp.zeros((2, 16, 16)).at[0, 0, 0].set(1.0).at[1, 1, 1].set(1.0)}

    @jax.jit
    def rank_at(weight_R):
        payload_R = jax.vmap(lambda x: codec.encode(x, codec.init(like))[0])(x_R)
        return codec.mean_rank(payload_R, weight_R, like, 0.9)

    assert rank_at(jnp.array([1.0, 1.0])) == 2
    assert rank_at(jnp.array([1.0, 0.01])) == 1


def test_stacked_layers_are_matrices_of_their_own():
    x = np.stack([noise((20, 30), 1), 50 * noise((20, 30), 2), noise((20, 30), 3)])
    stacked = make("stat4", stacked=("layers",))
    like = {"layers/w": x}
    y = jax.jit(lambda x: stacked.decode(stacked.encode(x, ())[0], x))(like)["layers/w"]
    for layer in range(3):
        alone, _ = leaf_round_trip(Statistical(4), x[layer])
        np.testing.assert_allclose(y[layer], alone, rtol=1e-4, atol=1e-4 * np.abs(x[layer]).max())
