"""Options of XLA for programs of inner steps, each with its reason.

Figures are ahead of time, for 150M with 8 sequences a device on `h100:2x8`.
"""

from __future__ import annotations

from typing import Any

from lowcomm_jax.compat import KNOWS_EARLY_STARTS, is_gpu
from lowcomm_jax.mesh.regions import Regions

# So many collectives are in flight at most. A loop counts with those inside it (FSDP): without room
# for both, XLA schedules an exchange before or behind the loop.
OVERLAP_LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"
INSIDE = 4  # collectives of an inner step in flight at once, beside payloads
ALONE = 2  # without payloads: one moves, and one waits for it
LAYER = 20_000_000  # bytes of one layer's matrices at 150M parameters; see `inner_options`

_ALWAYS = {
    # Without it nothing is scheduled between a collective's start and its end.
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # cuBLASLt adds residuals and computes GELU in the products themselves; Triton's do not.
    "xla_gpu_enable_triton_gemm": False,
    # Products with operands below 64 MiB are merged by default: copies put them side by side, which
    # adds 4.3 % to a step.
    "xla_gpu_dot_merger_threshold_mb": 1,
}


def inner_options(regions: Regions, in_flight: int = 0) -> dict[str, Any] | None:
    """Options for programs of inner steps on the devices of `regions`; None = XLA's own.

    Args:
      in_flight: payloads that are exchanged beside the steps.
    """
    if not is_gpu(regions.mesh.devices.flat[0]):
        return None
    options = {**_ALWAYS, OVERLAP_LIMIT: in_flight + INSIDE if in_flight else ALONE}
    if KNOWS_EARLY_STARTS:  # from jax 0.10.2; a step waits 0.14 ms instead of 0.20
        options["xla_gpu_experimental_collective_start_as_early_as_possible"] = True
    fsdp = regions.mesh.shape.get("fsdp", 1)
    if fsdp > 1:
        # About a layer at a time: each layer's sums run beside the next one's products. By itself
        # XLA sums the gradients of all layers at once, behind the last product. The first counts
        # gathered bytes, the second bytes of results.
        options["xla_gpu_all_gather_combine_threshold_bytes"] = LAYER
        options["xla_gpu_reduce_scatter_combine_threshold_bytes"] = LAYER // fsdp
    return options
