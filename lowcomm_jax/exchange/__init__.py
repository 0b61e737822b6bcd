"""How payloads travel between regions, and how many bytes that takes."""

from lowcomm_jax.exchange.mesh import MeshExchange
from lowcomm_jax.exchange.pairs import GroupExchange
from lowcomm_jax.exchange.traffic import Traffic, all_gather, pair, two_shot

__all__ = ["GroupExchange", "MeshExchange", "Traffic", "all_gather", "pair", "two_shot"]
