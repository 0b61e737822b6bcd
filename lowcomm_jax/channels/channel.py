"""`Channel`: one exchange of a method beside its main one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lowcomm_jax.channels.selection import Everything, Selection
from lowcomm_jax.channels.source import PARAMS
from lowcomm_jax.compression import Codec, make
from lowcomm_jax.refused import is_whole

_ALL = Everything()


@dataclasses.dataclass(frozen=True)
class Channel:
    """Selected values that regions average every `every` inner steps.

    `delay` steps after a send the mean overwrites these entries in every region. There is no outer
    rule. Without a landing rule, what a region changed in these entries since the send is lost.
    Everything else in a region stays, optimizer moments too, unless they are the source of a
    channel.

    With a landing rule a region keeps what it sent, and lands on mean + T(now - sent). Two payloads
    with one entry would count what was made between them twice. So an entry that is under way does
    not travel: its place in the payload stays empty.

    Attributes:
      name: label in events, metrics and the ledger.
      source: `params`, or a field of the inner optimizer's state (`mu` and `nu` of Adam).
      every: inner steps from one exchange to the next, at least 1.
      delay: inner steps from send to landing, at least 0.
      selection: which entries travel.
      codec: of the values, a codec without state or its name; None = fp32.
      landing: Optax transform without state of the progress made in flight, such as
        `lowcomm_jax.landing.replay()`; None = replace. Its `update` gets the mean as `params`, and
        the keywords `displacement`, `staleness`, `round` (of the exchange, from 0) and `step`.

    Raises:
      ValueError: an unknown name or setting of a codec.
    """

    name: str
    source: str = PARAMS
    every: int = 1
    delay: int = 0
    selection: Selection = _ALL
    codec: Any = None
    landing: optax.GradientTransformationExtraArgs | None = None

    def __post_init__(self) -> None:
        if isinstance(self.codec, str | Mapping):
            object.__setattr__(self, "codec", make(self.codec))
        if isinstance(self.landing, optax.GradientTransformation):
            object.__setattr__(self, "landing", optax.with_extra_args_support(self.landing))

    @property
    def slots(self) -> int:
        """How many payloads are in flight at most."""
        return -(-self.delay // self.every)

    def sends(self, step: int) -> bool:
        """Whether values leave after inner step `step` (1-based)."""
        return step % self.every == 0

    def lands(self, step: int) -> bool:
        """Whether values sent `delay` steps before land after inner step `step`."""
        return step > self.delay and (step - self.delay) % self.every == 0

    def slot(self, sent: int) -> int:
        """Number of the place, below `slots`, of a payload that was sent after this step."""
        return (sent // self.every - 1) % self.slots

    def violations(self) -> list[str]:
        """What is wrong with the settings, one line with its fix each."""
        found = [
            f"{name}={value!r}: a whole number, at least {least}, is needed"
            for name, value, least in (("every", self.every, 1), ("delay", self.delay, 0))
            if not is_whole(value) or value < least
        ]
        if not isinstance(self.selection, Selection):
            found.append(f"selection={self.selection!r}: give one of lowcomm_jax.channels")
        else:
            found += self.selection.violations()
        found += self._codec_violations() + self._landing_violations()
        return [f"channel {self.name}: {line}" for line in found]

    def _codec_violations(self) -> list[str]:
        if self.codec is None:
            return []
        if not isinstance(self.codec, Codec):
            return [f"codec={self.codec!r}: give a codec, a name of compression.names() or None"]
        if self.codec.reads_params:
            return [
                f"codec {self.codec.name} compares changes with the weights, and a channel sends "
                "values: use one that sends all, as bf16"
            ]
        shapes = ((256,), (512, 512))  # low-rank codecs have a state for matrices alone
        like = {str(shape): jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes}
        if self.codec.increments or jax.tree.leaves(self.codec.init(like)):
            return [
                f"codec {self.codec.name} remembers what it has sent, and other entries leave each "
                "time: use one without state, as bf16"
            ]
        ones = {name: jnp.ones(x.shape, x.dtype) for name, x in like.items()}
        found = jax.jit(
            lambda x: self.codec.decode(self.codec.encode(x, self.codec.init(like))[0], like)
        )(ones)
        if not all(np.asarray(x).all() for x in found.values()):
            return [
                f"codec {self.codec.name} sends some entries, and all that the channel selects are "
                "replaced: use one that sends all, as bf16"
            ]
        return []

    def _landing_violations(self) -> list[str]:
        if self.landing is None:
            return []
        if not isinstance(self.landing, optax.GradientTransformation):
            return [f"landing={self.landing!r}: give an Optax transform, or None to replace"]
        found = []
        if jax.tree.leaves(jax.eval_shape(self.landing.init, {"values": jnp.zeros(2)})):
            found.append(
                "landing: the rule has a state, and other entries land each time: use one without, "
                "as landing.replay()"
            )
        if self.source != PARAMS:
            found.append(
                f"landing: source={self.source!r} is no parameter, and a second moment could "
                "become negative: leave it out"
            )
        if self.delay == 0:
            found.append("landing: without a delay nothing is made in flight: leave it out")
        if self.selection.whole and self.delay > self.every:
            found.append(
                f"landing: every entry is still under way at the next send (every={self.every}): "
                f"use delay={self.every} or less, or a selection of entries"
            )
        return found
