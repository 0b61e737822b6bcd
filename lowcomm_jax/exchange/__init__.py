"""How payloads travel between regions, and how many bytes that takes."""

from lowcomm_jax.exchange.between.connect import peers, store
from lowcomm_jax.exchange.between.errors import (
    Lost,
    Missing,
    Parted,
    Rejected,
    StoreUnavailable,
    Superseded,
)
from lowcomm_jax.exchange.between.lockstep import LockstepExchange
from lowcomm_jax.exchange.between.remote import Arrived, RemoteExchange
from lowcomm_jax.exchange.between.timing import Timing
from lowcomm_jax.exchange.mesh import InSlices, MeshExchange
from lowcomm_jax.exchange.pairs import GroupExchange
from lowcomm_jax.exchange.traffic import (
    Traffic,
    all_gather,
    in_halves,
    pair,
    two_phase,
    two_shot,
)

JobExchange = RemoteExchange | LockstepExchange
"""Of a job that is one region of several."""

__all__ = [
    "Arrived",
    "GroupExchange",
    "InSlices",
    "JobExchange",
    "LockstepExchange",
    "Lost",
    "MeshExchange",
    "Missing",
    "Parted",
    "Rejected",
    "RemoteExchange",
    "StoreUnavailable",
    "Superseded",
    "Timing",
    "Traffic",
    "all_gather",
    "in_halves",
    "pair",
    "peers",
    "store",
    "two_phase",
    "two_shot",
]
