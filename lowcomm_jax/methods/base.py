"""What a method is: six answers and one flag, nothing else.

`Method` is what a factory of this room returns and what an engine takes. It holds no code of its
own but refusals: `violations` lists every setting that cannot work, with its fix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import optax

from lowcomm_jax import compression
from lowcomm_jax.batching import BatchPolicy
from lowcomm_jax.batching.trainers import Trainers
from lowcomm_jax.compression import Codec, make
from lowcomm_jax.compression.two_shot import per_tensor, wrapper_problem
from lowcomm_jax.outer import Consensus
from lowcomm_jax.params.fragments import Pattern
from lowcomm_jax.schedule import Schedule
from lowcomm_jax.topology.gossip import Gossip


@dataclasses.dataclass(frozen=True)
class Method:
    """A low-communication method as a composition.

    Attributes:
      name: label in tables, metrics and checkpoints.
      schedule: which fragment leaves when, and lands when.
      outer: Optax transform of the mean pseudo-gradient; with `signal="gradient"` what the mean
        gradient goes through before the inner optimizer (None = nothing).
      landing: Optax transform of the progress made in flight; None = replace.
      codec: what travels, a codec or a name of `compression.make`; None = dense fp32.
      anchors: `shared` by all regions, or one `per_region`.
      base: what a pseudo-gradient is measured against: the `anchor` of now, or the anchor as the
        region `received` it last. With `received` contributions are applied one by one, in region
        order, and everyone who arrived gets the newest anchor.
      signal: `progress` (pseudo-gradients, now and then) or `gradient` (at every step).
      pattern, rest: how the parameters are cut into fragments (`params.fragments.partition`).
      first_round: what the first boundary of a one-period method lands: an `empty` payload, or
        (`blocking`) the one just sent.
      inner_batching: batch policy of the inner steps; None = batches are as they are handed over.
      trainers: model instances in every region, and how they merge; None = one. With a policy or
        with trainers the method runs in an `AdaptiveEngine`.
      threshold: of `batching.Switch`: requests above so many memory caps are accumulated.

      rank_energy: share of the squared norm by which the rank of every reduced payload is measured,
        for schedules that follow it; None = not measured.
      topology: who averages with whom; None = all regions. With `Gossip` every region has its own
        anchor, and `outer` gets the group's mean anchor as `group_anchor`.
      consensus: the coefficients that must keep gossiping regions together.
      problems: settings that cannot work, one line with its fix each; the engine refuses them all
        at once.
    """

    name: str
    schedule: Schedule
    outer: optax.GradientTransformationExtraArgs | None
    landing: optax.GradientTransformationExtraArgs | None = None
    codec: Any = None
    anchors: Literal["shared", "per_region"] = "shared"
    base: Literal["anchor", "received"] = "anchor"
    signal: Literal["progress", "gradient"] = "progress"
    pattern: Pattern | Sequence[str] = "strided"
    rest: Literal["own", "dealt"] = "dealt"
    first_round: Literal["empty", "blocking"] = "empty"
    inner_batching: Any = None
    trainers: Trainers | None = None
    threshold: float = 2.0
    rank_energy: float | None = None
    topology: Gossip | None = None
    consensus: Consensus | None = None
    problems: tuple[str, ...] = ()

    def __post_init__(self):
        if isinstance(self.codec, str | Mapping):
            object.__setattr__(self, "codec", compression.make(self.codec))

    @property
    def takes_own_parts(self) -> bool:
        """Whether the outer rule tells a region's own payload from the others' (eager)."""
        own_anchors = self.anchors == "per_region" and self.topology is None
        return own_anchors and self.schedule.land_after_send

    @property
    def reduces_all(self) -> bool:
        """Whether nothing but the mean of all regions' payloads is needed.

        Where a region applies its own part itself, or payloads are applied one by one, what it
        sent must arrive as it is.
        """
        return self.anchors == "shared" and self.base == "anchor"

    def violations(self, regions: int) -> list[str]:
        """Every setting that cannot work with this many regions, one line with its fix each."""
        named = [
            ("rest", self.rest, ("own", "dealt")),
            ("first_round", self.first_round, ("empty", "blocking")),
        ]
        if isinstance(self.pattern, str):
            named.append(("pattern", self.pattern, ("sequential", "strided", "balanced")))
        wrong = [
            f"{name}={value!r}: use {', '.join(known)}"
            for name, value, known in named
            if value not in known
        ]
        wrong += self._codec_violations() + self.schedule.violations(regions)
        if self.topology is not None:
            wrong += self._gossip_violations(self.topology, regions)
        return [*self.problems, *wrong, *self.adaptive_violations(regions)]

    @property
    def adapts(self) -> bool:
        """Whether it needs an `AdaptiveEngine`."""
        return self.inner_batching is not None or self.trainers is not None

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
        several = self.trainers is not None and self.trainers.count != 1
        if several and np.any(np.asarray(self.schedule.delay) != 0):
            wrong.append(
                f"{self.name} has payloads in flight when trainers merge: use a schedule that "
                "lands at its send, or trainers=1"
            )
        return wrong

    def _codec_violations(self) -> list[str]:
        if self.codec is None:
            return []
        if not isinstance(self.codec, Codec):
            return [f"codec={self.codec!r}: give a codec, a name of compression.names() or None"]
        own_anchors = self.anchors == "per_region" and self.signal == "progress"
        fits = own_anchors and not self.schedule.land_after_send and self.topology is None
        if self.codec.personal and not fits:
            needed = "anchors='per_region', signal='progress' and a landing before the next send"
            return [f"codec {self.codec.name} needs {needed}"]
        if self.codec.increments and not self.reduces_all:
            return [
                f"codec {self.codec.name} sends changes of a mean over all regions, which needs one"
                " anchor and one mean of all of them; use error_feedback"
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
        impossible = topology.violations(regions)
        fits = not dataclasses.replace(topology, seed=0).violations(regions)
        if fits and self.consensus is not None:
            wrong += self.consensus.violations(regions)
        return wrong + impossible


def wire_codec(
    given: Any,
    paper: Callable[[], Codec],
    stacked: Sequence[str],
    **settings: tuple[Any, Any],
) -> tuple[Codec, tuple[str, ...]]:
    """The codec that is given (a codec, name or mapping), else the paper's.

    For factories of methods that a codec defines: they take its settings, or another codec instead.

    Args:
      given: codec, name or mapping; None = the paper's.
      paper: makes the paper's codec.
      stacked: path prefixes of leaves with a leading layer axis.
      settings: of the paper's codec, name -> (value, the factory's default).

    Returns:
      (codec, problems): settings that the given codec leaves without effect.

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
