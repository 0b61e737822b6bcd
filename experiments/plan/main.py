"""Plan a run before paying for it: bytes, utilisation, hours, memory and expected loss per method.

    python -m experiments plan --config=configs/plan/dilocox_107b.py

Prints one screen: memory, hours, bytes, price, the frontier of cost against published loss, and the
commands that start the first methods of it. `--explain` says which number matters most, `--details`
prints all tables.

Writes `plan.json`, `plan.png` (utilisation against bandwidth; loss against hours) and a training
config a method into the work directory. `report RUN --against=plan.json` later compares a run with
the plan. Config fields: `plan --help --config=configs/plan/template.py`; llama_7b, llama_8b and
llama_70b beside it are ready to use.

With `--target=h100:2x8` and a training config it compiles the run's programs for that target
(`plan --target=h100:2x8 --help`). With `--goodput` it computes what failures cost
(`plan --goodput --help`).
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from experiments.cli import WORKDIR, Flags, config_asked_for, values_refused
from experiments.plan.answer import answer
from experiments.plan.answer import explain as explanation
from experiments.plan.config import descriptions, read
from experiments.plan.screen import command, show_answer, show_explanation
from experiments.plan.show import picture, show
from experiments.plan.start import write_start
from experiments.progress import Work, plain_console
from lowcomm_jax.network import BASELINE
from lowcomm_jax.network.links import Network
from lowcomm_jax.planner.plan import PlanRow, plan
from lowcomm_jax.planner.search import Choice, search

_OF_THE_MEMORY = ("state_total", "estimates", "estimate_total")


def main(argv: Sequence[str]) -> int:
    """Plan as the command line says; returns the exit code."""
    options = Flags()
    options.text("workdir", None, WORKDIR)
    options.switch("explain", "say which number drives the hours, the memory and the price")
    options.switch("details", "print all tables")
    config, folder, _ = config_asked_for("plan", argv, options, __doc__, descriptions)
    values = options.values
    with values_refused("plan"):
        planned(config, values.workdir or folder, explain=values.explain, details=values.details)
    return 0


def planned(
    config: Any,
    workdir: str | Path,
    console: Console | None = None,
    explain: bool = False,
    details: bool = False,
) -> dict:
    """Plan what a config describes; print, write and return the result.

    Args:
        config: ml-collections ConfigDict or mapping, fields as in `configs/plan/template.py`.
        workdir: folder for `plan.json` and `plan.png`, made if missing.
        console: where tables go; None = standard output.
        explain, details: print these, too.

    Returns:
        The content of `plan.json`.

    Raises:
        ValueError: all violations of the config in one message.
    """
    started = time.perf_counter()
    request = read(config if isinstance(config, Mapping) else config.to_dict())
    fields, work = request.fields, request.work
    rows = plan(work, request.methods)
    with Work("plan: settings tried") as shown:
        best, tried, left_out = search(work, fields["loss_bound"], progress=shown.at)
    seconds = time.perf_counter() - started
    result = {
        **{name: fields[name] for name in ("name", "notes", "loss_bound")},
        "baseline": BASELINE,
        "scenario": work.scenario.text(),
        "network": _network_entry(work.network),
        "params": work.model.size,
        "network_spec": _plain(fields["network"]),
        **{k: getattr(work, k) for k in ("tokens", "tokens_per_step", "step_s", "steps")},
        "rows": [_row_entry(row) for row in rows],
        "best": _choice_entry(best) if best else None,
        "settings_tried": len(tried),
        "settings_left_out": left_out,
        "planning_seconds": seconds,
        "answer": answer(request, rows),
    }
    folder = Path(workdir)
    folder.mkdir(parents=True, exist_ok=True)
    result["starts"] = _write_starts(result, folder)
    (folder / "plan.json").write_text(json.dumps(result, indent=1) + "\n")
    picture(rows, work, folder / "plan.png", result["name"])
    console = console or plain_console()
    show_answer(result, rows, console)
    if explain:
        best = next(row for row in rows if row.method.name == result["answer"]["best"][0])
        show_explanation(result, best, explanation(request, best), console)
    if details:
        show(result, rows, console)
    return result


def _write_starts(result: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """A training config for every method that has one; name -> the command that starts it."""
    starts = {}
    for name, entry in result["answer"]["rows"].items():
        if entry["train"] is not None:
            path = folder / f"{name}.py"
            write_start(path, entry["train"], f"{result['name']}, {name}")
            starts[name] = command(path, name)
    return starts


def _plain(spec: Any) -> Any:
    """A network as it was given, for JSON."""
    return spec if isinstance(spec, str) else json.loads(json.dumps(spec, default=dict))


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
    kept = (
        "name",
        "preset",
        "period",
        "fragments",
        "tau",
        "codec",
        "rank",
        "eager",
        "stalls",
        "law",
    )
    method = {k: getattr(row.method, k) for k in kept}
    others = ("method", "played", "memory", "loss", "scales", "curve", "needed_gbps")
    others += ("warnings", "requests")
    return {
        **{k: v for k, v in vars(row).items() if k not in others},
        "method": {**method, "route": row.route},
        "repeats": row.played.repeats,
        "law_loss": row.loss.law,
        "law_label": row.loss.law_label,
        "loss_with_penalty": row.loss.total,
        "loss_with_penalty_label": row.loss.total_label,
        "warnings": list(row.warnings),
        "requests": row.requests and {**vars(row.requests), "total": row.requests.total},
        "scales": row.scales.tolist(),
        "curve": row.curve.tolist(),
        "needed_gbps": {f"{target:.0%}": gbps for target, gbps in row.needed_gbps.items()},
        "memory": {
            "state_bytes": row.memory.state,
            **{k: getattr(row.memory, k) for k in _OF_THE_MEMORY},
        },
    }


def _choice_entry(choice: Choice) -> dict:
    method = choice.method
    return {
        "period": method.period,
        "fragments": method.fragments,
        "tau": method.tau,
        "codec": method.codec,
        "utilisation": choice.utilisation,
        "penalty_nats": choice.penalty_nats,
        "penalty_confidence": method.penalty().confidence,
        "bytes_per_step": choice.bytes_per_step,
    }
