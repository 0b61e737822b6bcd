"""The quick comparison: every method on one small model and a named network, in minutes.

    python -m experiments [--workdir=runs/quick] [--config.common.steps=100]

Ends with a table and a page, report.html. Run again, it shows the same runs; interrupted (Ctrl-C or
SIGTERM: exit code 75), the same command continues. What is compared: configs/compare/quick.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.compare import main as compare


def main(config: Any, workdir: str | Path) -> int:
    """Compare, then say what could be done next; returns `compare.main`'s exit code."""
    console = Console()
    code = compare.main(config, workdir, console)
    if code == 0:
        console.print(
            f"\nopen {Path(workdir) / compare.REPORT} in a browser\n"
            "a run of your own:  python -m experiments train --config=configs/diloco.py "
            "--workdir=runs/a\n"
            "a comparison of your own:  python -m experiments compare "
            "--config=configs/compare/quick.py --config.seeds='(0,1,2)' --workdir=runs/b\n"
            "all commands:  python -m experiments --help",
            highlight=False,
            soft_wrap=True,
            markup=False,
        )
    return code
