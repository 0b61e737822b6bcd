"""Low-rank factors on bases that all regions share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowcomm_jax.compression import Integer, SharedBasis, compress, error_feedback, make

SHAPE, RANK = (1, 60, 44), 5


def regions_of(count=3, seed=0, rank=None):
    rng = np.random.default_rng(seed)
    if rank is None:
        return rng.standard_normal((count, *SHAPE)).astype("f4")
    left, right = rng.standard_normal((count, 60, rank)), rng.standard_normal((rank, 44))
    return (left @ right)[:, None].astype("f4")


def projection(m, u, v):
    """U U^T M + M V V^T - U U^T M V V^T in double precision."""
    m, u, v = (np.asarray(x, np.float64) for x in (m, u, v))
    left, right = u @ u.T, v @ v.T
    return left @ m + m @ right - left @ m @ right


def payloads(codec, x_R):
    encode = jax.jit(jax.vmap(lambda x: codec.encode(x, codec.init(SHAPE, 0))[0]))
    return encode(jnp.asarray(x_R))


def decoded(codec, payload_R, region):
    return codec.decode(jax.tree.map(lambda a: a[region], payload_R), SHAPE)[0]


def columns(bases):
    return bases["u"][0], bases["v"][0]


def test_decoded_is_the_projection_on_both_bases_and_the_mean_is_the_means():
    codec = SharedBasis(rank=RANK)
    codec = codec.on(codec.bases(SHAPE, 3))
    x_R, weight = regions_of(), np.array([0.3, 0.0, 1.2], "f4")
    sent = payloads(codec, x_R)
    u, v = columns(codec.held)
    np.testing.assert_allclose(decoded(codec, sent, 0), projection(x_R[0, 0], u, v), atol=1e-5)
    mean = (0.3 * x_R[0, 0] + 1.2 * x_R[2, 0]) / 1.5
    got = codec.aggregate(sent, jnp.asarray(weight), SHAPE)[0]
    np.testing.assert_allclose(got, projection(mean, u, v), atol=1e-5)
    assert np.linalg.matrix_rank(np.asarray(got), tol=1e-3) == 2 * RANK


@pytest.mark.parametrize("rank", [RANK, 3])
def test_next_bases_span_the_mean_factors(rank):
    """Of width 5 whatever the rank: what a lower rank does not use stays, made orthogonal."""
    codec = SharedBasis(rank=rank, basis=RANK)
    codec = codec.on(codec.bases(SHAPE, 1))
    x_R = regions_of(2, 4)
    turned = codec.turned(payloads(codec, x_R), jnp.array([1.0, 3.0]), SHAPE)
    mean = np.asarray((x_R[0, 0] + 3.0 * x_R[1, 0]) / 4.0, np.float64)
    u, v = columns(codec.held)
    for new, image, old in zip(columns(turned), (mean @ v[:, :rank], mean.T @ u[:, :rank]), (u, v)):
        new = np.asarray(new, np.float64)
        np.testing.assert_allclose(new.T @ new, np.eye(RANK), atol=1e-5)
        whole = np.concatenate([image, old[:, rank:]], axis=1)
        for used in (rank, RANK):
            q = np.linalg.qr(whole[:, :used])[0]
            np.testing.assert_allclose(new[:, :used] @ new[:, :used].T, q @ q.T, atol=1e-4)


def test_exact_once_the_bases_have_turned_when_the_rank_suffices():
    """All regions' matrices have one row space of rank 4; the mean shows it after one landing."""
    codec = SharedBasis(rank=4)
    codec = codec.on(codec.bases(SHAPE, 0))
    x_R = regions_of(3, 5, rank=4)
    assert np.abs(decoded(codec, payloads(codec, x_R), 0) - x_R[0, 0]).max() > 0.1
    codec = codec.on(codec.turned(payloads(codec, x_R), jnp.ones(3), SHAPE))
    sent = payloads(codec, x_R)
    for r in range(3):
        np.testing.assert_allclose(decoded(codec, sent, r), x_R[r, 0], atol=1e-4)
    assert codec.mean_rank(sent, jnp.ones(3), SHAPE, 0.999999) == 4
    assert codec.mean_rank(sent, jnp.zeros(3), SHAPE, 0.999999) == 0


def test_bases_survive_a_round_of_zeros():
    codec = SharedBasis(rank=RANK)
    codec = codec.on(codec.bases(SHAPE, 0))
    sent = payloads(codec, np.zeros((2, *SHAPE), "f4"))
    turned = codec.turned(sent, jnp.ones(2), SHAPE)
    for old, new in zip(columns(codec.held), columns(turned)):
        np.testing.assert_allclose(new @ new.T, old @ old.T, atol=1e-5)


def test_a_stationary_matrix_is_learned_with_quantised_factors_and_feedback():
    """Rounds with bases that turn: the mean over rounds of what is decoded comes to the matrix."""
    codec = error_feedback(make("low_rank_shared", rank=RANK, factors=Integer(4)))
    x = {"w": jnp.asarray(regions_of(1, 7)[0, 0])}
    bases, state, total, errors = codec.bases(x), codec.init(x), 0.0, []
    turn = jax.jit(lambda p_R, b: codec.on(b).turned(p_R, jnp.ones(1), x))
    step = jax.jit(lambda s, b: codec.on(b).encode(x, s))
    decode = jax.jit(lambda p, b: codec.on(b).decode(p, x))
    for t in range(1, 25):
        payload, state = step(state, bases)
        total = total + decode(payload, bases)["w"]
        bases = turn(jax.tree.map(lambda a: a[None], payload), bases)
        errors.append(float(jnp.linalg.norm(total / t - x["w"]) / jnp.linalg.norm(x["w"])))
    assert errors[0] > 0.8 and errors[-1] < 0.35


def test_bytes_are_those_of_factors_on_own_bases():
    like = {"w": jax.ShapeDtypeStruct((60, 44), jnp.float32)}
    for suffix in ("", "_int4"):
        own, shared = (make(f"low_rank{s}{suffix}", rank=4) for s in ("", "_shared"))
        assert own.nbytes(like) == shared.nbytes(like) < 4 * 60 * 44


def test_without_bases_it_says_what_to_do():
    codec = make("low_rank_shared", rank=4)
    x = {"w": jnp.zeros((60, 44))}
    with pytest.raises(ValueError, match=r"codec\.on\(codec\.bases\(like\)\)"):
        codec.encode(x, codec.init(x))
    with pytest.raises(ValueError, match="needs other regions"):
        compress("low_rank_shared")
