"""Rows of chunks coded band by band are coded as all at once."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowcomm_jax.compression import DCTTopK, TopK

top_k = sys.modules[TopK.__module__]  # `compression.top_k` is the Optax view of that name

SHAPE = (2, 24, 30)  # chunks of 8 x 6: three rows of five


@pytest.mark.parametrize("codec", [TopK(k=5, block=8), DCTTopK(k=5, block=8), TopK(k=48, block=8)])
def test_bands_change_nothing(codec, monkeypatch):
    x_R = np.random.default_rng(0).standard_normal((3, *SHAPE)).astype("f4")
    seen, lax_map = [], jax.lax.map

    def counted(fn, xs):
        seen.append(len(jax.tree.leaves(xs)[0]))
        return lax_map(fn, xs)

    def results():
        seen.clear()
        payload_R = jax.vmap(lambda x: codec.encode(x, ())[0])(jnp.asarray(x_R))
        first = jax.tree.map(lambda a: a[0], payload_R)
        decoded = codec.decode(first, SHAPE)
        return payload_R, decoded, codec.aggregate(payload_R, jnp.array([1.0, 0.0, 0.3]), SHAPE)

    monkeypatch.setattr(top_k.jax.lax, "map", counted)
    monkeypatch.setattr(top_k, "BAND", 8 * 30)
    banded = results()
    assert set(seen) == {2 * 3}  # layers times rows of chunks
    monkeypatch.setattr(top_k, "BAND", 10**9)
    whole = results()
    assert set(seen) <= {2}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), banded, whole)
