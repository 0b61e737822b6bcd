"""Small faults in the core rooms, one at a time: how many of them do the tests see?

    python tests/mutate.py ROOM [ROOM ...] [--sample=100 | --all] [--seed=0] [--kept=build/mutants]

Of each room a seeded sample of its mutants (`tests/mutants.py`) is judged, on one core, in a copy
of the tree. One run with coverage says which tests of the room, and of those in `BESIDE`, run which
line, and how long each takes. A mutant is tried by the tests that run its lines, and then by those
near them, until one fails; by tests of `--limit` seconds in all, quick ones first. A test that
fails counts if it passes without the fault.

Every process is forked from one that has imported jax, but nothing of this project.

Every verdict is a line of `ROOM.jsonl` in `--kept` at once: a run that was cut off goes on where it
was; `--again` tries the survivors once more. What is known of a survivor is written by hand into
`tests/mutants.toml`: "equivalent: why" does not count in the rate, "test: which" counts as killed
(a test written since, or one beyond the limit, seen to fail with the fault). The rate is printed
with its 95 % interval (Wilson).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import coverage
import pytest
from mutants import ROOT, of_room, sample

ROOMS = (
    *("sync", "train", "exchange", "store", "rounds", "jobs", "compression", "rules", "schedule"),
    *("loops", "checkpoint"),
)
# What sees faults of a room beside its own tests. They are tried last.
BESIDE = {
    "sync": ["tests/engine", "tests/schedule", "tests/recovery"],
    "loops": ["tests/sync", "tests/engine", "tests/mesh"],
    "train": ["tests/engine"],
    "exchange": ["tests/sync", "tests/engine", "tests/mesh", "tests/regions"],
    "store": ["tests/regions"],
    "rounds": ["tests/regions", "tests/recovery"],
    "jobs": ["tests/regions", "tests/exchange", "tests/recovery"],
    "compression": ["tests/engine"],
    "rules": ["tests/engine"],
    "schedule": ["tests/engine"],
    "checkpoint": ["tests/state", "tests/experiments/train"],
}
LIMIT_S = 60  # of tests for one mutant, by what they took while coverage was measured
VERDICTS = ROOT / "tests/mutants.toml"
BEFORE_FORKS = ("optax", "flax.linen", "flax.nnx", "orbax.checkpoint")


@dataclasses.dataclass
class Measured:
    """What one run of some tests without any fault showed."""

    seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # of each test
    # source file -> line -> tests; no test: the line runs at import
    lines: dict[str, dict[str, list[str]]] = dataclasses.field(default_factory=dict)

    def __or__(self, other: Measured) -> Measured:
        lines = {path: dict(at) for path, at in self.lines.items()}
        for path, at in other.lines.items():
            known = lines.setdefault(path, {})
            for line, tests in at.items():
                known[line] = [*known.get(line, ()), *tests]
        return Measured(self.seconds | other.seconds, lines)


class Watch:
    """A plug-in of pytest: runs chosen tests in their order, tells which began, and times them."""

    def __init__(self, tests: list[str] | None, seconds: dict[str, float], began: Path) -> None:
        self.order = None if tests is None else {test: i for i, test in enumerate(tests)}
        self.known, self.began, self.seconds = seconds, began, Counter()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.order is None:
            return
        items[:] = sorted(
            (item for item in items if item.nodeid in self.order),
            key=lambda item: self.order[item.nodeid],
        )
        for item in items:
            item.add_marker(pytest.mark.timeout(30 + 10 * self.known[item.nodeid]))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        with self.began.open("a") as out:
            out.write(f"{nodeid}\n")
        if (measured := coverage.Coverage.current()) is not None:
            measured.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration


class Tree:
    """A copy of the working tree in which faults are put, and tests run."""

    def __init__(self, folder: Path, kept: Path) -> None:
        self.copy, self.kept = folder / "copy", kept
        self.began, self.printed, self.used = (folder / n for n in ("began", "printed", "used"))
        leave = shutil.ignore_patterns(".git", "*.egg-info", "runs", "build")
        shutil.copytree(ROOT, self.copy, ignore=leave)
        path = os.pathsep.join([str(self.copy), str(self.copy / "tests")])
        os.environ["PYTHONPATH"] = path  # of processes that tests start
        # Most programs are those of other mutants too.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(kept / "compiled")
        for name in ("conftest", *BEFORE_FORKS):
            importlib.import_module(name)

    def measure(self, tests: str) -> Measured:
        """Which test of a folder runs which line; kept until the code or those tests change.

        Ends the program if one of them fails without any fault: it can judge none.
        """
        files = sorted(self.copy.glob("lowcomm_jax/**/*.py"))
        files += sorted((self.copy / tests).rglob("*.py"))
        digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]
        known_at = self.kept / f"{tests.replace('/', '_')}.{digest}.json"
        if not known_at.exists():
            inside = self.copy / "lowcomm_jax"

            def measured() -> int:
                lines = coverage.Coverage(
                    data_file=None, source=[str(inside)], concurrency="thread"
                )
                watch = Watch(None, {}, self.began)
                lines.start()
                code = self._pytest([tests], watch)
                lines.stop()
                data = lines.get_data()
                at = {
                    str(Path(path).relative_to(self.copy)): data.contexts_by_lineno(path)
                    for path in data.measured_files()
                }
                known_at.write_text(json.dumps({"seconds": watch.seconds, "lines": at}))
                return code

            if self._fork(measured, 7200) != 0:
                known_at.unlink(missing_ok=True)
                sys.exit(f"{self.printed.read_text()}\nwithout any fault: it can judge none")
        return Measured(**json.loads(known_at.read_text()))

    def first_to_fail(self, tests: list[str], seconds: dict[str, float]) -> str | None:
        """The first of `tests` that fails, in this order; "time" where one hangs."""
        files = list({test.partition("::")[0]: None for test in tests})
        watch = Watch(tests, seconds, self.began)
        limit_s = 120 + 5 * sum(seconds[test] for test in tests)
        code = self._fork(lambda: self._pytest(files, watch), limit_s)
        began = self.began.read_text().splitlines()
        if code in (0, 5):  # 5: none of them was left to run
            return None
        return "time" if code is None else began[-1] if began else "import"

    def _pytest(self, arguments: list[str], watch: Watch) -> int:
        options = ["-n", "0", "-q", "-x", "-p", "no:cacheprovider", f"--basetemp={self.used}"]
        return int(pytest.main([*options, *arguments], plugins=[watch]))

    def _fork(self, work: Callable[[], int], seconds: float) -> int | None:
        """The exit code of `work` in a process of its own; None where it took too long."""
        self.began.write_text("")

        def child() -> None:
            os.setsid()
            out = os.open(self.printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1), os.dup2(out, 2)
            os.chdir(self.copy)
            sys.path[:] = [p for p in sys.path if p and not Path(p).is_relative_to(ROOT)]
            sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
            for name, module in list(sys.modules.items()):  # those of the tree itself
                if name != "__main__" and str(ROOT) in str(getattr(module, "__file__", "")):
                    del sys.modules[name]
            os._exit(work())

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(seconds)
        took_too_long = process.exitcode is None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with what tests started
        process.join()
        return None if took_too_long else process.exitcode


def chosen_tests(
    mutant: dict, measured: Measured, own: list[str], judged: list[dict], limit_s: float
) -> list[str]:
    """Tests for one mutant, in the order in which they are tried; `limit_s` of them.

    First three that killed mutants nearby. Then those that run a changed line: the quickest of each
    file, then the second of each, since tests of one file often see the same. Then those that run
    another line of that source file, and the rest of the room's tests in the same files: what a
    fixture, a cache or a compiled function ran for several tests was counted for the first. A line
    that runs at import alone is judged by all of the room's tests, one that never runs by none.
    """
    lines, seconds = measured.lines.get(mutant["path"], {}), measured.seconds
    at = [lines[str(i)] for i in range(mutant["line"], mutant["last"] + 1) if str(i) in lines]
    if not at:
        return []
    of_room = {test for test in seconds if test.startswith(tuple(own))}
    running = {test for tests in at for test in tests if test in seconds} or of_room
    killed: Counter[str] = Counter()
    for other in judged:
        if other["path"] == mutant["path"] and other["killed_by"] in running:
            killed[other["killed_by"]] += 9 if other["function"] == mutant["function"] else 1
    first = [test for test, _ in killed.most_common(3)]
    files = {test.partition("::")[0] for test in running}
    beside = {test for test in of_room if test.partition("::")[0] in files}
    beside |= {test for tests in lines.values() for test in tests if test in seconds}
    in_turn = functools.partial(alternating, own=own, seconds=seconds)
    chosen, sum_s = [], 0.0
    for test in (*first, *in_turn(running - {*first}), *in_turn(beside - running)):
        if not chosen or sum_s + seconds[test] <= limit_s:
            chosen.append(test)
            sum_s += seconds[test]
    return chosen


def alternating(tests: set[str], own: list[str], seconds: dict[str, float]) -> list[str]:
    """The quickest test of each file, then the second of each; the room's `own` before others."""
    seen: Counter[str] = Counter()
    turns: list[tuple[int, bool, float, str]] = []
    for test in sorted(tests, key=seconds.__getitem__):
        file = test.partition("::")[0]
        turns.append((seen[file], not test.startswith(tuple(own)), seconds[test], test))
        seen[file] += 1
    return [test for *_, test in sorted(turns)]


