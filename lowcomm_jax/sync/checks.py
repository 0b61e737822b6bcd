"""Refusals of an engine before any work starts, one line with its fix each."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
import optax
from jax.sharding import Mesh

from lowcomm_jax import methods
from lowcomm_jax.compression import Codec
from lowcomm_jax.exchange import GroupExchange
from lowcomm_jax.mesh.regions import Regions
from lowcomm_jax.methods.base import Method
from lowcomm_jax.network import VirtualClock, parse
from lowcomm_jax.refused import Refused, refuse
from lowcomm_jax.sync.round_functions import OutlierGuard
from lowcomm_jax.sync.round_programs import EngineConfig
from lowcomm_jax.train.batch_blocks import MicrobatchCut


def refuse_other_types(loss_fn: Any, inner: Any, method: Any, mesh: Any, seed: Any) -> None:
    """Check that the arguments of an engine are what their names say.

    Raises:
      TypeError: lists those that are not, with the fix.
    """
    problems = []
    if not callable(loss_fn):
        problems.append(f"loss_fn={loss_fn!r}: give a function (params, batch, rng) -> loss")
    if not isinstance(inner, optax.GradientTransformation):
        fix = "give an Optax optimizer, as optax.adamw(1e-3)"
        if hasattr(inner, "gradient_transformation"):  # optax.MultiSteps
            fix = f"give optax.{type(inner).__name__}(...).gradient_transformation()"
        problems.append(f"inner={inner!r}: {fix}")
    if not isinstance(method, Method):
        name = method if isinstance(method, str) else getattr(method, "__name__", "")
        near = difflib.get_close_matches(name, methods.__all__, n=1) or ["diloco"]
        fix = f"call its factory, as lc.methods.{near[0]}(...)"
        problems.append(f"method={method!r} is no Method: {fix}")
    if not (mesh is None or isinstance(mesh, Mesh)):
        problems.append(
            f"mesh={mesh!r} is no Mesh: give one of lc.make_mesh(region=2), or leave it out"
        )
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        problems.append(f"seed={seed!r}: give a whole number")
    if problems:
        raise TypeError("an engine cannot be made of this:\n- " + "\n- ".join(problems))


def layout_problems(
    regions: Regions, method: Method, weights: Any, guard: OutlierGuard, network: Any = None
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
        equal = isinstance(weights, str) and weights == "equal"
        if isinstance(method.codec, Codec) and method.codec.increments and not equal:
            problems.append(
                f"weights={weights!r}: codec {method.codec.name} keeps a running mean of equal "
                "regions; use weights='equal', or error_feedback"
            )
        if method.base == "received":
            problems += _arrival_problems(method, weights, guard, count)
    if method.adapts:
        problems.append(
            f"{method.name} has a batch policy or trainers (inner_batching, trainers): use "
            "lowcomm_jax.AdaptiveEngine, which takes the same arguments"
        )
    problems += guard.violations()
    if method.channels and isinstance(weights, str) and weights == "tokens":
        problems.append(
            "weights='tokens': channels average by fixed weights; use 'equal', or a number a region"
        )
    if not method.has_anchor and guard.max_update_norm is not None:
        problems.append(
            f"max_update_norm={guard.max_update_norm}: {method.name} has no outer update; leave it "
            "out"
        )
    if method.topology is not None and guard.outlier_factor is not None:
        problems.append(
            f"outlier_factor={guard.outlier_factor}: gossiping regions do not know the median over "
            "all of them; leave it out"
        )
    return problems


def _arrival_problems(method: Method, weights: Any, guard: OutlierGuard, count: int) -> list[str]:
    """Settings that arrivals, each applied by itself, take no notice of: one line each."""
    found, name = [], method.name
    if not weight_problems(weights, count):
        numbers = np.ones(count) if isinstance(weights, str) else np.asarray(weights, np.float64)
        # With servers 0 counts like any other number.
        counted = numbers if method.servers is not None else numbers[numbers > 0]
        by_tokens = isinstance(weights, str) and weights != "equal"
        if by_tokens or np.unique(counted).size > 1:
            zero = "" if method.servers is not None else ", or 0 for regions that do not count"
            found.append(
                f"weights={weights!r}: {name} applies every arrival by itself, whatever its weight;"
                f" use 'equal'{zero}"
            )
    if guard.outlier_factor is not None:
        found.append(
            f"outlier_factor={guard.outlier_factor}: {name} applies every arrival by itself, and no"
            " median is known; leave it out"
        )
    if method.servers is not None and guard.max_update_norm is not None:
        found.append(
            f"max_update_norm={guard.max_update_norm}: {name} has servers, whose updates are not "
            "clipped; leave it out"
        )
    return found


def mode_problems(
    method: Method,
    regions: Regions,
    separate: bool,
    counts: dict[str, Any],
    offload: bool,
    hops: Any,
    loss_fn: Any,
) -> list[str]:
    """Wrong counts; offloading, or routing, that does not fit the method or the mesh.

    Args:
      separate: whether this job is one region of several.
      counts: name -> setting that must be a whole number from 1.
      offload, hops, loss_fn: as given to the engine.
    """
    problems, name = counting_problems(**counts), method.name
    if offload and method.signal == "gradient":
        problems.append(f"offload: {name} needs its anchor at every step; leave it out")
    if offload and method.servers is not None:
        problems.append(f"offload: the servers of {name} stay on the devices; leave it out")
    if hops is None:
        routed = getattr(getattr(loss_fn, "__self__", None), "routed", False)
        unbooked = "hops is missing: this loss_fn moves values between regions; give Pipeline.hops"
        return problems + [unbooked] * routed
    if separate:
        problems.append(
            "hops: paths lead through one program; use exchange='mesh', or do not route"
        )
    elif not regions.violations() and regions.count != regions.slots:
        problems.append(
            f"hops: {regions.count} regions on {regions.slots} slots of the mesh; paths lead from "
            f"slot to slot: use a region axis of {regions.count}"
        )
    if method.signal == "gradient":
        problems.append(
            f"hops: the regions of {name} are equal, paths would mix nothing; leave it out"
        )
    if method.schedule.uneven:
        problems.append(
            f"hops: regions of {name} stand still at times, and paths lead through all; leave it "
            "out, or use another method"
        )
    return problems


def weight_problems(weights: Any, count: int) -> list[str]:
    """Problems unless weights are `equal`, `tokens` or a finite number >= 0 a region, not all 0."""
    if isinstance(weights, str):
        known = weights in ("equal", "tokens")
        return [] if known else [f"weights={weights!r}: use 'equal', 'tokens' or {count} numbers"]
    given = np.asarray(weights, np.float64)
    fine = given.shape == (count,) and np.isfinite(given).all() and (given >= 0).all()
    if fine and given.sum() > 0:
        return []
    return [f"weights={weights}: give {count} numbers >= 0, one of them positive"]


def counting_problems(**counts: Any) -> list[str]:
    """Problems of settings that must be whole numbers from 1."""
    return [
        f"{name}={value!r}: a whole number, at least 1, is needed"
        for name, value in counts.items()
        if not isinstance(value, int) or value < 1
    ]


def virtual_clock(network: Any, regions: int, seed: int) -> tuple[VirtualClock | None, list[str]]:
    """(the clock of a network, or None without one; problems)."""
    if network is None:
        return None, []
    try:
        links = parse(network)
    except Refused as error:
        return None, [f"network: {line}" for line in error.lines]
    except ValueError as error:
        return None, [f"network: {error}"]
    count = len(links.regions)
    if count != regions:
        return None, [f"network has {count} regions, the engine {regions}: make them equal"]
    return VirtualClock(links, seed=seed, record=True), []


def microbatch_cut(
    config: EngineConfig, size: int | None, counts_R: Sequence[int] | None
) -> MicrobatchCut:
    """Check how batches are to be cut.

    Raises:
      ValueError: listing everything that cannot work.
    """
    if size is None:
        raise ValueError("counts_R counts microbatches: give their size, microbatch=")
    problems = microbatch_problems(config, [size])
    count = config.regions.count
    if counts_R is not None:
        given = list(counts_R)
        if len(given) != count or any(counting_problems(n=n) for n in map(_plain, given)):
            problems.append(f"counts_R={given}: give {count} whole numbers, at least 1")
        counts_R = tuple(map(_plain, given))
    refuse_microbatches(problems)
    return MicrobatchCut(size, counts_R)


def refuse_microbatches(problems: Sequence[str]) -> None:
    """Raise one error that lists them all, if there are any."""
    refuse("these microbatches cannot work", problems)


def microbatch_problems(config: EngineConfig, sizes: Sequence[int]) -> list[str]:
    """Why steps cannot run on microbatches of these sizes, one line with its fix each."""
    problems = [p for size in sizes for p in counting_problems(microbatch=size)]
    fsdp, method = config.regions.mesh.shape["fsdp"], config.method
    if not problems:
        uneven = [size for size in sizes if size % fsdp]
        problems += [
            f"microbatch={size} does not divide over fsdp={fsdp} devices: use a multiple of {fsdp}"
            for size in uneven
        ]
    if config.accumulate > 1:
        problems.append(
            f"accumulate={config.accumulate} cuts batches too: leave it out of the engine"
        )
    if sizes and method.channels:
        problems.append(
            f"{method.name} has channels, which exchange inside the program of fixed batches: "
            "leave microbatch= out, or cut it with Engine(accumulate=)"
        )
    if config.routed:
        problems.append(
            "hops: regions that route microbatches to one another need as many of them; cut the "
            "batch with Engine(accumulate=)"
        )
    return problems + _microbatch_unfit(method, config.network is not None)


def _microbatch_unfit(method: Method, has_network: bool) -> list[str]:
    problems = []
    if method.signal == "gradient":
        problems.append(
            f"{method.name} exchanges a gradient at every step and takes a fixed batch: leave "
            "microbatch= out, or cut it with Engine(accumulate=)"
        )
    if has_network:
        problems.append(
            "network: its seconds of a step are those of a fixed batch; cut it with "
            "Engine(accumulate=), or leave the network out"
        )
    return problems


def _plain(number: Any) -> Any:
    return int(number) if isinstance(number, np.integer) else number
