"""Measure speed: bench engine, bench codec, ...; each compares within one run.

python -m experiments bench engine --help
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from experiments.cli import RefusedError, closest

NAMES = ("engine", "codec", "gpu")


def main(argv: Sequence[str]) -> int:
    """Run `experiments/bench/NAME.py`; returns its exit code."""
    if list(argv) in ([], ["--help"]):
        print((__doc__ or "") + "\nBenchmarks: " + ", ".join(NAMES))
        return 0
    name, *rest = argv
    if name not in NAMES:
        raise RefusedError([f"unknown benchmark {name!r}{closest(name, NAMES)}"], "bench")
    code = importlib.import_module(f"experiments.bench.{name}").main(rest)
    return code if isinstance(code, int) else 0
