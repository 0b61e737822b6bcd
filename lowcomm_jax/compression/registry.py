"""Codecs by name, for configs and the command line."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from lowcomm_jax.compression.base import Codec
from lowcomm_jax.compression.cast import Cast
from lowcomm_jax.compression.codebook import Statistical
from lowcomm_jax.compression.dct_top_k import DCTTopK
from lowcomm_jax.compression.e3m0 import E3M0
from lowcomm_jax.compression.error_feedback import error_feedback as with_error_feedback
from lowcomm_jax.compression.integer import Integer
from lowcomm_jax.compression.low_rank import LowRank
from lowcomm_jax.compression.matrix import MatrixCodec
from lowcomm_jax.compression.random_k import RandomK
from lowcomm_jax.compression.rules import PRESETS, PerTensor
from lowcomm_jax.compression.sign import Sign
from lowcomm_jax.compression.top_k import TopK
from lowcomm_jax.refused import is_unknown, refuse

INT4 = Integer(bits=4)
STAT2 = Statistical(bits=2)

# name -> (constructor, decay of the error feedback that belongs to the name or None)
CODECS: dict[str, tuple[Callable[..., MatrixCodec], float | None]] = {
    "fp32": (functools.partial(Cast, "fp32"), None),
    "bf16": (functools.partial(Cast, "bf16"), None),
    "fp16": (functools.partial(Cast, "fp16"), None),
    "int8": (functools.partial(Integer, 8), None),
    "int4": (functools.partial(Integer, 4), None),
    "int8_affine": (functools.partial(Integer, 8, True), None),
    "int4_affine": (functools.partial(Integer, 4, True), None),
    "stat8": (functools.partial(Statistical, 8), None),
    "stat4": (functools.partial(Statistical, 4), None),
    "stat2": (functools.partial(Statistical, 2), None),
    "stat2_ef": (functools.partial(Statistical, 2), 0.95),
    "e3m0": (E3M0, None),
    "topk": (TopK, None),
    "topk_int4": (functools.partial(TopK, values=INT4), None),
    "topk_stat2": (functools.partial(TopK, values=STAT2), None),
    "topk_stat2_ef": (functools.partial(TopK, values=STAT2), 0.95),
    "random_k": (RandomK, None),
    "dct_topk": (DCTTopK, None),
    "sign": (Sign, None),
    "sign_ef": (Sign, 1.0),
    "low_rank": (LowRank, None),
    "low_rank_int4": (functools.partial(LowRank, factors=INT4), None),
}
NESTED = ("values", "factors", "dense")


def names() -> tuple[str, ...]:
    """All names `make` knows."""
    return tuple(CODECS)


def make_matrix(spec: str | MatrixCodec, **settings: Any) -> MatrixCodec:
    """One leaf's codec by name; fields that hold codecs take names as well.

    Raises:
      ValueError: unknown name or settings.

    >>> make_matrix("topk", k=8, values="int4").name
    'topk8_int4'
    """
    if isinstance(spec, MatrixCodec):
        return spec
    problems = _unknown(spec, settings)
    refuse("codec", problems)
    nested = {k: make_matrix(v) for k, v in settings.items() if k in NESTED}
    return CODECS[spec][0](**{**settings, **nested})


def make(
    spec: str | Mapping[str, Any] | Codec,
    *,
    rules: str | tuple[tuple[str, str | MatrixCodec], ...] = "none",
    stacked: tuple[str, ...] = (),
    seed: int = 0,
    error_feedback: float | None = None,
    reduce: str = "auto",
    **settings: Any,
) -> Codec:
    """Build a codec from its name.

    Args:
      spec: a name of `names()`, a mapping with `name` and any keyword of this function, or a codec,
        which is returned as it is.
      rules: a name of `rules.PRESETS`, or (regular expression, name or codec) pairs: leaves whose
        path matches get that codec instead.
      stacked: path prefixes of leaves with a leading layer axis.
      seed: of random starts and choices.
      error_feedback: decay; None = the name decides (names that end in `_ef` have one).
      reduce: how payloads are averaged (`PerTensor.reduce`).
      settings: fields of the codec, e.g. `k`, `bits`, `block`, `rank`; codecs inside (`values`,
        `factors`, `dense`) by name.

    Raises:
      ValueError: unknown name, setting or preset; all of them at once.

    >>> import jax.numpy as jnp
    >>> make("int4", block=128, rules=(("bias", "fp32"),)).nbytes({"w": jnp.zeros((4, 128))})
    272
    >>> make({"name": "topk_stat2_ef", "k": 32}).name
    'topk32_stat2_ef'
    """
    if isinstance(spec, Codec):
        return spec
    if isinstance(spec, Mapping):
        keywords = {"rules": rules, "stacked": stacked, "seed": seed, **settings, **spec}
        keywords = {"error_feedback": error_feedback, "reduce": reduce, **keywords}
        return make(keywords.pop("name", "<no name given>"), **keywords)
    problems = _unknown(spec, settings)
    if isinstance(rules, str) and rules not in PRESETS:
        problems.append(f"rules={rules!r} {is_unknown(rules, PRESETS, 'choose one of')}")
    refuse("codec", problems)
    pairs = PRESETS[rules] if isinstance(rules, str) else rules
    codec = PerTensor(
        default=make_matrix(spec, **settings),
        rules=tuple((pattern, make_matrix(each)) for pattern, each in pairs),
        stacked=tuple(stacked),
        seed=seed,
        reduce=reduce,
    )
    decay = CODECS[spec][1] if error_feedback is None else error_feedback
    return codec if decay is None else with_error_feedback(codec, decay)


def _unknown(name: str, settings: Mapping[str, Any]) -> list[str]:
    """Problems of a name and its settings, one line with its fix each."""
    if name not in CODECS:
        return [f"{name!r} {is_unknown(name, CODECS, 'choose one of')}"]
    fields = inspect.signature(CODECS[name][0]).parameters
    free = [k for k, p in fields.items() if p.kind is not p.POSITIONAL_ONLY]
    wrong = [k for k in settings if k not in free]
    return [f"{name} has no setting {k!r}: choose from {', '.join(free) or 'none'}" for k in wrong]
