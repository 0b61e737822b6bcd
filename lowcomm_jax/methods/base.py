"""`Method`: what a factory of this room returns and what an engine takes.

A method is a frozen dataclass that names one rule for each part of the loop, and `rule_calls` says
how loops call them. It computes nothing; what cannot work together is a row of
`lowcomm_jax.refusals`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import optax

from lowcomm_jax import compression
from lowcomm_jax.channels import Channel
from lowcomm_jax.channels.source import PARAMS
from lowcomm_jax.compression import Codec, LeafCodec, UnitCodec
from lowcomm_jax.params import roles
from lowcomm_jax.params.fragments import Pattern
from lowcomm_jax.refused import collect, is_number, is_unknown
from lowcomm_jax.rules import merge
from lowcomm_jax.rules.merge import Reads
from lowcomm_jax.rules.topology import Gossip
from lowcomm_jax.rules.trainers import Trainers
from lowcomm_jax.schedule import Schedule

Rule = optax.GradientTransformationExtraArgs | None
Law = Literal["data_parallel", "diloco"]
Factory = TypeVar("Factory", bound=Callable[..., Any])
TOLD = ("fragment", "round", "step")
"""Keywords that every rule is called with."""


@dataclasses.dataclass(frozen=True)
class LocalServers:
    """The lower of two levels: a server for each group of regions (`schedule.TwoLevels`).

    Attributes:
      outer: Optax transform of one region's pseudo-gradient that arrives at its server. Its
        `update` gets no keywords.
      blend: alpha, weight of the global model when a server merges it, in [0, 1].
      codec: of what a server sends to the global one, a codec or a name of `compression.make`;
        None = dense. What regions send to their server has that of the method.
      problems: as in `Method`.
    """

    outer: optax.GradientTransformationExtraArgs
    blend: float
    codec: Any = None

    problems: tuple[str, ...] = ()

    def __post_init__(self):
        _make_named(self, "codec", compression.make, "global_codec: ")
        _leave_out_unless(Codec, self, "codec", _CODEC, "global_codec")


@dataclasses.dataclass(frozen=True)
class Method:
    """A low-communication method as a composition of rules.

    Attributes:
      name: label in tables, metrics and checkpoints.
      schedule: which fragment leaves when, and lands when.
      outer: Optax transform of the merged pseudo-gradient, or one per fragment; with
        `signal="gradient"` what the mean gradient goes through before the inner optimizer (None =
        nothing). Its `update` gets the keywords `fragment`, `round` (of that fragment, from 0) and
        `step` (inner steps done), int32; none of them with `signal="gradient"` or with `servers`,
        where a rule that needs them is refused.
      landing: Optax transform of the progress made in flight, or one per fragment; None = replace.
        Its `update` gets `displacement`, `staleness`, and the keywords of `outer`. Where the
        schedule has no delay, nothing is made in flight: the progress is 0, and most rules then
        have no effect.
      codec: what travels: a codec of trees or of leaves, or its name or settings for
        `compression.make`; None = dense fp32.
      anchors: `shared` by all regions, or one `per_region`.
      base: what a pseudo-gradient is measured against: the current `anchor`, or the anchor as the
        region `received` it last. With `received` the loop applies contributions one by one, in
        region order, and every region that arrived gets the newest anchor.
      signal: what travels: `progress` (pseudo-gradients, when the schedule says) or `gradient` (at
        every step).
      pattern, rest: how the parameters are cut into fragments (`params.fragments.partition`).
      inner_batching: a `batching.BatchPolicy` of the inner steps; None = batches are as they are
        handed over.
      trainers: model instances in every region, and how they merge; None = one. They need a batch
        policy, too, and with one the method runs in an `AdaptiveEngine`.
      topology: who averages with whom; None = all regions. With `Gossip` every region has its own
        anchor, and `outer` gets the group's mean anchor as `group_anchor`, and with `reads_own` its
        own pseudo-gradient as `own`, as the others decode it.
      problems: settings that cannot work, one line with its fix each; the engine refuses them all
        at once.
      channels: exchanges beside the main one, or (`schedule.Never`) instead of it.
      merge: how the payloads of those who took part become one direction, a rule of
        `lowcomm_jax.merge`, its name in `merge.NAMES`, or a mapping of `name` and its settings;
        None = their weighted mean. A rule that reads payloads one by one costs bytes: every region
        then receives all of them.
      hands_out: what regions are given instead of the anchor: `(anchor, outer state) -> values`,
        trees of one anchor; None = the anchor.
      roles: which rows of which leaves a region trains, of `lowcomm_jax.roles` or a mapping of
        `name` (in `roles.NAMES`) and its settings; None = all regions train all. Inner steps leave
        the rest of a region where it is: no gradient, no weight decay. The mean of an entry is over
        the regions present that train it; without one it stays.
      servers: a level of local servers between regions and anchor; None = there is one level. With
        servers the schedule is `schedule.TwoLevels`, and `outer` the rule of the global server.
    """

    name: str
    schedule: Schedule
    outer: Rule | tuple[Rule, ...]
    landing: Rule | tuple[Rule, ...] = None
    codec: Any = None
    anchors: Literal["shared", "per_region"] = "shared"
    base: Literal["anchor", "received"] = "anchor"
    signal: Literal["progress", "gradient"] = "progress"
    pattern: Pattern | Sequence[str] = "strided"
    rest: Literal["own", "dealt"] = "dealt"
    inner_batching: Any = None
    trainers: Trainers | None = None
    topology: Gossip | None = None
    problems: tuple[str, ...] = ()
    channels: tuple[Channel, ...] = ()
    merge: Any = None
    hands_out: Callable[[Any, Any], Any] | None = None
    servers: LocalServers | None = None
    roles: Any = None

    def __post_init__(self) -> None:
        _make_named(self, "codec", compression.make, "codec: ")
        _make_named(self, "merge", functools.partial(_by_name, "merge", merge.NAMES), "")
        _make_named(self, "roles", functools.partial(_by_name, "roles", roles.NAMES), "")
        _leave_out_unless(Codec, self, "codec", _CODEC)
        _leave_out_unless(merge.Merge, self, "merge", _MERGE)
        _leave_out_unless(roles.RegionRoles, self, "roles", _ROLES)
        for name in ("outer", "landing"):
            object.__setattr__(self, name, _with_keywords(getattr(self, name)))

    def named(self, name: str, problems: Iterable[str] = (), **changes: Any) -> Method:
        """This method under another name, with other answers; `problems` join its own."""
        joined = (*problems, *self.problems)
        return dataclasses.replace(self, name=name, problems=joined, **changes)

    @property
    def rules_differ(self) -> bool:
        """Whether fragments have outer or landing rules of their own."""
        return any(per_fragment(rules) for rules in (self.outer, self.landing))

    def outer_of(self, fragment: int) -> Rule:
        """The outer rule of a fragment."""
        return rule_of(self.outer, fragment)

    def landing_of(self, fragment: int) -> Rule:
        """The landing rule of a fragment; None = replace."""
        return rule_of(self.landing, fragment)

    @property
    def lands_beside_anchor(self) -> bool:
        """Whether regions take over other values than the anchor's, by a landing rule or a channel.

        With gradient exchange there is neither.
        """
        fragments = range(self.schedule.fragments)
        return any(channel.source == PARAMS for channel in self.channels) or (
            self.signal == "progress" and any(self.landing_of(p) for p in fragments)
        )

    @property
    def takes_own_parts(self) -> bool:
        """Whether the outer rule needs a region's own payload apart from the mean (eager)."""
        own_anchors = self.anchors == "per_region" and self.topology is None
        return own_anchors and self.schedule.land_after_send

    @property
    def reduces_all(self) -> bool:
        """Whether the mean of all regions' payloads is all that is needed.

        Else the exchange may not reduce them: regions apply their own part themselves, or payloads
        one by one or by weights of their own.
        """
        return self.anchors == "shared" and self.base == "anchor" and self.reads == "mean"

    @functools.cached_property
    def reads(self) -> Reads:
        """What the merge rule reads (`Merge.reads`); without one, the mean."""
        return "mean" if self.merge is None else self.merge.reads

    @property
    def has_anchor(self) -> bool:
        """Whether pseudo-gradients are sent; else channels alone exchange, without an anchor."""
        return not self.schedule.never_sends

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of a step's metrics that this method adds, which no aux of a loss_fn may have."""
        return tuple(f"{c.name}_{k}" for c in self.channels for k in ("left_out", "spread"))

    @property
    def adapts(self) -> bool:
        """Whether the method needs an `AdaptiveEngine`."""
        return self.inner_batching is not None or self.trainers is not None

    @property
    def trainer_count(self) -> int:
        """Trainers of a region at the start."""
        return 1 if self.trainers is None else self.trainers.count


