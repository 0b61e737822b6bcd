"""What an engine refuses before any work starts, one line with its fix each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lowcomm_jax.compression import Codec
from lowcomm_jax.exchange import GroupExchange
from lowcomm_jax.guard import Guard
from lowcomm_jax.methods.base import Method
from lowcomm_jax.network import VirtualClock, parse
from lowcomm_jax.regions import Regions


def layout_problems(
    regions: Regions, method: Method, weights: Any, guard: Guard, network: Any = None
) -> list[str]:
    """Regions, mesh, method, weights, guards and network that do not fit one another."""
    problems, count = regions.violations(), regions.count
    if method.schedule.needs_network and network is None:
        problems.append("gamma without T_c and T_s: give both, or measured=True, or a network")
    if isinstance(count, int):
        unfit = method.violations(count)
        if method.topology is not None and not problems + unfit:
            unfit = GroupExchange(regions, method.topology).violations()
        problems += unfit + weight_problems(weights, count)
        if isinstance(method.codec, Codec) and method.codec.increments and weights != "equal":
            problems.append(
                f"weights={weights!r}: codec {method.codec.name} keeps a running mean of equal "
                "regions; use weights='equal', or error_feedback"
            )
    if method.adapts:
        problems.append(
            f"{method.name} has a batch policy or trainers (inner_batching, trainers): use "
            "lowcomm_jax.AdaptiveEngine, which takes the same arguments"
        )
    problems += guard.violations()
    if method.topology is not None and guard.outlier_factor is not None:
        problems.append(
            f"outlier_factor={guard.outlier_factor}: gossiping regions do not know the median over "
            "all of them; leave it out"
        )
    return problems


def mode_problems(
    method: Method,
    regions: Regions,
    alone: bool,
    counts: dict[str, Any],
    offload: bool,
    hops: Any,
    loss_fn: Any,
) -> list[str]:
    """Counts that are none; offloading, or routing, that does not fit the method or the mesh.

    Args:
      alone: whether this job is one region of several.
    """
    problems, name = counting_problems(**counts), method.name
    if offload and method.signal == "gradient":
        problems.append(f"offload: {name} needs its anchor at every step; leave it out")
    if hops is None:
        routed = getattr(getattr(loss_fn, "__self__", None), "routed", False)
        unbooked = "hops is missing: this loss_fn moves values between regions; give Pipeline.hops"
        return problems + [unbooked] * routed
    if alone:
        problems.append(
            "hops: paths lead through one program; use exchange='mesh', or do not route"
        )
    elif not regions.violations() and regions.count != regions.slots:
        problems.append(
            f"hops: {regions.count} regions on {regions.slots} slots of the mesh; paths lead from "
            f"slot to slot: use a region axis of {regions.count}"
        )
    if method.signal == "gradient":
        problems.append(f"hops: the regions of {name} are equal, paths would mix nothing")
    if method.schedule.uneven:
        problems.append(f"hops: regions of {name} stand still at times, and paths lead through all")
    return problems


def weight_problems(weights: Any, count: int) -> list[str]:
    """`equal`, `tokens` or one finite number >= 0 per region, not all 0."""
    if isinstance(weights, str):
        known = weights in ("equal", "tokens")
        return [] if known else [f"weights={weights!r}: use 'equal', 'tokens' or {count} numbers"]
    given = np.asarray(weights, np.float64)
    fine = given.shape == (count,) and np.isfinite(given).all() and (given >= 0).all()
    if fine and given.sum() > 0:
        return []
    return [f"weights={weights}: give {count} numbers >= 0, one of them positive"]


def counting_problems(**counts: Any) -> list[str]:
    """Settings that count something and must be whole numbers from 1."""
    return [
        f"{name}={value}: a whole number, at least 1, is needed"
        for name, value in counts.items()
        if not isinstance(value, int) or value < 1
    ]


def virtual_clock(network: Any, regions: int, seed: int) -> tuple[VirtualClock | None, list[str]]:
    """The clock of a network (None without one), and what keeps it from being used."""
    if network is None:
        return None, []
    try:
        links = parse(network)
    except ValueError as error:
        return None, [f"network: {error}"]
    count = len(links.regions)
    if count != regions:
        return None, [f"network has {count} regions, the engine {regions}: make them equal"]
    return VirtualClock(links, seed=seed, record=True), []


def participants_mask(participants: Sequence[bool] | None, count: int) -> np.ndarray:
    """Bool `[R]` of who takes part; None = all.

    Raises:
      ValueError: not one bool per region.
    """
    if participants is None:
        return np.ones(count, bool)
    mask = np.asarray(participants, bool)
    if mask.shape != (count,):
        raise ValueError(f"participants has shape {mask.shape}: give one bool per region ({count})")
    return mask


def check_batch(shape: tuple[int, ...], regions: Regions, accumulate: int) -> None:
    """Refuse staged batch leaves that do not fit; cheap enough for every call.

    Args:
      shape: of a leaf, [R, S, b, ...].

    Raises:
      ValueError: wrong number of regions, or a batch that does not divide.
    """
    count, cut = regions.count, regions.mesh.shape["fsdp"]
    if len(shape) < 3 or shape[0] != count:
        raise ValueError(f"batch leaves must be [{count} regions, per-region batch, ...]")
    if shape[2] % accumulate or (shape[2] // accumulate) % cut:
        raise ValueError(
            f"a per-region batch of {shape[2]} does not divide into accumulate={accumulate} "
            f"microbatches over fsdp={cut} devices: use a multiple of {accumulate * cut}, or "
            f"another mesh"
        )
