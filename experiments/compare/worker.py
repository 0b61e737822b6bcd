"""One run of a comparison in its own process: python -m experiments.compare.worker FOLDER [CACHE].

FOLDER holds the run's config.json; CACHE is the folder of compiled programs, or `off`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from experiments.compare.runs import attempt, error_of, terminations_interrupt
from experiments.processes import end_with_parent
from experiments.train import compile_cache
from experiments.workdir import read_config
from lowcomm_jax.interrupt import EXIT_INTERRUPTED


def main(argv: Sequence[str]) -> int:
    """Train; returns the exit code (0: complete, 1: failed, 75: interrupted)."""
    workdir, cache = Path(argv[0]), argv[1] if len(argv) > 1 else None
    with terminations_interrupt():
        try:
            compile_cache.enable(cache)
            if not attempt(read_config(workdir), workdir, Console()):
                return EXIT_INTERRUPTED
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
    return 0 if error_of(workdir) is None else 1


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main(sys.argv[1:]))
