"""Build a method from a config's `method` section, whose fields are the keywords of its factory.

`section` makes the section with all defaults; `make_method` checks it and calls the factory.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_collections
from ml_collections import config_dict

from experiments.cli import closest, problems_of
from lowcomm_jax import batching, landing, merge, methods, outer
from lowcomm_jax.compression import registry
from lowcomm_jax.methods.adloco import TESTS

METHODS = {name: getattr(methods, name) for name in methods.__all__ if name.islower()}
OUTER = {name: getattr(outer, name) for name in ("nesterov", "heavy_ball", "sgd", "average")}
POLICIES = {"fixed": batching.Fixed, **TESTS}
OUTER["delayed_nesterov"] = outer.delayed_nesterov
OUTER["restarting"] = outer.restarting
OWN = ":"  # in the name of a method that is not in the package: module:factory
DERIVED = "stacked"  # a factory's keyword that the model settles, not the config


def find(name: str) -> Callable[..., methods.Method] | None:
    """The factory of a method: a key of `METHODS`, or `module:factory` of your own; None = unknown.

    Raises:
      ValueError: there is no such module, or no such function in it.
    """
    module, own, factory = str(name).partition(OWN)
    if not own:
        return METHODS.get(name)
    try:
        found = getattr(importlib.import_module(module), factory, None)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"method.name={name!r}: {error}; name a module that Python finds from here"
        ) from error
    if not callable(found):
        raise ValueError(f"method.name={name!r}: {module} has no function {factory!r}")
    return found


def section(name: str, knobs: Mapping[str, Any]) -> ml_collections.ConfigDict:
    """The config's `method` section: `name`, and every keyword of the method's factory.

    Args:
      name: see `find`.
      knobs: values; keywords that are not given take the factory's default. `outer` and `taylor`
        may be dicts: a rule's name and its own keywords.
    """
    fields, factory = ml_collections.ConfigDict({"name": name}), find(name)
    types = typing.get_type_hints(factory)
    for key, parameter in inspect.signature(factory).parameters.items():
        if key == DERIVED:
            continue
        value = knobs.get(key, parameter.default)
        if value is None:
            fields[key] = config_dict.placeholder(_plain_type(types.get(key)))
        elif value is not inspect.Parameter.empty:
            fields[key] = _with_defaults(key, value)
    for key in knobs:
        if key not in fields:
            fields[key] = knobs[key]  # unknown: reported by `make_method`
    return fields


def _with_defaults(key: str, value: Any) -> Any:
    """A section of an outer rule, or of `adaptive`, holds all its keywords: each can be set."""
    if not isinstance(value, Mapping):
        return value
    if key == "adaptive":
        makes = methods.AdaGradCmp
    elif key == "outer" and value.get("name") in OUTER:
        makes = OUTER[value["name"]]
    else:
        return value
    types, filled = typing.get_type_hints(makes), dict(value)
    for name, parameter in inspect.signature(makes).parameters.items():
        if name in value or parameter.default is inspect.Parameter.empty:
            continue
        missing = parameter.default is None
        kind = _plain_type(types.get(name))
        filled[name] = config_dict.placeholder(kind) if missing else parameter.default
    return filled


def _plain_type(hint: Any) -> type:
    """The type a placeholder takes its text as: that of `float | None` is float."""
    plain = [t for t in typing.get_args(hint) or (hint,) if t in (int, float, str)]
    return plain[0] if plain else str


def make_method(
    fields: Mapping[str, Any], stacked: Sequence[str] = (), seed: int = 0
) -> tuple[methods.Method | None, list[str]]:
    """Build the method that the section describes; returns (method, []) or (None, problems).

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
        return None, [f"method.name={name!r} is unknown{closest(str(name), list(METHODS))}"]
    parameters = dict(inspect.signature(factory).parameters)
    arguments = {DERIVED: tuple(stacked)} if parameters.pop(DERIVED, None) else {}
    problems = [
        f"method.{key}={value!r}: {name} has no such setting{closest(key, list(parameters))}"
        for key, value in fields.items()
        if key not in parameters
    ]
    known = {key: value for key, value in fields.items() if key in parameters}
    problems += [
        f"method.{key} is missing: {name} needs it"
        for key, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty and known.get(key) is None
    ]
    for key, value in known.items():
        if key == "codec":
            make = functools.partial(make_codec, value, stacked, seed)
            arguments[key], found = problems_of(make, f"method.codec={value!r}: ")
            if isinstance(parameters[key].default, str) and value is not None:
                # Such a factory builds its codecs itself, at several sizes.
                spec = {"name": value} if isinstance(value, str) else dict(value)
                arguments[key] = {"stacked": tuple(stacked), "seed": seed, **spec}
        else:
            arguments[key], found = _argument(key, value, tuple(stacked))
        problems += found
    if problems:
        return None, problems
    return problems_of(lambda: factory(**arguments), "method: ")


def _argument(key: str, value: Any, stacked: tuple[str, ...]) -> tuple[Any, list[str]]:
    if key == "outer" and value is not None:
        return _rule("outer", value, OUTER)
    if key == "merge" and value is not None:
        return problems_of(lambda: merge.make(value), "method.")
    if key == "inner_batching" and value is not None:
        return _rule("inner_batching", value, POLICIES)
    if key == "taylor" and isinstance(value, Mapping):
        # Rows of a layer stack are tensors of their own, as if the layers were unrolled.
        axes = {"batch_axes": lambda name: int(name.startswith(stacked))} if stacked else {}
        make = functools.partial(landing.taylor_delay_correction, **{**axes, **value})
        return problems_of(make, "method.taylor: ")
    return (tuple(value) if isinstance(value, list) else value), []


def _rule(key: str, value: Any, rules: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Build a transform or a policy from its name and keywords."""
    keywords = dict(value) if isinstance(value, Mapping) else {"name": value}
    name = keywords.pop("name", None)
    if name not in rules:
        return None, [f"method.{key}.name={name!r} is unknown{closest(str(name), list(rules))}"]
    parameters = list(inspect.signature(rules[name]).parameters)
    problems = [
        f"method.{key}.{k}={v!r}: {name} has no such setting{closest(k, parameters)}"
        for k, v in keywords.items()
        if k not in parameters
    ]
    if problems:
        return None, problems
    return problems_of(lambda: rules[name](**keywords), f"method.{key}: ")


def make_codec(
    spec: str | Mapping[str, Any] | None, stacked: Sequence[str] = (), seed: int = 0
) -> Any:
    """The codec of a name, or of a section with `name` and settings; None is dense fp32.

    Raises:
      ValueError: an unknown name (lists the available ones) or setting.
    """
    if spec is None:
        return None
    return registry.make(spec, stacked=tuple(stacked), seed=seed)
