"""Low-rank factors on a basis that all regions agree on: PowerSGD's two phases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowcomm_jax.compression import Integer, SharedBasis, compress, error_feedback, make

SHAPE, RANK = (1, 60, 44), 5
WEIGHT = np.array([0.3, 0.0, 1.2], "f4")


def regions_of(count=3, seed=0, rank=None):
    rng = np.random.default_rng(seed)
    if rank is None:
        return rng.standard_normal((count, *SHAPE)).astype("f4")
    left, right = rng.standard_normal((count, 60, rank)), rng.standard_normal((rank, 44))
    return (left @ right)[:, None].astype("f4")


def started(seed=0, **settings):
    codec = SharedBasis(**{"rank": RANK, **settings})
    return codec.on(codec.bases(SHAPE, seed))


def exchanged(codec, x_R, weight_R):
    """(the codec on what all agree on, everyone's payload)."""

    @jax.jit
    def phases(held, x_R, weight_R):
        at, state = codec.on(held), codec.init(SHAPE, 0)
        ahead_R = jax.vmap(lambda x: at.ahead(x, state))(x_R)
        agreed = at.agreed(ahead_R, weight_R, SHAPE)
        at = codec.on(agreed)
        return agreed, jax.vmap(lambda x: at.encode(x, state)[0])(x_R)

    agreed, payload_R = phases(codec.held, jnp.asarray(x_R), jnp.asarray(weight_R))
    return codec.on(agreed), payload_R


def decoded(codec, payload_R, region):
    return codec.decode(jax.tree.map(lambda a: a[region], payload_R), SHAPE)[0]


def mean_of(x_R, weight_R):
    x_R = np.asarray(x_R[:, 0], np.float64)
    return np.einsum("r,rnm->nm", np.asarray(weight_R, np.float64), x_R) / np.sum(weight_R)


def power_sgd(x_R, weight_R, v):
    """Algorithm 1 in double precision: (U U^T, the next V)."""
    u = np.linalg.qr(mean_of(x_R, weight_R) @ np.asarray(v, np.float64))[0]
    return u @ u.T, mean_of(x_R, weight_R).T @ u


def test_as_power_sgd_of_regions_with_different_data():
    codec, x_R = started(3), regions_of()
    x_R[1] = np.nan  # of weight 0
    onto, _ = power_sgd(np.nan_to_num(x_R), WEIGHT, codec.held["v"][0])
    codec, sent = exchanged(codec, x_R, WEIGHT)
    for region in (0, 2):
        np.testing.assert_allclose(decoded(codec, sent, region), onto @ x_R[region, 0], atol=1e-4)
    mean = codec.aggregate(sent, jnp.asarray(WEIGHT), SHAPE)[0]
    np.testing.assert_allclose(mean, onto @ mean_of(np.nan_to_num(x_R), WEIGHT), atol=1e-4)
    assert np.linalg.matrix_rank(np.asarray(mean), tol=1e-3) == RANK
    # Not what every region's own basis gives.
    own = np.linalg.qr(x_R[0, 0] @ np.asarray(started(3).held["v"][0]))[0]
    assert np.abs(own @ own.T - onto).max() > 0.1


@pytest.mark.parametrize("rank", [RANK, 3])
def test_the_next_start_spans_the_mean_second_factor(rank):
    """Of width 5 whatever the rank: what a lower rank does not use stays as it is."""
    codec, x_R = started(1, rank=rank, basis=RANK), regions_of(2, 4)
    weight, old = np.array([1.0, 3.0], "f4"), np.asarray(codec.held["v"][0])
    _, second = power_sgd(x_R, weight, old[:, :rank])
    codec, sent = exchanged(codec, x_R, weight)
    new = np.asarray(codec.turned(sent, jnp.asarray(weight), SHAPE)["v"][0], np.float64)
    np.testing.assert_array_equal(new[:, rank:], old[:, rank:])
    assert np.abs(new).max(axis=0)[:rank] == pytest.approx(1.0)
    q, wanted = np.linalg.qr(new[:, :rank])[0], np.linalg.qr(second)[0]
    np.testing.assert_allclose(q @ q.T, wanted @ wanted.T, atol=1e-4)


def test_a_mean_of_that_rank_is_exact_at_once():
    codec, x_R, weight = started(rank=4), regions_of(3, 5, rank=4), jnp.ones(3)
    codec, sent = exchanged(codec, x_R, weight)
    mean = codec.aggregate(sent, weight, SHAPE)[0]
    np.testing.assert_allclose(mean, mean_of(x_R, weight), atol=1e-4)
    assert codec.mean_rank(sent, jnp.ones(3), SHAPE, 0.999999) == 4
    assert codec.mean_rank(sent, jnp.zeros(3), SHAPE, 0.999999) == 0


def test_a_warm_start_comes_to_the_best_of_that_rank():
    codec, x_R, weight = started(), regions_of(2, 6), jnp.ones(2)
    x_R = x_R + 3.0 * regions_of(1, 7, rank=RANK)
    values = np.linalg.svd(mean_of(x_R, weight), compute_uv=False)
    best, errors = np.sqrt(np.sum(values[RANK:] ** 2)), []
    for _ in range(4):
        codec, sent = exchanged(codec, x_R, weight)
        mean = codec.aggregate(sent, weight, SHAPE)[0]
        errors.append(np.linalg.norm(np.asarray(mean) - mean_of(x_R, weight)))
        codec = codec.on(codec.turned(sent, weight, SHAPE))
    assert errors[0] > 1.01 * best and errors[-1] < 1.001 * best


def test_bases_survive_a_round_of_zeros_and_one_of_nobody():
    before = started()
    for weight in (np.ones(2, "f4"), np.zeros(2, "f4")):
        codec, sent = exchanged(before, np.zeros((2, *SHAPE), "f4"), weight)
        after = codec.turned(sent, jnp.asarray(weight), SHAPE)
        u, old = after["u"][0], before.held["u"][0]
        np.testing.assert_allclose(u @ u.T, old @ old.T, atol=1e-5)
        np.testing.assert_array_equal(after["v"], before.held["v"])


def test_a_stationary_matrix_is_learned_with_quantised_factors_and_feedback():
    """The mean over rounds of what is decoded comes to the matrix."""
    codec = error_feedback(make("low_rank_shared", rank=RANK, factors=Integer(4)))
    x = {"w": jnp.asarray(regions_of(1, 7)[0, 0])}

    def lead(tree):
        return jax.tree.map(lambda a: a[None], tree)

    @jax.jit
    def round_of(state, bases):
        ahead_R = lead(codec.on(bases).ahead(x, state))
        used = codec.on(codec.on(bases).agreed(ahead_R, jnp.ones(1), x))
        payload, state = used.encode(x, state)
        return used.decode(payload, x)["w"], state, used.turned(lead(payload), jnp.ones(1), x)

    bases, state, total, errors = codec.bases(x), codec.init(x), 0.0, []
    for t in range(1, 25):
        got, state, bases = round_of(state, bases)
        total = total + got
        errors.append(float(jnp.linalg.norm(total / t - x["w"]) / jnp.linalg.norm(x["w"])))
    assert errors[0] > 0.7 and errors[-1] < 0.35


def test_bytes_are_those_of_factors_on_own_bases_in_two_parts():
    like = {"b": jax.ShapeDtypeStruct((7,), jnp.float32)}
    like["w"] = jax.ShapeDtypeStruct((60, 44), jnp.float32)
    for suffix in ("", "_int4"):
        own, shared = (make(f"low_rank{s}{suffix}", rank=4) for s in ("", "_shared"))
        assert own.nbytes(like) == shared.nbytes(like) < 4 * 60 * 44
        shared = shared.on(shared.bases(like))
        x = jax.tree.map(lambda s: jnp.ones(s.shape), like)
        first = shared.ahead(x, shared.init(x))
        second = shared.behind(shared.encode(x, shared.init(x))[0], x)
        parts = [sum(a.nbytes for a in jax.tree.leaves(part)) for part in (first, second)]
        assert sum(parts) == shared.nbytes(like) and min(parts) > 0


def test_without_bases_it_says_what_to_do():
    codec = make("low_rank_shared", rank=4)
    x = {"w": jnp.zeros((60, 44))}
    with pytest.raises(ValueError, match=r"codec\.on\(codec\.bases\(like\)\)"):
        codec.encode(x, codec.init(x))
    with pytest.raises(ValueError, match="needs other regions"):
        compress("low_rank_shared")
