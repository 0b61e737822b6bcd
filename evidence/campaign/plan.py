"""Check a campaign's config and give a `Campaign`; nothing is started."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from evidence.campaign import config as given
from evidence.campaign.config import Size, Stage, Tuning
from experiments.cli import (
    RefusedError,
    closest,
    load_config,
    problems_of,
    refuse_any,
    refuse_incomplete,
)
from experiments.compare.plan import merged
from experiments.compare.vary import Axis, parse_axis, points
from experiments.config import plain
from lowcomm_jax.checkpoint.load import dotted
from lowcomm_jax.data.config import Sharding
from lowcomm_jax.network import Network, parse

TITLE = "cannot run the campaign"
LEAST_SEEDS = 3  # of a verdict
MEASURES = ("loss", "anchor_variance")  # of a claim, as records name them
_EQUAL = 1e-6  # relative: nearer values are one


@dataclasses.dataclass(frozen=True)
class Arm:
    """A method as the campaign compares it.

    Attributes:
      points: name -> learning rates that it may get.
      grid: names of the points that all train; the others lie beyond (`tuning.widen`).
      tuned_as: name of the arm whose tuning gives its rates: its own, or that it is a variant of.
    """

    name: str
    tuned_as: str
    base: dict[str, Any]
    changes: dict[str, Any]
    points: dict[str, dict[str, Any]]
    grid: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Rung:
    """One scale at which a claim is tested."""

    size: str
    rounds: int
    regions: int
    split: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim(given.Claim):
    """A claim with its scales: `ladder` has the rungs of each stage, and each one's seeds."""

    name: str
    ladder: dict[str, dict[Rung, tuple[int, ...]]]

    def rungs(self) -> dict[Rung, tuple[int, ...]]:
        """Every rung of any stage with all its seeds."""
        found: dict[Rung, tuple[int, ...]] = {}
        for rungs in self.ladder.values():
            for rung, seeds in rungs.items():
                found[rung] = tuple(dict.fromkeys((*found.get(rung, ()), *seeds)))
        return found


@dataclasses.dataclass(frozen=True)
class Campaign:
    """A checked campaign; fields are those of `config.campaign`. Sizes are in their order."""

    title: str
    records: Path
    page: str
    text: str
    origin: str
    see: str
    beside: str
    period: int
    evaluations: int
    common: dict[str, Any]
    sizes: dict[str, Size]
    arms: dict[str, Arm]
    claims: dict[str, Claim]
    stages: tuple[str, ...]
    tuning: Tuning
    link: dict[str, float]
    step_seconds: float

    def network(self, regions: int) -> Network:
        """Links of one kind between all regions."""
        return parse({"name": f"{regions} regions", "regions": regions, **self.link})

    def tokens(self, size: str, rounds: int) -> int:
        """Tokens that all regions together train on."""
        of = self.sizes[size]
        seq_len = {**self.common.get("data", {}), **of.fields.get("data", {})}["seq_len"]
        return rounds * self.period * of.batch * seq_len


def plan(
    config: Any,
    only: Sequence[str] | None = None,
    until: str | None = None,
    since: str | None = None,
) -> Campaign:
    """Check a campaign.

    Args:
      config: made by `config.campaign`.
      only: names of the claims it is narrowed to; None = all.
      until, since: its last stage and its first; None = the last and the first of all.

    Raises:
      RefusedError: every violation.
    """
    refuse_incomplete(config, given.campaign(), "evidence.campaign.config.campaign")
    fields = plain(config)
    stages = sorted(fields["stages"])
    arms, problems = _arms(fields)
    problems += _tuning_problems(fields, arms)
    problems += _unknown("--only", only or (), fields["claims"])
    for flag, stage in (("--since", since), ("--until", until)):
        problems += _unknown(flag, () if stage is None else (stage,), stages)
    if since is not None and until is not None and since > until:
        problems.append(f"--since={since} comes after --until={until}: exchange them")
    claims = {}
    for name in fields["claims"] if only is None else filter(fields["claims"].get, only):
        claims[name], found = _claim(name, given.Claim(**fields["claims"][name]), fields)
        problems += found
    refuse_any(problems, TITLE)
    sizes = {name: Size(**size) for name, size in fields["sizes"].items()}
    checked = {
        "records": Path(fields["records"]),
        "sizes": dict(sorted(sizes.items(), key=lambda item: item[1].params)),
        "arms": arms,
        "claims": {name: claims[name] for name in fields["claims"] if name in claims},
        "stages": tuple(key for key in stages if (since or key) <= key <= (until or key)),
        "tuning": Tuning(**fields["tuning"]),
    }
    return Campaign(**{**fields, **checked})


def _unknown(where: str, names: Sequence[Any], known: Sequence[str]) -> list[str]:
    return [
        f"{where}: {name!r} is unknown{closest(str(name), list(known))}"
        for name in names
        if name not in known
    ]


def _arms(fields: Mapping[str, Any]) -> tuple[dict[str, Arm], list[str]]:
    """The arms that can be made; variants come after what they vary, in the config's order."""
    arms, problems, entries = {}, [], fields["arms"]
    for name, entry in sorted(entries.items(), key=lambda item: "of" in item[1]):
        if "of" not in entry:
            arms[name], found = _tuned_arm(name, entry, fields["tuning"]["widen"])
        elif "of" in entries.get(entry["of"], {"of": ""}):
            own = [key for key, value in entries.items() if "of" not in value]
            arms[name], found = None, _unknown("of", [entry["of"]], own)
        else:
            arms[name], found = _variant(name, arms[entry["of"]], entry["set"])
        problems += [f"arms.{name}: {line}" for line in found]
    return {name: arms[name] for name in entries if arms[name] is not None}, problems


