"""One program over two processes against one process, and against a job a region.

    python -m experiments bench hosts [--config=streaming_diloco] [--steps=240] [--repeats=3]

Two regions on two CPU devices make the same steps on the same cores in three ways, in turn:

- both devices in one process;
- a process for each device, in one program;
- a job for each region; the jobs exchange through a folder.

Tokens a second are those after the first quarter of the steps, in which programs compile.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from experiments.cli import Flags, flag_problems, refuse_any
from experiments.metrics import read_records
from experiments.processes import free_port, run_together
from experiments.progress import right, tracked
from experiments.workdir import METRICS

ONE, SEVERAL, JOBS = "one process, two devices", "two processes", "a job a region"
TARGET = 0.9


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; see the module's docstring for the flags."""
    options = Flags()
    options.text("config", "streaming_diloco", "what is trained")
    options.whole("steps", 240, "inner steps of a run")
    options.whole("batch", 4, "sequences of a region's step")
    options.whole("repeats", 3, "rounds")
    values = options.values
    problems = flag_problems("bench hosts", argv, values, __doc__)
    problems += [
        f"--{name}={getattr(values, name)}: at least {least} is needed"
        for name, least in (("steps", 60), ("batch", 1), ("repeats", 1))
        if getattr(values, name) < least
    ]
    refuse_any(problems, "bench hosts")
    console = Console()
    given = [
        f"--config={values.config}",
        "--config.regions=2",
        f"--config.steps={values.steps}",
        f"--config.batch={values.batch}",
        "--config.eval.every=0",
        "--config.eval.sequences=16",
        "--config.checkpoint.every=0",
    ]
    found: dict[str, list[float]] = {ONE: [], SEVERAL: [], JOBS: []}
    with tempfile.TemporaryDirectory() as folder:
        parts = [(round_, name) for round_ in range(values.repeats) for name in found]
        for round_, name in tracked(parts, "bench hosts", lambda part: part[1]):
            work = Path(folder) / f"{round_}.{list(found).index(name)}"
            work.mkdir()
            found[name].append(tokens_per_second(name, given, values.steps, work))
            console.print(f"{name}: {found[name][-1]:,.0f} tokens/s", highlight=False)
    console.print(table(found))
    return 0


def tokens_per_second(name: str, given: Sequence[str], steps: int, work: Path) -> float:
    """Train once; tokens of all regions a second.

    Raises:
      RuntimeError: a process failed; holds the end of its output.
    """
    commands = commands_of(name, given, work)
    run_together(name, "experiments", ((c, work / "output.txt", ()) for c in commands))
    folders = [work / "run"] if name != JOBS else [work / "run" / f"region{r}" for r in range(2)]
    return sum(pace(folder, steps // 4) for folder in folders)


def commands_of(name: str, given: Sequence[str], work: Path) -> list[list[str]]:
    """The commands that run at the same time."""
    common = [*given, f"--workdir={work / 'run'}"]
    if name == JOBS:
        return [["launch", *(a for a in common if "regions" not in a), "--regions=2"]]
    mesh = ["--config.mesh.region=2", "--config.mesh.fsdp=1", "--quiet"]
    if name == ONE:
        return [["train", *common, *mesh]]
    address = f"127.0.0.1:{free_port()}"
    place = [f"--coordinator={address}", "--processes=2"]
    return [["train", *common, *mesh, *place, f"--process={i}"] for i in range(2)]


def pace(folder: Path, after: int) -> float:
    """Tokens a second after a step, from the run's records."""
    steps = [r for r in read_records(folder / METRICS) if r["kind"] == "step"]
    first, last = next(r for r in steps if r["step"] >= after), steps[-1]
    return (last["tokens"] - first["tokens"]) / (last["seconds"] - first["seconds"])


def table(found: dict[str, list[float]]) -> Table:
    """Medians, and the ratio to one process within each round."""
    headings = ("tokens/s", "of one process", "lowest", "highest", "target")
    title = f"two regions on this machine, {len(found[ONE])} rounds"
    made = Table("", *right(headings), title=title)
    for name, measured in found.items():
        ratios = [a / b for a, b in zip(measured, found[ONE])]
        target = f">= {TARGET}" if name == SEVERAL else ""
        cells = [f"{statistics.median(measured):,.0f}", f"{statistics.median(ratios):.2f}"]
        made.add_row(name, *cells, f"{min(ratios):.2f}", f"{max(ratios):.2f}", target)
    return made
