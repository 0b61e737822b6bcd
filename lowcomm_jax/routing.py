"""Random pipeline routing: the one place where activations cross regions within a step.

Behind every tick of the pipeline the activations of all regions move on by one drawn number of
regions, on their way to the next stage; gradients go the same way back, labels go straight from
where a microbatch starts to where it ends. Source: NoLoCo, arXiv 2506.10911, section 3.

Differs from the paper, which draws among all permutations of the replicas: cyclic shifts alone,
which are the same for R = 2, so that a program holds R - 1 transfers and not R!. Any two replicas
of neighbouring stages are equally likely to meet.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowcomm_jax.stages import REGION, STAGE, index, pass_on

LABEL_BYTES = 8  # of a token: int32 target and fp32 weight


class Hop(NamedTuple):
    """One transfer between regions: each region sends `nbytes` on to region r + `shift`."""

    shift: int
    nbytes: int


def draw(key_data: jax.Array, ticks: int, regions: int) -> jax.Array:
    """By how many regions activations move on behind each tick, int32 `[T]`."""
    return jax.random.randint(jax.random.wrap_key_data(key_data), (ticks,), 0, regions)


def shifts(key_data: jax.Array, ticks: int, regions: int) -> jax.Array:
    """`draw` from region 0's key, the same in all regions: 8 bytes a device cross, not booked."""
    return draw(jax.lax.all_gather(key_data, REGION)[0], ticks, regions)


@dataclasses.dataclass(frozen=True)
class Paths:
    """Ways of M microbatches through S stages of R regions; M + S - 1 ticks.

    Microbatch m leaves stage s behind tick m + s. What idle stages compute crosses to no region.
    """

    regions: int
    stages: int
    microbatches: int

    @property
    def ticks(self) -> int:
        return self.microbatches + self.stages - 1

    def leaving(self, tick: int) -> range:
        """Stages whose result of this tick goes on to the next stage."""
        return range(max(0, tick - self.microbatches + 1), min(tick, self.stages - 2) + 1)

    def hand_on(self, y: jax.Array, tick: jax.Array, shift_T: jax.Array) -> jax.Array:
        """What stage s - 1 of region r - shift has as `y`, in stage s of region r (traced).

        Zeros where nothing was sent; backward the same way back.
        """
        leaving = [self.leaving(t) for t in range(self.ticks)]
        senders = [who for who in dict.fromkeys(leaving) if who]
        moves = [
            self._move([(s, s + 1) for s in who], by)
            for who in senders
            for by in range(1, self.regions)
        ]
        first_T = [
            senders.index(who) * (self.regions - 1) if who else -self.regions for who in leaving
        ]
        shift = shift_T[tick]
        moved = jnp.where(shift > 0, jnp.array(first_T)[tick] + shift, 0)
        stay = functools.partial(pass_on, stages=self.stages)
        return jax.lax.switch(jnp.maximum(moved, 0), [stay, *moves], y)

    def totals(self, shift_T):
        """By how many regions each microbatch moves on altogether, int32 `[M]`."""
        count = self.microbatches
        return sum(shift_T[s : s + count] for s in range(self.stages - 1)) % self.regions

    def labels(self, target_MxN: jax.Array, weight_MxN: jax.Array, shift_T: jax.Array):
        """int32 targets and fp32 weights of the microbatches that end here, in all stages.

        They travel between the last stages alone. Without a gradient.
        """
        last = self.stages - 1
        moves = [self._move([(last, last)], by) for by in range(1, self.regions)]
        weight_MxN = jax.lax.stop_gradient(weight_MxN)
        bits_MxN = jax.lax.bitcast_convert_type(weight_MxN, jnp.int32)
        both_Mx2xN = jnp.stack([target_MxN, bits_MxN], axis=1)

        def one(total, both_2xN):
            return jax.lax.switch(total, [lambda x: x, *moves], both_2xN)

        came_Mx2xN = jax.lax.map(lambda pair: one(*pair), (self.totals(shift_T), both_Mx2xN))
        came_Mx2xN = jnp.where(index() == last, came_Mx2xN, 0)
        target_MxN, bits_MxN = jnp.moveaxis(jax.lax.psum(came_Mx2xN, STAGE), 1, 0)
        return target_MxN, jax.lax.bitcast_convert_type(bits_MxN, jnp.float32)

    def hops(self, shift_T: np.ndarray, activation: int, labels: int) -> list[Hop]:
        """Every transfer of a gradient step, in order: forward, labels, backward.

        Args:
          shift_T: as drawn, on the host.
          activation, labels: bytes of one microbatch's.
        """
        there = [
            Hop(int(shift_T[t]), len(self.leaving(t)) * activation)
            for t in range(self.ticks)
            if shift_T[t] and self.leaving(t)
        ]
        carried = [] if self.stages == 1 else [Hop(int(n), labels) for n in self.totals(shift_T)]
        back = [Hop(self.regions - shift, nbytes) for shift, nbytes in reversed(there)]
        return there + [hop for hop in carried if hop.shift] + back

    def _move(self, stage_pairs: list[tuple[int, int]], by: int):
        """A transfer from stage a of region r to stage b of region r + `by`, for all pairs a, b."""
        pairs = [
            (r * self.stages + a, (r + by) % self.regions * self.stages + b)
            for r in range(self.regions)
            for a, b in stage_pairs
        ]
        return lambda x: jax.lax.ppermute(x, (REGION, STAGE), pairs)
