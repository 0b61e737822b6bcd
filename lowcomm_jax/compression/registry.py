"""Codecs by name, for configs and the command line."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from lowcomm_jax.compression import codecs
from lowcomm_jax.compression.base import Codec
from lowcomm_jax.compression.error_feedback import error_feedback as with_error_feedback
from lowcomm_jax.compression.grid import Unit
from lowcomm_jax.compression.leaf import LeafCodec
from lowcomm_jax.compression.rules import PRESETS, PerTensor
from lowcomm_jax.compression.units import UnitCodec
from lowcomm_jax.refused import imported, is_unknown, refuse
from lowcomm_jax.settings import PREFIXES

LeafOrUnit = UnitCodec | LeafCodec


class Named(NamedTuple):
    """What a name stands for.

    Attributes:
      codec: with the settings of the name; or a class or a function of one's own, of which
        settings make one. A function may also return a `Codec` of whole trees.
      decay: of the error feedback that belongs to the name, or None.
    """

    codec: LeafOrUnit | Callable[..., LeafOrUnit | Codec]
    decay: float | None

    @property
    def maker(self) -> Callable[..., LeafOrUnit | Codec]:
        """What takes the settings: the function, or the class."""
        return self.codec if callable(self.codec) else type(self.codec)

    @property
    def of_leaves(self) -> bool:
        """Whether it is a codec of leaves or the class of one, and no function."""
        return isinstance(self.maker, type) and issubclass(self.maker, LeafOrUnit)

    @property
    def takes(self) -> Mapping[str, inspect.Parameter]:
        """The settings; none where Python does not know them, as those of `dict`."""
        try:
            return inspect.signature(self.maker).parameters
        except ValueError:
            return {}


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
      ValueError: unknown name or settings, a codec of whole trees, or one of one's own whose unit
        is none.

    >>> make_leaf("topk", k=8, values="int4").name
    'topk8_int4'
    """
    if isinstance(spec, LeafOrUnit):
        return spec
    refuse("codec", _unknown(spec, settings))
    made = _made(spec, settings)
    if isinstance(made, Codec):
        raise ValueError(f"codec {spec!r}: it codes whole trees: give one of leaves here")
    return made


def _made(spec: str, settings: Mapping[str, Any], **derived: Any) -> LeafOrUnit | Codec:
    """The codec of a name whose settings are known to fit.

    derived: is given to a function that takes it.
    """
    found = find(spec)
    codec, held = found.codec, {}
    if not found.of_leaves:
        held |= {name: value for name, value in derived.items() if name in found.takes}
    for name, value in settings.items():
        held[name] = _inside(value) if isinstance(getattr(codec, name, None), LeafOrUnit) else value
    if not callable(codec):
        return dataclasses.replace(codec, **held)
    try:
        made = codec(**held)
    except TypeError as error:  # of somebody's function, whose settings may be of another kind
        raise ValueError(f"codec {spec!r}: {error}") from error
    if not isinstance(made, LeafOrUnit | Codec):
        must = "must return a compression.UnitCodec, LeafCodec or Codec"
        raise ValueError(f"codec {spec!r}: it returned a {type(made).__name__}, and {must}")
    if isinstance(made, UnitCodec) and not isinstance(made.unit, Unit):
        unit = made.unit
        raise ValueError(f"codec {spec!r}: its unit is {unit!r}: give a compression.grid.Unit")
    return made


def _inside(spec: str | LeafOrUnit) -> LeafOrUnit:
    """The codec of a leaf inside another one, or of a rule: without a residual."""
    made = make_leaf(spec)
    if isinstance(spec, str) and find(spec).decay is not None:
        refuse("codec", [f"{spec!r} keeps a residual, and is only a part here: leave _ef out"])
    return made


