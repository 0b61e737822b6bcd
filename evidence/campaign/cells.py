"""The runs of a campaign: a cell names one, gives its train config, its digest and its record."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evidence.campaign.plan import Campaign, Rung
from experiments.compare.plan import merged
from experiments.workdir import of_program, without_path

_DIGITS = 10  # of a digest in a file's name


@dataclasses.dataclass(frozen=True, order=True)
class Cell:
    """One run.

    Attributes:
      size, arm: names.
      rounds: of the campaign's H steps each, also where the arm has another period.
      split: of the data over regions.
      point: name of the learning rates, one of the arm's points.
      tunes: whether it chooses learning rates and is never reported.
    """

    size: str
    arm: str
    rounds: int
    regions: int
    split: str
    seed: int
    point: str
    tunes: bool = False

    @property
    def name(self) -> str:
        """A short name, different from those of all other cells of its size and arm."""
        kind = "tune-" if self.tunes else ""
        scale = f"r{self.rounds:03}-m{self.regions:02}-{self.split}-s{self.seed}"
        return f"{kind}{scale}-{self.point}"

    @property
    def rung(self) -> Rung:
        """Its scale."""
        return Rung(self.size, self.rounds, self.regions, self.split)

    @property
    def title(self) -> str:
        """Its name with its size and arm."""
        return f"{self.size} {self.arm} {self.name}"


def fields_of(campaign: Campaign, cell: Cell) -> dict[str, Any]:
    """The whole train config of a cell."""
    arm, size = campaign.arms[cell.arm], campaign.sizes[cell.size]
    steps = cell.rounds * campaign.period
    every = 0 if cell.tunes else max(1, steps // campaign.evaluations)
    period = arm.changes.get("method", {}).get("period", campaign.period)
    mine = {
        "seed": cell.seed,
        "steps": steps,
        "regions": cell.regions,
        "batch": size.batch // cell.regions,
        "method": {"period": period} if "period" in arm.base["method"] else {},
        "data": {"sharding": cell.split},
        "eval": {"every": every},
        "log": {"every": max(1, steps // 4)},
    }
    found = arm.base
    for changes in (campaign.common, size.fields, arm.changes, arm.points[cell.point], mine):
        found = merged(found, changes)
    return found


def digest_of(fields: Mapping[str, Any]) -> str:
    """Digest of all fields that decide numbers, equal on every machine.

    Unset fields (None) count as missing, so that a new field leaves older records valid.
    """
    data = {k: v for k, v in fields["data"].items() if k != "cache_dir"}
    data["corpus"] = without_path(data["corpus"])
    method, gone = fields["method"], {"stack_trainers": True}  # the records still have it
    if method["name"] == "adloco":
        method = _adloco_as_recorded(method)
    kept = of_program({**fields, "method": method, "data": data})
    kept = _set_fields(merged(kept, {"adaptive": gone}))
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _adloco_as_recorded(method: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of AdLoCo by the names that they had when the records were made, and those gone."""
    kept = {name: value for name, value in method.items() if name != "inner_batching"}
    policy = method["inner_batching"]
    return kept | {
        "moments": "merge",
        "scope": "within",
        "choose": "worst_with_worst",
        "monotone": True,
        "smoothing": 0.5,
        "test": policy["name"],
        "start_batch": policy["start"],
        "max_batch": policy.get("cap", 32),  # a fixed batch had them, too
        "microbatches": policy.get("microbatches", 2),
    }


def _set_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    found = {k: _set_fields(v) if isinstance(v, Mapping) else v for k, v in fields.items()}
    return {k: v for k, v in found.items() if v is not None}


def record_path(campaign: Campaign, cell: Cell, digest: str) -> Path:
    """Path of a cell's record; a changed config gives another file."""
    folder = campaign.records / cell.size / cell.arm
    return folder / f"{cell.name}-{digest[:_DIGITS]}.json"
