"""Build a method from a config's `method` section, whose fields are the keywords of its factory.

`section` makes the section with all defaults; `make_method` checks it and calls the factory. Parts
that the factory does not take (`parts.PARTS`) are fields as well: a given one takes the place of
the method's own.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_collections
from ml_collections import config_dict

from experiments.cli import closest, has_config, plain_type, problems_of
from experiments.train import parts
from experiments.train.parts import METHOD, OWN, PARTS
from lowcomm_jax import landing, methods
from lowcomm_jax.params.fragments import is_stacked

DERIVED = "stacked"  # a factory's keyword that the model gives, not the config


def find(name: str) -> Callable[..., methods.Method] | None:
    """The factory of a method: a name of `methods.NAMES`, or `module:factory`; None = unknown.

    Raises:
      ValueError: there is no such module, or no such function in it.
    """
    return parts.find(METHOD, name, "method.name")


def section(name: str, knobs: Mapping[str, Any]) -> ml_collections.ConfigDict:
    """The config's `method` section: `name`, every keyword of the method's factory, other parts.

    Args:
      name: see `find`.
      knobs: values; keywords that are not given take the factory's default. A part and `taylor` may
        be dicts: a rule's name and its own keywords.
    """
    fields, factory = ml_collections.ConfigDict({"name": name}), find(name)
    types = typing.get_type_hints(factory)
    for key, parameter in inspect.signature(factory).parameters.items():
        if key == DERIVED:
            continue
        value = knobs.get(key, parameter.default)
        if value is not None and value is not inspect.Parameter.empty:
            value = _with_defaults(key, value)
            # The text of a part may become a mapping, and the other way round.
            text = key in PARTS and isinstance(value, str)
            fields[key] = config_dict.FieldReference(value, field_type=object) if text else value
        elif value is None:
            kind = object if key in PARTS else plain_type(types.get(key))
            fields[key] = config_dict.placeholder(kind)
    for key in PARTS:
        if key not in fields and key not in knobs:
            fields[key] = config_dict.placeholder(object)
    for key in knobs:
        if key not in fields:
            # A part of its own; else unknown, and reported by `make_method`.
            fields[key] = _with_defaults(key, knobs[key])
    return fields


def _with_defaults(key: str, value: Any) -> Any:
    """The value with all keywords of an outer rule, of `adaptive`, or of a part of your own."""
    if not isinstance(value, Mapping):
        return value
    own = key in PARTS and OWN in str(value.get("name"))
    makes = parts.takes_settings(key, value) if own or key in ("adaptive", "outer") else None
    if not callable(makes):
        return value  # a codec with its settings; or what `make_method` reports
    types, filled = typing.get_type_hints(makes), dict(value)
    for name, parameter in inspect.signature(makes).parameters.items():
        if name in value or parameter.default is inspect.Parameter.empty:
            continue
        if key in PARTS and name in PARTS[key].derived:
            continue
        missing = parameter.default is None
        kind = plain_type(types.get(name))
        filled[name] = config_dict.placeholder(kind) if missing else parameter.default
    return filled


def make_method(
    fields: Mapping[str, Any], stacked: Sequence[str] = (), seed: int = 0
) -> tuple[methods.Method | None, list[str]]:
    """Build the method that the section describes; returns (method or None, problems).

    With problems of its parts it is built without them, so that its own settings are checked, too.

    Args:
      fields: the section.
      stacked: path prefixes of leaves with a leading layer axis, for the codec and the Taylor rule.
      seed: of the codec's random choices.
    """
    fields = dict(fields)
    name = fields.pop("name", None)
    factory, problems = problems_of(lambda: find(name))
    if problems:
        return None, problems
    if factory is None:
        hint = closest(str(name), list(methods.NAMES))
        return None, [f"method.name={name!r} is unknown{hint}; your own: module:function"]
    takes = dict(inspect.signature(factory).parameters)
    others = {k: v for k, v in fields.items() if k in PARTS and k not in takes}
    known = {key: value for key, value in fields.items() if key not in others}
    problems = parts.setting_problems(factory, known, "method", str(name), (DERIVED,))
    if problems:
        if "is missing" in problems[-1] and name in methods.NAMES and has_config(name):
            problems[-1] += f", or use --config=configs/{name}.py"
        return None, problems
    arguments = {DERIVED: tuple(stacked)} if DERIVED in takes else {}
    replaced = {}
    for key, value in known.items():
        if key not in takes:  # it takes any keyword
            continue
        made, found = _argument(key, value, takes, tuple(stacked), seed)
        problems += found
        if not found:
            arguments[key] = made
    for key, value in others.items():
        if value is not None:
            made, found = parts.build(key, value, stacked, seed)
            problems += found
            if not found:
                replaced[key] = made
    method, found = parts.call(METHOD, factory, arguments, "method", str(name))
    for key, part in replaced.items():
        if method is not None:
            method, found = parts.put(method, key, part)
    return method, problems + found


def _argument(
    key: str, value: Any, takes: Mapping[str, Any], stacked: tuple[str, ...], seed: int
) -> tuple[Any, list[str]]:
    """A keyword of a method's factory: (value, []) or (None, problems)."""
    of_codec = parts.part_of(key) is parts.PARTS["codec"]
    if (of_codec or parts.is_rule(key, takes)) and value is not None:
        made, problems = parts.build(key, value, stacked, seed)
        name = value.get("name") if isinstance(value, Mapping) else value
        if key == "codec" and isinstance(takes[key].default, str) and OWN not in str(name):
            # Such a factory builds its codecs itself, at several sizes.
            spec = {"name": value} if isinstance(value, str) else dict(value)
            made = {"stacked": stacked, "seed": seed, **spec}
        return made, problems
    if key == "taylor" and isinstance(value, Mapping):
        # Rows of a layer stack are tensors of their own, as if the layers were unrolled.
        axes = {"batch_axes": lambda name: int(is_stacked(name, stacked))} if stacked else {}
        make = functools.partial(landing.taylor_delay_correction, **{**axes, **value})
        return problems_of(make, "method.taylor: ")
    return (tuple(value) if isinstance(value, list) else value), []
