"""The quick comparison: every method on one small model and a named network, in minutes.

    python -m experiments [--workdir=runs/quick] [--config.common.steps=100]

Prints what it will do and where the page will be, and after the first steps how long it takes.
Ends with a table, a page (report.html), and the result at equal time and at equal bytes. After an
interruption (Ctrl-C or SIGTERM: exit code 75) the same command continues; after the end it shows
the same runs again. The methods and settings: configs/compare/quick.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from experiments.cli import WORKDIR, Flags, config_asked_for, values_refused
from experiments.compare.at_equal import sentence
from experiments.compare.config import REPORT, RESULT
from experiments.compare.main import compare, descriptions
from experiments.compare.plan import Comparison
from experiments.progress import plain_console, say

DEFAULT = "configs/compare/quick.py"


def main(argv: Sequence[str]) -> int:
    """Print what will be compared, compare, print the result; returns the exit code."""
    options = Flags()
    options.text("workdir", None, WORKDIR)
    config, folder, _ = config_asked_for("quick", argv, options, __doc__, descriptions, DEFAULT)
    console, workdir = plain_console(), Path(options.values.workdir or folder)
    with values_refused("quick"):
        code = compare(config, workdir, console, announce=announce)
    if code == 0:
        result = json.loads((workdir / RESULT).read_text(encoding="utf-8"))
        found = sentence(result["at_equal"], result["baseline"], len(result["seeds"]))
        say(
            console,
            "\na run of your own:  python -m experiments train --config=configs/diloco.py "
            "--workdir=runs/a\n"
            "a comparison of your own:  python -m experiments compare "
            "--config=configs/compare/quick.py --config.seeds='(0,1,2)' --workdir=runs/b\n"
            "all commands:  python -m experiments --help\n",
        )
        console.print(found, highlight=False, soft_wrap=not console.is_terminal)
        say(console, f"page: {(workdir / REPORT).absolute()}")
    return code


def announce(comparison: Comparison, console: Console) -> None:
    """Print what is about to happen."""
    config = comparison.config
    sizes = [
        f"{config['common'][key]} {key}" for key in ("steps", "regions") if key in config["common"]
    ]
    where = f" on the network {', '.join(config['networks'])}" if config["networks"] else ""
    say(
        console,
        f"{config['title']}: {', '.join(comparison.variants)}",
        f"{len(comparison.runs)} runs of {', '.join(sizes)} each, {config['parallel']} at once; "
        f"virtual time{where}",
        "the time left is printed after the first steps (minutes in all on two cores)",
        f"the page will be {(comparison.workdir / REPORT).absolute()}",
    )
