"""The record of a region's job: who was counted in every exchange, and when the region came in.

The job writes one line of JSON each to WORKDIR/landings.jsonl, before the payload lands, so that a
killed job has recorded everything it acted on. `gathered` merges the files of all regions.

Every line has the epoch of the run. Where all jobs die, those that return begin a new epoch at the
step of the furthest checkpoint, and write a line for it. Events of an older epoch after that step
are void in all regions, also in those that rejoin the new epoch later. Payloads in flight at that
step are exchanged once more, and the record of the newest epoch counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.faults.happened import Happened, Rejoin, Settings
from experiments.metrics import encoded, read_records, truncated
from experiments.workdir import METRICS, write_whole
from lowcomm_jax.jobs.job_carrier import Counted
from lowcomm_jax.mesh.leader import leader
from lowcomm_jax.sync.sync_loop import SyncLoop

FILE = "landings.jsonl"
Record = dict[str, Any]
Table = dict[int, tuple[int, ...]]


class Landings:
    """One region's file, which the first of its processes writes.

    Args:
      loop: of this region's engine; its landings are recorded from now on.
      epoch: of the run that this job has joined.
    """

    def __init__(self, loop: SyncLoop, workdir: Path, region: int, epoch: int):
        self._path, self._region, self._loop = workdir / FILE, region, loop
        self._epoch = epoch
        if leader().leads and truncated(self._path):
            write_whole(self._path, "".join(map(_line, read_records(self._path))))
        loop.carrier.witness = self._saw

    def begin(self, step: int) -> None:
        """Record that this region begins the epoch with a state of this step."""
        self._write({"kind": "begin", "step": step})

    def _saw(self, counted: Counted) -> None:
        """Record who was counted in an exchange; the loop calls this before the payload lands."""
        everyone = tuple(range(self._loop.total))
        groups = self._loop.groups(counted.number) or [everyone]
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
                "adopted": counted.adopted,
            }
        )

    def came(self, step: int, moments_of: int | None) -> None:
        """Record that this region started from the anchor; moments_of: see `happened.Rejoin`."""
        record = {"kind": "rejoin", "step": step, "region": self._region}
        self._write(record | ({} if moments_of is None else {"moments_of": moments_of}))

    def not_finite(self, step: int) -> None:
        """Record that this region's parameters stopped being finite after this step."""
        self._write({"kind": "not_finite", "step": step})

    def _write(self, record: Record) -> None:
        if not leader().leads:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line(record | {"epoch": self._epoch}))


def _line(record: Record) -> str:
    return encoded(record) + "\n"


def gathered(workdirs: Sequence[Path], run: Settings) -> Happened:
    """Merge the records of all regions of a run.

    Args:
      workdirs: of the regions, in order.
      run: its settings.

    Raises:
      ValueError: two regions have different records in one epoch; epochs do not follow one another,
        or are missing; a region that has been in the run has no file.
    """
    exchanges: dict[tuple, tuple[int, list[bool]]] = {}
    rejoined, kept = {}, {}  # kept: (exchange, region) -> (epoch, whether it kept its own values)
    spoilt: dict[int, set[int]] = {}
    regions = {workdir / FILE: region for region, workdir in enumerate(workdirs)}
    for path, record in _standing([workdir / FILE for workdir in workdirs]):
        epoch, kind, step = (record.pop(name) for name in ("epoch", "kind", "step"))
        if kind == "rejoin":
            rejoined[step, record["region"]] = Rejoin(step, **record)
        elif kind == "not_finite":
            spoilt.setdefault(step, set()).add(regions[path])
        elif kind == "landing":
            members, counted = tuple(record["members"]), record["counted"]
            name = step, record["fragment"], record["number"], record["last"], members
            before = exchanges.get(name)
            if before is not None and before[0] == epoch and before[1] != counted:
                raise ValueError(
                    f"{path}: in epoch {epoch}, for the send at step {step} ({record}), others saw "
                    f"counted {before[1]}"
                )
            exchanges[name] = epoch, counted
            did = counted[members.index(regions[path])] and not record.get("adopted", True)
            # A region that comes in lands once more, as a listener, what its dead job has landed.
            here = name, regions[path]
            if here not in kept or kept[here][0] < epoch:
                kept[here] = epoch, did
    own: dict[int, set[int]] = {}
    for ((step, *_), region), (_, did) in kept.items():
        own.setdefault(step, set()).update({region} if did else ())
    during, ends = _left_out({name: counted for name, (_, counted) in exchanges.items()})
    came = tuple(rejoined[key] for key in sorted(rejoined))
    tables = {"left_out": during, "kept_own": _some(own), "at_the_end": ends}
    return Happened(run, **tables, rejoined=came, not_finite=_some(spoilt))


def _standing(paths: Sequence[Path]) -> list[tuple[Path, Record]]:
    """(file, record) of the records that no newer epoch has made void, newer epochs last."""
    seen = [(path, record) for path in paths for record in _in_turn(path)]
    begun = {r["epoch"]: r["step"] for _, r in seen if r["kind"] == "begin"}

    def stands(record: Record) -> bool:
        newer = (step for epoch, step in begun.items() if epoch > record["epoch"])
        return record["step"] <= min(newer, default=record["step"])

    return sorted((one for one in seen if stands(one[1])), key=lambda one: one[1]["epoch"])


def _in_turn(path: Path) -> list[Record]:
    """Records of a file, whose epochs must follow one another; none if the region never joined."""
    if not path.is_file():
        if path.with_name(METRICS).is_file():
            raise ValueError(f"{path} is missing, though this region has been in the run")
        return []
    records, newest = read_records(path), 0
    for record in records:
        epoch = record["epoch"]
        if epoch < newest or (epoch == newest and record["kind"] == "begin"):
            raise ValueError(
                f"{path}: epoch {epoch} comes after epoch {newest}: the run went on in another "
                "rendezvous, and what was undone by that is not known"
            )
        newest = epoch
    return records


def _left_out(exchanges: Mapping[tuple, Sequence[bool]]) -> tuple[Table, Table]:
    """(step of the send -> regions, fragment -> regions in the last synchronisation)."""
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
    return _some(during), _some({fragment: out for fragment, (_, out) in ends.items()})


def _some(table: Mapping[int, set[int]]) -> Table:
    return {key: tuple(sorted(out)) for key, out in sorted(table.items()) if out}
