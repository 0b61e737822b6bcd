"""How payloads travel between separate jobs: what a config's `exchange` names.

`store` and `peers` are names; a transport of one's own is `module:Class`, a class that has what
`lowcomm_jax.exchange.Transport` says. A field of `FIELDS` is handed to transports that have a
keyword of that name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.cli import OWN, named_function, problems_of
from lowcomm_jax.rounds.connect import peers
from lowcomm_jax.store.context import ExchangeContext
from lowcomm_jax.store.transport import Transport

MESH = "mesh"
"""The `exchange` of a program that has all regions: they need no transport."""

NAMES: dict[str, tuple[str, Callable[..., Any]]] = {
    "store": ("lowcomm_jax.store.transport:StoreTransport", lambda: None),
    "peers": ("lowcomm_jax.store.peers_transport:PeersTransport", peers),
}
"""Name -> (the class, a function of its settings that gives `exchange.store` its `transport`)."""

FIELDS = ("address", "listen", "certificates")
"""Fields of a config that are settings of a transport; each is None where it is not given."""

_MEMBERS = (*Transport.__annotations__, *(k for k in vars(Transport) if not k.startswith("_")))


class Found(NamedTuple):
    """A transport that a config names.

    Attributes:
      lingers: whether others can get payloads only while the job runs that wrote them.
      takes: those of `FIELDS` that are settings of it.
      needs: those of them that have no default.
      make: gives `exchange.store` its `transport`, of the settings that are given.
    """

    lingers: bool
    takes: Sequence[str]
    needs: Sequence[str]
    make: Callable[..., Callable[[ExchangeContext], Transport] | None]


def find(name: str) -> Found:
    """The transport of a name, or of `module:Class`.

    Raises:
      ValueError: there is no such name, module or class, or it is no transport, cannot be made of a
        context, or needs a setting that no config has; one line.
    """
    if name in NAMES:
        path, make = NAMES[name]
        return _found(named_function(path, "exchange"), inspect.signature(make).parameters, make)
    label = f"exchange={name!r}"
    if OWN not in name:
        raise ValueError(f"{label}: use {MESH}, {' or '.join(NAMES)}; your own: module:Class")
    kind = named_function(name, "exchange", lambda there: isinstance(there, type), "class")
    abstract = getattr(kind, "__abstractmethods__", frozenset())
    members = dict.fromkeys((*_MEMBERS, *sorted(abstract)))
    lacks = [key for key in members if not hasattr(kind, key) or key in abstract]
    if lacks:
        fix = "write what lowcomm_jax.exchange.Transport says, and inherit it"
        raise ValueError(f"{label}: {kind.__name__} has no {', '.join(lacks)}: {fix}")
    if not isinstance(kind.name, str) or not isinstance(kind.lingers, bool):
        fix = "make name a text and lingers True or False, both of the class"
        raise ValueError(f"{label}: {fix}: they are asked before there is a transport")
    settings = _settings(kind)
    if settings is None:
        fix = "write a constructor that takes it"
        raise ValueError(f"{label}: {kind.__name__} cannot be made of a context: {fix}")
    found = _found(kind, settings, functools.partial(_transport_of, kind))
    strange = [key for key in _needed(settings) if key not in found.needs]
    if strange:
        fix = f"give it a default (keywords that a config fills: {', '.join(FIELDS)})"
        raise ValueError(f"{label}: {kind.__name__} needs {', '.join(strange)}: {fix}")
    return found


def _found(
    kind: type[Transport], settings: Mapping[str, inspect.Parameter], make: Callable[..., Any]
) -> Found:
    keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    named = [key for key in FIELDS if key in settings and settings[key].kind in keyword]
    takes_any = any(x.kind is x.VAR_KEYWORD for x in settings.values())
    needs = [key for key in _needed(settings) if key in named]
    return Found(kind.lingers, FIELDS if takes_any else named, needs, make)


def _settings(kind: type[Transport]) -> dict[str, inspect.Parameter] | None:
    """What the constructor takes behind the context; None = it does not take that."""
    signature = inspect.signature(kind)
    try:
        bound = signature.bind_partial(None).arguments
    except TypeError:
        return None
    # That of a protocol says that it takes anything, and takes nothing.
    if kind.__init__ is Transport.__init__:
        return None
    several = inspect.Parameter.VAR_POSITIONAL
    return {k: x for k, x in signature.parameters.items() if k not in bound or x.kind is several}


def _transport_of(kind: type[Transport], **given: Any) -> Callable[[ExchangeContext], Transport]:
    return functools.partial(kind, **given)


def _needed(settings: Mapping[str, inspect.Parameter]) -> list[str]:
    """Settings without a default."""
    several = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [k for k, x in settings.items() if x.default is x.empty and x.kind not in several]


def of(fields: Mapping[str, Any]) -> tuple[Found | None, list[str]]:
    """(the transport that a config names, why there is none); (None, []) on a mesh."""
    name = fields["exchange"]
    return (None, []) if name == MESH else problems_of(lambda: find(name))


def misfits(found: Found, fields: Mapping[str, Any]) -> list[str]:
    """Fields of a config that its transport needs and does not get, or gets and does not take."""
    given, name = _given(fields), fields["exchange"]
    problems = [
        f"{key}={value!r} has no effect with exchange={name}: leave it out"
        for key, value in given.items()
        if key not in found.takes
    ]
    problems += [
        f"{key} is missing: exchange={name} needs it: give --config.{key}=..."
        for key in found.needs
        if key not in given
    ]
    return problems or problems_of(lambda: found.make(**given))[1]


def transport(fields: Mapping[str, Any]) -> Callable[[ExchangeContext], Transport] | None:
    """What `exchange.store` takes as `transport` for a config without `misfits`."""
    return find(fields["exchange"]).make(**_given(fields))


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: fields[key] for key in FIELDS if fields[key] is not None}
