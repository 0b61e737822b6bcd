"""Campaigns of random faults on real jobs, each compared with one process.

    python tests/campaigns.py FOLDER --config=configs/diloco.py --regions=3 --count=20 [--seed=7]
    python tests/campaigns.py FOLDER [SEED ...]
    python tests/campaigns.py FOLDER soak

A campaign

1. draws a script of faults (experiments/faults/fault.py) by its seed;
2. launches a job per region under that script;
3. trains in one process what the commit records say has happened;
4. compares the anchors of all regions with one another and with that process, bit for bit.

Jobs and process are compiled with flags under which XLA does not fuse across operations, since it
would round differently.

With `--config` it is one campaign of that config; overrides (--config.FIELD=VALUE) apply to jobs
and process. Without it, they are the 24 campaigns of docs/regions.md, or its two soaks, two at a
time, on a small model and the text of docs/: some 50 minutes on two idle cores. A soak takes two
hours, since inner steps are paced; 2001 and 2002 are their seeds.

A line says how each ended; its output lies in FOLDER/SEED.log. Exit code 1: an anchor differed, or
a job failed. FOLDER/SEED then stays, with the script.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rounding import same_rounding

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # a script has its own folder there

from experiments.faults import happened  # noqa: E402
from experiments.faults.fault import Fault  # noqa: E402
from experiments.faults.scripts import RANDOM, read_random, write  # noqa: E402
from experiments.trained.anchor import load_trained  # noqa: E402

SCRIPT, JOBS, ALONE = "script.yaml", "jobs", "alone"
STEPS_A_FAULT = 40
LATE_S = 0.15
ALIKE = f"--xla_backend_optimization_level=1 {same_rounding()}"
LIMIT_S = 1500.0  # of a campaign, beside the seconds of paced steps
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
    """One campaign.

    Attributes:
      config: a file in configs/, or its bare name.
      count: faults; None = those of `DRAWN`.
      steps: inner steps of the run; None = `STEPS_A_FAULT` for each fault.
      pace: seconds by which each inner step is made longer.
      fields: (dotted name, value) of the config.
    """

    regions: int
    config: str
    exchange: str
    seed: int
    count: int | None = None
    steps: int | None = None
    pace: float = 0.02
    fields: tuple[tuple[str, Any], ...] = ()

    def script(self) -> tuple[list[Fault], int, list[str]]:
        """(the faults drawn, steps of the run, problems)."""
        count = DRAWN[self.regions] if self.count is None else self.count
        steps = self.steps or STEPS_A_FAULT * count
        found, problems = read_random(f"{RANDOM}{self.seed}:{count}", self.regions, steps)
        return found, steps, problems


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
SOAKS = [
    Campaign(3, "diloco", "store", 2001, 150, 18_000, 0.4),
    Campaign(4, "streaming_diloco", "peers", 2002, 150, 18_000, 0.4),
]


def far_apart(regions: int, steps: int, pace: float) -> list[Fault]:
    """Faults for the whole run: late payloads, as of distant regions, and steps of a large model.

    Args:
      pace: seconds by which each inner step is made longer.

    Without them the other regions make thousands of steps while a region is started again.
    """
    return [
        fault
        for region in range(regions)
        for fault in (
            Fault(1, "late", region, steps=steps, delay=LATE_S),
            Fault(1, "straggle", region, steps=steps, delay=pace),
        )
    ]


def command(arguments: Sequence[str], log: Path, until: float) -> int | str:
    """The exit code of a command of `experiments`, or why there is none.

    Args:
      log: file to which its output is appended.
      until: by the monotonic clock; it is killed then.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} {ALIKE}".strip()
    with log.open("a") as opened:
        try:
            return subprocess.run(
                [sys.executable, "-m", "experiments", *arguments],
                cwd=ROOT,
                env={**os.environ, "XLA_FLAGS": flags},
                stdout=opened,
                stderr=subprocess.STDOUT,
                timeout=until - time.monotonic(),
            ).returncode
        except subprocess.TimeoutExpired:
            return "none: it took too long"


def anchor(workdir: Path) -> dict[str, np.ndarray]:
    """The leaves of a run's newest anchor, by name."""
    leaves = jax.tree.leaves_with_path(load_trained(workdir).params)
    return {jax.tree_util.keystr(name): np.asarray(x) for name, x in leaves}


