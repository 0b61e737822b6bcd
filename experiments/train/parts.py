"""Parts of a method that a config names: those of the package by name, your own by module:function.

The names of the package stand in `NAMES` of the room that has the part. `PARTS` has a row a part,
and `METHOD` is the row of the method itself. A value is a name, or a mapping of `name` and
settings: `codec={"name": "my_module:my_codec", "bits": 2}`. `build` makes the part or lists what is
wrong with it: no such module or function, an unknown setting, or a result of the wrong type; codecs
come from `compression.make`. `put` gives a part to a method whose factory does not take it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optax

from experiments.cli import OWN, closest, named_function, problems_of
from lowcomm_jax import batching, landing, merge, methods, outer, roles, schedule, topology
from lowcomm_jax.compression import Codec, LeafCodec, UnitCodec, registry
from lowcomm_jax.optimizers import InnerConfig


@dataclasses.dataclass(frozen=True)
class PartKind:
    """A part of a method, as configs name it.

    Attributes:
      about: what it decides, for `train --help`.
      known: name -> function that makes it, of those in the package.
      kinds: types of which a function's result must be one.
      what: these types in words, for messages.
      derived: keywords that the run gives to functions that take them: of a codec `stacked` (path
        prefixes of leaves with a leading layer axis) and `seed`.
      finish: is applied to the result.
      gradient: whether methods that exchange a gradient at every step have this part.
    """

    about: str
    known: Mapping[str, Any]
    kinds: tuple[type, ...]
    what: str
    derived: tuple[str, ...] = ()
    finish: Callable[[Any], Any] = lambda made: made
    gradient: bool = True


_TRANSFORM = {
    "kinds": (optax.GradientTransformation,),
    "what": "an Optax transform",
    "finish": optax.with_extra_args_support,
}
METHOD = PartKind(
    "what regions exchange, and when",
    methods.NAMES,
    (methods.Method,),
    "a lowcomm_jax.methods.Method",
    ("stacked",),
)
# Keys are fields of `Method`.
PARTS = {
    "codec": PartKind(
        "what is made of a pseudo-gradient on the wire",
        registry.known(),
        (Codec, UnitCodec, LeafCodec),
        "a lowcomm_jax.compression.Codec, UnitCodec or LeafCodec",
        ("stacked", "seed"),
    ),
    "outer": PartKind(
        "how the anchor moves by the merged pseudo-gradient", outer.NAMES, **_TRANSFORM
    ),
    "merge": PartKind(
        "how the payloads of those who took part become one direction",
        merge.NAMES,
        (merge.Merge,),
        "a lowcomm_jax.merge.Merge",
        gradient=False,
    ),
    "landing": PartKind(
        "how a region adopts the moved anchor", landing.NAMES, **_TRANSFORM, gradient=False
    ),
    "schedule": PartKind(
        "which fragment leaves and lands when",
        schedule.NAMES,
        (schedule.Schedule,),
        "a lowcomm_jax.schedule.Schedule",
        gradient=False,
    ),
    "topology": PartKind(
        "who averages with whom",
        topology.NAMES,
        (topology.Gossip,),
        "a lowcomm_jax.topology.Gossip",
        gradient=False,
    ),
    "roles": PartKind(
        "which rows of which leaves a region trains",
        roles.NAMES,
        (roles.RegionRoles,),
        "a lowcomm_jax.roles.RegionRoles",
        gradient=False,
    ),
    "inner_batching": PartKind(
        "how many samples a region trains on at each inner step",
        batching.NAMES,
        (batching.BatchPolicy,),
        "a lowcomm_jax.batching policy (BatchPolicy)",
    ),
}
# Keywords of factories that take a mapping of settings without a name.
SETTINGS = {"adaptive": methods.AdaGradCmp, "taylor": landing.taylor_delay_correction}

INNER = PartKind(
    "the direction of an inner step",
    {},
    (optax.GradientTransformation,),
    "an Optax transform",
    ("b1", "b2", "eps"),
)


def inner_config(section: Mapping[str, Any]) -> tuple[InnerConfig | None, list[str]]:
    """The `inner` section of a config; its optimizer may be a function of one's own."""
    name = section["optimizer"]
    if OWN not in str(name):
        return InnerConfig(**section), []
    label = "inner.optimizer"
    maker, problems = problems_of(lambda: named_function(name, label))
    if problems:
        return None, problems
    settings = {key: section[key] for key in INNER.derived if key in (_parameters(maker) or {})}
    made, problems = call(INNER, maker, settings, label, name)
    return (None if problems else InnerConfig(**{**section, "optimizer": made})), problems


def find(part: PartKind, name: str, label: str) -> Callable[..., Any] | None:
    """The function that makes a part, by name or by `module:function`; None = unknown.

    Of codecs it may also be a codec itself, which takes settings, too (`compression.registry`).

    Args:
      label: the field that names it, for the error.

    Raises:
      ValueError: there is no such module, it cannot be imported, or has no such function.
    """
    if part is PARTS["codec"]:
        found = registry.find(str(name))
        return None if found is None else found.codec
    return named_function(name, label) if OWN in str(name) else part.known.get(name)


