"""The outer step of gossip: every region has an anchor, and means run over a round's groups."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from lowcomm_jax.exchange import GroupExchange
from lowcomm_jax.exchange.mesh import without_lead
from lowcomm_jax.params import fragments as fragmentation
from lowcomm_jax.sync.round_functions import AnchorState, Contributions, RoundFunctions, select


def gossip_step(
    functions: RoundFunctions,
    groups: GroupExchange,
    held: AnchorState,
    sent: Contributions,
    rows,
    told=None,
    *,
    if_news=False,
    level=0,
    rules=0,
):
    """Step 1 of a landing: phi_i <- phi_i + outer(mean_G Delta; phi_i, mean_G phi).

    The means run over the members of a region's group that take part. The anchor of a member that
    does not moves, too, unless the rule reads own pseudo-gradients (`Gossip.reads_own`); in a group
    where no member takes part no anchor moves.

    Args:
      groups: reduces over the groups of a round.
      sent: with the round's `draw`. There are no personal codecs, and the landing does the
        exchange.
      told, rules: as in `RoundFunctions.outer_step`; gossip has one level.
      if_news: leave the anchors of a group alone whose mean is exactly 0.

    Returns:
      (held, metrics `[R]`): `pull_norm` is the distance of an anchor from the mean of its group
      before it moves, 0 where it does not.
    """
    del level
    anchor, outer_state, draw = held.anchor, held.outer, sent.draw
    base = fragmentation.take(anchor, rows)
    anchors = base if draw.anchors is None else draw.anchors
    given = sent.payload, anchors, sent.weight, draw.members, without_lead(base)
    mean, group, moves_R = groups.means(*given)

    (rule, _), told, read = functions.rules_K[rules], told or {}, {"group_anchor": group}
    if groups.topology.reads_own:
        payload, weight_R = sent.payload, sent.weight
        if draw.row is not None:
            payload, weight_R = jax.tree.map(lambda x: x[draw.row][None], (payload, weight_R))
        read["own"] = functions.own_part(payload, weight_R, base, functions.exchange)
        moves_R &= weight_R > 0

    def one_region(mean, state, anchor, read):
        return rule.update(mean, state, anchor, **read, **told)

    updates, new_state = jax.vmap(one_region)(mean, outer_state, base, read)
    pull = jax.tree.map(jnp.subtract, base, group)
    mean_norm, update_norm, pull_norm = functions.norms(mean, updates, pull)
    updates, update_norm = functions.clip(updates, update_norm)
    if if_news:
        moves_R &= mean_norm > 0
    moved = select(moves_R, jax.tree.map(jnp.add, base, updates), base)
    metrics = {
        "mean_norm": mean_norm,
        "update_norm": jnp.where(moves_R, update_norm, 0.0),
        "pull_norm": jnp.where(moves_R, pull_norm, 0.0),
    }
    new_state = select(moves_R, new_state, outer_state)
    return AnchorState(fragmentation.put(anchor, rows, moved), new_state), metrics
