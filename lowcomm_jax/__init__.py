"""Low-communication, cross-region training of language models in JAX."""

import importlib
from typing import TYPE_CHECKING, Any

from lowcomm_jax import exchange, methods
from lowcomm_jax.engine import Engine
from lowcomm_jax.mesh.launchers import connect_processes
from lowcomm_jax.mesh.regions import make_mesh
from lowcomm_jax.params import roles
from lowcomm_jax.params_view import global_params, region_params
from lowcomm_jax.rules import batching, consensus, landing, merge, outer, topology
from lowcomm_jax.train.batch_sharding import shard_batch, shard_batch_loss

if TYPE_CHECKING:
    from lowcomm_jax.adloco.engine import AdaptiveEngine
    from lowcomm_jax.aot import Target, ahead_of_time
    from lowcomm_jax.planner import Workload, plan

__version__ = "0.1.0"

# Resolved when asked for: what trains does not need them, and they take a tenth of the import.
_LATER = {
    "AdaptiveEngine": "adloco.engine",
    "Target": "aot",
    "Workload": "planner",
    "ahead_of_time": "aot",
    "plan": "planner",
}

__all__ = [
    "AdaptiveEngine",
    "Engine",
    "Target",
    "Workload",
    "ahead_of_time",
    "batching",
    "connect_processes",
    "consensus",
    "exchange",
    "global_params",
    "landing",
    "make_mesh",
    "merge",
    "methods",
    "outer",
    "plan",
    "region_params",
    "roles",
    "shard_batch",
    "shard_batch_loss",
    "topology",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"lowcomm_jax.{_LATER[name]}"), name)
