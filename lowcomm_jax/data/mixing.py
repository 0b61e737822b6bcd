"""Hashes of integers: the randomness of splits, shards and generated text.

SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) in uint64 arithmetic, vectorised. It is equal on
every machine and in every library version; NumPy's and Grain's generators do not promise that.
"""

import hashlib

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(counter: np.ndarray) -> np.ndarray:
    """Return SplitMix64's output for each uint64 counter; uint64, same shape."""
    z = counter * _GOLDEN + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def salt(*parts: object) -> int:
    """Return a 64-bit integer drawn from the parts; equal parts give equal integers."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def salted(key: np.ndarray, *parts: object) -> np.ndarray:
    """Return the uint64 keys hashed under a salt: a fresh uniform value a key; same shape."""
    return splitmix64(key ^ np.uint64(salt(*parts)))
