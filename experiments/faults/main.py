"""Run a campaign of random faults on real jobs, and compare the result with one process.

    python -m experiments faults --config=configs/diloco.py --regions=3 --count=20 [--seed=7]

The command

1. draws a script of faults (experiments/faults/fault.py) by the seed, which it prints;
2. launches a job per region under that script;
3. trains in one process what the commit records say has happened;
4. compares the anchors of all regions with one another and with that process, bit for bit.

Jobs and process are compiled with flags under which XLA does not fuse across operations, since it
would round differently. Overrides (--config.FIELD=VALUE) apply to both.

Exit code 1: an anchor differs, or a job failed. The command then prints the folder, and the command
that repeats the script.
"""

from __future__ import annotations

import collections
import math
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from experiments.cli import Flags, parse_flags, refuse_any, show_help, split_config
from experiments.faults import happened
from experiments.faults.fault import Fault
from experiments.faults.random_scripts import RANDOM, at_random, read_random
from experiments.faults.scripts import write
from experiments.processes import same_rounding

SCRIPT, ALONE = "script.yaml", "alone"
STEPS_A_FAULT = 40
_LATE_S = 0.15
_ALIKE = (
    "--xla_backend_optimization_level=1 --xla_llvm_disable_expensive_passes=true " + same_rounding()
)


def main(argv: Sequence[str]) -> int:
    """Run one campaign; returns the exit code."""
    path, overrides, others = split_config(argv)
    flags = Flags()
    flags.text("workdir", None, "folder of the campaign (default runs/faults-SEED)")
    flags.whole("regions", 3, "how many jobs")
    flags.whole("count", 20, "how many faults")
    flags.whole("steps", None, f"inner steps of the run (default: {STEPS_A_FAULT} a fault)")
    flags.real("step_seconds", 0.02, "seconds by which each inner step is made longer")
    flags.whole("seed", None, "seed of the script (default: drawn, and printed)")
    flags.text("exchange", "store", "how payloads travel between the jobs: store or peers")
    flags.text(
        "compile_cache",
        None,
        "folder of compiled programs, or off (default: xla in the cache folder)",
    )
    values = flags.values
    rest = parse_flags("faults", others, values)
    if values.help:
        show_help(values, __doc__)
        return 0
    seed = secrets.randbelow(1 << 31) if values.seed is None else values.seed
    regions, count = values.regions, values.count
    steps = STEPS_A_FAULT * max(count, 1) if values.steps is None else values.steps
    pace = values.step_seconds
    problems = [f"unexpected argument {argument!r}" for argument in rest]
    problems += ["--regions: at least 2"] if regions < 2 else []
    problems += ["--count: at least 1"] if count < 1 else []
    problems += [] if 0 <= pace < math.inf else ["--step_seconds: seconds, at least 0"]
    if not problems:
        problems += read_random(f"{RANDOM}{seed}:{count}", regions, steps)[1]
    refuse_any(problems, "faults")
    workdir = Path(values.workdir or f"runs/faults-{seed}").absolute()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_ALIKE}".strip()
    console = Console(highlight=False, soft_wrap=True, markup=False)
    drawn = at_random(seed, count, regions, steps)
    kinds = collections.Counter(fault.kind for fault in drawn)
    said = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    console.print(f"seed {seed}: {count} faults in {steps} steps of {regions} regions ({said})")
    workdir.mkdir(parents=True, exist_ok=True)
    write(workdir / SCRIPT, [*far_apart(regions, steps, pace), *drawn])
    config = path or "configs/diloco.py"
    given = [f"--config={config}", *(f"--config.{name}={value}" for name, value in overrides)]
    given += [f"--config.steps={steps}", "--config.checkpoint.every=0"]
    if values.compile_cache is not None:
        given.append(f"--compile_cache={values.compile_cache}")
    wrong = _campaign(workdir, given, regions, values.exchange, console)
    for line in wrong:
        console.print(f"seed {seed}: {line}")
    if wrong:
        again = f"--seed={seed} --count={count} --regions={regions} --exchange={values.exchange}"
        again += f" --steps={steps} --step_seconds={pace}"
        console.print(f"the same script: python -m experiments faults --config={config} {again}")
        console.print(f"what is left: {workdir}")
    return 1 if wrong else 0


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
            Fault(1, "late", region, steps=steps, delay=_LATE_S),
            Fault(1, "straggle", region, steps=steps, delay=pace),
        )
    ]


def _campaign(
    workdir: Path, given: Sequence[str], regions: int, exchange: str, console: Console
) -> list[str]:
    """Launch the jobs, repeat the run in one process, and compare; one line for each difference."""
    from experiments.regions.main import main as launch  # it imports this room
    from experiments.train.main import main as train

    jobs, alone, began = workdir / "jobs", workdir / ALONE, time.monotonic()
    how = [f"--regions={regions}", f"--exchange={exchange}", f"--faults={workdir / SCRIPT}"]
    code = launch([*given, *how, f"--workdir={jobs}"])
    took = time.monotonic() - began
    if code:
        return [f"launch ended with code {code} after {took:.0f} s"]
    told = [f"--config.faults={jobs / happened.FILE}", f"--config.regions={regions}", "--quiet"]
    code = train([*given, *told, f"--workdir={alone}"])
    if code:
        return [f"one process ended with code {code}"]
    anchors = [_anchor(jobs / f"region{region}") for region in range(regions)]
    wrong = [
        f"regions 0 and {region} have different anchors ({name})"
        for region in range(1, regions)
        if (name := _differs(anchors[region], anchors[0])) is not None
    ]
    wanted = _anchor(alone)
    wrong += [
        f"region {region} has another anchor than one process ({name})"
        for region in range(regions)
        if (name := _differs(anchors[region], wanted)) is not None
    ]
    if not wrong:
        console.print(f"{took:.0f} s; the anchors of all regions are those of one process")
    return wrong


def _anchor(workdir: Path) -> dict[str, Any]:
    from experiments.trained.anchor import load_trained

    leaves = jax.tree.leaves_with_path(load_trained(workdir).params)
    return {jax.tree_util.keystr(name): np.asarray(x) for name, x in leaves}


def _differs(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """The first leaf that is not the same, bit for bit."""
    return next((n for n in wanted if found[n].tobytes() != wanted[n].tobytes()), None)
