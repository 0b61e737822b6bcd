"""Check a campaign's config and give a `Campaign`; nothing is started."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from evidence.campaign.config import campaign
from experiments.cli import (
    RefusedError,
    closest,
    load_config,
    problems_of,
    refuse_any,
    refuse_incomplete,
)
from experiments.compare.plan import merged
from experiments.config import plain
from experiments.sweep.space import SweepAxis, parse_axis, points
from lowcomm_jax.checkpoint.load import dotted
from lowcomm_jax.data.config import SHARDINGS
from lowcomm_jax.network import Network, parse

TITLE = "cannot run the campaign"
LEAST_SEEDS = 3  # of a verdict
MEASURES = ("loss", "anchor_variance")  # of a claim, as records name them
_EQUAL = 1e-6  # relative: nearer values are one
_NAME = re.compile(r"\w+")
_AS_GIVEN = (
    "title",
    "page",
    "text",
    "origin",
    "see",
    "beside",
    "period",
    "evaluations",
    "common",
    "link",
    "step_seconds",
)
_CLAIM_AS_GIVEN = ("says", "source", "here", "there", "mind", "published", "measure")
_LISTS = ("sizes", "rounds", "regions", "splits", "seeds")


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
class Size:
    """A model; see `config.size`."""

    name: str
    params: float
    batch: int
    fields: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Successive halving; see `config.tuning`."""

    rungs: tuple[tuple[int, int], ...]
    regions: int
    split: str
    seeds: tuple[int, ...]
    widen: int


@dataclasses.dataclass(frozen=True)
class Rung:
    """One scale at which a claim is tested."""

    size: str
    rounds: int
    regions: int
    split: str


@dataclasses.dataclass(frozen=True)
class Claim:
    """A paper's claim on two arms; see `config.claim`.

    Attributes:
      stages: stage -> its rungs, each with the seeds that stage asks for.
      measure: what is compared, one of `MEASURES`.
    """

    name: str
    says: str
    source: str
    here: str
    there: str
    margin: float
    mind: str
    published: str
    stages: dict[str, tuple[tuple[Rung, tuple[int, ...]], ...]]
    measure: str

    def rungs(self) -> dict[Rung, tuple[int, ...]]:
        """Every rung of any stage with all its seeds."""
        found: dict[Rung, tuple[int, ...]] = {}
        for rungs in self.stages.values():
            for rung, seeds in rungs:
                found[rung] = tuple(dict.fromkeys((*found.get(rung, ()), *seeds)))
        return found


@dataclasses.dataclass(frozen=True)
class Campaign:
    """A checked campaign.

    Attributes:
      sizes: in their order, from the smallest.
      link, step_seconds: of the virtual network of any number of regions (`network`).
    """

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
    refuse_incomplete(config, campaign(), "evidence.campaign.config.campaign")
    fields = plain(config)
    problems = _number_problems(fields) + _name_problems(fields)
    arms = {}
    for name, entry in fields["arms"].items():
        if "of" not in entry:
            arms[name], found = _arm(name, entry, fields["tuning"]["widen"])
            problems += found
    tuned = dict(arms)
    for name, entry in fields["arms"].items():
        if "of" in entry:
            arms[name], found = _variant(name, entry, tuned)
            problems += found
    arms = {name: arms[name] for name in fields["arms"]}
    problems += _tuning_problems(fields, {n: arm for n, arm in arms.items() if arm is not None})
    known = list(fields["claims"])
    unknown = [name for name in only or () if name not in known]
    problems += [f"--only: {name!r} is no claim{closest(name, known)}" for name in unknown]
    stages = sorted(fields["stages"])
    ends = [("since", since), ("until", until)]
    problems += [
        f"--{flag}: {stage!r} is no stage{closest(stage, stages)}"
        for flag, stage in ends
        if stage is not None and stage not in stages
    ]
    if since is not None and until is not None and since > until:
        problems.append(f"--since={since} comes after --until={until}: exchange them")
    claims = {}
    for name, entry in fields["claims"].items():
        if only is not None and name not in only:
            continue
        claims[name], found = _claim(name, entry, fields)
        problems += found
    refuse_any(problems, TITLE)
    sizes = {n: Size(n, s["params"], s["batch"], s["set"]) for n, s in fields["sizes"].items()}
    return Campaign(
        **{name: fields[name] for name in _AS_GIVEN},
        records=Path(fields["records"]),
        sizes=dict(sorted(sizes.items(), key=lambda item: item[1].params)),
        arms=arms,
        claims=claims,
        stages=tuple(key for key in stages if (since or key) <= key <= (until or key)),
        tuning=_tuning(fields["tuning"]),
    )


