"""The device mesh: cut into regions and pipeline stages, and the processes that hold it.

In: a number of regions and JAX's devices. Out: `Regions`, which lifts one region's function to all
of them and takes the one mean over regions; collectives between pipeline stages; arrays placed on
the mesh, fetched from it, or kept in host memory; the leader of a job of several processes, which
decides for all of them.
"""

from lowcomm_jax.mesh.arrays import fetch, place, whole
from lowcomm_jax.mesh.leader import Leader, ProcessLostError, leader, opened
from lowcomm_jax.mesh.regions import REGION, Regions, default_mesh, make_mesh

__all__ = [
    "REGION",
    "Leader",
    "ProcessLostError",
    "Regions",
    "default_mesh",
    "fetch",
    "leader",
    "make_mesh",
    "opened",
    "place",
    "whole",
]
