"""Matrices are factorised one at a time: batches on all threads at once never end (jaxlib 0.10)."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

from lowcomm_jax.compression import PerTensor, make_leaf
from lowcomm_jax.compression.codecs.low_rank import eigen, factorised, orthonormal

FACTORISATIONS = ("geqrf", "qr", "householder_product", "eigh")
SHAPE = (3, 12, 10)


def test_each_matrix_of_a_batch():
    x = np.random.default_rng(0).standard_normal((2, 3, 7, 4)).astype(np.float32)
    both = lambda fn: jax.jit(jax.vmap(jax.vmap(fn)))(x)  # noqa: E731
    q, r = both(factorised)
    np.testing.assert_array_equal(both(orthonormal), q)
    np.testing.assert_allclose(q @ r, x, atol=1e-5)
    np.testing.assert_allclose(np.swapaxes(q, 2, 3) @ q, np.eye(4) + np.zeros_like(r), atol=1e-5)
    x = np.swapaxes(x, 2, 3) @ x
    values, vectors = both(eigen)
    np.testing.assert_allclose(values, np.linalg.eigvalsh(x), atol=1e-5)
    np.testing.assert_allclose(x @ vectors, vectors * values[:, :, None], atol=1e-5)


def of_what_rank(fn, *args):
    """Ranks of the arrays that are factorised, by the name of the operation."""

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in FACTORISATIONS:
                yield eqn.primitive.name, eqn.invars[0].aval.ndim
            for inner in jaxprs_in_params(eqn.params):
                yield from walk(inner)

    return set(walk(jax.make_jaxpr(fn)(*args).jaxpr))


def test_the_codec_factorises_one_matrix_at_a_time():
    """Of several layers and, under `vmap`, several regions."""
    codec = PerTensor(make_leaf("low_rank_int4", rank=2, least=1.0), stacked=("x",))

    def all_of_it(x):
        x = {"x": x}
        payload, state = codec.encode(x, codec.init(x))
        one = jax.tree.map(lambda leaf: leaf[None], payload)
        rank = codec.mean_rank(one, jnp.ones(1), x, 0.9)
        return payload, state, rank

    found = of_what_rank(jax.vmap(all_of_it), jnp.ones((2, *SHAPE)))
    assert {ndim for _, ndim in found} == {2} and "eigh" in {kind for kind, _ in found}
    # The test sees what it looks for.
    assert ("eigh", 3) in of_what_rank(jnp.linalg.eigh, jnp.ones((3, 4, 4)))
