"""The landing of methods whose regions average in small groups: every anchor moves on its own."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from lowcomm_jax import fragments as fragmentation
from lowcomm_jax.exchange.pairs import GroupExchange
from lowcomm_jax.guard import norm_per_row, select
from lowcomm_jax.rounds import Rounds, without_lead


@dataclasses.dataclass(frozen=True)
class GossipRounds(Rounds):
    """`Rounds` with an anchor per region and means over a round's groups.

    Attributes:
      groups: reduces over the groups of a round.
    """

    groups: GroupExchange

    def move(
        self,
        anchor,
        outer_state,
        payload,
        weight_R,
        rows,
        draw,
        codec_state=None,
        bases=(),
        *,
        if_news=False,
        level=0,
    ):
        """Step 1 of a landing: phi_i <- phi_i + outer(mean_G Delta; phi_i, mean_G phi).

        The means run over the members of a region's group that take part. A region that does not
        still moves by this rule; a group nobody of which takes part does nothing.

        Args:
          draw: of the round (`exchange.pairs.Draw`); the rest as in `Rounds.move`.
          codec_state, bases, level: not used: gossip has no personal or shared codecs, one level.
          if_news: leave the anchors of a group alone whose mean is exactly 0.

        Returns:
          (anchor, outer_state, None, (), metrics `[R]`): `pull_norm` is the distance of an anchor
          from the mean of its group before it moves, 0 where it does not.
        """
        del codec_state, bases, level
        base = fragmentation.take(anchor, rows)
        like = without_lead(base)
        anchors = base if draw.anchors is None else draw.anchors
        mean, group, moves_R = self.groups.means(
            payload, anchors, weight_R, draw.members, like, self._specs(like)
        )

        def one_region(mean, state, own, group):
            return self.method.outer.update(mean, state, own, group_anchor=group)

        updates, new_state = jax.vmap(one_region)(mean, outer_state, base, group)
        updates, update_norm = self.guard.clip(updates)
        mean_norm = norm_per_row(mean)
        if if_news:
            moves_R &= mean_norm > 0
        moved = select(moves_R, jax.tree.map(jnp.add, base, updates), base)
        pull_norm = norm_per_row(jax.tree.map(jnp.subtract, base, group))
        metrics = {
            "mean_norm": mean_norm,
            "update_norm": jnp.where(moves_R, update_norm, 0.0),
            "pull_norm": jnp.where(moves_R, pull_norm, 0.0),
        }
        new_state = select(moves_R, new_state, outer_state)
        return fragmentation.put(anchor, rows, moved), new_state, None, (), metrics
