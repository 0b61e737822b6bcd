"""Plan a run before paying for it: bytes, utilisation, hours, memory and expected loss per method.

    python -m experiments plan --config=configs/plan/dilocox_107b.py

Prints tables, writes `plan.json` and `plan.png` (utilisation against bandwidth; loss against hours)
into the work directory. Config fields: see `configs/plan/template.py`.
"""

import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from experiments.plan_show import picture, show
from lowcomm_jax.network import reproduction
from lowcomm_jax.network.errors import raise_all
from lowcomm_jax.network.links import Network
from lowcomm_jax.network.parse import parse
from lowcomm_jax.network.plan_methods import plan_method
from lowcomm_jax.network.plan_search import Choice, search
from lowcomm_jax.network.planner import PlanRow, Workload, decoder_workload, plan
from lowcomm_jax.network.shapes import MODELS, Decoder, param_count

FIELDS = frozenset(
    [
        "name",
        "model",
        "network",
        "compute_s",
        "devices_per_region",
        "flops_per_device",
        "mfu",
        "tokens",
        "tokens_per_step",
        "mesh",
        "microbatch_tokens",
        "remat",
        "methods",
        "loss_bound",
        "published",
        "notes",
    ]
)
COMPARISONS = {
    "": lambda: [],
    "dilocox": reproduction.dilocox_table,
    "streaming": lambda: (
        [c for _, _, c in reproduction.bandwidth_table()] + reproduction.hours_table()
    ),
    "noloco": reproduction.noloco_table,
    "sync": reproduction.sync_table,
}


def main(config: Any, workdir: str | Path, console: Console | None = None) -> dict:
    """Plan what a config describes; print, write and return the result.

    Args:
        config: ml-collections ConfigDict or mapping, fields as in `configs/plan/template.py`.
        workdir: folder for `plan.json` and `plan.png`, made if missing.
        console: where tables go; None = standard output.

    Returns:
        The content of `plan.json`.

    Raises:
        ValueError: all violations of the config in one message.
    """
    started = time.perf_counter()
    fields = dict(config) if isinstance(config, Mapping) else config.to_dict()
    work, methods = workload(fields)
    rows = plan(work, methods)
    best, tried, left_out = search(work, float(fields.get("loss_bound", 0.03)))
    comparisons = COMPARISONS[fields.get("published", "")]()
    seconds = time.perf_counter() - started
    result = {
        "name": fields.get("name", "plan"),
        "notes": fields.get("notes", ""),
        "network": _network_entry(work.network),
        "params": param_count(work.params),
        "step_s": work.step_s,
        "steps": work.steps,
        "rows": [_row_entry(row) for row in rows],
        "best": _choice_entry(best) if best else None,
        "settings_tried": len(tried),
        "settings_left_out": left_out,
        "published": [{**dataclasses.asdict(c), "error": c.error} for c in comparisons],
        "planning_seconds": seconds,
    }
    folder = Path(workdir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(result, indent=1) + "\n")
    picture(rows, work, folder / "plan.png", result["name"])
    show(result, rows, console or Console())
    return result


def workload(fields: Mapping[str, Any]) -> tuple[Workload, list]:
    """Turn config fields into a workload and methods.

    Raises:
        ValueError: all violations in one message.
    """
    found = [
        f"field {k!r} is unknown: use {', '.join(sorted(FIELDS))}"
        for k in sorted(set(fields) - FIELDS)
    ]
    found += [
        f"field {k!r} is missing"
        for k in ("model", "network", "methods", "tokens_per_step")
        if k not in fields
    ]
    published = fields.get("published", "")
    if published not in COMPARISONS:
        found.append(
            f"published {published!r} is unknown: use one of {', '.join(map(repr, COMPARISONS))}"
        )
    model = _collect(found, lambda: _model(fields.get("model")))
    network = _collect(found, lambda: parse(fields["network"])) if "network" in fields else None
    methods = [
        _collect(found, lambda m=m: plan_method(m))
        for m in _method_specs(fields.get("methods", {}))
    ]
    if not methods:
        found.append("methods is empty: name at least one")
    raise_all("plan config", found)
    step_s = fields.get("compute_s") or _step_seconds(model, network, fields)
    tokens = fields.get("tokens") or 20.0 * param_count(model.params())
    work = decoder_workload(
        model,
        network.with_compute(step_s),
        float(tokens),
        float(fields["tokens_per_step"]),
        mesh=dict(fields.get("mesh") or {}),
        microbatch_tokens=int(fields.get("microbatch_tokens") or 0),
        remat=bool(fields.get("remat", True)),
    )
    return work, methods


