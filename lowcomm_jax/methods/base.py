"""`Method`: what a factory of this room returns and what an engine takes.

A method is a frozen dataclass that names one rule for each part of the loop. It computes nothing;
its own code lists settings that cannot work (`violations`), each with its fix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import optax

from lowcomm_jax import compression, merge
from lowcomm_jax.batching import BatchPolicy
from lowcomm_jax.batching.trainers import Trainers
from lowcomm_jax.channels import Channel
from lowcomm_jax.channels.source import PARAMS
from lowcomm_jax.compression import Codec, make
from lowcomm_jax.compression.ef21 import averages_senders
from lowcomm_jax.compression.two_shot import per_tensor, wrapper_problem
from lowcomm_jax.merge import Merge
from lowcomm_jax.params.fragments import Pattern
from lowcomm_jax.schedule import Never, Schedule, TwoLevels
from lowcomm_jax.topology.gossip import Gossip

Rule = optax.GradientTransformationExtraArgs | None


@dataclasses.dataclass(frozen=True)
class LocalServers:
    """The lower of two levels: a server for each group of regions (`schedule.TwoLevels`).

    Attributes:
      outer: Optax transform of one region's pseudo-gradient that arrives at its server. Its
        `update` gets no keywords.
      blend: alpha, weight of the global model when a server merges it, in [0, 1].
      codec: of what a server sends to the global one, a codec or a name of `compression.make`;
        None = dense. What regions send to their server has that of the method.
    """

    outer: optax.GradientTransformationExtraArgs
    blend: float
    codec: Any = None

    def __post_init__(self):
        if isinstance(self.codec, str | Mapping):
            object.__setattr__(self, "codec", compression.make(self.codec))

    def violations(self) -> list[str]:
        """Settings that cannot work, one line with its fix each."""
        found = []
        if not 0 <= self.blend <= 1:
            found.append(f"blend={self.blend}: the weight of the global model lies in [0, 1]")
        if self.codec is None:
            return found
        if not isinstance(self.codec, Codec):
            fix = "give a codec, a name of compression.names() or None"
            return [*found, f"global_codec={self.codec!r}: {fix}"]
        if self.codec.increments or self.codec.personal:
            found.append(
                f"global_codec {self.codec.name}: a server's update is applied by itself, and no "
                "mean is kept; use error_feedback"
            )
        part = per_tensor(self.codec)
        if part is not None and part.reduce == "two_shot":
            found.append("global_codec.reduce='two_shot': nothing is reduced there; leave it out")
        return found


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
        Its `update` gets these keywords. Where the schedule has no delay, nothing is made in
        flight: the progress is 0, and most rules then have no effect.
      codec: what travels: a codec, or its name or settings for `compression.make`; None = dense
        fp32.
      anchors: `shared` by all regions, or one `per_region`.
      base: what a pseudo-gradient is measured against: the current `anchor`, or the anchor as the
        region `received` it last. With `received` the loop applies contributions one by one, in
        region order, and every region that arrived gets the newest anchor.
      signal: what travels: `progress` (pseudo-gradients, when the schedule says) or `gradient` (at
        every step).
      pattern, rest: how the parameters are cut into fragments (`params.fragments.partition`).
      inner_batching: a `batching.BatchPolicy` of the inner steps; None = batches are as they are
        handed over.
      trainers: model instances in every region, and how they merge; None = one. With a policy or
        with trainers the method runs in an `AdaptiveEngine`.
      topology: who averages with whom; None = all regions. With `Gossip` every region has its own
        anchor, and `outer` gets the group's mean anchor as `group_anchor`.
      problems: settings that cannot work, one line with its fix each; the engine refuses them all
        at once.
      channels: exchanges beside the main one, or (`schedule.Never`) instead of it.
      merge: how the payloads of those who took part become one direction, a rule of
        `lowcomm_jax.merge` or its name; None = their weighted mean. A rule that reads payloads one
        by one costs bytes: every region then receives all of them.
      hands_out: what regions are given instead of the anchor: `(anchor, outer state) -> values`,
        trees of one anchor; None = the anchor.
      servers: a level of local servers between regions and anchor; None = there is one level. With
        servers the schedule is `schedule.TwoLevels`, and `outer` the rule of the global server.

    Raises:
      ValueError: the name or a setting of a codec or a merge rule is unknown or out of range.
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

    def __post_init__(self) -> None:
        if isinstance(self.codec, str | Mapping):
            object.__setattr__(self, "codec", compression.make(self.codec))
        if isinstance(self.merge, str | Mapping):
            object.__setattr__(self, "merge", merge.make(self.merge))
        for name in ("outer", "landing"):
            object.__setattr__(self, name, _told(getattr(self, name)))

    @property
    def rules_differ(self) -> bool:
        """Whether fragments have outer or landing rules of their own."""
        return any(_per_fragment(rules) for rules in (self.outer, self.landing))

    def outer_of(self, fragment: int) -> Rule:
        """The outer rule of a fragment."""
        return _rule_of(self.outer, fragment)

    def landing_of(self, fragment: int) -> Rule:
        """The landing rule of a fragment; None = replace."""
        return _rule_of(self.landing, fragment)

    @property
    def takes_own_parts(self) -> bool:
        """Whether the outer rule needs a region's own payload apart from the mean (eager)."""
        own_anchors = self.anchors == "per_region" and self.topology is None
        return own_anchors and self.schedule.land_after_send

    @property
    def reduces_all(self) -> bool:
        """Whether the mean of all regions' payloads is all that is needed.

        Else the exchange may not reduce them: regions apply their own part themselves, or payloads
        one by one.
        """
        return self.anchors == "shared" and self.base == "anchor" and not self.reads_payloads

    @property
    def reads_payloads(self) -> bool:
        """Whether the merge rule reads payloads one by one."""
        return self.merge is not None and self.merge.reads == "payloads"

    @property
    def has_anchor(self) -> bool:
        """Whether pseudo-gradients are sent; else channels alone exchange, without an anchor."""
        return not isinstance(self.schedule, Never)

    def violations(self, regions: int) -> list[str]:
        """Every setting that cannot work with this many regions, one line with its fix each."""
        named = [("rest", self.rest, ("own", "dealt"))]
        if isinstance(self.pattern, str):
            named.append(("pattern", self.pattern, get_args(Pattern)))
        wrong = [
            f"{name}={value!r}: use {', '.join(known)}"
            for name, value, known in named
            if value not in known
        ]
        wrong += self._codec_violations() + self._rule_violations()
        wrong += self.schedule.violations(regions) + _channel_violations(self)
        if self.topology is not None:
            wrong += self._gossip_violations(self.topology, regions)
        return [*self.problems, *wrong, *self.adaptive_violations(regions)]

    @property
    def adapts(self) -> bool:
        """Whether the method needs an `AdaptiveEngine`."""
        return self.inner_batching is not None or self.trainers is not None

    @property
    def trainer_count(self) -> int:
        """Trainers of a region at the start."""
        return 1 if self.trainers is None else self.trainers.count

    def adaptive_violations(self, regions: int) -> list[str]:
        """What is wrong with the batch policy and the trainers."""
        if not self.adapts:
            return []
        wrong = [] if self.trainers is None else self.trainers.violations()
        if isinstance(self.inner_batching, BatchPolicy):
            wrong += self.inner_batching.violations(regions)
        elif self.inner_batching is not None:
            fix = "give a policy of lowcomm_jax.batching, or None for a fixed batch"
            wrong.append(f"inner_batching={self.inner_batching!r}: {fix}")
        if self.signal == "gradient":
            wrong.append(
                f"{self.name} exchanges a gradient at every step and takes a fixed batch and one "
                "trainer: leave inner_batching and trainers out"
            )
        several = self.trainer_count != 1
        if several and np.any(np.asarray(self.schedule.delay) != 0):
            wrong.append(
                f"{self.name} has payloads in flight when trainers merge: use a schedule that "
                "lands at its send, or trainers=1"
            )
        return wrong

    def _codec_violations(self) -> list[str]:
        """Codecs that this method cannot use, one line with its fix each."""
        if self.codec is None:
            return []
        if not isinstance(self.codec, Codec):
            return [f"codec={self.codec!r}: give a codec, a name of compression.names() or None"]
        own_anchors = self.anchors == "per_region" and self.signal == "progress"
        fits = own_anchors and not self.schedule.land_after_send and self.topology is None
        if self.codec.personal and not fits:
            needed = "anchors='per_region', signal='progress' and a landing before the next send"
            return [f"codec {self.codec.name} needs {needed}; use another codec with {self.name}"]
        if self.codec.increments and not self.reduces_all:
            return [
                f"codec {self.codec.name} sends changes of a mean over all regions, which needs one"
                " anchor and one mean of all of them; use error_feedback"
            ]
        if self.codec.increments and averages_senders(self.codec):
            return [
                f"codec {self.codec.name} sends changes of a mean over all regions, and averages "
                "over senders: give the codec in it mean='regions'"
            ]
        if self.reduces_all and (problem := wrapper_problem(self.codec)) is not None:
            return [problem]
        found = per_tensor(self.codec)
        if found is None or found.reduce != "two_shot" or self.reduces_all:
            return []
        return [
            f"codec.reduce='two_shot': {self.name} needs the payloads themselves, not only their "
            "mean; use all_gather, or leave it out"
        ]

    def _rule_violations(self) -> list[str]:
        """What is wrong with rules per fragment, the merge rule and what is handed out."""
        wrong = [
            f"{name}: {len(rules)} rules for {self.schedule.fragments} fragments; give one, or one "
            "per fragment"
            for name, rules in (("outer", self.outer), ("landing", self.landing))
            if _per_fragment(rules) and len(rules) != self.schedule.fragments
        ]
        wrong += [
            f"{name}={rule!r}: give an Optax transform, a tuple of one per fragment, or None"
            for name, rules in (("outer", self.outer), ("landing", self.landing))
            for rule in (rules if _per_fragment(rules) else (rules,))
            if not (rule is None or isinstance(rule, optax.GradientTransformation))
        ]
        moves = self.signal == "progress" and self.has_anchor and not self.problems
        if moves and (self.outer is None or (_per_fragment(self.outer) and None in self.outer)):
            wrong.append(
                "outer=None: with signal='progress' an outer rule moves the anchor; give one, as "
                "lowcomm_jax.outer.average(), for every fragment"
            )
        one_mean = self.anchors == "shared" and self.signal == "progress"
        for name, value in (("merge", self.merge), ("hands_out", self.hands_out)):
            if value is not None and not one_mean:
                wrong.append(
                    f"{name}: needs anchors='shared' and signal='progress', where one direction "
                    "moves one anchor"
                )
        if self.rules_differ and self.signal == "gradient":
            wrong.append(
                "outer: with signal='gradient' there is one rule for all parameters; give one"
            )
        if self.servers is not None:
            wrong += self._server_violations(self.servers)
        if self.merge is None:
            return wrong
        if not isinstance(self.merge, Merge):
            fix = "give a rule of lowcomm_jax.merge, or None for the weighted mean"
            return [*wrong, f"merge={self.merge!r}: {fix}"]
        if isinstance(self.codec, Codec) and self.codec.increments:
            wrong.append(
                f"merge: codec {self.codec.name} sends changes of a mean, and no payload that a "
                "merge rule could read; leave merge or the codec out"
            )
        if self.schedule.energy is not None and self.reads_payloads:
            wrong.append(
                "merge: the rank is measured of a mean that is reduced on the way, and this rule "
                "reads payloads one by one; leave the schedule's energy (adaptive) or the rule out"
            )
        return wrong + self.merge.violations()

    def _server_violations(self, servers: LocalServers) -> list[str]:
        needs = {
            "schedule.TwoLevels": isinstance(self.schedule, TwoLevels),
            "base='received'": self.base == "received",
            "the mean (merge=None)": self.merge is None,
            "no landing rule": self.landing is None,
        }
        unmet = [f"servers: two levels need {need}" for need, met in needs.items() if not met]
        return unmet + servers.violations()

    def _gossip_violations(self, topology: Gossip, regions: int) -> list[str]:
        schedule = self.schedule
        needs = {
            "anchors='per_region'": self.anchors == "per_region",
            "base='anchor'": self.base == "anchor",
            "signal='progress'": self.signal == "progress",
            "a schedule that lands first": not schedule.land_after_send,
            "a schedule that reads no change rates": schedule.statistic == "none",
            "one overlap for all regions": np.unique(schedule.delay).size == 1,
        }
        unmet = [need for need, met in needs.items() if not met]
        wrong = [f"topology={topology}: gossip needs {need}" for need in unmet]
        return wrong + topology.violations(regions)


