"""happened.yaml: the record of a run of one job per region, which one process can repeat.

`launch` writes WORKDIR/happened.yaml. `train --config.faults=WORKDIR/happened.yaml` then ends with
the same anchors, bit for bit:

    regions: 4                 # the run: only a run with these settings can repeat it
    steps: 2000
    method: diloco
    period: 30
    seed: 0
    left_out:                  # step of the send: regions that were not counted
      12: [1]
      18: [1, 3]
    kept_own:                  # regions that were counted, but kept their own values (an outage)
      6: [0, 2]
    left_out_at_the_end:       # fragment: regions not counted in the last synchronisation
      0: [2]
    rejoined:                  # started from the anchor, after the sends of that step
    - {step: 40, region: 1}
    - {step: 90, region: 3, moments_of: 60}  # with the optimizer's state of its checkpoint
    not_finite:                # after that step: regions whose parameters stopped being finite
      24: [1]

The commit record of an exchange says who took part (`landings`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

FILE = "happened.yaml"
# Tables of the file, and the fields of `Happened` that hold them.
_TABLES = {
    "left_out": "left_out",
    "kept_own": "kept_own",
    "left_out_at_the_end": "at_the_end",
    "not_finite": "not_finite",
}


class Settings(NamedTuple):
    """The settings that identify a run; others differ between jobs and one process.

    Attributes:
      method: its name.
      period: its keyword; None where it has none.
    """

    regions: int
    steps: int
    method: str
    period: int | None
    seed: int


def settings(fields: Mapping[str, Any], steps: int) -> Settings:
    """The settings of a config, for a run of `steps` steps."""
    method = fields["method"]
    return Settings(
        fields["regions"], steps, method.get("name"), method.get("period"), fields["seed"]
    )


@dataclasses.dataclass(frozen=True)
class Rejoin:
    """A region started from the anchor.

    Attributes:
      step: of the anchor; the region's next inner step is the one after it.
      moments_of: step of the checkpoint that its inner optimizer's state came from; None = a fresh
        one.
    """

    step: int
    region: int
    moments_of: int | None = None


@dataclasses.dataclass(frozen=True)
class Happened:
    """The content of happened.yaml, see the module docstring.

    Attributes:
      run: the run it was recorded from.
      left_out, kept_own: step of the send -> regions.
      at_the_end: fragment -> regions.
      rejoined: regions that started from the anchor.
      not_finite: step -> regions whose parameters stopped being finite after it.
    """

    run: Settings
    left_out: Mapping[int, tuple[int, ...]]
    kept_own: Mapping[int, tuple[int, ...]]
    at_the_end: Mapping[int, tuple[int, ...]]
    rejoined: tuple[Rejoin, ...]
    not_finite: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write the file that `parsed` takes."""
        body = {name: dict(getattr(self, field)) for name, field in _TABLES.items()}
        came = [dataclasses.asdict(one) for one in self.rejoined]
        body["rejoined"] = [{k: v for k, v in one.items() if v is not None} for one in came]
        text = yaml.dump(self.run._asdict() | body, Dumper=_Lists, sort_keys=False)
        path.write_text(text, encoding="utf-8")


class _Lists(yaml.SafeDumper):
    """Writes the regions of a step in one line, and those of two that are alike twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Lists.add_representer(
    tuple, lambda dumper, x: dumper.represent_sequence("tag:yaml.org,2002:seq", x, flow_style=True)
)


def parsed(body: Mapping, name: str, run: Settings) -> tuple[Happened | None, list[str]]:
    """(content of a file or None, problems).

    Args:
      body: the file's YAML.
      name: of the file, for messages.
      run: the run that is to repeat it.
    """
    fields, body = (*Settings._fields, *_TABLES, "rejoined"), dict(body)
    if set(body) != set(fields):
        return None, [f"faults={name!r}: give a list of faults, or all of {list(fields)}"]
    problems = [
        f"faults={name!r} is of a run with {key}={body[key]}: this one has {key}={value}"
        for key, value in run._asdict().items()
        if body[key] != value
    ]
    for key in _TABLES:
        table = body[key]
        if not isinstance(table, dict) or not all(
            _whole(k) and _are_some(v, run.regions) for k, v in table.items()
        ):
            fix = f"number -> some of the regions 0 to {run.regions - 1}"
            problems.append(f"faults={name!r}: {key} must be a table, {fix}")
    came = body["rejoined"]
    if not isinstance(came, list) or not all(_is_rejoin(one, run.regions) for one in came):
        fix = "{step, region} or {step, region, moments_of}, whole numbers"
        problems.append(f"faults={name!r}: rejoined must be a list of {fix}")
    if problems:
        return None, problems
    tables = {
        field: {step: tuple(regions) for step, regions in body[name].items()}
        for name, field in _TABLES.items()
    }
    return Happened(run, **tables, rejoined=tuple(Rejoin(**one) for one in came)), []


def _is_rejoin(one: Any, regions: int) -> bool:
    known = isinstance(one, dict) and {"step", "region"} <= set(one)
    known = known and set(one) <= {"step", "region", "moments_of"}
    return known and all(map(_whole, one.values())) and one["region"] < regions


def _are_some(given: Any, regions: int) -> bool:
    listed = isinstance(given, list) and all(map(_whole, given))
    return listed and set(given) <= set(range(regions))


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
