"""Virtual CPU devices: cut the processor into as many devices as the mesh asks for."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

import jax

from lowcomm_jax import compat

FLAG = "--xla_force_host_platform_device_count"


MEMORY = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_PREALLOCATE = ("XLA_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_PREALLOCATE")


def take_memory() -> None:
    """Let this process have 92 % of a GPU's memory, where the environment says nothing of it.

    JAX's own share is three quarters. The rest is for the driver and its libraries. Call it before
    the first device is used.
    """
    if not any(name in os.environ for name in (*MEMORY, *_PREALLOCATE)):
        os.environ[MEMORY[0]] = "0.92"


def memory_of_machine() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


MOST = 1024  # devices that a processor is cut into unasked; each takes threads and memory


def asked_for(mesh: Mapping[str, int]) -> int:
    """How many devices the sizes of a mesh ask for; 0 asks for nothing."""
    return math.prod(size for size in mesh.values() if size > 0)


def provide(mesh: Mapping[str, int], processes: int | None = None) -> None:
    """Cut the processor into as many devices as the sizes of a mesh ask for.

    Args:
      processes: of this job, which share the mesh; None = those that `jax.distributed` has found.

    Accelerators are left as they are, and so is a number that XLA_FLAGS or JAX's own setting gives.
    A mesh of more than `MOST` devices cuts nothing.
    JAX fixes its devices when they are first used: later calls change nothing, and a mesh that
    does not fit is refused when it is made.
    """
    wanted = asked_for(mesh) // (processes or compat.process_count())
    settled = FLAG in os.environ.get("XLA_FLAGS", "") or jax.config.jax_num_cpu_devices >= 0
    if not 2 <= wanted <= MOST or settled:
        return
    try:
        jax.config.update("jax_num_cpu_devices", wanted)
    except RuntimeError:
        return  # JAX has its devices already