def _channel_violations(method: Method) -> list[str]:
    """Every setting of a `Method`'s channels that cannot work, one line with its fix each."""
    if not method.channels:
        idle = "the schedule never sends and there are no channels: nothing is exchanged; add one"
        return [] if method.has_anchor else [idle]
    found = [line for channel in method.channels for line in channel.violations()]
    found += _twice(method)
    for what, unfit in _unfit(method).items():
        if unfit:
            found.append(f"{method.name} has channels: {what}")
    if not method.has_anchor:
        unused = {"landing": method.landing, "codec": method.codec, "outer": method.outer}
        found += [
            f"{name}: {method.name} has no main exchange, so it would have no effect; leave it out"
            for name, value in unused.items()
            if value is not None
        ]
    return found


def _unfit(method: Method) -> dict[str, bool]:
    """What does not go with channels, with its fix, and whether the method has it."""
    late = any(c.delay and c.source == PARAMS for c in method.channels)
    return {
        "gossiping regions never meet all; leave topology out": method.topology is not None,
        "regions that exchange gradients are equal; use signal='progress'": (
            method.signal == "gradient"
        ),
        "regions at a pace of their own make no step at times; use another schedule": (
            method.schedule.uneven
        ),
        "batches that grow and trainers are not supported; leave them out": method.adapts,
        "with several fragments an anchor would make part of a late payload stale; use one, or a "
        "delay of 0": late and method.schedule.fragments > 1,
    }