class RuleCall(NamedTuple):
    """How a loop calls a rule, or one per fragment: `update` of `first`, with the keywords `told`.

    It is called on a fragment's leaves; without `by_fragment` on values selected from all of them.
    """

    name: str
    rules: Any
    first: str
    told: tuple[str, ...] = ()
    by_fragment: bool = True


def rule_calls(method: Method) -> Iterator[RuleCall]:
    """How the method's rules are called: outer, landing, those of its servers and channels."""
    late = ("displacement", "staleness")
    if method.signal == "gradient":
        yield RuleCall("outer", method.outer, "gradient")
    else:
        yield RuleCall("outer", method.outer, "delta", _told_outer(method))
        yield RuleCall("landing", method.landing, "progress", (*late, *TOLD))
    if method.servers is not None:
        yield RuleCall("servers.outer", method.servers.outer, "delta")
    for channel in method.channels:
        name, told = f"channel {channel.name}: landing", (*late, "round", "step")
        yield RuleCall(name, channel.landing, "progress", told, by_fragment=False)


def _told_outer(method: Method) -> tuple[str, ...]:
    if method.servers is not None:
        return ()
    if method.topology is not None:
        return (*TOLD, "group_anchor", *(["own"] if method.topology.reads_own else []))
    return (*TOLD, "own", "own_late", "weight", "weight_late") if method.takes_own_parts else TOLD


