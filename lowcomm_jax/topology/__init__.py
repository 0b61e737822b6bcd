"""Who averages with whom, and which stages of which regions a microbatch passes through.

In: a round's or step's number and a seed. Out: groups of regions (`groups`, `Gossip`), or paths
through pipeline stages (`pipeline_paths`): pure functions that every region computes by itself.
`consensus` measures how far gossiping regions are apart; it reads the training state.
"""

from lowcomm_jax.topology.gossip import Gossip, Groups, groups, member_table, raw_stream

__all__ = ["Gossip", "Groups", "groups", "member_table", "raw_stream"]