def part_of(key: str) -> PartKind | None:
    """The part that a keyword of a method's factory takes; None = none."""
    return PARTS.get("codec" if key == "global_codec" else key)


def is_rule(key: str, takes: Mapping[str, inspect.Parameter]) -> bool:
    """Whether a keyword names a part other than a codec, beside what a factory takes.

    A factory whose `landing` is text has names of its own, for the landing of its channel.
    """
    own = key == "landing" and key in takes and isinstance(takes[key].default, str)
    return key in PARTS and key != "codec" and not own


def takes_settings(key: str, section: Mapping[str, Any]) -> Callable[..., Any] | None:
    """What takes the settings of a keyword that a config gives as a mapping; None = not known."""
    part = part_of(key)
    if part is None:
        return SETTINGS.get(key)
    return problems_of(lambda: find(part, section.get("name"), key))[0]


def build(
    key: str, value: Any, stacked: Sequence[str] = (), seed: int = 0
) -> tuple[Any, list[str]]:
    """Make a part as a config describes it; returns (part, []) or (None, problems).

    Args:
      key: for which there is a part (`part_of`).
      value: a name, or a mapping of `name` and settings.
      stacked, seed: of a codec; see `compression.make`.
    """
    part, label = part_of(key), f"method.{key}"
    if not isinstance(value, str | Mapping):
        fix = "name the function that makes it, as in 'my_module:my_function'"
        return None, [f"{label} is a {type(value).__name__}, which no config.json holds: {fix}"]
    if part is PARTS["codec"]:
        make = functools.partial(registry.make, value, stacked=tuple(stacked), seed=seed)
        return problems_of(make, f"{label}={value!r}: ")
    settings = {"name": value} if isinstance(value, str) else dict(value)
    name = settings.pop("name", None)
    maker, problems = problems_of(lambda: find(part, name, f"{label}.name"))
    if problems:
        return None, problems
    if maker is None:
        hint = closest(str(name), list(part.known))
        return None, [f"{label}.name={name!r} is unknown{hint}; your own: module:function"]
    return call(part, maker, settings, label, str(name))


def call(
    part: PartKind, maker: Callable[..., Any], settings: Mapping[str, Any], label: str, name: str
) -> tuple[Any, list[str]]:
    """Call the function of a part, if its settings fit; returns (part, []) or (None, problems)."""
    problems = setting_problems(maker, settings, label, name)
    if problems:
        return None, problems
    made, problems = problems_of(lambda: maker(**settings), f"{label}: ")
    if problems:
        return None, problems
    if not isinstance(made, part.kinds):
        kind = type(made).__name__
        return None, [f"{label}={name!r}: it returned a {kind}, and must return {part.what}"]
    return part.finish(made), []


def setting_problems(
    maker: Callable[..., Any],
    settings: Mapping[str, Any],
    label: str,
    name: str,
    settled: Sequence[str] = (),
) -> list[str]:
    """Settings that a function does not take, and those that it needs and does not get.

    Args:
      settled: keywords that the run gives, not the config.
    """
    parameters = _parameters(maker)
    if parameters is None:
        return []
    any_number = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = [k for k, p in parameters.items() if p.kind not in any_number and k not in settled]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    wrong = [] if takes_any else [k for k in settings if k not in named]
    found = [
        f"{label}.{k}={settings[k]!r}: {name} has no such setting{closest(k, named)}" for k in wrong
    ]
    return found + [
        f"{label}.{k} is missing: {name} needs it"
        for k in named
        if parameters[k].default is inspect.Parameter.empty and settings.get(k) is None
    ]


def _parameters(maker: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    """Keywords of a function; None where Python does not know them."""
    try:
        return dict(inspect.signature(maker).parameters)
    except ValueError:
        return None


def put(method: methods.Method, key: str, part: Any) -> tuple[methods.Method | None, list[str]]:
    """The method with one of its parts replaced; returns (method, []) or (None, problems).

    What does not fit the method is a row of `lowcomm_jax.refusals`.
    """
    label = f"method.{key}: {method.name}"
    if method.signal == "gradient" and not PARTS[key].gradient:
        return None, [f"{label} exchanges a gradient at every step and has no {key}; leave it out"]
    changes = {key: part}
    consensus = method.topology and method.topology.consensus
    if consensus is not None and key == "outer":
        fix = "use its own settings, or a method of your own"
        return None, [f"{label} checks its outer rule's coefficients for {key}: {fix}"]
    if consensus is not None and key == "topology":
        consensus = dataclasses.replace(consensus, group_size=part.group_size)
        changes[key] = dataclasses.replace(part, consensus=consensus)
    if key == "schedule":
        unlike = [
            f"{label} needs a schedule with {field}={value}, this has {not value}"
            for field in ("land_after_send", "uneven")
            if (value := bool(getattr(method.schedule, field))) != bool(getattr(part, field))
        ]
        if unlike:
            return None, unlike
    return dataclasses.replace(method, **changes), []
