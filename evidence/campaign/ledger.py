"""The records of a campaign: one small file a run, and the ledger of all of them.

A record holds metrics only. Records from several machines join by lying in one folder: the name
of each file follows from its cell and the digest of its config.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import os
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from evidence.campaign.cells import Cell, digest_of, fields_of, record_path
from evidence.campaign.plan import Campaign
from experiments.cli import refuse_any

VERSION = 1
LARGEST_BYTES = 100_000
CURVE = ("step", "tokens", "bytes", "seconds", "loss")  # of a record's curve, a row an evaluation
_ROOT = Path(__file__).resolve().parents[2]
_CODE = (
    "lowcomm_jax",
    "experiments",
    "configs",
    "evidence/campaign",
    "evidence/configs",
)  # the code that decides numbers


class Excluded(NamedTuple):
    """A record that no figure uses, by its path among the records, and why."""

    file: str
    reason: str


class Records:
    """The records of a campaign: those that count, by cell, and the others, each with a reason.

    A record counts if its config is still the campaign's (by digest), its run is complete, and its
    corpus is that of most records.
    """

    def __init__(self, campaign: Campaign, records: Iterable[tuple[str, Mapping[str, Any]]] = ()):
        """`records`: (path among the records, content)."""
        self.campaign = campaign
        self.found: dict[Cell, Mapping[str, Any]] = {}
        self.failed: dict[Cell, str] = {}
        self.excluded: list[Excluded] = []
        self.seen: set[tuple[str, int]] = set()  # files on disk that were read, and their times
        self._digests: dict[Cell, str] = {}
        for file, record in records:
            self.add(file, record)
        self.one_corpus()

    def digest(self, cell: Cell) -> str:
        """Of the cell's config as the campaign has it now."""
        if cell not in self._digests:
            self._digests[cell] = digest_of(fields_of(self.campaign, cell))
        return self._digests[cell]

    def add(self, file: str, record: Mapping[str, Any]) -> None:
        """Count a record, or note why it does not count."""
        cell = Cell(**record["cell"])
        campaign = self.campaign
        if cell.size not in campaign.sizes or cell.arm not in campaign.arms:
            self.excluded.append(Excluded(file, "the campaign no longer has this cell"))
        elif cell.point not in campaign.arms[cell.arm].points:
            self.excluded.append(Excluded(file, "at learning rates that the campaign does not try"))
        elif self.digest(cell) != record["config_digest"]:
            self.excluded.append(Excluded(file, "made with another config"))
        elif record["failed"] is not None:
            self.failed[cell] = record["failed"]
            self.excluded.append(Excluded(file, record["failed"]))
        else:
            self.found[cell] = record
            self.failed.pop(cell, None)

    def done(self, cell: Cell) -> bool:
        """Whether a cell has a record, also one of a run that failed."""
        return cell in self.found or cell in self.failed

    def loss(self, cell: Cell) -> float | None:
        """The final loss in nats per token; infinite if the run failed, None if it is missing."""
        if cell in self.failed:
            return math.inf
        return self.found[cell]["loss"] if cell in self.found else None

    def one_corpus(self) -> None:
        """Leave out records of other corpora than most have: their losses cannot be compared."""
        counts = Counter(record["corpus_digest"] for record in self.found.values())
        if len(counts) < 2:
            return
        usual = max(sorted(counts), key=counts.__getitem__)
        for cell, record in list(self.found.items()):
            if record["corpus_digest"] != usual:
                del self.found[cell]
                path = record_path(self.campaign, cell, record["config_digest"])
                file = path.relative_to(self.campaign.records).as_posix()
                self.excluded.append(Excluded(file, "trained on another corpus"))


def read(campaign: Campaign) -> Records:
    """The ledger of the records in the campaign's folder.

    Raises:
      RefusedError: files that are no records of this version; lists all.
    """
    ledger = Records(campaign)
    update(ledger)
    return ledger


def update(ledger: Records) -> list[Mapping[str, Any]]:
    """Take the records that were written since the ledger was read, by any process.

    Returns:
      Those that count.

    Raises:
      RefusedError: files that are no records of this version; lists all.
    """
    records, problems = [], []
    for file in sorted(ledger.campaign.records.rglob("*.json")):
        stamp = file.name, file.stat().st_mtime_ns
        if stamp in ledger.seen:
            continue
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
            version = record["version"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            problems.append(f"{file} is no record ({type(error).__name__}): remove it")
            continue
        if version != VERSION:
            problems.append(f"{file} is of version {version}, this program reads {VERSION}")
            continue
        ledger.seen.add(stamp)
        ledger.add(file.relative_to(ledger.campaign.records).as_posix(), record)
        records.append(record)
    refuse_any(problems, "cannot read the records")
    ledger.one_corpus()
    return [record for record in records if ledger.found.get(Cell(**record["cell"])) is record]


def hours(records: Iterable[Mapping[str, Any]]) -> str:
    """What runs took: core-hours on CPUs, and hours of processes that may have shared a card."""
    took = Counter()
    for record in records:
        took[record["machine"]["backend"] == "cpu"] += record["core_seconds"] / 3600
    found = [f"{took[True]:.2f} core-hours"] if took[True] or not took[False] else []
    found += [f"{took[False]:.2f} process-hours on accelerators"] if took[False] else []
    return " and ".join(found)


def write(campaign: Campaign, cell: Cell, record: Mapping[str, Any]) -> Path:
    """Store a record; a process that is killed leaves no partial file.

    Raises:
      ValueError: the record is larger than `LARGEST_BYTES`, or has numbers that JSON cannot hold.
    """
    curve = record.get("curve", [])
    text = json.dumps({**record, "curve": []}, indent=1, sort_keys=True, allow_nan=False) + "\n"
    rows = ",\n".join(f"  {json.dumps(row, allow_nan=False)}" for row in curve)
    text = text.replace('"curve": []', f'"curve": [\n{rows}\n ]')  # a row a line, for diffs
    if len(text.encode()) > LARGEST_BYTES:
        raise ValueError(f"the record of {cell.name} has {len(text):,} bytes: evaluate less often")
    path = record_path(campaign, cell, record["config_digest"])
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
    return path


@functools.cache
def code_version() -> dict[str, Any]:
    """The package's version, the commit, and whether files that decide numbers were changed.

    As they were when first asked for: files may change while a campaign runs.
    """

    def git(*arguments: str) -> str:
        return subprocess.check_output(["git", *arguments], cwd=_ROOT, text=True).strip()

    return {
        "package": importlib.metadata.version("lowcomm_jax"),
        "commit": git("rev-parse", "HEAD"),
        "changed": bool(git("status", "--porcelain", "--", *_CODE)),
    }