def fragment_codecs(method: Method) -> tuple[Codec | None, ...]:
    """The codecs of a fragment's payloads: the method's, and its servers'; None = dense or none."""
    return method.codec, None if method.servers is None else method.servers.codec


def _make_named(owner: Any, field: str, make: Callable[[Any], Any], prefix: str) -> None:
    """Put what is named, described or given for a leaf into a field; problems join the owner's."""
    given, found = getattr(owner, field), list(owner.problems)
    if isinstance(given, str | Mapping | UnitCodec | LeafCodec):
        object.__setattr__(owner, field, collect(found, prefix, lambda: make(given)))
        object.__setattr__(owner, "problems", tuple(found))


_CODEC = "give a codec, a name of compression.names() or None"
_MERGE = "give a rule of lowcomm_jax.merge, or None for the weighted mean"
_ROLES = "give roles of lowcomm_jax.roles, or None"


def _leave_out_unless(kind: type, owner: Any, field: str, fix: str, label: str = "") -> None:
    """Leave out what is no `kind`; a line joins the owner's problems."""
    value = getattr(owner, field)
    if not isinstance(value, kind | None):
        line = f"{label or field}={value!r}: {fix}"
        object.__setattr__(owner, field, None)
        object.__setattr__(owner, "problems", (*owner.problems, line))