def _collect(found: list[str], build) -> Any:
    """Run a builder; keep its message instead of stopping at the first bad field."""
    try:
        return build()
    except ValueError as error:
        found.append(str(error))
        return None


def _model(spec: Any) -> Decoder:
    if isinstance(spec, str):
        if spec not in MODELS:
            raise ValueError(
                f"model {spec!r} is unknown: use {', '.join(MODELS)} or give layers, width, mlp, "
                "..."
            )
        return MODELS[spec]
    names = set(Decoder.__dataclass_fields__)
    given = set(spec or ())
    needed = {"layers", "width", "mlp", "heads", "vocab"}
    if not needed <= given <= names:
        raise ValueError(
            f"model has fields {sorted(given)}: it needs {sorted(needed)} and knows {sorted(names)}"
        )
    return Decoder(**spec)


def _method_specs(methods: Any) -> list:
    if isinstance(methods, Mapping):
        return [{"name": name, **dict(spec)} for name, spec in methods.items()]
    return list(methods)


def _step_seconds(model: Decoder, network: Network, fields: Mapping[str, Any]) -> float:
    """Give 6 N tokens / (devices x FLOP/s x MFU) of one region."""
    needed = ("devices_per_region", "flops_per_device", "mfu")
    missing = [k for k in needed if not fields.get(k)]
    raise_all(
        "plan config", [f"field {k!r} is missing: give it, or give compute_s" for k in missing]
    )
    flops = 6.0 * param_count(model.params()) * fields["tokens_per_step"] / network.size
    return flops / (fields["devices_per_region"] * fields["flops_per_device"] * fields["mfu"])


def _network_entry(network: Network) -> dict:
    return {
        "name": network.name,
        "regions": list(network.regions),
        "slowest_gbps": network.slowest_gbps,
        "largest_delay_s": float(
            network.delay_RxR[~np.eye(network.size, dtype=bool)].max(initial=0.0)
        ),
        "source": network.source,
        "confidence": network.confidence,
    }


def _row_entry(row: PlanRow) -> dict:
    method = {k: v for k, v in dataclasses.asdict(row.method).items() if k != "state"}
    entry = {
        k: v
        for k, v in vars(row).items()
        if k not in ("method", "memory", "scales", "curve", "needed_gbps")
    }
    return {
        **entry,
        "method": method,
        "warnings": list(row.warnings),
        "scales": row.scales.tolist(),
        "curve": row.curve.tolist(),
        "needed_gbps": {f"{target:.0%}": gbps for target, gbps in row.needed_gbps.items()},
        "memory": {
            "state_bytes": row.memory.state,
            "state_total": row.memory.state_total,
            "activations_estimate": row.memory.activations,
            "stage": row.memory.stage,
            "stage_bytes": list(row.memory.stage_bytes),
        },
    }


def _choice_entry(choice: Choice) -> dict:
    method = choice.method
    return {
        "period": method.period,
        "fragments": method.fragments,
        "tau": method.tau_steps,
        "codec": method.codec,
        "utilisation": choice.utilisation,
        "penalty_nats": choice.penalty_nats,
        "penalty_confidence": method.penalty().confidence,
        "bytes_per_step": choice.bytes_per_step,
    }
