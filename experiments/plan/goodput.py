"""Compute what failures cost: goodput and uptime of DP, elastic DP, DiLoCo, Streaming, Decoupled.

    python -m experiments plan --goodput [--config=configs/plan/goodput_three_regions.py] \
        [--config.regions=512,512,512] [--config.region_mtbf_hours=99]

Without --config: the published simulation of Decoupled DiLoCo beside ours. Goodput is the share of
allocated chip time that does useful work, uptime the share of time at least one region advances.
The time of links is not in goodput: multiply by the share "busy" of a plan. Writes goodput.json
into the work directory. docs/plan.md says how every method reacts to a failure.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table

from experiments.cli import (
    Flags,
    RefusedError,
    flag_problems,
    load_config,
    refuse_any,
    split_config,
)
from experiments.progress import right, say, tracked
from lowcomm_jax.planner.goodput import (
    CONFIDENCE,
    DECOUPLED,
    DP,
    ELASTIC_DP,
    FITTED,
    METHODS,
    PUBLISHED,
    SOURCE,
    Fleet,
    Goodput,
    even_regions,
    largest_error,
)
from lowcomm_jax.planner.goodput_simulation import plan_goodput
from lowcomm_jax.refused import above_zero, is_unknown, not_negative, refuse, whole

DEFAULT = "configs/plan/goodput.py"
HOUR = 3600.0
COUPLED = tuple(name for name in METHODS if name not in (DP, ELASTIC_DP, DECOUPLED))
_COSTS = ("stop_s", "restart_s", "overhead", "restart_overhead")
_PLAIN = (*_COSTS, "elastic_regions", "slice_chips", "spare_slices", "fragments")
_POSITIVE = ("step_s", "period")
_FROM_0 = ("repair_hours", "outage_hours", "overlap", "decoupled_period")
_MTBF = ("chip_mtbf_hours", "region_mtbf_hours")
_OTHERS = ("outage_mtbf_hours", "price_per_chip_hour", "seed")
_FLEETS = ("regions", "chips", "learners", "diloco_regions")
FIELDS = ("name", "notes", *_FLEETS, *_MTBF, *_PLAIN, *_POSITIVE, *_FROM_0, *_OTHERS)


@dataclasses.dataclass(frozen=True)
class GoodputRequest:
    """A config, checked.

    Attributes:
        fields: plain values.
        fleets: by (chips, regions).
        own: whether they are one fleet of the user's regions.
    """

    fields: Mapping[str, Any]
    fleets: Mapping[tuple[int, int], Fleet]
    own: bool


def main(argv: Sequence[str]) -> int:
    """Simulate what the command line asks for; returns the exit code."""
    path, overrides, others = split_config(argv)
    options = Flags()
    options.switch("goodput", "what failures cost")
    options.text("workdir", "runs/goodput", "where goodput.json goes")
    values = options.values
    problems = flag_problems("plan", others, values, __doc__)
    config, found = load_config(path or DEFAULT, overrides)
    refuse_any(problems + found, "plan")
    try:
        answer(config.to_dict(), values.workdir, Console())
    except ValueError as error:
        raise RefusedError([str(error)], "plan") from error
    return 0


def answer(config: Mapping[str, Any], workdir: str | Path, console: Console) -> dict[str, Any]:
    """Simulate what a config describes; print, write and return the result.

    Raises:
        Refused: everything that is wrong with the config.
    """
    request = read(config)
    seed = request.fields["seed"]
    rows = {key: [] for key in request.fleets}
    fleets = tracked(
        request.fleets.items(), "goodput: fleets", lambda f: f"{f[0][0]:,} chips, {f[0][1]} regions"
    )
    for (chips, regions), fleet in fleets:
        rows[chips, regions] = plan_goodput(fleet, _methods(request, chips, regions), seed)
    result = {
        "name": request.fields["name"],
        "notes": request.fields["notes"],
        "fields": dict(request.fields),
        "rows": [
            {"chips": chips, "regions": regions, **dataclasses.asdict(row)}
            for (chips, regions), found in rows.items()
            for row in found
        ],
        "published": {"table": PUBLISHED, "source": SOURCE, "confidence": CONFIDENCE},
        "fitted": {name: values._asdict() for name, values in FITTED.items()},
    }
    folder = Path(workdir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "goodput.json").write_text(json.dumps(result, indent=1) + "\n")
    if request.own:
        ((fleet, found),) = ((request.fleets[key], found) for key, found in rows.items())
        _show_own(request.fields, fleet, found, console)
    else:
        _show_fleets(request, rows, console)
    return result


def _methods(request: GoodputRequest, chips: int, regions: int) -> tuple[str, ...]:
    """Every method of a fleet of one's own; of the others each where its column is."""
    if request.own:
        return tuple(METHODS)
    found = (DECOUPLED,) if regions in request.fields["learners"] else ()
    if regions == request.fields["diloco_regions"]:
        found += (DP, ELASTIC_DP, *COUPLED)
    return found


