"""What is computed at the servers of a method with two levels: pure functions.

`two_level_loop` compiles and calls them, and says what `TrainState.servers` holds.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from lowcomm_jax.sync.round_functions import norm_per_row, pseudo_gradient


def arrive(rule, codec, params, received, servers, states, region, group):
    """A worker's Delta moves its server's model, which the worker receives."""
    own, had = jax.tree.map(lambda x: x[region], (params, received))
    delta = pseudo_gradient(had, own, {})
    delta, states = _decoded(codec, delta, states, region, had)
    model, outer = _moved_by(rule, delta, servers["model"], servers["outer"], group)
    params = {k: x.at[region].set(model[k][group].astype(x.dtype)) for k, x in params.items()}
    received = {k: x.at[region].set(model[k][group]) for k, x in received.items()}
    return params, received, {**servers, "model": model, "outer": outer}, states


def _decoded(codec, delta, states, row, base):
    """What receivers decode of Delta from sender `row`, and all senders' codec states.

    `base` is what Delta is measured against, for codecs that read the weights.
    Without news, or with what is not finite, nothing is sent: it decodes to 0, and the state stays.
    """
    if codec is None:
        return delta, states
    size = norm_per_row(jax.tree.map(lambda x: x[None], delta))[0]
    news = jnp.isfinite(size) & (size > 0)
    base = base if codec.reads_params else None
    payload, new = codec.encode_if(news, delta, jax.tree.map(lambda x: x[row], states), base)
    found = codec.decode(payload, delta)
    found = jax.tree.map(lambda x: jnp.where(news, x, 0.0), found)
    return found, jax.tree.map(lambda x, y: x.at[row].set(y), states, new)


def _moved_by(rule, delta, model, outer, row):
    """Row `row` of a model and its outer state, moved by Delta, unless that is 0 or not finite."""
    one, state = jax.tree.map(lambda x: x[row], (model, outer))
    updates, new = rule.update(delta, state, one)
    size = norm_per_row(jax.tree.map(lambda x: x[None], delta))[0]
    moves = jnp.isfinite(size) & (size > 0)
    moved = jax.tree.map(lambda x, u: jnp.where(moves, x + u, x), one, updates)
    new = jax.tree.map(lambda n, o: jnp.where(moves, n, o), new, state)
    return jax.tree.map(lambda x, y: x.at[row].set(y), (model, outer), (moved, new))


def leave(codec, servers, group):
    """The change of a server's model since the last merge leaves for the global server."""
    merged = {k: x[group] for k, x in servers["merged"].items()}
    news = {k: merged[k] - x[group] for k, x in servers["model"].items()}
    news, states = _decoded(codec, news, servers.get("codec"), group, merged)
    update = {k: x.at[group].set(news[k]) for k, x in servers["update"].items()}
    return {**servers, "update": update} | ({} if codec is None else {"codec": states})


def reach(rule, anchor, outer, servers, group):
    """A server's update moves the global model, which leaves for that server."""
    delta = {k: x[group] for k, x in servers["update"].items()}
    anchor, outer = _moved_by(rule, delta, anchor, outer, 0)
    reply = {k: x.at[group].set(anchor[k][0]) for k, x in servers["reply"].items()}
    return anchor, outer, {**servers, "reply": reply}


def merge(blend, servers, group):
    """A server mixes the global model into its own."""
    model = {
        k: x.at[group].set((1 - blend) * x[group] + blend * servers["reply"][k][group])
        for k, x in servers["model"].items()
    }
    merged = {k: x.at[group].set(model[k][group]) for k, x in servers["merged"].items()}
    return {**servers, "model": model, "merged": merged}


def start_anew(params, received, servers, anchor):
    """All servers and workers take the global model; momenta stay."""

    def spread(tree):
        return {k: jnp.broadcast_to(anchor[k], x.shape).astype(x.dtype) for k, x in tree.items()}

    servers = {**servers, "model": spread(servers["model"]), "merged": spread(servers["merged"])}
    return spread(params), spread(received), servers
