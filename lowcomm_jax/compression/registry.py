"""Codecs by name, for configs and the command line."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any, NamedTuple

from lowcomm_jax.compression import codecs
from lowcomm_jax.compression.base import Codec
from lowcomm_jax.compression.error_feedback import error_feedback as with_error_feedback
from lowcomm_jax.compression.grid import Unit
from lowcomm_jax.compression.leaf import LeafCodec
from lowcomm_jax.compression.rules import PRESETS, PerTensor
from lowcomm_jax.compression.units import UnitCodec
from lowcomm_jax.refused import is_unknown, refuse

LeafOrUnit = UnitCodec | LeafCodec


class Named(NamedTuple):
    """What a name stands for.

    Attributes:
      codec: with the settings of the name; or a class of one's own, of which settings make one.
      decay: of the error feedback that belongs to the name, or None.
    """

    codec: LeafOrUnit | type[LeafOrUnit]
    decay: float | None


@functools.cache
def known() -> dict[str, Named]:
    """All names, from the files of `codecs`."""
    found: dict[str, Named] = {}
    for module in pkgutil.iter_modules(codecs.__path__):
        file = importlib.import_module(f"{codecs.__name__}.{module.name}")
        found |= {name: Named(codec, None) for name, codec in getattr(file, "NAMES", {}).items()}
        for name, decay in getattr(file, "FEEDBACK", {}).items():
            found[name] = Named(file.NAMES[name.removesuffix("_ef")], decay)
    return found


def names() -> tuple[str, ...]:
    """All names `make` knows."""
    return tuple(known())


def make_leaf(spec: str | LeafOrUnit, **settings: Any) -> LeafOrUnit:
    """One leaf's codec by name; fields that hold codecs take names as well.

    Raises:
      ValueError: unknown name or settings, or a codec of one's own whose unit is none.

    >>> make_leaf("topk", k=8, values="int4").name
    'topk8_int4'
    """
    if isinstance(spec, LeafOrUnit):
        return spec
    problems = _unknown(spec, settings)
    refuse("codec", problems)
    codec = _named(spec).codec
    holds = (k for k in settings if isinstance(getattr(codec, k, None), LeafOrUnit))
    settings |= {k: _inside(settings[k]) for k in holds}
    if isinstance(codec, type):
        try:
            made = codec(**settings)
        except TypeError as error:  # it lacks a function that every codec has
            raise ValueError(f"codec {spec!r}: {error}") from error
    else:
        made = dataclasses.replace(codec, **settings)
    if isinstance(made, UnitCodec) and not isinstance(made.unit, Unit):
        unit = made.unit
        raise ValueError(f"codec {spec!r}: its unit is {unit!r}: give a compression.grid.Unit")
    return made


def _inside(spec: str | LeafOrUnit) -> LeafOrUnit:
    """The codec of a leaf inside another one, or of a rule: without a residual."""
    made = make_leaf(spec)
    if isinstance(spec, str) and _named(spec).decay is not None:
        refuse("codec", [f"{spec!r} keeps a residual, and is only a part here: leave _ef out"])
    return made


def make(
    spec: str | Mapping[str, Any] | Codec | LeafOrUnit,
    *,
    rules: str | tuple[tuple[str, str | LeafOrUnit], ...] = "none",
    stacked: tuple[str, ...] = (),
    seed: int = 0,
    error_feedback: float | None = None,
    reduce: str = "auto",
    **settings: Any,
) -> Codec:
    """Build a codec from its name.

    Args:
      spec: a name of `names()`, a mapping with `name` and any keyword of this function, or a codec
        of leaves; a `Codec` is returned as it is.
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
    problems = [] if isinstance(spec, LeafOrUnit) else _unknown(spec, settings)
    if isinstance(rules, str) and rules not in PRESETS:
        problems.append(f"rules={rules!r} {is_unknown(rules, PRESETS, 'choose one of')}")
    refuse("codec", problems)
    pairs = PRESETS[rules] if isinstance(rules, str) else rules
    codec = PerTensor(
        default=make_leaf(spec, **settings),
        rules=tuple((pattern, _inside(each)) for pattern, each in pairs),
        stacked=tuple(stacked),
        seed=seed,
        reduce=reduce,
    )
    decay = error_feedback
    if decay is None and isinstance(spec, str):
        decay = _named(spec).decay
    return codec if decay is None else with_error_feedback(codec, decay)


def _unknown(name: str, settings: Mapping[str, Any]) -> list[str]:
    """Problems of a name and its settings, one line with its fix each."""
    if not isinstance(name, str):
        return [f"{name!r} is no codec: give a name of compression.names(), or a codec"]
    try:
        found = _named(name)
    except ValueError as error:
        return [str(error)]
    if found is None:
        return [f"{name!r} {is_unknown(name, known(), 'choose one of')}"]
    fields = dataclasses.fields(found.codec)
    free = [field.name for field in fields if field.init]
    wrong = [k for k in settings if k not in free]
    lines = [f"{name} has no setting {k!r}: choose from {', '.join(free) or 'none'}" for k in wrong]
    if isinstance(found.codec, type):
        needed = [field.name for field in fields if field.init and not _has_default(field)]
        missing = [k for k in needed if k not in settings]
        lines += [f"{name} needs its setting {k!r}: give it, or a default" for k in missing]
    return lines


def _has_default(field: dataclasses.Field) -> bool:
    missing = dataclasses.MISSING
    return field.default is not missing or field.default_factory is not missing


def _named(name: str) -> Named | None:
    """What a name stands for; None = unknown.

    Raises:
      ValueError: there is no such module, it has no such name, or that is no codec.
    """
    module, separator, attribute = name.partition(":")
    if not separator:
        return known().get(name)
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"codec {name!r}: {error}; name a codec of a module") from error
    kind = found if isinstance(found, type) else type(found)
    if not of_leaves(found) or not dataclasses.is_dataclass(kind):
        what = "name a UnitCodec, or a LeafCodec, that is a frozen dataclass"
        raise ValueError(f"codec {name!r}: it is a {kind.__name__}; {what}")
    if not kind.__dataclass_params__.frozen:
        raise ValueError(f"codec {name!r}: make its dataclass a frozen one")
    return Named(found, None)


def of_leaves(found: Any) -> bool:
    """Whether what a module has under a name is a codec of leaves, or the class of one."""
    return issubclass(found if isinstance(found, type) else type(found), LeafOrUnit)
