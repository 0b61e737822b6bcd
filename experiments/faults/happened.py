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

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml

FILE = "happened.yaml"
Whole = Annotated[int, msgspec.Meta(ge=0)]
Regions = tuple[Whole, ...]


class Settings(msgspec.Struct, frozen=True):
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


class Rejoin(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A region started from the anchor.

    Attributes:
      step: of the anchor; the region's next inner step is the one after it.
      moments_of: step of the checkpoint that its inner optimizer's state came from; None = a fresh
        one.
    """

    step: Whole
    region: Whole
    moments_of: Whole | None = None


class Happened(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of happened.yaml, see the module docstring.

    Attributes:
      run: the run it was recorded from; its fields stand beside the tables in the file.
      left_out, kept_own: step of the send -> regions.
      at_the_end: fragment -> regions.
      rejoined: regions that started from the anchor.
      not_finite: step -> regions whose parameters stopped being finite after it.
    """

    run: Settings
    left_out: dict[Whole, Regions]
    kept_own: dict[Whole, Regions]
    at_the_end: dict[Whole, Regions] = msgspec.field(name="left_out_at_the_end")
    rejoined: tuple[Rejoin, ...]
    not_finite: dict[Whole, Regions] = msgspec.field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write the file that `parsed` takes."""
        body = msgspec.to_builtins(self)
        text = yaml.dump(body.pop("run") | body, Dumper=_Lists, sort_keys=False)
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
    own = {key: body[key] for key in Settings.__struct_fields__ if key in body}
    tables = {key: table for key, table in body.items() if key not in own}
    try:
        found = msgspec.convert({"run": own, **tables}, Happened)
    except msgspec.ValidationError as error:
        fields = ", ".join((*Settings.__struct_fields__, *Happened.__struct_fields__[1:]))
        fix = f"give a list of faults, or what launch has written, with {fields}"
        return None, [f"faults={name!r} is no record of a run ({error}): {fix}"]
    problems = [
        f"faults={name!r} is of a run with {key}={there}: this one has {key}={here}"
        for key in Settings.__struct_fields__
        if (there := getattr(found.run, key)) != (here := getattr(run, key))
    ]
    of_steps = (found.left_out, found.kept_own, found.at_the_end, found.not_finite)
    named = {region for table in of_steps for regions in table.values() for region in regions}
    named |= {one.region for one in found.rejoined}
    if strange := sorted(named - set(range(found.run.regions))):
        problems.append(f"faults={name!r} names regions {strange} of {found.run.regions}")
    return (None if problems else found), problems
