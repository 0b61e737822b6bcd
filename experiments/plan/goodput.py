r"""Compute what failures cost: goodput and uptime of DP, elastic DP, DiLoCo, Streaming, Decoupled.

    python -m experiments plan --goodput [--config=configs/plan/goodput.py] \
        [--config.regions=512,512,512] [--config.region_mtbf_hours=99]

Goodput is the share of allocated chip time that does useful work, uptime the share of time at least
one region advances. The time of links is not in goodput: multiply by the share "busy" of a plan.
Writes goodput.json into the work directory. docs/plan.md says how every method reacts to a failure.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from experiments.cli import Flags, config_asked_for, values_refused
from experiments.progress import plain_console, right, say
from lowcomm_jax.planner.goodput import DP, FITTED, METHODS, Fleet, Goodput
from lowcomm_jax.planner.goodput_simulation import plan_goodput
from lowcomm_jax.refused import above_zero, is_unknown, not_negative, refuse, whole
from lowcomm_jax.settings import settings_of

DEFAULT = "configs/plan/goodput.py"
HOUR = 3600.0
_COSTS = ("stop_s", "restart_s", "overhead", "restart_overhead")
_PLAIN = (*_COSTS, "elastic_regions", "slice_chips", "spare_slices", "fragments")
_POSITIVE = ("step_s", "period")
_FROM_0 = ("repair_hours", "outage_hours", "overlap", "decoupled_period")
_MTBF = ("chip_mtbf_hours", "region_mtbf_hours")
_OF_FLEET = {name: setting.about for name, setting in settings_of(Fleet).items()}
FIELDS = {
    "name": "title of the answer",
    "notes": "a line that is printed under the title",
    "regions": _OF_FLEET["regions"],
    "chip_mtbf_hours": "Mean time between interrupts of a chip: one number, or one for each region "
    'as text, "99,99,40".',
    "region_mtbf_hours": "The same of a whole region's job, as logs show it; where it is given, "
    "chip_mtbf_hours is not read.",
    **{name: _OF_FLEET[name] for name in _PLAIN},
    "step_s": "seconds of an inner step",
    "period": "H of DiLoCo and Streaming, in steps",
    "repair_hours": _OF_FLEET["repair_s"],
    "outage_hours": _OF_FLEET["outage_s"],
    "overlap": "of Streaming: steps from a send to its landing",
    "decoupled_period": "P of Decoupled, in steps; 0 = what a learner had not sent is counted in "
    "stop_s (as in the fit).",
    "outage_mtbf_hours": _OF_FLEET["outage_mtbf_s"],
    "price_per_chip_hour": "price of a chip and hour, in any currency; None = unknown",
    "seed": "seed of the simulation",
}
"""Field -> what it is."""


def main(argv: Sequence[str]) -> int:
    """Simulate what the command line asks for; returns the exit code."""
    options = Flags()
    options.switch("goodput", "what failures cost")
    options.text("workdir", "runs/goodput", "where goodput.json goes")
    config, _, _ = config_asked_for(
        "plan --goodput", argv, options, __doc__, lambda _: FIELDS, DEFAULT
    )
    with values_refused("plan"):
        answer(config.to_dict(), options.values.workdir, plain_console())
    return 0


def answer(config: Mapping[str, Any], workdir: str | Path, console: Console) -> dict[str, Any]:
    """Simulate what a config describes; print, write and return the result.

    Raises:
        Refused: everything that is wrong with the config.
    """
    fleet = read(config)
    rows = plan_goodput(fleet, seed=config["seed"])
    where = {"chips": fleet.chips, "regions": len(fleet.regions)}
    result = {
        "name": config["name"],
        "notes": config["notes"],
        "fields": dict(config),
        "rows": [where | dataclasses.asdict(row) for row in rows],
        "fitted": {name: values._asdict() for name, values in FITTED.items()},
    }
    folder = Path(workdir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "goodput.json").write_text(json.dumps(result, indent=1) + "\n")
    _show(config, fleet, rows, console)
    return result


# -- the config --------------------------------------------------------------------------------


def read(config: Mapping[str, Any]) -> Fleet:
    """Turn config fields (`FIELDS`) into a fleet.

    Raises:
        Refused: everything that is wrong.
    """
    found = [f"field {name!r} is missing: give it" for name in FIELDS if name not in config]
    found += [f"field {name!r} {is_unknown(name, FIELDS)}" for name in config if name not in FIELDS]
    refuse("goodput config", found)
    found = whole("seed", config["seed"], 0)
    found += [line for name in _FROM_0 for line in not_negative(name, config[name])]
    found += [line for name in _POSITIVE for line in above_zero(name, config[name])]
    found += [line for n in config["regions"] for line in whole("regions", n)]
    if config["price_per_chip_hour"] is not None:
        found += not_negative("price_per_chip_hour", config["price_per_chip_hour"])
    outages = config["outage_mtbf_hours"]
    if outages is not None:
        found += above_zero("outage_mtbf_hours", outages)
    refuse("goodput config", found)
    fleet = Fleet(
        regions=tuple(config["regions"]),
        chip_mtbf_s=_chip_mtbf_s(config),
        repair_s=config["repair_hours"] * HOUR,
        outage_mtbf_s=None if outages is None else outages * HOUR,
        outage_s=config["outage_hours"] * HOUR,
        period_s=config["period"] * config["step_s"],
        overlap_s=config["overlap"] * config["step_s"],
        decoupled_period_s=config["decoupled_period"] * config["step_s"],
        **{name: config[name] for name in _PLAIN},
    )
    refuse("goodput config", fleet.violations())
    return fleet


def _chip_mtbf_s(config: Mapping[str, Any]) -> tuple[float, ...]:
    """Seconds between interrupts of a chip, for each region; what logs show of a region wins."""
    name, regions = _MTBF[config["region_mtbf_hours"] is not None], config["regions"]
    text = str(config[name])
    try:
        hours = [float(part) for part in text.split(",")]
    except ValueError:
        hours = []
    if not hours or len(hours) not in (1, len(regions)):
        one = f"one number, or {len(regions)} (a region each): {name}=99"
        refuse("goodput config", [f"{name} is {text!r}: give {one}"])
    refuse("goodput config", [line for value in hours for line in above_zero(name, value)])
    hours = hours * (len(regions) // len(hours))
    of_a_chip = name == _MTBF[0]
    return tuple(h * HOUR * (1 if of_a_chip else n) for h, n in zip(hours, regions, strict=True))


# -- the screen --------------------------------------------------------------------------------


def _show(
    fields: Mapping[str, Any], fleet: Fleet, rows: Sequence[Goodput], console: Console
) -> None:
    """Print one fleet: a row a method, and where its chip time goes."""
    shown = " + ".join(map(str, fleet.regions))
    spare = fleet.allocated - fleet.chips
    say(
        console,
        f"{fields['name']}: {shown} chips" + (f" and {spare} spare ones" if spare else ""),
        f"an interrupt of a region every {_each([1 / rate for rate in fleet.rates])}, of all every "
        f"{_time(1 / sum(fleet.rates))}; {_costs(fleet)}",
        *_breaks(fleet),
    )
    parts = [what for what in rows[0].lost if any(row.lost[what] >= 5e-6 for row in rows)]
    priced = fields["price_per_chip_hour"] is not None
    headings = ["goodput", "uptime", *(f"lost: {part}" for part in parts), "chips lost"]
    headings += ["a day"] if priced else []
    words = ("\n".join(h.split(": ") if ": " in h else h.rsplit(" ", 1)) for h in headings)
    how = {"no_wrap": True, "vertical": "bottom"}
    columns = Column("%", **how), *right(words, **how)
    table = Table(*columns, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for row in rows:
        lost = (1.0 - row.goodput) * fleet.allocated
        shares = [row.goodput, row.uptime, *(row.lost[part] for part in parts)]
        cells = [*(f"{100 * share:.2f}" for share in shares), f"{lost:,.1f}"]
        if priced:
            cells.append(f"{lost * 24 * fields['price_per_chip_hour']:,.0f}")
        table.add_row(METHODS[row.method].title, *cells)
    console.print(table)
    best = max(rows, key=lambda row: row.goodput)
    by_name = {row.method: row for row in rows}
    say(
        console,
        f"highest goodput: {METHODS[best.method].title}, {100 * best.goodput:.2f}%; DP loses "
        f"{100 * (best.goodput - by_name[DP].goodput):.2f} points more. Standard errors of the "
        f"simulation: at most {100 * max(row.error for row in rows):.2f} points",
        *_reactions(),
    )
    if fields["notes"]:
        say(console, fields["notes"])


def _reactions() -> list[str]:
    return [
        "waits: the others wait for a stopped region at the next synchronisation. absent: nobody "
        "waits, what it had not sent is lost, it is back after the next one (this runtime)",
        "goodput counts failures; for what the links take, multiply by a plan's busy share",
    ]


def _costs(fleet: Fleet) -> str:
    def cost(what: str, seconds: float, fitted: str) -> str:
        label = " (fitted to the published table)" if seconds == FITTED[fitted].stop_s else ""
        return f"{what} {seconds:g} s{label}"

    others = "elastic DP" if not fleet.elastic_regions else "an elastic job"
    restarts = "DP" if fleet.elastic_regions else "DP, and a region's job,"
    elastic, dp = cost(others, fleet.stop_s, "elastic"), cost(restarts, fleet.restart_s, "dp")
    return f"an interrupt costs {elastic}, {dp}"


def _breaks(fleet: Fleet) -> list[str]:
    """Sentences about what is away, and for how long."""
    lines = []
    if fleet.repair_s:
        lines.append(
            f"a failed chip takes {fleet.slice_chips} out for {_time(fleet.repair_s)}; spare "
            f"slices in every region: {fleet.spare_slices}"
        )
    if fleet.outage_mtbf_s is not None:
        every = _time(fleet.outage_mtbf_s)
        lines.append(f"a region is away every {every}, for {_time(fleet.outage_s)}")
    return lines


def _each(seconds: Sequence[float]) -> str:
    """Times of the regions, once where they are the same."""
    return ", ".join(dict.fromkeys(_time(value) for value in seconds))


def _time(seconds: float) -> str:
    for unit, name in ((HOUR, "h"), (60.0, "min")):
        if seconds >= 2 * unit:
            return (
                f"{seconds / unit:,.3g} {name}"
                if seconds < 1000 * unit
                else f"{seconds / unit:,.0f} {name}"
            )
    return f"{seconds:.3g} s"