def _twice(method: Method) -> list[str]:
    found = []
    for what in ("name", "source"):
        values = [getattr(channel, what) for channel in method.channels]
        found += [
            f"channels: {what}={value!r} stands in {values.count(value)} of them; give each its own"
            for value in dict.fromkeys(values)
            if values.count(value) > 1
        ]
    return found


def _per_fragment(rules: Any) -> bool:
    # An Optax transform is itself a tuple, of functions.
    return isinstance(rules, tuple) and not isinstance(rules, optax.GradientTransformation)


def _rule_of(rules: Rule | tuple[Rule, ...], fragment: int) -> Rule:
    if isinstance(rules, optax.GradientTransformation):
        return rules
    return rules[fragment] if isinstance(rules, tuple) else rules


def _told(rules: Any) -> Any:
    """The rules, each of which accepts extra keywords, whether it reads them or not."""
    if isinstance(rules, optax.GradientTransformation):
        return optax.with_extra_args_support(rules)
    return tuple(map(_told, rules)) if isinstance(rules, tuple | list) else rules


def wire_codec(
    given: Any,
    paper: Callable[[], Codec],
    stacked: Sequence[str],
    **settings: tuple[Any, Any],
) -> tuple[Codec, tuple[str, ...]]:
    """The codec that is given, else the paper's.

    For factories of methods whose paper defines a codec: they take its settings, or another codec.

    Args:
      given: codec, name or mapping; None = the paper's.
      paper: makes the paper's codec.
      stacked: path prefixes of leaves with a leading layer axis.
      settings: of the paper's codec, name -> (value, the factory's default).

    Returns:
      (codec, problems): one line for settings that would have no effect beside a given codec.

    Raises:
      ValueError: an unknown name or setting of a codec.
    """
    if given is None:
        return paper(), ()
    unused = [f"{k}={value!r}" for k, (value, default) in settings.items() if value != default]
    problem = (
        f"codec is given, so {', '.join(unused)} would have no effect: remove one or the other"
    )
    return make(given, stacked=tuple(stacked)), (problem,) if unused else ()
