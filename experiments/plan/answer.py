"""The short answer of a plan: memory, cost, the frontier of methods, the most important input."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.plan.config import PlanRequest
from experiments.plan.start import train_fields
from lowcomm_jax.planner.methods import PlanMethod
from lowcomm_jax.planner.plan import PlanRow, Workload, memory_plan, plan
from lowcomm_jax.planner.search import NEAR

BEST = 3
_DRIVERS = {
    "devices": "devices twice as fast (or as many, or as well used)",
    "links": "links twice as fast",
    "delays": "delays half as long",
}


def answer(request: PlanRequest, rows: Sequence[PlanRow]) -> dict[str, Any]:
    """Judge the rows of a plan.

    Args:
        request: the plan; prices and the size of a device are among its fields.
        rows: from `planner.plan`, in the order of the request's methods.

    Returns:
        Plain values for plan.json:

        - `devices_per_region`, `device_gb`; `activations`: whether memory has them;
        - `rows`: name -> a dict of

          - `gb`: state and estimates of a device, itself an estimate;
          - `above`: whether that is more than `device_gb`; None where that is not given;
          - `below_with`: the smallest fsdp with which it would not be, else None;
          - `gpu_hours`;
          - `price`: None, or `gpu`, `traffic` and `total` in the currency of the given prices;
          - `train`: fields of the training config, which `report --against` compares;
          - `no_train`: why there are none;

        - `frontier`: names of the rows that no other one beats: none is as cheap (without prices:
          as fast) at a smaller published loss penalty. The cheapest is first. Rows whose estimate
          is above `device_gb` or whose penalty is unknown are not among them;
        - `order`: all names: the frontier, then those with a known penalty, then the others;
        - `best`: the first `BEST` of them.
    """
    fields, work = request.fields, request.work
    devices = devices_per_region(request)
    found = {}
    for row in rows:
        gb = row.memory.total / 1e9
        above = None if fields["device_gb"] is None else gb > fields["device_gb"]
        train, reason = train_fields(request, row)
        found[row.method.name] = {
            "gb": gb,
            "above": above,
            "below_with": _fsdp_below(request, row) if above else None,
            "gpu_hours": row.hours * devices * work.network.size,
            "price": _price(fields, row, devices, work.network.size),
            "train": train,
            "no_train": reason,
        }
    ranked = sorted(rows, key=lambda row: _rank(row, found[row.method.name]))
    frontier = _frontier(ranked, found)
    order = [*frontier, *(row.method.name for row in ranked if row.method.name not in frontier)]
    return {
        "devices_per_region": devices,
        "device_gb": fields["device_gb"],
        "activations": request.model.decoder is not None,
        "rows": found,
        "frontier": frontier,
        "order": order,
        "best": order[:BEST],
    }


def _frontier(ranked: Sequence[PlanRow], found: Mapping[str, Any]) -> list[str]:
    """Rows with a smaller penalty than every cheaper one."""
    names, least = [], math.inf
    for row in ranked:
        name = row.method.name
        if row.penalty_nats is None or found[name]["above"] or row.penalty_nats >= least:
            continue
        names.append(name)
        least = row.penalty_nats
    return names


def devices_per_region(request: PlanRequest) -> int:
    """As given, or as many as the mesh has."""
    given = request.fields["devices_per_region"]
    return given or math.prod(request.work.mesh.values())


def _rank(row: PlanRow, found: Mapping[str, Any]) -> tuple:
    price = found["price"]
    cost = row.hours if price is None else price["total"]
    near = round(math.log(cost) / NEAR) if cost > 0 else -math.inf
    penalty = math.inf if row.penalty_nats is None else row.penalty_nats
    return bool(found["above"]), row.penalty_nats is None, near, penalty, row.sent_bytes_total


def _price(
    fields: Mapping[str, Any], row: PlanRow, devices: int, regions: int
) -> dict[str, float] | None:
    hour, gigabyte = fields["price_per_gpu_hour"], fields["price_per_gb"]
    if hour is None and gigabyte is None:
        return None
    gpu = row.hours * devices * regions * (hour or 0.0)
    traffic = row.sent_bytes_total * regions / 1e9 * (gigabyte or 0.0)
    return {"gpu": gpu, "traffic": traffic, "total": gpu + traffic}


def _fsdp_below(request: PlanRequest, row: PlanRow) -> int | None:
    """The smallest doubled fsdp whose estimate is below `device_gb`, up to 64 times; else None."""
    work, fields = request.work, request.fields
    others = work.mesh.get("stage", 1) * work.mesh.get("tensor", 1)
    fsdp = 2 * work.mesh.get("fsdp", 1)
    while fsdp * others <= 64 * devices_per_region(request):
        wider = dataclasses.replace(work, mesh={**work.mesh, "fsdp": fsdp})
        if memory_plan(row.played, wider).total <= fields["device_gb"] * 1e9:
            return fsdp
        fsdp *= 2
    return None


def explain(request: PlanRequest, row: PlanRow) -> dict[str, Any]:
    """Which input has the largest effect on the hours, the memory and the price of a row.

    Returns:
        - `changes`: list of (what is changed, hours then, their ratio to the plan's), the largest
          effect first: every input twice as good or as large, one at a time.
        - `driver`: "devices", "links" or "delays": the one that, twice as good, saves most hours.
        - `memory`: (what, bytes a device) of the largest part; `price`: "gpu", "traffic" or None.
    """
    work, method = request.work, _allowed(row.method)
    network = work.network
    changed = {
        _DRIVERS["links"]: (_on(work, network.scaled(bandwidth=2.0)), method),
        _DRIVERS["delays"]: (_on(work, network.scaled(delay=0.5)), method),
        _DRIVERS["devices"]: (
            _on(work, network.scaled(compute=0.5)),
            method,
        ),
        "half the tokens": (dataclasses.replace(work, tokens=work.tokens / 2), method),
    }
    if method.period > 1 and method.method.has_anchor:
        longer = method.with_period(2 * method.period)
        changed["twice the period (at a loss penalty)"] = (work, longer)
    hours = {}
    for what, (there, with_method) in changed.items():
        (found,) = plan(there, [with_method])
        hours[what] = found.hours
    order = sorted(hours, key=lambda what: hours[what])
    parts = {**row.memory.state, **row.memory.estimates}
    price = _price(request.fields, row, devices_per_region(request), network.size)
    largest = max(parts, key=parts.get)
    return {
        "changes": [(what, hours[what], hours[what] / row.hours) for what in order],
        "driver": min(_DRIVERS, key=lambda name: hours[_DRIVERS[name]]),
        "memory": (largest, parts[largest]),
        "price": price and ("gpu" if price["gpu"] >= price["traffic"] else "traffic"),
    }


def _on(work: Workload, network: Any) -> Workload:
    return dataclasses.replace(work, network=network)


def _allowed(method: PlanMethod) -> PlanMethod:
    """The method, planned even where a changed link makes its payloads pile up."""
    return dataclasses.replace(method, stalls=True, margin=None)