def make(
    spec: str | Mapping[str, Any] | Codec | LeafOrUnit,
    *,
    rules: str | tuple[tuple[str, str | LeafOrUnit], ...] = "none",
    stacked: Sequence[str] = (),
    seed: int = 0,
    error_feedback: float | None = None,
    reduce: str = "auto",
    **settings: Any,
) -> Codec:
    """Build a codec from its name.

    Args:
      spec: a name of `names()`; `module:name` of a codec of leaves, its class, or a function that
        makes a codec. A mapping with `name` and any keyword of this function; or a codec of leaves.
        A function is given `stacked` and `seed` if it takes them. A `Codec` is returned as it is.
      rules: a name of `compression.rules.PRESETS`, or (regular expression, name or codec) pairs:
        leaves whose path matches get that codec instead.
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
    refuse("codec", [*problems, PREFIXES.problem("stacked", stacked)])
    prefixes = (stacked,) if isinstance(stacked, str) else tuple(stacked)
    own = isinstance(spec, LeafOrUnit)
    made = spec if own else _made(spec, settings, stacked=prefixes, seed=seed)
    if isinstance(made, Codec):
        given = {"rules": rules != "none", "reduce": reduce != "auto"}
        return _whole(made, spec, **given, error_feedback=error_feedback is not None)
    pairs = PRESETS[rules] if isinstance(rules, str) else rules
    codec = PerTensor(
        default=made,
        rules=tuple((pattern, _inside(each)) for pattern, each in pairs),
        stacked=prefixes,
        seed=seed,
        reduce=reduce,
    )
    decay = error_feedback
    if decay is None and isinstance(spec, str):
        decay = find(spec).decay
    return codec if decay is None else with_error_feedback(codec, decay)


def _whole(codec: Codec, name: str, **given: bool) -> Codec:
    """A codec of whole trees, if no setting of one of leaves is given beside it."""
    only = "only a codec of leaves takes it; leave it out"
    lines = [f"it is a whole codec, {k}: {only}" for k, is_given in given.items() if is_given]
    refuse(f"codec {name!r}", lines)
    return codec


def _unknown(name: str, settings: Mapping[str, Any]) -> list[str]:
    """Problems of a name and its settings, one line with its fix each."""
    if not isinstance(name, str):
        return [f"{name!r} is no codec: give a name of compression.names(), or a codec"]
    try:
        found = find(name)
    except ValueError as error:
        return [str(error)]
    if found is None:
        return [f"{name!r} {is_unknown(name, known(), 'choose one of')}"]
    takes = found.takes
    free = [k for k, x in takes.items() if x.kind not in (x.VAR_KEYWORD, x.VAR_POSITIONAL)]
    takes_any = any(x.kind is x.VAR_KEYWORD for x in takes.values())
    wrong = [] if takes_any else [k for k in settings if k not in free]
    lines = [f"{name} has no setting {k!r}: choose from {', '.join(free) or 'none'}" for k in wrong]
    if callable(found.codec):
        lacks = ", ".join(sorted(getattr(found.codec, "__abstractmethods__", ())))
        lines += [f"{name} has no {lacks}: write what every codec has"] if lacks else []
        missing = [k for k in free if takes[k].default is takes[k].empty and k not in settings]
        lines += [f"{name} needs its setting {k!r}: give it, or a default" for k in missing]
    return lines


def find(name: str) -> Named | None:
    """What a name stands for; None = unknown.

    Raises:
      ValueError: there is no such module, it cannot be imported, it has no such name, or that makes
        no codec.
    """
    module, separator, attribute = name.partition(":")
    if not separator:
        return known().get(name)
    if not module or not attribute:
        lacks = "codec" if module else "module"
        raise ValueError(f"codec {name!r}: it names no {lacks}: write module:codec")
    found = getattr(imported(module, f"codec {name!r}"), attribute, None)
    kind = found if isinstance(found, type) else type(found)
    if not issubclass(kind, LeafOrUnit):
        if not callable(found):
            there = "" if found is None else f", which is a {type(found).__name__}"
            fix = "name a codec of leaves, or a function that makes a codec"
            raise ValueError(
                f"codec {name!r}: {module} has no function {attribute!r}, or codec{there}: {fix}"
            )
        return Named(found, None)
    if not dataclasses.is_dataclass(kind) or not kind.__dataclass_params__.frozen:
        raise ValueError(f"codec {name!r}: make {kind.__name__} a frozen dataclass")
    return Named(found, None)
