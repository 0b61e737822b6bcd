"""The demonstration: four regions train a small language model on Python sources with DiLoCo.

    python -m experiments

Takes two to three minutes on two cores. Prints progress, a report and samples, and writes the loss
curves. Run again, it shows the same run; with another --workdir it trains anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from experiments import compile_cache, report
from experiments.cli import Flags, RefusedError, load_config, parse_flags, show_help, split_config
from experiments.job import resolve
from experiments.sample import sample
from experiments.train import train
from experiments.trained import load_trained
from lowcomm_jax.interrupt import EXIT_INTERRUPTED

PROMPTS = ("def ", "import ", "class ")


def main(argv: Sequence[str]) -> int:
    """Train, report, sample; returns the exit code."""
    path, overrides, others = split_config(argv)
    options = Flags()
    options.text("workdir", "runs/quick", "folder of the run")
    options.text(
        "compile_cache",
        None,
        "folder of compiled programs, or off (default: xla in the cache folder)",
    )
    values = options.values
    rest = parse_flags("quick", others, values)
    if values.help:
        show_help(values, __doc__)
        return 0
    problems = [f"unexpected argument {argument!r}" for argument in rest]
    config, found = load_config(path or "quick", overrides)
    if problems + found:
        raise RefusedError(problems + found)
    job = resolve(config, values.workdir)
    compile_cache.enable(values.compile_cache)
    console = Console()
    console.print(_pitch(job), soft_wrap=True)
    if not train(job, console):
        console.print("interrupted and saved; run the same command to continue")
        return EXIT_INTERRUPTED
    report.show([job.workdir], console)
    show_samples(job.workdir, console)
    console.print(
        f"\nmore text:  python -m experiments sample --workdir={job.workdir} --prompt='class '\n"
        "a run of your own:  python -m experiments train --config=configs/diloco.py "
        "--workdir=runs/a\nall commands:  python -m experiments --help",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )
    return 0


def _pitch(job) -> str:
    return (
        f"[bold]{job.method.name}, {job.regions} regions[/bold]: each trains on its own text, and "
        f"they talk every {job.method.schedule.period} steps, not at every step"
    )


def show_samples(workdir: Path, console: Console) -> None:
    """Print what the trained anchor makes of a few prompts."""
    trained = load_trained(workdir)
    for number, prompt in enumerate(PROMPTS):
        text = sample(trained, prompt, temperature=0.6, seed=number)
        console.rule(f"sample: {prompt!r}", align="left")
        console.print(text, highlight=False, markup=False)
