"""What a region's job saw happen: who was counted in every exchange, and where it came in itself.

A line of JSON each in WORKDIR/landings.jsonl, written before the payload lands, so that a job that
is killed leaves nothing untold that it has acted on. `gathered` puts those of all regions together.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.faults.happened import Happened, Rejoin, Settings
from experiments.metrics import read_records
from lowcomm_jax.arrivals import Counted
from lowcomm_jax.processes import team
from lowcomm_jax.roundtrip import RoundTrips

FILE = "landings.jsonl"


class Landings:
    """One region's file, which the first of its processes writes.

    Args:
      trips: of this region's engine; what arrives is noted from now on.
    """

    def __init__(self, trips: RoundTrips, workdir: Path, region: int):
        self._path, self._region, self._trips = workdir / FILE, region, trips
        trips.arrivals.witness = self._saw

    def begin(self, step: int) -> None:
        """The run goes on at this step: what came later in an earlier life is undone."""
        if not team().leads:
            return
        records = read_records(self._path) if self._path.is_file() else []
        kept = [record for record in records if record["step"] <= step]
        whole = self._path.with_suffix(".tmp")
        whole.write_text("".join(map(_line, kept)), encoding="utf-8")
        whole.replace(self._path)

    def _saw(self, counted: Counted) -> None:
        """Something has arrived."""
        groups = self._trips.groups(counted.number)
        if groups is not None and not counted.counted_N.any():
            return  # nothing is heard of groups that one was not in
        groups = groups or [tuple(range(self._trips.carrier.total))]
        mine = next(group for group in groups if self._region in group)
        self._write(
            {
                "kind": "landing",
                "step": counted.step,
                "fragment": counted.fragment,
                "number": counted.number,
                "last": counted.last,
                "members": list(mine),
                "counted": counted.counted_N.tolist(),
            }
        )

    def came(self, step: int, moments_of: int | None) -> None:
        """This region has started from the anchor; moments_of: see `happened.Rejoin`."""
        record = {"kind": "rejoin", "step": step, "region": self._region}
        self._write(record | ({} if moments_of is None else {"moments_of": moments_of}))

    def _write(self, record: dict[str, Any]) -> None:
        if not team().leads:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line(record))


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":")) + "\n"


def gathered(workdirs: Sequence[Path], run: Settings) -> Happened:
    """What all regions of a run saw.

    Args:
      workdirs: of the regions, in order; run: which one.

    Raises:
      ValueError: two of them saw different things.
    """
    exchanges: dict[tuple, list[bool]] = {}
    rejoined = []
    for path in [workdir / FILE for workdir in workdirs]:
        for record in read_records(path) if path.is_file() else []:
            if record.pop("kind") == "rejoin":
                rejoined.append(Rejoin(**record))
                continue
            counted = record.pop("counted")
            name = tuple(tuple(x) if isinstance(x, list) else x for x in record.values())
            if exchanges.setdefault(name, counted) != counted:
                raise ValueError(f"{path}: of {record} others saw {exchanges[name]}, not {counted}")
    during: dict[int, set[int]] = {}
    ends: dict[int, tuple[int, set[int]]] = {}
    for (step, fragment, number, last, members), counted in exchanges.items():
        out = {region for region, took in zip(members, counted, strict=True) if not took}
        if not last:
            during.setdefault(step, set()).update(out)
        elif fragment not in ends or number < ends[fragment][0]:
            # Who comes once the others have ended synchronises once more, alone: nothing moves.
            ends[fragment] = number, out
        elif number == ends[fragment][0]:
            ends[fragment][1].update(out)
    order = sorted(rejoined, key=lambda one: (one.step, one.region))
    at_the_end = {fragment: out for fragment, (_, out) in ends.items()}
    return Happened(run, _some(during), _some(at_the_end), tuple(order))


def _some(table: dict[int, set[int]]) -> dict[int, tuple[int, ...]]:
    return {key: tuple(sorted(out)) for key, out in sorted(table.items()) if out}