def _by_name(what: str, names: Mapping[str, Callable[..., Any]], spec: str | Mapping) -> Any:
    """A part from its name, or from a mapping of `name` and its settings."""
    settings = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = settings.pop("name", None)
    if name not in names:
        raise ValueError(f"{what}={name!r} {is_unknown(name, names)}")
    try:
        return names[name](**settings)
    except TypeError as error:
        known = ", ".join(inspect.signature(names[name]).parameters) or "none"
        raise ValueError(f"{what}: {name} has the settings {known} ({error}): give these") from None


def timing_problems(step_seconds: float | None, sync_seconds: float | None) -> list[str]:
    """What is wrong with the seconds of an inner step, and of a payload's way, that are given."""
    named = {"step_seconds": step_seconds, "sync_seconds": sync_seconds}
    given = {name: value for name, value in named.items() if value is not None}
    found = [] if len(given) != 1 else ["step_seconds and sync_seconds go together: give both"]
    return found + [
        f"{name}={value!r}: give a positive, finite number"
        for name, value in given.items()
        if not (is_number(value) and value > 0)
    ]


def per_fragment(rules: Any) -> bool:
    """Whether there is a rule of its own for each fragment."""
    # An Optax transform is itself a tuple, of functions.
    return isinstance(rules, tuple) and not isinstance(rules, optax.GradientTransformation)


def rule_of(rules: Any, fragment: int) -> Rule:
    """The rule of this fragment: its own, or the one that all have."""
    return rules[fragment] if per_fragment(rules) else rules


def _with_keywords(rules: Any) -> Any:
    """The rules, each of which accepts extra keywords, whether it reads them or not."""
    if isinstance(rules, optax.GradientTransformation):
        return optax.with_extra_args_support(rules)
    return tuple(map(_with_keywords, rules)) if isinstance(rules, tuple | list) else rules


@dataclasses.dataclass(frozen=True)
class Published:
    """How a method's paper runs it: what a plan takes where it is told nothing else.

    Attributes:
      settings: keywords of the factory, where they differ from its defaults, and from those of
        `planner.methods.asked_for`.
      law: the scaling law that its loss follows (`planner.expected_loss`); None = none published.
      inner: the inner optimizer; None = one with the state of Adam.
    """

    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    law: Law | None = None
    inner: optax.GradientTransformation | None = None


_PUBLISHED = "published"


def published(
    law: Law | None = None, inner: optax.GradientTransformation | None = None, **settings: Any
) -> Callable[[Factory], Factory]:
    """Decorator: the factory's `Published`, which `published_by` gives."""

    def mark(factory: Factory) -> Factory:
        setattr(factory, _PUBLISHED, Published(settings, law, inner))
        return factory

    return mark


def published_by(factory: Callable[..., Method]) -> Published:
    """What the paper of a factory has published; nothing, unless it says so (`published`)."""
    return getattr(factory, _PUBLISHED, Published())


def wire_codec(
    factory: Callable[..., Method],
    given: Any,
    paper: Mapping[str, Any],
    stacked: Sequence[str],
    **settings: Any,
) -> tuple[Codec | None, tuple[str, ...]]:
    """The codec that is given, else the paper's, for factories that take either.

    Args:
      factory: whose signature has the defaults of `settings`.
      given: codec, name or mapping; None = the paper's.
      paper: settings of the paper's codec, for `compression.make`.
      stacked: path prefixes of leaves with a leading layer axis.
      settings: the factory's keywords that only the paper's codec reads.

    Returns:
      (codec, problems): a codec that cannot be made is None and a line; so are settings, in one
      line, that have no effect beside a given codec.
    """
    spec, found = paper if given is None else given, []
    codec = collect(found, "codec: ", lambda: compression.make(spec, stacked=stacked))
    if given is None and paper.get("error_feedback", 1.0) is None:
        found.append("codec: decay=None: give a number in [0, 1]")
    defaults = inspect.signature(factory).parameters
    unused = [f"{k}={v!r}" for k, v in settings.items() if np.any(v != defaults[k].default)]
    if given is not None and unused:
        found.append(
            f"codec is given, so {', '.join(unused)} would have no effect: remove one or the other"
        )
    return codec, tuple(found)
