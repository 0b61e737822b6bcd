"""Low-communication, cross-region training of language models in JAX."""

from lowcomm_jax import batching, consensus, landing, methods, outer, topology
from lowcomm_jax.engine import Engine
from lowcomm_jax.probe import Probe
from lowcomm_jax.regions import make_mesh
from lowcomm_jax.views import global_params, region_params

__all__ = [
    "Engine",
    "Probe",
    "batching",
    "consensus",
    "global_params",
    "landing",
    "make_mesh",
    "methods",
    "outer",
    "region_params",
    "topology",
]
