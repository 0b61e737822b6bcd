"""A method: six answers and one flag, nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import optax

from lowcomm_jax import compression
from lowcomm_jax.fragments import Pattern
from lowcomm_jax.schedule import Schedule


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
      pattern, rest: how the parameters are cut into fragments (`fragments.partition`).
      first_round: what the first boundary of a one-period method lands: an `empty` payload, or
        (`blocking`) the one just sent.
      inner_batching: batch policy of the inner steps; only None, a fixed batch, is available.
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
    problems: tuple[str, ...] = ()

    def __post_init__(self):
        if self.codec is not None:
            object.__setattr__(self, "codec", compression.make(self.codec))

    def violations(self, regions: int) -> list[str]:
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
        if self.inner_batching is not None:
            wrong.append(f"inner_batching={self.inner_batching!r}: only None, a fixed batch, works")
        own_anchors = self.anchors == "per_region" and self.signal == "progress"
        fits = own_anchors and not self.schedule.land_after_send
        if self.codec is not None and self.codec.personal and not fits:
            needed = "anchors='per_region', signal='progress' and a landing before the next send"
            wrong.append(f"codec {self.codec.name} needs {needed}")
        return [*self.problems, *wrong, *self.schedule.violations(regions)]