# -- the config --------------------------------------------------------------------------------


def read(config: Mapping[str, Any]) -> GoodputRequest:
    """Turn config fields (see `configs/plan/goodput.py`) into fleets.

    Raises:
        Refused: everything that is wrong.
    """
    if "methods" in config or "method" in config:
        fix = "give one such as configs/plan/goodput_three_regions.py"
        refuse("goodput config", [f"--goodput has configs of its own: {fix}"])
    found = [f"field {name!r} is missing: give it" for name in FIELDS if name not in config]
    found += [f"field {name!r} {is_unknown(name, FIELDS)}" for name in config if name not in FIELDS]
    refuse("goodput config", found)
    found = whole("seed", config["seed"], 0)
    found += [line for name in _FROM_0 for line in not_negative(name, config[name])]
    found += [line for name in _POSITIVE for line in above_zero(name, config[name])]
    if config["price_per_chip_hour"] is not None:
        found += not_negative("price_per_chip_hour", config["price_per_chip_hour"])
    if config["outage_mtbf_hours"] is not None:
        found += above_zero("outage_mtbf_hours", config["outage_mtbf_hours"])
    own = bool(config["regions"])
    if own and (config["chips"] or config["learners"]):
        found.append(
            "regions and chips are both given: set chips=() and learners=(), or regions=()"
        )
    elif not own and not config["chips"]:
        found.append("no chips are given: regions=(512, 512, 512), or chips=(150_000,)")
    counts = [(name, n) for name in ("regions", "chips", "learners") for n in config[name]]
    counts += [] if own else [("diloco_regions", config["diloco_regions"])]
    found += [line for name, n in counts for line in whole(name, n)]
    refuse("goodput config", found)
    cuts = {(sum(config["regions"]), len(config["regions"])): tuple(config["regions"])}
    if not own:
        parts = sorted({*config["learners"], config["diloco_regions"]})
        cuts = {(n, m): even_regions(n, m) for n in config["chips"] for m in parts}
    fleets = {key: _fleet(config, regions, found) for key, regions in cuts.items()}
    refuse("goodput config", list(dict.fromkeys(found)))
    return GoodputRequest(dict(config), fleets, own)


def _fleet(config: Mapping[str, Any], regions: tuple[int, ...], found: list[str]) -> Fleet | None:
    """The fleet of some regions; notes what is wrong with it."""
    mtbf_s = _chip_mtbf_s(config, regions, found)
    if mtbf_s is None:
        return None
    outages = config["outage_mtbf_hours"]
    fleet = Fleet(
        regions=regions,
        chip_mtbf_s=mtbf_s,
        repair_s=config["repair_hours"] * HOUR,
        outage_mtbf_s=None if outages is None else outages * HOUR,
        outage_s=config["outage_hours"] * HOUR,
        period_s=config["period"] * config["step_s"],
        overlap_s=config["overlap"] * config["step_s"],
        decoupled_period_s=config["decoupled_period"] * config["step_s"],
        **{name: config[name] for name in _PLAIN},
    )
    found += fleet.violations()
    return fleet


