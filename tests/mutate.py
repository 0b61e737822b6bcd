"""Small faults in the core rooms, one at a time: how many of them do the tests see?

    python tests/mutate.py ROOM [ROOM ...] [--sample=100 | --all] [--seed=0] [--out=mutants.jsonl]

A mutant is one change of one place of a room's source: another comparison, another sign or
operator, a condition negated or dropped, a number moved by one, a keyword left out. Of each room a
seeded sample is judged, on one core, in a copy of the tree. Coverage of the room's tests and of
those in `BESIDE` says which tests run a changed line; only those are run for it, until one fails.

Every verdict is a line of `--out` at once: a run that was cut off goes on where it was. Survivors
have an empty "verdict": write there why, e.g. "equivalent: ..." or "test: ..."; equivalent ones do
not count in the rate, which is printed with its 95 % interval (Wilson).
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import coverage

ROOT = Path(__file__).parents[1]
ROOMS = (
    *("sync", "train", "exchange", "runtime", "compression", "landing", "outer", "schedule"),
    "checkpoint",
)
# What sees faults of a room beside its own tests. They are tried last.
BESIDE = {
    "sync": ["tests/engine"],
    "train": ["tests/engine"],
    "exchange": ["tests/runtime"],
    "runtime": ["tests/exchange", "tests/recovery"],
    "compression": ["tests/engine"],
    "landing": ["tests/engine"],
    "outer": ["tests/engine"],
    "schedule": ["tests/engine"],
    "checkpoint": ["tests/state", "tests/experiments/train"],
}
TEST_S, TRY_S = 90, 1800  # seconds for one test, and for all that judge one mutant
Covered = dict[str, dict[str, list[str]]]  # source file -> line -> tests
COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


def changes(node: ast.AST) -> list[ast.expr]:
    """What may stand in the place of one expression."""
    found: list[ast.expr] = []
    match node:
        case ast.Compare(left, [op], [right]) if type(op) in COMPARISONS:
            found.append(ast.Compare(left, [COMPARISONS[type(op)]()], [right]))
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            found.append(ast.BinOp(left, OPERATORS[type(op)](), right))
        case ast.BoolOp(op, values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            found += [ast.BoolOp(other, values), values[0], values[-1]]
        case ast.UnaryOp(ast.Not() | ast.USub() | ast.Invert(), operand):
            found.append(operand)
        case ast.IfExp(_, body, orelse):
            found += [body, orelse]
        case ast.Constant(bool() as value):
            found.append(ast.Constant(not value))
        case ast.Constant(int() | float() as value):
            found.append(ast.Constant(value + 1))
        case ast.Call(function, arguments, keywords) if keywords:
            found += [
                ast.Call(function, arguments, keywords[:i] + keywords[i + 1 :])
                for i in range(len(keywords))
                if keywords[i].arg
            ]
    return found


def mutants(path: str, source: str) -> list[dict]:
    """All mutants of one file: where, from what, to what."""
    lines = source.encode().splitlines(keepends=True)
    starts = [sum(map(len, lines[:i])) for i in range(len(lines))]
    tree, found, skipped = ast.parse(source), [], set()
    for node in ast.walk(tree):
        for part in (*getattr(node, "decorator_list", ()), getattr(node, "annotation", None)):
            skipped |= set(map(id, ast.walk(part))) if part is not None else set()
        skipped |= {id(node.returns)} if getattr(node, "returns", None) is not None else set()
        if isinstance(node, ast.JoinedStr | ast.Raise):
            skipped |= set(map(id, ast.walk(node)))  # messages
    for node in ast.walk(tree):
        for new in changes(node) if id(node) not in skipped else ():
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            text = f"({ast.unparse(ast.fix_missing_locations(new))})"
            old = source.encode()[begin:end].decode()
            where = {"path": path, "line": node.lineno, "last": node.end_lineno}
            found.append({**where, "begin": begin, "end": end, "old": old, "new": text})
    return found


def of_room(room: str) -> list[dict]:
    folder = ROOT / "lowcomm_jax" / room
    files = sorted(folder.rglob("*.py"))
    return [m for f in files for m in mutants(str(f.relative_to(ROOT)), f.read_text())]


def pytest_runtest_logstart(nodeid: str) -> None:
    """As a plug-in of the run that measures coverage: lines belong to the test that runs them."""
    if (measured := coverage.Coverage.current()) is not None:
        measured.switch_context(nodeid)


def covering(copy: Path, tests: list[str], out: Path) -> Covered:
    """Which test runs which line, by one run of `tests`; kept beside `out`.

    Ends the program if one of them fails without any fault: it can judge none.
    """
    known_at = out.with_suffix(f".{hashlib.sha256(repr(tests).encode()).hexdigest()[:8]}.covered")
    if not known_at.exists():
        data = copy / ".coverage"
        data.unlink(missing_ok=True)
        launcher = ["-m", "coverage", "run", "--source=lowcomm_jax", "--concurrency=thread"]
        if pytest(copy, tests, 7200, launcher=launcher, options=["-p", "mutate"]) != 0:
            sys.exit(f"a test of {tests} fails without any fault: it can judge none")
        measured = coverage.CoverageData(str(data))
        measured.read()
        lines = {
            str(Path(path).relative_to(copy)): measured.contexts_by_lineno(path)
            for path in measured.measured_files()
        }
        known_at.write_text(json.dumps(lines))
    return json.loads(known_at.read_text())


def pytest(copy: Path, tests: list[str], seconds: float, launcher=(), options=()) -> int | None:
    """The exit code of these tests, slow ones left out; None = they took too long."""
    asked = copy / "asked.txt"
    asked.write_text("\n".join(tests))
    command = [sys.executable, *launcher, "-m", "pytest", "-n", "0", "-q", "-x", f"@{asked}"]
    around = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(copy), str(copy / "tests")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        # Most programs are those of other mutants too.
        "JAX_COMPILATION_CACHE_DIR": str(copy / "compiled"),
    }
    quiet = {"stdout": (copy / "printed.txt").open("w"), "stderr": subprocess.STDOUT}
    try:
        made = subprocess.run([*command, *options], cwd=copy, env=around, timeout=seconds, **quiet)
    except subprocess.TimeoutExpired:
        return None
    finally:
        quiet["stdout"].close()
    return made.returncode


def chosen_tests(mutant: dict, known: Covered, own: list[str]) -> list[list[str]]:
    """Tests for one mutant, in the order in which they are tried, each until one fails.

    First the tests that run a changed line; then the rest of their files, since what a fixture or
    a cache ran for several tests was counted for the first. A line that runs at import alone is
    judged by the room's own files, one that never runs by none.
    """
    lines = known.get(mutant["path"], {})
    at = [lines[str(i)] for i in range(mutant["line"], mutant["last"] + 1) if str(i) in lines]
    # The room's own tests first, as they were listed; those of other rooms behind them.
    running = {test: None for tests in at for test in tests if test}
    if not running:
        return [own] if at else []
    files = {test.partition("::")[0]: None for test in running}
    return [
        sorted(running, key=lambda test: not test.startswith(tuple(own))),
        sorted(files, key=lambda file: not file.startswith(tuple(own))),
    ]


def judge(copy: Path, mutant: dict, known: Covered, own: list[str]) -> dict:
    """The mutant with `killed_by`: a test, `time` if it takes too long, or None for a survivor."""
    path = copy / mutant["path"]
    source = path.read_bytes()
    path.write_bytes(source[: mutant["begin"]] + mutant["new"].encode() + source[mutant["end"] :])
    tries = chosen_tests(mutant, known, own)
    try:
        killed_by = next(filter(None, (killer(copy, tests) for tests in tries)), None)
    finally:
        path.write_bytes(source)
    return {**mutant, "tests": len(tries[0]) if tries else 0, "killed_by": killed_by, "verdict": ""}


def killer(copy: Path, tests: list[str]) -> str | None:
    """The first of `tests` that fails."""
    code = pytest(copy, tests, TRY_S, options=["-o", f"timeout={TEST_S}"])
    if code in (0, 5):
        return None
    found = re.findall(r"^(?:FAILED|ERROR) (\S+)", (copy / "printed.txt").read_text(), re.M)
    return found[0] if found else "time" if code is None else "the process ended"


def rate(judged: list[dict]) -> str:
    """The kill rate of what is not equivalent, with Wilson's 95 % interval."""
    counted = [m for m in judged if not m["verdict"].startswith("equivalent")]
    n, killed = len(counted), sum(m["killed_by"] is not None for m in counted)
    if not n:
        return "nothing was judged"
    p, z = killed / n, 1.96
    centre, spread = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = ((centre + sign * spread) / (1 + z * z / n) for sign in (-1, 1))
    return f"{killed} of {n} killed: {p:.1%} [{low:.1%}, {high:.1%}]"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rooms", nargs="+", choices=ROOMS)
    parser.add_argument("--sample", type=int, default=100, help="mutants of each room")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="these files and folders of tests alone")
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"))
    given = parser.parse_args(arguments)
    judged = (
        [json.loads(x) for x in given.out.read_text().splitlines()] if given.out.exists() else []
    )
    done = {(m["path"], m["begin"], m["end"], m["new"]) for m in judged}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        leave = shutil.ignore_patterns(".git", "__pycache__", "*.egg-info", "runs")
        shutil.copytree(ROOT, copy, ignore=leave)
        for room in given.rooms:
            every = of_room(room)
            random.Random(given.seed).shuffle(every)
            chosen = every if given.all else every[: given.sample]
            own = given.only or [f"tests/{room}"]
            beside = [] if given.only else BESIDE[room]
            known = covering(copy, [*own, *beside], given.out.resolve())
            for mutant in chosen:
                if (mutant["path"], mutant["begin"], mutant["end"], mutant["new"]) in done:
                    continue
                judged.append(judge(copy, {"room": room, **mutant}, known, own))
                with given.out.open("a") as out:
                    out.write(json.dumps(judged[-1]) + "\n")
                print(judged[-1]["path"], judged[-1]["line"], judged[-1]["killed_by"], flush=True)
            print(f"{room} ({len(every)}):", rate([m for m in judged if m["room"] == room]))


if __name__ == "__main__":
    main()
