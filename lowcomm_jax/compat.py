"""Names of JAX and Orbax that are experimental or may move; only this module uses them.

Each has a test (`tests/test_compat.py`) that fails when an upgrade moves the name.
"""

import os
from typing import Any

import jax
from jax._src import clusters, distributed
from jax.extend.core import jaxprs_in_params

__all__ = [
    "KNOWS_EARLY_STARTS",
    "all_gather_invariant",
    "array_write_spec",
    "coordination",
    "coordinator_host",
    "detected",
    "is_gpu",
    "jaxprs_in_params",
    "process_count",
    "process_index",
]

# Whether XLA has `xla_gpu_experimental_collective_start_as_early_as_possible`: with jax 0.10.0 and
# 0.10.1 a program that sets it is refused.
KNOWS_EARLY_STARTS = jax.__version_info__ >= (0, 10, 2)
_NOT_CALLED = "jax.distributed.initialize() was not called; call it (lc.connect_processes) first"


def coordinator_host() -> str:
    """Host on which the first process of this `jax.distributed` job is reached.

    Raises:
      RuntimeError: `jax.distributed.initialize` was not called.
    """
    address = distributed.global_state.coordinator_address
    if address is None:
        raise RuntimeError(_NOT_CALLED)
    return address.rpartition(":")[0].strip("[]")


def detected(launcher: str) -> tuple[int, int, str] | None:
    """What JAX's own detection reads from a launcher's variables, before JAX connects to anything.

    Args:
      launcher: "slurm" or "ompi" (Open MPI 4), as `jax.distributed.initialize` calls them.

    Returns:
      Number of processes, number of this one, and HOST:PORT at which the first one listens; None =
      this launcher has not started this process.

    Raises:
      ValueError: its variables cannot be read.
    """
    cluster = {"slurm": clusters.SlurmCluster, "ompi": clusters.OmpiCluster}[launcher]
    if not cluster.is_env_present():
        return None
    port = os.environ.get("JAX_COORDINATOR_PORT")
    try:
        address = cluster.get_coordinator_address(timeout_secs=None, override_coordinator_port=port)
        numbers = cluster.get_process_count(), cluster.get_process_id()
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{launcher}: its variables cannot be read ({error})") from error
    host, _, port = address.rpartition(":")
    if ":" in host:  # an address of IPv6, which JAX leaves without its brackets
        host = f"[{host}]"
    return *numbers, f"{host}:{port}"


def coordination() -> Any:
    """The client of this `jax.distributed` job's coordinator: keys that all processes share.

    Raises:
      RuntimeError: `jax.distributed.initialize` was not called.
    """
    if distributed.global_state.client is None:
        raise RuntimeError(_NOT_CALLED)
    return distributed.global_state.client


def all_gather_invariant(x: jax.Array, axis_name: str | tuple[str, ...], *, axis: int) -> jax.Array:
    """Gather `x` along `axis_name`; the result is typed equal on every device of that axis."""
    return jax.lax.all_gather(x, axis_name, axis=axis, tiled=True, to="invarying")


def is_gpu(device: jax.Device) -> bool:
    """Whether a device, present or not, is a GPU: names of the platform differ by maker."""
    return device.platform in ("gpu", "cuda", "rocm")


def process_count() -> int:
    """Number of processes of this job; unlike `jax.process_count` it starts no backend."""
    return distributed.global_state.num_processes


def process_index() -> int:
    """Number of this process, from 0; unlike `jax.process_index` it starts no backend."""
    return distributed.global_state.process_id


def array_write_spec(x: Any, info: Any) -> dict[str, Any]:
    """How TensorStore writes an array of the host that one process has whole.

    Args:
      x: a NumPy array.
      info: Orbax's `ParamInfo` of it.
    """
    from orbax.checkpoint._src.serialization import tensorstore_utils  # slow to import

    whole = {"global_shape": x.shape, "local_shape": x.shape, "dtype": x.dtype}
    spec = tensorstore_utils.build_array_write_spec(info, **whole, use_ocdbt=True, process_index=0)
    return spec.json
