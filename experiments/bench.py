"""Measure speed: bench engine, bench codec, ...; each compares within one run.

python -m experiments bench engine --help
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from experiments.cli import RefusedError, closest

NAMES = ("engine", "codec", "exchange", "wan", "pipeline")


def main(argv: Sequence[str]) -> int:
    """Run `experiments/bench_NAME.py`; returns its exit code."""
    folder = Path(__file__).parent
    known = [name for name in NAMES if (folder / f"bench_{name}.py").is_file()]
    if list(argv) in ([], ["--help"]):
        print((__doc__ or "") + "\nBenchmarks: " + ", ".join(known))
        return 0
    name, *rest = argv
    if name not in known:
        raise RefusedError([f"unknown benchmark {name!r}{closest(name, known)}"], "bench")
    code = importlib.import_module(f"experiments.bench_{name}").main(rest)
    return code if isinstance(code, int) else 0
