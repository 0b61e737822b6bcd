"""The device mesh: cut into regions and pipeline stages, and the processes that hold it.

In: a number of regions and JAX's devices. Out:

- `regions`: `Regions` lifts one region's function to all regions, and takes the mean over them;
- `stages`: collectives between the pipeline stages of a region, and GPipe's schedule;
- `arrays` and `offload`: arrays placed on the mesh, fetched from it, or kept in host memory;
- `launchers`: the number of this process and of all processes, and how they meet;
- `leader` (with `serialization`): in a job of several processes the first one decides for all.
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