def judge(tree: Tree, mutant: dict, tests: list[str], seconds: dict[str, float]) -> dict:
    """The mutant with `killed_by`: a test, "time" where one hangs, "import", or None."""
    path = tree.copy / mutant["path"]
    source, compiled = path.read_bytes(), Path(importlib.util.cache_from_source(str(path)))
    changed = source[: mutant["begin"]] + mutant["new"].encode() + source[mutant["end"] :]
    compiled.unlink(missing_ok=True)
    path.write_bytes(changed)
    try:
        killed_by = tree.first_to_fail(tests, seconds) if tests else None
    finally:
        path.write_bytes(source)
        compiled.unlink(missing_ok=True)
    return {**mutant, "tests": len(tests), "killed_by": killed_by}


def verdicts() -> dict[str, str]:
    """What was written by hand about each survivor, by its id."""
    known = tomllib.loads(VERDICTS.read_text()) if VERDICTS.exists() else {}
    return {m["id"]: m["verdict"] for m in known.get("mutant", ())}


def rate(judged: list[dict], known: dict[str, str]) -> str:
    """The kill rate of what is not equivalent, with Wilson's 95 % interval."""
    verdict = {m["id"]: "test" if m["killed_by"] else known.get(m["id"], "") for m in judged}
    counted = [said for said in verdict.values() if not said.startswith("equivalent")]
    n, killed = len(counted), sum(said.startswith("test") for said in counted)
    if not n:
        return "nothing was judged"
    p, z = killed / n, 1.96
    centre, spread = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = ((centre + sign * spread) / (1 + z * z / n) for sign in (-1, 1))
    return f"{killed} of {n} killed: {p:.1%} [{low:.1%}, {high:.1%}]"


