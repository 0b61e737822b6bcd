"""Refusals: settings that cannot work, or do not yet, when every region is a job of its own."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from lowcomm_jax.compression import Codec
from lowcomm_jax.mesh.regions import REGION
from lowcomm_jax.methods.base import Method
from lowcomm_jax.runtime.connect import JobExchange
from lowcomm_jax.schedule import Arrivals, Learners, TwoLevels
from lowcomm_jax.sync.round_functions import OutlierGuard


def exchange_problems(exchange: Any, regions: int, method: Method, mesh: Any, guard: OutlierGuard):
    """One line with its fix for each setting that keeps a job from exchanging with others."""
    if isinstance(exchange, str):
        known = exchange == "mesh"
        return [] if known else [f"exchange={exchange!r}: use 'mesh', or an exchange between jobs"]
    if not isinstance(exchange, JobExchange):
        return [f"exchange={exchange!r}: use 'mesh', exchange.store(...) or exchange.peers(...)"]
    found = []
    if exchange.count != regions:
        found.append(
            f"the exchange has {exchange.count} regions, the engine {regions}: make them equal"
        )
    if mesh.shape.get(REGION, 1) != 1:
        found.append(
            f"the mesh has {mesh.shape[REGION]} region slots, but this job is one region: use "
            "region=1, and fsdp or tensor for its devices"
        )
    if method.schedule.uneven and exchange.kind != "store":
        found.append(store_needed(method.name))
    return found + heal_problems(method, exchange.heal) + job_problems(method, regions, guard)


def store_needed(name: str) -> str:
    """Why regions at a pace of their own need the exchange that they need."""
    return (
        f"{name} between jobs: payloads must outlive who wrote them; use exchange.store "
        "(exchange=store)"
    )


def heal_problems(method: Method, heal: str) -> list[str]:
    """Where no vote can tell whose anchor is to be kept."""
    if heal == "stop":
        return []
    if method.adapts:
        return [
            f"heal={heal!r}: every trainer has an anchor of its own, and regions may part in some; "
            f"use heal='stop' with {method.name}"
        ]
    if not isinstance(method.schedule, Arrivals):
        return []
    return [
        f"heal={heal!r}: the record of an arrival has one region's anchor, and no majority; use "
        f"heal='stop' with {method.name}"
    ]


def job_problems(method: Method, regions: int, guard: OutlierGuard) -> list[str]:
    """One line with its fix for each setting that cannot be where every region is a job."""
    found = []
    if guard.outlier_factor is not None:
        found.append(
            f"outlier_factor={guard.outlier_factor}: a job does not know the other regions' norms "
            "when it sends; leave it out"
        )
    if regions > 2 and method.reduces_all and not _on_host():
        found.append(
            "payloads are averaged on the host's processor, beside the training: add cpu to "
            "JAX_PLATFORMS"
        )
    return found + _method_problems(method)


def _on_host() -> bool:
    try:
        return bool(jax.local_devices(backend="cpu"))
    except RuntimeError:
        return False


def _method_problems(method: Method) -> list[str]:
    """Methods that need more of the other regions than payloads at landings."""
    schedule, found = method.schedule, []

    def refuse(reason: str, fix: str) -> None:
        found.append(f"{method.name} between jobs: {reason}; {fix}")

    if method.signal == "gradient":
        refuse("it exchanges at every step", "use exchange='mesh'")
    found += adaptive_problems(method)
    if method.channels:
        refuse("channels exchange inside the inner steps' program", "use exchange='mesh'")
    if isinstance(schedule, Learners):
        found += _learner_problems(schedule)
    elif isinstance(schedule, TwoLevels):
        refuse("local servers are simulated only", "use exchange='mesh'")
    elif isinstance(schedule, Arrivals) != (method.base == "received"):
        refuse(
            "contributions are applied one by one in the order of their arrival alone",
            "give base='received' and schedule.Arrivals, or neither, or use exchange='mesh'",
        )
    elif schedule.uneven and not isinstance(schedule, Arrivals):
        refuse("regions at a pace of their own are simulated only", "use exchange='mesh'")
    if method.takes_own_parts:
        refuse("it applies a region's own part apart from the others'", "use exchange='mesh'")
    if isinstance(method.codec, Codec) and method.codec.increments:
        refuse(
            f"codec {method.codec.name} keeps a running mean of all regions, in which the share of "
            "one that was lost and comes back would stay for good",
            "use error feedback in its place, or exchange='mesh'",
        )
    if np.ndim(schedule.delay):
        refuse("one overlap for all regions is needed", "give a single number")
    return found


def adaptive_problems(method: Method) -> list[str]:
    """Trainers and batch policies whose regions cannot decide alike, one line with its fix each."""
    if not method.adapts:
        return []
    schedule, found = method.schedule, []
    at_once = not np.any(np.asarray(schedule.delay)) and not schedule.land_after_send
    plain = schedule.fragments == 1 and at_once and not schedule.header_floats()
    own = method.topology is not None or method.anchors != "shared" or method.base == "received"
    if not plain or own or schedule.uneven:
        found.append(
            f"{method.name} between jobs: batches and merges follow from rounds that land whole "
            "and at once, in all regions: use one fragment and no overlap, or exchange='mesh'"
        )
    if getattr(method.inner_batching, "scope", "within") == "across":
        found.append(
            "scope='across': a mean gradient of all regions would be exchanged at every round's "
            "first step; use scope='within', or exchange='mesh'"
        )
    if method.trainers is not None and method.trainers.hurt_bound is not None:
        found.append(
            f"hurt_bound={method.trainers.hurt_bound}: each region would judge a merge by a loss "
            "of its own rounding, and they could part; leave it out, or use exchange='mesh'"
        )
    return found


def memory_problems(name: str, value: Any) -> list[str]:
    """Where each region would find a largest microbatch of its own, by what its devices hold."""
    if value is None:
        return []
    fix = "give largest_microbatch, the same for all"
    return [f"{name}={value}: regions between jobs could plan different batches; {fix}"]


def _learner_problems(schedule: Learners) -> list[str]:
    """Settings of independent learners that cannot be where each is a job."""
    found = [
        f"{name}={value}: between jobs learners are as fast, and as often away, as they are; leave "
        "it out"
        for name, value in (("speeds", schedule.speeds), ("outages", schedule.outages))
        if value
    ]
    if not np.ndim(schedule.delay) and schedule.delay < 1:
        found.append(
            f"overlap={schedule.delay}: between jobs a round is written, committed and read beside "
            "the training; use at least 1"
        )
    return found