def _tuning(given: Mapping[str, Any]) -> Tuning:
    rungs = tuple((rounds, kept) for rounds, kept in given["rungs"])
    return Tuning(rungs, given["regions"], given["split"], tuple(given["seeds"]), given["widen"])


def _arm(name: str, entry: Mapping[str, Any], widen: int) -> tuple[Arm | None, list[str]]:
    try:
        loaded, _ = load_config(entry["config"], [])
    except RefusedError as error:
        return None, [f"arms.{name}: {line}" for line in error.problems]
    grid, problems = problems_of(lambda: points(loaded, entry["over"], None, 0))
    if problems:
        return None, [f"arms.{name}: {line}" for line in problems]
    every = grid
    if widen > 0:
        try:
            wider = [widened(parse_axis(text), widen) for text in entry["over"]]
        except ValueError as error:
            return None, [f"arms.{name}: tuning.widen={widen} is for numbers above 0: {error}"]
        every = grid | points(loaded, wider, None, 0)
    return Arm(name, name, plain(loaded), entry["set"], every, tuple(grid)), []


def widened(axis: SweepAxis, times: int) -> str:
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


def _variant(
    name: str, entry: Mapping[str, Any], tuned: Mapping[str, Arm | None]
) -> tuple[Arm | None, list[str]]:
    of = entry["of"]
    if of not in tuned:
        return None, [f"arms.{name}: {of!r} is no arm with rates of its own{closest(of, [*tuned])}"]
    whole = tuned[of]
    if whole is None:
        return None, []  # what is wrong with that arm is listed already
    grid = {field for point in whole.points.values() for field in dotted(point)}
    unused = sorted(grid & dotted(entry["set"]).keys())
    changes = merged(whole.changes, entry["set"])
    return dataclasses.replace(whole, name=name, changes=changes), [
        f"arms.{name}: {field} is tuned for {of}: leave it out, or make this an arm of its own"
        for field in unused
    ]


def _claim(
    name: str, entry: Mapping[str, Any], fields: Mapping[str, Any]
) -> tuple[Claim | None, list[str]]:
    arms, stages, problems = list(fields["arms"]), {}, []
    for side in ("here", "there"):
        if entry[side] not in arms:
            hint = closest(str(entry[side]), arms)
            problems.append(f"claims.{name}.{side}: {entry[side]!r} is no arm{hint}")
    if entry["measure"] not in MEASURES:
        hint = closest(entry["measure"], MEASURES)
        problems.append(f"claims.{name}.measure: {entry['measure']!r} is unknown{hint}")
    unknown = sorted(set(entry["stages"]) - set(fields["stages"]))
    hint = closest("", list(fields["stages"]))
    problems += [f"claims.{name}.stages: {key!r} is no stage{hint}" for key in unknown]
    for key in sorted(fields["stages"]):
        changes = entry["stages"].get(key, {})
        if changes is None:
            continue
        whole = {**fields["stages"][key], **changes}
        found = _stage_problems(whole, fields)
        problems += [f"claims.{name}.stages.{key}: {line}" for line in found]
        if not found:
            stages[key] = tuple((rung, tuple(whole["seeds"])) for rung in _rungs(whole))
    if problems:
        return None, problems
    words = {k: entry[k] for k in _CLAIM_AS_GIVEN}
    return Claim(name, margin=float(entry["margin"]), stages=stages, **words), []