def _chip_mtbf_s(
    config: Mapping[str, Any], regions: tuple[int, ...], found: list[str]
) -> tuple[float, ...] | None:
    """Seconds between interrupts of a chip, for each region; what logs show of a region wins."""
    name = _MTBF[config["region_mtbf_hours"] is not None]
    text = str(config[name])
    try:
        hours = [float(part) for part in text.split(",")]
    except ValueError:
        hours = []
    if len(hours) not in (1, len(regions)):
        one = f"one number, or {len(regions)} (a region each): {name}=99"
        found.append(f"{name} is {text!r}: give {one}")
        return None
    hours = hours * (len(regions) // len(hours))
    problems = [line for value in hours for line in above_zero(name, value)]
    found += problems
    if problems:
        return None
    of_a_chip = name == _MTBF[0]
    return tuple(h * HOUR * (1 if of_a_chip else n) for h, n in zip(hours, regions, strict=True))


# -- the screen --------------------------------------------------------------------------------


def _show_own(
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


def _show_fleets(
    request: GoodputRequest, rows: Mapping[tuple[int, int], Sequence[Goodput]], console: Console
) -> None:
    """Print a row a fleet size, what is published beside it, and the other methods below."""
    fields = request.fields
    m = fields["diloco_regions"]
    columns = [DP, ELASTIC_DP, *fields["learners"]]
    cells = {}
    for (chips, regions), found in rows.items():
        for row in found:
            cells[chips, regions if row.method == DECOUPLED else row.method] = row
    of = {chips: cells[chips, DP] for chips in fields["chips"]}
    first = next(iter(request.fleets.values()))
    say(console, f"{fields['name']}: an interrupt of a chip every {_each(first.mtbfs)}")
    say(console, _costs(first), *_breaks(first))
    shown = _columns(["chips", "DP", "elastic DP", *(f"M = {n}" for n in fields["learners"])])
    title = "goodput, % (ours - published)"
    table = Table(*shown, box=box.SIMPLE, title=title, title_justify="left")
    for chips in of:
        shown = (_beside(cells[chips, c].goodput, PUBLISHED.get(chips, {}).get(c)) for c in columns)
        table.add_row(_chips(chips), *shown)
    console.print(table)
    _show_fit(cells, fields, console)
    names = [DP, ELASTIC_DP, *COUPLED]
    last = fields["learners"][-1:]
    titles = [METHODS[name].title for name in names]
    columns = _columns(["chips", *titles, *(f"Decoupled, M = {n}" for n in last)])
    title = f"goodput / uptime, %; DiLoCo and Streaming with {m} regions (not published)"
    table = Table(*columns, box=box.SIMPLE, title=title, title_justify="left")
    for chips in of:
        row = [cells[chips, column] for column in (*names, *last)]
        shown = (f"{100 * one.goodput:.1f} / {100 * one.uptime:.1f}" for one in row)
        table.add_row(_chips(chips), *shown)
    console.print(table)
    say(console, *_reactions())
    if fields["notes"]:
        say(console, fields["notes"])


def _show_fit(cells: Mapping, fields: Mapping[str, Any], console: Console) -> None:
    """Say what is fitted, how far off it is, and how far the simulation is from the closed form."""
    chips = [n for n in fields["chips"] if n in PUBLISHED]
    known = {column for row in PUBLISHED.values() for column in row}
    elastic = [ELASTIC_DP, *(m for m in fields["learners"] if m in known)]
    ours = {n: {c: cells[n, c].goodput for c in (DP, *elastic)} for n in chips}
    if chips:
        say(
            console,
            f"largest error: {largest_error(ours, elastic):.2f} points (elastic DP, Decoupled), "
            f"{largest_error(ours, [DP]):.2f} (DP); published: {SOURCE}",
        )
    for name, what in (("elastic", "elastic DP and Decoupled"), ("dp", "DP")):
        overhead, stop_s, points = FITTED[name]
        say(
            console,
            f"fitted to that table, in no source: {what}: (1 - {overhead:.2%}) / (1 + {stop_s} s / "
            f"T), T the time between interrupts of a job; largest error {points:.2f} points",
        )
    gaps = [abs(c.goodput - c.closed_form) for c in cells.values() if c.closed_form is not None]
    if gaps:
        say(console, f"simulation against closed form: at most {100 * max(gaps):.2f} points")


def _columns(headings: Sequence[str]) -> list[Column]:
    return right((heading.replace(", ", ",\n") for heading in headings), vertical="bottom")


def _beside(ours: float, published: float | None) -> str:
    error = "" if published is None else f" ({100 * ours - published:+.1f})"
    return f"{100 * ours:.1f}{error}"


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


def _chips(count: int) -> str:
    return f"{count / 1e6:g}M" if count >= 1e6 else f"{count / 1e3:g}k"
