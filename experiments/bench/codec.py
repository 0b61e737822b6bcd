"""Bytes, error and speed of every codec, with speed as a fraction of a device copy.

Usage: `python -m experiments bench codec [--size 4096] [--repeats 5] [--codecs int4,topk]
[--output FILE]`. Copies and codecs take turns within one run, so that whatever else loads the
machine loads them alike; medians are reported.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.progress import tracked
from lowcomm_jax import compression
from lowcomm_jax.compression import Codec


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the benchmark.

    Attributes:
      codecs: names for `compression.make`; empty = all.
      size: the matrix is size x size, fp32.
      repeats: rounds of the interleaved timing.
      rank: rank of the low-rank codecs; None = size / 64.
      output: JSON file, or None.
    """

    codecs: tuple[str, ...] = ()
    size: int = 4096
    repeats: int = 5
    rank: int | None = None
    output: str | None = None


def main(config: Config | Mapping[str, Any] | Sequence[str] = ()) -> list[dict[str, Any]]:
    """Measure, print a table, write JSON.

    Args:
      config: settings, or command-line words.

    Returns:
      One row per codec: name, bytes_per_value, compression, error_gaussian, error_heavy,
      encode_s, decode_s, copy_s, of_copy.
    """
    config = _config(config)
    noise = {"gaussian": _gaussian(config.size), "heavy": _heavy_tailed(config.size)}
    codecs = {name: _build(name, config) for name in config.codecs or compression.names()}
    programs = {name: _programs(codec, config.size) for name, codec in codecs.items()}
    seconds = _interleaved(programs, noise["gaussian"], config.repeats)
    rows = []
    for name, codec in codecs.items():
        copy, (encode, decode) = seconds["copy"][0], seconds[name]
        rows.append(
            {
                "codec": name,
                **_size(codec, noise["gaussian"]),
                **{f"error_{kind}": _error(programs[name], x) for kind, x in noise.items()},
                "encode_s": encode,
                "decode_s": decode,
                "copy_s": copy,
                "of_copy": copy / (encode + decode),
            }
        )
    _print(rows, config)
    if config.output is not None:
        where = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
        text = json.dumps({"config": dataclasses.asdict(config), **where, "rows": rows}, indent=1)
        pathlib.Path(config.output).write_text(text + "\n")
    return rows


def _config(given: Config | Mapping[str, Any] | Sequence[str]) -> Config:
    if isinstance(given, Config):
        return given
    if isinstance(given, Mapping):
        return Config(**given)
    parser = argparse.ArgumentParser(prog="bench codec", description=__doc__)
    parser.add_argument("--codecs", default="", help="names, separated by commas")
    parser.add_argument("--size", type=int, default=Config.size)
    parser.add_argument("--repeats", type=int, default=Config.repeats)
    parser.add_argument("--rank", type=int, default=None)
    parser.add_argument("--output", default=None)
    words = vars(parser.parse_args(list(given)))
    return Config(**{**words, "codecs": tuple(filter(None, words["codecs"].split(",")))})


def _build(name: str, config: Config) -> Codec:
    rank = config.rank or max(config.size // 64, 1)
    return compression.make(name, **({"rank": rank} if name.startswith("low_rank") else {}))


def _gaussian(size: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (size, size))


def _heavy_tailed(size: int) -> jax.Array:
    """Gaussian times log-normal, the shape of gradients: rare values far beyond the rest."""
    return _gaussian(size) * jnp.exp(jax.random.normal(jax.random.key(1), (size, size)))


def _programs(codec: Codec, size: int) -> tuple[Callable, Callable]:
    """Jitted encode of a matrix, and decode of its payload, by a single region."""
    like = jax.ShapeDtypeStruct((size, size), jnp.float32)
    encode = jax.jit(codec.encode)
    decode = jax.jit(lambda payload: codec.decode(payload, like))
    state = codec.init(like)
    return (lambda x: encode(x, state)), (lambda coded: decode(coded[0]))


def _interleaved(programs, x: jax.Array, repeats: int) -> dict[str, list[float]]:
    """Median seconds of every program; each round runs all of them once, after a copy each.

    The first round, which compiles, does not count.
    """
    copy = jax.jit(jnp.copy)
    taken = {name: [[] for _ in pair] for name, pair in programs.items()}
    copies = []
    parts = [name for _ in range(1 + repeats) for name in programs]
    for name in tracked(parts, "bench codec", str):
        encode, decode = programs[name]
        copies.append(_timed(copy, x)[0])
        of_encode, coded = _timed(encode, x)
        of_decode, _ = _timed(decode, coded)
        for times, seconds in zip(taken[name], (of_encode, of_decode)):
            times.append(seconds)
    medians = {name: [float(np.median(t[1:])) for t in pair] for name, pair in taken.items()}
    return {"copy": [float(np.median(copies[len(programs) :]))], **medians}


def _timed(program: Callable, argument: Any) -> tuple[float, Any]:
    """(seconds of a call, its result)."""
    start = time.perf_counter()
    result = jax.block_until_ready(program(argument))
    return time.perf_counter() - start, result


def _size(codec: Codec, x: jax.Array) -> dict[str, float]:
    per_value = codec.nbytes(x) / x.size
    return {"bytes_per_value": per_value, "compression": 4 / per_value}


def _error(programs: tuple[Callable, Callable], x: jax.Array) -> float:
    """Relative L2 error of the first payload."""
    encode, decode = programs
    return float(jnp.linalg.norm(x - decode(encode(x))) / jnp.linalg.norm(x))


def _print(rows: list[dict[str, Any]], config: Config) -> None:
    copy = rows[0]["copy_s"]
    title = (
        f"{config.size} x {config.size} fp32 on {jax.devices()[0].device_kind}; "
        f"copy {1e3 * copy:.2f} ms ({4e-9 * config.size**2 / copy:.2f} GB/s)"
    )
    # Names in full, in a terminal of 80 columns.
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, collapse_padding=True)
    table.add_column("codec", no_wrap=True)
    for heading in ("B/value", "times", "err Gauss", "err heavy", "enc ms", "dec ms", "of copy"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["codec"],
            f"{row['bytes_per_value']:.4f}",
            f"{row['compression']:.1f}",
            f"{row['error_gaussian']:.4f}",
            f"{row['error_heavy']:.4f}",
            f"{1e3 * row['encode_s']:.1f}",
            f"{1e3 * row['decode_s']:.1f}",
            f"{row['of_copy']:.3f}",
        )
    Console().print(table)
