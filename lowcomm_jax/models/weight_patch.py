"""Lossless patches between two sets of bf16 weights: values of what changed, and where it stands.

In: two sets of tensors by name (`weights.llama_tensors`), each rounded to bf16. Out: a file from
which, and from the older set, the newer one is made bit by bit. Values travel, not differences, so
that nothing drifts over many patches.

The file is a safetensors file. Its metadata has the `format`, SHA-256 `base` and `result` of both
sets, and what the writer adds. Each tensor with a change has two arrays, bytes of deflate:

| array | content |
| --- | --- |
| `NAME:values` | uint16: the new bits of each entry whose bits changed, in order |
| `NAME:uint8` or `NAME:uint16` | gaps: the entries between a change and the one before it |

The largest number of a gap's type stands for as many entries without a change. Of the two types
each tensor takes the one of fewer bytes.

Source: PULSESync, arXiv 2602.03839, from notes. Differs: deflate takes the place of zstd, and a gap
that does not fit is spelt out, instead of a wider type for all of them.

Measured on the laptop model (992,384 weights, 1.98 MB in bf16; 1.59 MB by deflate alone), one seed,
two CPU cores, between checkpoints that are one round of DiLoCo (30 steps of four regions) apart:

| run, steps | weights that changed | patch | of all weights in bf16 |
| --- | --- | --- | --- |
| `configs/diloco.py`, 600 steps, 30 to 60 | 99.6 % | 1.61 MB | 81 % |
| the same, 300 to 330 | 98.8 % | 1.62 MB | 82 % |
| the same, 570 to 600 | 96.2 % | 1.63 MB | 82 % |
| from its weights, learning rate 1e-5, 30 to 60 | 17.7 % | 397 kB | 20 % |
| the same, 60 to 90 | 14.7 % | 335 kB | 17 % |
| from its weights, learning rate 1e-6, 30 to 60 | 3.0 % | 85 kB | 4.3 % |
| the same, 60 to 90 | 2.5 % | 72 kB | 3.6 % |

Both runs had `--config.checkpoint.every=30 --config.checkpoint.keep_last=30`. The second began as
`train --config=configs/diloco.py --config.model.init_from=runs/a --config.steps=90` with
`--config.inner.learning_rate=1e-6 --config.inner.warmup_steps=0`. `export --workdir=runs/b
--since=30 --step=60 --output=patch` wrote the patch.
"""

from __future__ import annotations

import hashlib
import pathlib
import zlib
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
import safetensors
from safetensors.numpy import save

Tensors = Mapping[str, np.ndarray]
FORMAT = "weight_patch"
_KINDS = {"uint8": np.dtype("<u1"), "uint16": np.dtype("<u2")}
_VALUES = np.dtype("<u2")


