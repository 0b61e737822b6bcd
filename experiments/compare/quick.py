"""The quick comparison: every method on one small model and a named network, in minutes.

    python -m experiments [--workdir=runs/quick] [--config.common.steps=100]

Prints at once what it will do and where the page will be, and after the first steps how long it
takes. Ends with a table, a page (report.html), and the result at equal time and at equal bytes.
After an interruption (Ctrl-C or SIGTERM: exit code 75) the same command continues; after the end it
shows the same runs again. The methods and settings: configs/compare/quick.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.cli import WORKDIR, Flags, config_asked_for, values_refused
from experiments.compare.config import REPORT, RESULT, refuse_unmade
from experiments.progress import plain_console, say

DEFAULT = "configs/compare/quick.py"


def main(argv: Sequence[str]) -> int:
    """Print what will be compared, compare, print the result; returns the exit code."""
    options = Flags()
    options.text("workdir", None, WORKDIR)
    config, folder, _ = config_asked_for("quick", argv, options, __doc__, DEFAULT)
    refuse_unmade(config)
    console, workdir = plain_console(), Path(options.values.workdir or folder)
    say(console, announcement(config, workdir))
    # What trains is slow to import: the lines above come first.
    from experiments.compare.at_equal import sentence
    from experiments.compare.main import compare

    with values_refused("quick"):
        code = compare(config, workdir, console)
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


def announcement(config: Any, workdir: Path) -> str:
    """What is about to happen, from the config alone."""
    common, seeds = config["common"], len(config["seeds"])
    runs = len(config["variants"]) * seeds
    sizes = [
        f"{common[key]} {what}"
        for key, what in (("steps", "steps"), ("regions", "regions"))
        if key in common
    ]
    where = f" on the network {', '.join(config['networks'])}" if config["networks"] else ""
    return (
        f"{config['title']}: {', '.join(config['variants'])}\n"
        f"{runs} runs of {', '.join(sizes)} each, {config['parallel']} at once; virtual time"
        f"{where}\n"
        f"the time left is printed after the first steps (minutes in all on two cores)\n"
        f"the page will be {(workdir / REPORT).absolute()}"
    )
