"""Packing is invertible and dense, for every width and odd sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowcomm_jax.compression.packing import pack, packed_width, unpack

WIDTHS = (1, 2, 3, 5, 8, 13, 64, 129)


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 12])
def test_unpack_inverts_pack(bits):
    rng, codes = np.random.default_rng(bits), {}
    for width in WIDTHS:
        codes[width] = rng.integers(0, 2**bits, (3, 2, width)).astype(
            np.uint16 if bits == 12 else np.uint8
        )
        codes[width][0, 0, :] = 2**bits - 1

    @jax.jit
    def there_and_back(codes):
        packed = {width: pack(x, bits) for width, x in codes.items()}
        return packed, {width: unpack(x, bits, width) for width, x in packed.items()}

    packed, back = there_and_back(codes)
    unit = 3 if bits == 12 else 1  # a pair of 12-bit codes is three bytes
    for width, x in packed.items():
        assert x.dtype == jnp.uint8
        assert x.shape == (3, 2, packed_width(width, bits))
        assert width * bits <= 8 * x.shape[-1] < width * bits + 8 * unit
        np.testing.assert_array_equal(back[width], codes[width], f"width {width}")


def test_layout_is_by_planes():
    codes = jnp.array([1, 2, 3, 4, 5], jnp.uint8)  # planes 1 2 3 and 4 5 0
    np.testing.assert_array_equal(pack(codes, 4), [0x41, 0x52, 0x03])
    np.testing.assert_array_equal(
        pack(jnp.array([0xABC, 0x123], jnp.uint16), 12), [0xBC, 0x23, 0x1A]
    )


def test_a_width_that_does_not_pack_is_refused():
    with pytest.raises(ValueError, match="bits=3: use 1, 2, 4, 8 or 12"):
        pack(jnp.zeros(8, jnp.uint8), 3)