def digest(tensors: Tensors) -> str:
    """SHA-256 of names, shapes and bf16 bits."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(f"{name} {list(tensors[name].shape)}\n".encode())
        found.update(_bits(tensors[name]).tobytes())
    return found.hexdigest()


def write_patch(
    file: str | pathlib.Path, old: Tensors, new: Tensors, about: Mapping[str, str] | None = None
) -> int:
    """Write the patch that makes `new` of `old`, both rounded to bf16.

    Args:
      file: its path.
      about: what else the file says of itself.

    Returns:
      How many entries changed.

    Raises:
      ValueError: the two sets have other names or shapes.
    """
    problems = [f"{name}: in one set alone" for name in sorted(old.keys() ^ new.keys())]
    problems += [
        f"{name}: {list(old[name].shape)} became {list(new[name].shape)}"
        for name in sorted(old.keys() & new.keys())
        if old[name].shape != new[name].shape
    ]
    if problems:
        raise ValueError("no patch leads from one model to another:\n" + "\n".join(problems))
    arrays, changed = {}, 0
    for name in sorted(new):
        before, after = _bits(old[name]), _bits(new[name])
        at = np.flatnonzero(before != after)
        if at.size:
            kind, gaps = _gaps(at)
            arrays |= {f"{name}:values": _deflated(after[at]), f"{name}:{kind}": _deflated(gaps)}
            changed += at.size
    found = {"format": FORMAT, "base": digest(old), "result": digest(new)}
    # Written here, so that it can be read by whom any file can that is.
    pathlib.Path(file).write_bytes(save(arrays, metadata={**(about or {}), **found}))
    return changed


def read_about(file: str | pathlib.Path) -> dict[str, str]:
    """What a patch says of itself.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is no patch of this format.
    """
    try:
        with safetensors.safe_open(file, framework="np") as opened:
            found = opened.metadata() or {}
    except safetensors.SafetensorError as error:
        raise _damaged(file, str(error)) from error
    if found.get("format") != FORMAT or not {"base", "result"} <= found.keys():
        raise _damaged(file, f"format {found.get('format')!r}, not {FORMAT!r}")
    return found


def apply_patch(file: str | pathlib.Path, old: Tensors) -> dict[str, np.ndarray]:
    """The newer bf16 tensors, of a patch and of the older ones; their digest is as written.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the patch was made for other weights, or it is damaged.
    """
    about, new = read_about(file), {}
    if (found := digest(old)) != about["base"]:
        raise ValueError(
            f"{file}: made for weights {about['base'][:12]}, and these are {found[:12]}: apply the "
            "patches in between first, or take a whole export"
        )
    try:
        with safetensors.safe_open(file, framework="np") as opened:
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        for name, x in old.items():
            bits = _bits(x).copy()
            for kind, dtype in _KINDS.items():
                if f"{name}:{kind}" in arrays:
                    at = _places(_inflated(arrays[f"{name}:{kind}"], dtype))
                    bits[at] = _inflated(arrays[f"{name}:values"], _VALUES)
            new[name] = bits.view(jnp.bfloat16).reshape(x.shape)
    except (safetensors.SafetensorError, zlib.error, KeyError, ValueError, IndexError) as error:
        raise _damaged(file, f"{type(error).__name__}: {error}") from error
    if digest(new) != about["result"]:
        raise _damaged(file, "its result is not what was written")
    return new


def _damaged(file: str | pathlib.Path, why: str) -> ValueError:
    return ValueError(f"{file}: no patch, or a damaged one ({why}): write or fetch it again")


def _bits(x: np.ndarray) -> np.ndarray:
    """bf16 bits of all entries, uint16 `[n]`."""
    narrow = np.ascontiguousarray(x, dtype=jnp.bfloat16)
    return narrow.reshape(-1).view(_VALUES)


def _deflated(x: np.ndarray) -> np.ndarray:
    return np.frombuffer(zlib.compress(x.tobytes(), 1), np.uint8)


def _inflated(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return np.frombuffer(zlib.decompress(x.tobytes()), dtype)


def _gaps(at: np.ndarray) -> tuple[str, np.ndarray]:
    """Places in rising order, as (type, entries between each and the one before it)."""
    between = np.diff(at, prepend=-1) - 1
    coded = {kind: _spelt_out(between, dtype) for kind, dtype in _KINDS.items()}
    return min(coded.items(), key=lambda item: item[1].nbytes)


def _spelt_out(between: np.ndarray, dtype: np.dtype) -> np.ndarray:
    skip = np.iinfo(dtype).max
    skips, rest = np.divmod(between, skip)
    ends = np.cumsum(skips + 1) - 1
    coded = np.full(ends[-1] + 1, skip, dtype)
    coded[ends] = rest
    return coded


def _places(gaps: np.ndarray) -> np.ndarray:
    """Inverse of `_gaps`."""
    ends = gaps != np.iinfo(gaps.dtype).max
    return np.cumsum(gaps.astype(np.int64) + ends)[ends] - 1