def judge_room(tree: Tree, room: str, given: argparse.Namespace) -> None:
    """Judges the room's sample, one line a mutant, and prints the rate."""
    every, out = of_room(room), given.kept / f"{room}.jsonl"
    chosen = sample(every, given.seed)[: None if given.all else given.sample]
    lines = out.read_text().splitlines() if out.exists() else []
    judged = {m["id"]: m for m in map(json.loads, lines)}
    own = given.only or [x for x in [f"tests/{room}"] if (ROOT / x).is_dir()]
    measured = Measured()
    for tests in [*own, *([] if given.only else BESIDE[room])]:
        measured |= tree.measure(tests)
    sound: set[str] = set()  # tests seen to pass without the fault, as they were run
    for mutant in chosen:
        before = judged.get(mutant["id"])
        if before and (before["killed_by"] or not given.again):
            continue
        others = list(judged.values())
        while True:
            tests = chosen_tests(mutant, measured, own, others, given.limit)
            verdict = judge(tree, mutant, tests, measured.seconds)
            test = verdict["killed_by"]
            if test not in measured.seconds or test in sound:
                break
            until = tests[: tests.index(test) + 1]
            if tree.first_to_fail(until, measured.seconds) is None:
                sound.add(test)
                break
            print(f"{test} fails without any fault too: it judges nothing", flush=True)
            del measured.seconds[test]
        judged[mutant["id"]] = verdict
        with out.open("a") as file:
            file.write(json.dumps(verdict) + "\n")
        print(mutant["path"], mutant["line"], verdict["killed_by"], flush=True)
    of_sample = [judged[m["id"]] for m in chosen if m["id"] in judged]
    print(f"{room} ({len(every)}):", rate(of_sample, verdicts()))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rooms", nargs="+", choices=ROOMS)
    parser.add_argument("--sample", type=int, default=100, help="mutants of each room")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="these files and folders of tests alone")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of tests a mutant")
    parser.add_argument("--again", action="store_true", help="try survivors once more")
    parser.add_argument("--kept", type=Path, default=ROOT / "build/mutants")
    given = parser.parse_args(arguments)
    given.kept = given.kept.resolve()
    given.kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder), given.kept)
        for room in given.rooms:
            judge_room(tree, room, given)


if __name__ == "__main__":
    main()
