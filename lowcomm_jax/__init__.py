"""Low-communication, cross-region training of language models in JAX."""

from lowcomm_jax import exchange, methods
from lowcomm_jax.adloco.engine import AdaptiveEngine
from lowcomm_jax.adloco.probe import Probe
from lowcomm_jax.aot import Target, ahead_of_time
from lowcomm_jax.engine import Engine
from lowcomm_jax.mesh.launchers import connect_processes
from lowcomm_jax.mesh.regions import make_mesh
from lowcomm_jax.params import roles
from lowcomm_jax.params_view import global_params, region_params
from lowcomm_jax.planner import Workload, plan
from lowcomm_jax.rules import batching, consensus, landing, merge, outer, topology
from lowcomm_jax.train.batch_sharding import shard_batch, shard_batch_loss

__version__ = "0.1.0"

__all__ = [
    "AdaptiveEngine",
    "Engine",
    "Probe",
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