def _rungs(stage: Mapping[str, Any]) -> Iterator[Rung]:
    axes = (stage[key] for key in ("sizes", "rounds", "regions", "splits"))
    return (Rung(*values) for values in itertools.product(*axes))


# -- what is wrong ---------------------------------------------------------------------------------


def _number_problems(fields: Mapping[str, Any]) -> list[str]:
    found = []
    for key in ("period", "evaluations", "step_seconds"):
        if not fields[key] > 0:
            found.append(f"{key}={fields[key]}: must be positive")
    for name, entry in fields["sizes"].items():
        for key in ("params", "batch"):
            if not entry[key] > 0:
                found.append(f"sizes.{name}.{key}={entry[key]}: must be positive")
    for kind in ("sizes", "arms", "claims", "stages"):
        if not fields[kind]:
            found.append(f"{kind}: none is given; name at least one")
    return found


def _name_problems(fields: Mapping[str, Any]) -> list[str]:
    return [
        f"{kind}: {name!r} is no folder name; use letters, digits and _"
        for kind in ("sizes", "arms")
        for name in fields[kind]
        if not _NAME.fullmatch(name)
    ]


def _stage_problems(stage: Mapping[str, Any], fields: Mapping[str, Any]) -> list[str]:
    unknown = sorted(set(stage) - set(_LISTS))
    found = [f"{key!r} is no field{closest(key, _LISTS)}" for key in unknown]
    sizes = list(fields["sizes"])
    found += [
        f"sizes: {name!r} is unknown{closest(str(name), sizes)}"
        for name in stage["sizes"]
        if name not in sizes
    ]
    found += [
        f"splits: {name!r} is unknown{closest(str(name), SHARDINGS)}"
        for name in stage["splits"]
        if name not in SHARDINGS
    ]
    found += [f"rounds: {count}: give at least 1" for count in stage["rounds"] if count < 1]
    for regions in stage["regions"]:
        uneven = [n for n in stage["sizes"] if n in sizes and fields["sizes"][n]["batch"] % regions]
        if uneven:
            found.append(f"regions: {regions} do not divide the batch of {', '.join(uneven)}")
    seeds = stage["seeds"]
    if len(set(seeds)) < LEAST_SEEDS:
        found.append(f"seeds: {tuple(seeds)}: a verdict needs at least {LEAST_SEEDS}")
    both = sorted(set(seeds) & set(fields["tuning"]["seeds"]))
    if both:
        found.append(f"seeds: {both} tune learning rates, so they cannot be reported")
    return found


def _tuning_problems(fields: Mapping[str, Any], arms: Mapping[str, Arm]) -> list[str]:
    given, found = fields["tuning"], []
    counts = {name: len(arm.grid) for name, arm in arms.items()}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{name} {count}" for name, count in counts.items())
        found.append(f"arms: budgets differ, give all equally many points ({shown})")
    rungs = given["rungs"]
    if not rungs or not given["seeds"]:
        return [*found, "tuning: give at least one rung and one seed"]
    kept = [count for _, count in rungs]
    if counts and kept[0] != max(counts.values()):
        found.append(
            f"tuning.rungs: the first takes {kept[0]} points, the arms have {counts}: make them "
            "equal"
        )
    if any(later >= earlier for earlier, later in itertools.pairwise(kept)) or kept[-1] < 1:
        found.append(f"tuning.rungs: points must become fewer from rung to rung, not {kept}")
    if given["widen"] < 0:
        found.append(f"tuning.widen={given['widen']}: give 0 (off) or more")
    if any(rounds < 1 for rounds, _ in rungs):
        found.append("tuning.rungs: give at least 1 round each")
    if given["split"] not in SHARDINGS:
        found.append(f"tuning.split: {given['split']!r} is unknown{closest('', SHARDINGS)}")
    return found
