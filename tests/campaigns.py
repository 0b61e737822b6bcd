"""Runs the 24 campaigns of random faults of docs/regions.md, or its two soaks, two at a time.

    python tests/campaigns.py FOLDER [SEED ...]
    python tests/campaigns.py FOLDER soak

Each is `python -m experiments faults` with a seed of its own, on a small model and the text of
docs/. A line says how it ended; its output lies in FOLDER/SEED.log. Some 50 minutes on two idle
cores. A soak takes two hours, since inner steps are paced; 2001 and 2002 are their seeds. Exit code
1: an anchor differed, or a job failed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIMIT_S, SOAK_LIMIT_S = 1500.0, 4 * 3600.0
DRAWN = {2: 60, 3: 60, 4: 60, 5: 50, 6: 50, 7: 40, 8: 40}  # faults, by number of regions
SETTINGS = {
    "model.layers": 1,
    "model.width": 16,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.head_dim": 8,
    "model.mlp_width": 24,
    "data.val_fraction": 0.3,
    "data.seq_len": 16,
    "batch": 1,
    "method.period": 6,
    "inner.warmup_steps": 2,
    "eval.sequences": 20,
    "eval.batch": 8,
    "eval.every": 500,
    "checkpoint.every": 0,
    "log.every": 10,
}


class Campaign(NamedTuple):
    regions: int
    method: str
    exchange: str
    seed: int

    @property
    def how_long(self) -> list[str]:
        if self not in SOAKS:
            return [f"--count={DRAWN[self.regions]}"]
        return ["--count=150", "--steps=18000", "--step_seconds=0.4"]


CAMPAIGNS = [
    *(Campaign(2, "diloco", "store", seed) for seed in (1001, 1018)),
    Campaign(2, "diloco", "peers", 1011),
    Campaign(2, "streaming_diloco", "peers", 1003),
    Campaign(2, "cocodc", "store", 1007),
    Campaign(2, "sparseloco", "store", 1015),
    Campaign(2, "sparseloco", "peers", 1023),
    Campaign(3, "diloco", "store", 1013),
    *(Campaign(3, "diloco", "peers", seed) for seed in (1002, 1016)),
    Campaign(3, "streaming_diloco", "store", 1005),
    Campaign(3, "cocodc", "store", 1021),
    Campaign(3, "sparseloco", "peers", 1009),
    Campaign(4, "diloco", "store", 1004),
    Campaign(4, "streaming_diloco", "store", 1019),
    Campaign(4, "sparseloco", "peers", 1012),
    Campaign(5, "diloco", "peers", 1008),
    Campaign(5, "sparseloco", "store", 1022),
    Campaign(6, "diloco", "peers", 1020),
    Campaign(6, "streaming_diloco", "store", 1010),
    Campaign(7, "streaming_diloco", "peers", 1014),
    Campaign(8, "diloco", "store", 1006),
    Campaign(8, "diloco", "peers", 1017),
    Campaign(8, "streaming_diloco", "store", 1024),
]
SOAKS = [Campaign(3, "diloco", "store", 2001), Campaign(4, "streaming_diloco", "peers", 2002)]


def run(one: Campaign, folder: Path) -> bool:
    """Run a campaign; whether all anchors were equal."""
    workdir, texts = folder / str(one.seed), folder / "texts"
    shutil.rmtree(workdir, ignore_errors=True)
    settings = SETTINGS | {"data.corpus": f"text:{texts}", "data.cache_dir": folder / "cache"}
    command = [
        *(sys.executable, "-m", "experiments", "faults"),
        f"--config=configs/{one.method}.py",
        f"--regions={one.regions}",
        *one.how_long,
        f"--seed={one.seed}",
        f"--exchange={one.exchange}",
        f"--workdir={workdir}",
        *(f"--config.{field}={value}" for field, value in settings.items()),
    ]
    began, limit = time.monotonic(), SOAK_LIMIT_S if one in SOAKS else LIMIT_S
    with (folder / f"{one.seed}.log").open("w") as log:
        try:
            code = subprocess.run(
                command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=limit
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    took = time.monotonic() - began
    print(*one, "equal" if code == 0 else f"exit code {code}", f"{took:.0f} s", flush=True)
    if code == 0:
        shutil.rmtree(workdir, ignore_errors=True)
    return code == 0


def main(folder: Path, given: list[str]) -> int:
    texts = folder / "texts"
    texts.mkdir(parents=True, exist_ok=True)
    for page in (ROOT / "docs").glob("*.md"):
        shutil.copy(page, texts / f"{page.stem}.txt")
    known = SOAKS if given == ["soak"] else CAMPAIGNS
    chosen = [one for one in known if given in ([], ["soak"]) or str(one.seed) in given]
    with ThreadPoolExecutor(2) as pool:
        equal = list(pool.map(lambda one: run(one, folder), chosen))
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