def _tuned_arm(name: str, entry: Mapping[str, Any], widen: int) -> tuple[Arm | None, list[str]]:
    try:
        loaded, _ = load_config(entry["config"], [])
    except RefusedError as error:
        return None, error.problems
    grid, problems = problems_of(lambda: points(loaded, entry["over"], None, 0), "over: ")
    if problems:
        return None, problems
    every = grid
    if widen > 0:
        try:
            wider = [widened(parse_axis(text), widen) for text in entry["over"]]
        except ValueError as error:
            return None, [f"tuning.widen={widen} is for numbers above 0: {error}"]
        every = grid | points(loaded, wider, None, 0)
    return Arm(name, name, plain(loaded), entry["set"], every, tuple(grid)), []


def widened(axis: Axis, times: int) -> str:
    """An axis with so many more values on either side, as a text for `parse_axis`.

    Raises:
      ValueError: a value is no number above 0.
    """
    values = sorted(axis.values, key=float)
    if not 0 < float(values[0]) < math.inf:
        raise ValueError(f"{axis.field} has {values[0]}")
    for _ in range(times):
        low, high = float(values[0]), float(values[-1])
        decades = range(math.floor(math.log10(low)) - 1, math.floor(math.log10(high)) + 2)
        ladder = [float(f"{digit}e{decade}") for decade in decades for digit in (1, 2, 5)]
        below = max(x for x in ladder if x < low * (1 - _EQUAL))
        above = min(x for x in ladder if x > high * (1 + _EQUAL))
        values = [_short(below), *values, _short(above)]
    return f"{axis.field}={','.join(values)}"


def _short(value: float) -> str:
    """As people write a learning rate: 5e-4, 0.05, 1.0."""
    return f"{value:.0e}".replace("e-0", "e-") if value < 0.01 else str(value)


def _variant(name: str, of: Arm | None, changes: Mapping[str, Any]) -> tuple[Arm | None, list[str]]:
    if of is None:
        return None, []  # what is wrong with that arm is listed already
    tuned = {field for point in of.points.values() for field in dotted(point)}
    return dataclasses.replace(of, name=name, changes=merged(of.changes, changes)), [
        f"{field} is tuned for {of.name}: leave it out, or make this an arm of its own"
        for field in sorted(tuned & dotted(changes).keys())
    ]


def _claim(name: str, claim: given.Claim, fields: Mapping[str, Any]) -> tuple[Claim, list[str]]:
    problems = _unknown("arms", (claim.here, claim.there), fields["arms"])
    problems += _unknown("measure", (claim.measure,), MEASURES)
    problems += _unknown("stages", sorted(claim.stages), sorted(fields["stages"]))
    ladder = {}
    for key in sorted(fields["stages"]):
        changes = claim.stages.get(key, {})
        if changes is not None:
            stage = Stage(**{**fields["stages"][key], **changes})
            problems += [f"stages.{key}: {line}" for line in _stage_problems(stage, fields)]
            scales = itertools.product(stage.sizes, stage.rounds, stage.regions, stage.splits)
            ladder[key] = {Rung(*scale): tuple(stage.seeds) for scale in scales}
    problems = [f"claims.{name}.{line}" for line in problems]
    return Claim(**vars(claim), name=name, ladder=ladder), problems


def _stage_problems(stage: Stage, fields: Mapping[str, Any]) -> Iterator[str]:
    sizes, seeds = fields["sizes"], stage.seeds
    yield from _unknown("sizes", stage.sizes, sizes)
    yield from _unknown("splits", stage.splits, get_args(Sharding))
    for regions in stage.regions:
        if uneven := [n for n in stage.sizes if n in sizes and sizes[n]["batch"] % regions]:
            yield f"regions: {regions} do not divide the batch of {', '.join(uneven)}"
    if len(set(seeds)) < LEAST_SEEDS:
        yield f"seeds: {tuple(seeds)}: a verdict needs at least {LEAST_SEEDS}"
    if both := sorted(set(seeds) & set(fields["tuning"]["seeds"])):
        yield f"seeds: {both} tune learning rates, so they cannot be reported"


def _tuning_problems(fields: Mapping[str, Any], arms: Mapping[str, Arm]) -> Iterator[str]:
    how = Tuning(**fields["tuning"])
    yield from _unknown("tuning.split", (how.split,), get_args(Sharding))
    counts = {name: len(arm.grid) for name, arm in arms.items()}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{name} {count}" for name, count in counts.items())
        yield f"arms: budgets differ, give all equally many points ({shown})"
    kept = [count for _, count in how.rungs]
    if not kept or not how.seeds:
        yield "tuning: give at least one rung and one seed"
    elif counts and kept[0] != max(counts.values()):
        yield f"tuning.rungs: the first takes {kept[0]} points, the arms have {counts}"
    if any(later >= earlier for earlier, later in itertools.pairwise(kept)):
        yield f"tuning.rungs: points must become fewer from rung to rung, not {kept}"
