"""Exchanges of a method beside its main one, or instead of it: which values travel, and when.

In: a `Channel` in `Method.channels`: a source (parameters, or a field of the inner optimizer's
state), a selection of its entries, a period, a delay. Out: nothing; a channel is a description.
`sync.channel_exchange` does what it says, inside the program of the inner steps.

- `selection`: which entries travel, from a seed that all regions share: no index ever does.
- `source`: finds the leaves that a channel averages.
"""

from lowcomm_jax.channels.channel import Channel
from lowcomm_jax.channels.selection import Everything, Partitioned, Sampled, Selection, Shuffled

__all__ = ["Channel", "Everything", "Partitioned", "Sampled", "Selection", "Shuffled"]
