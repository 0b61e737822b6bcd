"""Packing is invertible and dense, for every width and odd sizes."""

import jax.numpy as jnp
import numpy as np
import pytest

from lowcomm_jax.compression.packing import pack, packed_width, unpack


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 12])
@pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 13, 64, 129])
def test_unpack_inverts_pack(bits, width):
    rng = np.random.default_rng(bits * 1000 + width)
    dtype = np.uint16 if bits == 12 else np.uint8
    codes = rng.integers(0, 2**bits, (3, 2, width)).astype(dtype)
    codes[0, 0, :] = 2**bits - 1
    packed = pack(jnp.asarray(codes), bits)
    assert packed.dtype == jnp.uint8
    assert packed.shape == (3, 2, packed_width(width, bits))
    unit = 3 if bits == 12 else 1  # a pair of 12-bit codes is three bytes
    assert width * bits <= 8 * packed.shape[-1] < width * bits + 8 * unit
    np.testing.assert_array_equal(unpack(packed, bits, width), codes)


def test_layout_is_by_planes():
    codes = jnp.array([1, 2, 3, 4, 5], jnp.uint8)  # planes 1 2 3 and 4 5 0
    np.testing.assert_array_equal(pack(codes, 4), [0x41, 0x52, 0x03])
    np.testing.assert_array_equal(
        pack(jnp.array([0xABC, 0x123], jnp.uint16), 12), [0xBC, 0x23, 0x1A]
    )
