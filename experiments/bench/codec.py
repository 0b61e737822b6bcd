"""Bytes, error and speed of every codec, with speed as a fraction of a device copy.

Usage: `python -m experiments bench codec [--size 4096] [--repeats 5] [--codecs int4,topk]
[--json FILE]`. A codec and a copy take turns, so that whatever else loads the machine
loads them alike; medians are reported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from experiments.bench.main import BenchTable, Row, flags, run
from experiments.bench.work import interleave, median
from experiments.cli import listed
from experiments.refusals import checked_flags
from lowcomm_jax import compression
from lowcomm_jax.compression import Codec
from lowcomm_jax.compression.two_shot import per_tensor


def main(argv: Sequence[str]) -> int:
    """Measure, print a table, write JSON; see the module's docstring for the flags."""
    options = flags(repeats=5)
    options.text("codecs", "", "names, separated by commas (default: all)")
    options.whole("size", 4096, "the matrix is size x size, fp32")
    options.whole("rank", None, "of the low-rank codecs (default: size / 64)")
    values = options.values
    checked_flags("bench codec", argv, values, __doc__)
    size, how = values.size, (values.size, values.repeats, values.rank)
    parts = [
        (name, lambda name=name: [measure(name, *how)])
        for name in listed(values.codecs) or compression.names()
    ]
    stage = BenchTable(parts, COLUMNS, functools.partial(_title, size))
    return run("bench codec", {"codecs": stage}, values)


def measure(name: str, size: int, repeats: int, rank: int | None = None) -> Row:
    """Time a codec.

    Args:
      name: of the codec.
      size: of a square matrix, fp32.
      rank: of a low-rank codec; None = size / 64.

    Returns:
      Its row: codec, bytes_per_value, compression, error_gaussian, error_heavy, encode_s,
      decode_s, copy_s, of_copy.
    """
    noise = {"gaussian": _gaussian(size), "heavy": _heavy_tailed(size)}
    codec = _build(name, max(size // 64, 1) if rank is None else rank)
    encode, decode = programs = _programs(codec, size)
    x = noise["gaussian"]
    variants = {
        "copy": functools.partial(jax.jit(jnp.copy), x),
        "encode": functools.partial(encode, x),
        "decode": functools.partial(decode, encode(x)),
    }
    seconds = {what: median(taken) for what, taken in interleave(variants, repeats).items()}
    return {
        "codec": name,
        **_size(codec, x),
        **{f"error_{kind}": _error(programs, x) for kind, x in noise.items()},
        **{f"{what}_s": seconds[what] for what in ("encode", "decode", "copy")},
        "of_copy": seconds["copy"] / (seconds["encode"] + seconds["decode"]),
    }


def _build(name: str, rank: int) -> Codec:
    codec = compression.make(name)
    of_leaves = per_tensor(codec)
    low_rank = of_leaves is not None and isinstance(of_leaves.default, compression.LowRank)
    return compression.make(name, rank=rank) if low_rank else codec


def _gaussian(size: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (size, size))


def _heavy_tailed(size: int) -> jax.Array:
    """Gaussian times log-normal, the shape of gradients: rare values far beyond the rest."""
    return _gaussian(size) * jnp.exp(jax.random.normal(jax.random.key(1), (size, size)))


def _programs(codec: Codec, size: int) -> tuple[Callable, Callable]:
    """Jitted encode of a matrix, and decode of its payload, by a single region."""
    like = jax.ShapeDtypeStruct((size, size), jnp.float32)
    # Next to weights of which every value would change something, for codecs that read them.
    encode = jax.jit(lambda x, state: codec.encode(x, state, x))
    decode = jax.jit(lambda payload: codec.decode(payload, like))
    state = codec.init(like)
    return (lambda x: encode(x, state)), (lambda coded: decode(coded[0]))


def _size(codec: Codec, x: jax.Array) -> dict[str, float]:
    per_value = codec.nbytes(x) / x.size
    return {"bytes_per_value": per_value, "compression": 4 / per_value}


def _error(programs: tuple[Callable, Callable], x: jax.Array) -> float:
    """Relative L2 error of the first payload."""
    encode, decode = programs
    return float(jnp.linalg.norm(x - decode(encode(x))) / jnp.linalg.norm(x))


def _title(size: int, rows: Sequence[Row]) -> str:
    copy = median([row["copy_s"] for row in rows])
    return (
        f"{size} x {size} fp32 on {jax.devices()[0].device_kind}; "
        f"copy {1e3 * copy:.2f} ms ({4e-9 * size**2 / copy:.2f} GB/s)"
    )


COLUMNS = (  # all of them in a terminal of 80 letters
    ("codec", lambda row: row["codec"]),
    ("B/value", lambda row: f"{row['bytes_per_value']:.4f}"),
    ("times", lambda row: f"{row['compression']:.1f}"),
    ("err Gauss", lambda row: f"{row['error_gaussian']:.4f}"),
    ("err heavy", lambda row: f"{row['error_heavy']:.4f}"),
    ("enc ms", lambda row: f"{1e3 * row['encode_s']:.1f}"),
    ("dec ms", lambda row: f"{1e3 * row['decode_s']:.1f}"),
    ("of copy", lambda row: f"{row['of_copy']:.3f}"),
)