def run(one: Campaign, folder: Path) -> list[str]:
    """Run jobs under the script, and one process; a line for what failed."""
    workdir, log = folder / str(one.seed), folder / f"{one.seed}.log"
    shutil.rmtree(workdir, ignore_errors=True)
    workdir.mkdir(parents=True)
    log.unlink(missing_ok=True)
    drawn, steps, _ = one.script()
    until = time.monotonic() + LIMIT_S + 2 * steps * one.pace
    write(workdir / SCRIPT, [*far_apart(one.regions, steps, one.pace), *drawn])
    fields = (*one.fields, ("steps", steps), ("checkpoint.every", 0))
    given = [f"--config={one.config}", *(f"--config.{name}={value}" for name, value in fields)]
    how = [f"--regions={one.regions}", f"--exchange={one.exchange}"]
    how += [f"--faults={workdir / SCRIPT}", f"--workdir={workdir / JOBS}"]
    told = [f"--config.faults={workdir / JOBS / happened.FILE}", "--quiet"]
    told += [f"--config.regions={one.regions}", f"--workdir={workdir / ALONE}"]
    for name, more in (("launch", how), ("train", told)):
        if (code := command([name, *given, *more], log, until)) != 0:
            return [f"{name} ended with code {code}"]
    return []


def differences(one: Campaign, workdir: Path) -> list[str]:
    """A line for every region whose anchor is not that of one process, bit for bit."""
    wanted = anchor(workdir / ALONE)
    anchors = {f"region {r}": anchor(workdir / JOBS / f"region{r}") for r in range(one.regions)}
    return [
        f"{name} has another anchor than one process ({leaf})"
        for name, found in anchors.items()
        for leaf in [n for n in wanted if found[n].tobytes() != wanted[n].tobytes()][:1]
    ]


def listed(folder: Path, chosen: Sequence[str]) -> list[Campaign]:
    """Those of docs/regions.md, or its soaks, with the text of docs/ as their corpus.

    Args:
      chosen: seeds, or `soak`; empty = all but the soaks.
    """
    texts = folder / "texts"
    texts.mkdir(parents=True, exist_ok=True)
    for page in (ROOT / "docs").glob("*.md"):
        shutil.copy(page, texts / f"{page.stem}.txt")
    fields = SETTINGS | {"data.corpus": f"text:{texts}", "data.cache_dir": folder / "cache"}
    known = SOAKS if chosen == ["soak"] else CAMPAIGNS
    some = [one for one in known if chosen in ([], ["soak"]) or str(one.seed) in chosen]
    return [one._replace(fields=tuple(fields.items())) for one in some]


def main(argv: Sequence[str]) -> int:
    """Run the campaigns of the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("chosen", nargs="*", help="seeds of the list, or soak")
    parser.add_argument("--config", help="one campaign of this config")
    parser.add_argument("--regions", type=int, default=3, help="how many jobs")
    parser.add_argument("--count", type=int, default=20, help="how many faults")
    parser.add_argument("--steps", type=int, help=f"of the run (default: {STEPS_A_FAULT} a fault)")
    parser.add_argument("--pace", type=float, default=0.02, help="seconds added to each inner step")
    parser.add_argument("--seed", type=int, help="of the script (default: drawn, and printed)")
    parser.add_argument("--exchange", default="store", help="store or peers")
    given, others = parser.parse_known_args(argv)
    given.folder = given.folder.absolute()
    fields = tuple(x.removeprefix("--config.").split("=", 1) for x in others)
    if not all(x.startswith("--config.") and "=" in x for x in others):
        parser.error(f"{' '.join(others)}: give settings as --config.FIELD=VALUE")
    if given.config is None:
        campaigns = listed(given.folder, given.chosen)
    else:
        seed = secrets.randbelow(1 << 31) if given.seed is None else given.seed
        own = given.count, given.steps, given.pace, fields
        one = Campaign(given.regions, given.config, given.exchange, seed, *own)
        if given.regions < 2 or given.count < 1 or not given.pace >= 0:
            parser.error("give at least 2 regions, 1 fault, and a pace of 0 or more")
        if problems := one.script()[2]:
            parser.error("; ".join(problems))
        campaigns = [one]
        given.folder.mkdir(parents=True, exist_ok=True)
        print(f"seed {seed}: {given.count} faults, {given.regions} regions", flush=True)
    code = 0
    with ThreadPoolExecutor(2) as pool:
        ran = pool.map(lambda one: run(one, given.folder), campaigns)
        for one, failed in zip(campaigns, ran, strict=True):
            workdir = given.folder / str(one.seed)
            wrong = failed or differences(one, workdir)
            said = "; ".join(wrong) or "equal"
            print(one.regions, one.config, one.exchange, one.seed, said, flush=True)
            if wrong:
                code = 1
            else:
                shutil.rmtree(workdir)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
