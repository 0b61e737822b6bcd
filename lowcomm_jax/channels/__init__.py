"""Exchanges of a method beside its main one, or instead of it: which values travel, and when.

In: a source (parameters, or a field of the inner optimizer's state), a selection of its entries, a
period, a delay, a codec. Out: a `Channel` for `Method.channels`. A channel is only a description;
`loops.channel_exchange` makes the exchanges, inside the program of the inner steps.

- `selection`: which entries travel, from a seed that all regions share, so that no index travels.
- `source`: finds the leaves that a channel averages.
"""

from lowcomm_jax.channels.channel import Channel
from lowcomm_jax.channels.selection import Everything, Partitioned, Sampled, Selection, Shuffled

__all__ = ["Channel", "Everything", "Partitioned", "Sampled", "Selection", "Shuffled"]
