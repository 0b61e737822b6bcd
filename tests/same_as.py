"""`python tests/same_as.py BASE`: shows that no number has moved since the git revision BASE.

Trains every method, codecs, meshes and engine settings for a few rounds (`same_as_cases`), once
with BASE's package and once with the working tree's, and compares bit for bit: losses, metrics,
events and their bytes, anchors, the regions' parameters, virtual clocks, and how many programs are
compiled. Of every method the working tree also restores BASE's checkpoint, payloads in flight
included, and must go on exactly as BASE did. One line a case; exits with 1, naming them, where
cases differ or fail. What must be as it was in a reorganisation is then not a matter of opinion.

Both sides run this tree's cases, side by side, each in a process of its own that imports the
package from a copy; so they may use only names that both revisions have (`same_as_cases`,
`same_as_probe`). Programs are not kept between runs, as compilations are counted. They are
optimised little, as in the tests: what differs, differs before the compiler sees it.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
sys.path.insert(0, str(ROOT))
from experiments.processes import same_rounding  # noqa: E402  (found from here)

PACKAGE = "lowcomm_jax"
FLAGS = (
    "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    f" --xla_llvm_disable_expensive_passes=true {same_rounding()}"
)
NOT_HERE = "(none)"


def extract(base: str, folder: Path) -> None:
    """Put the package of a revision into a folder."""
    command = ["git", "-C", str(ROOT), "archive", "--format=tar", base, PACKAGE]
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        raise SystemExit(f"{base} cannot be compared with: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        # As an attribute: `extractall(filter=)` is unknown to Python 3.11.2.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)


def copy(folder: Path) -> None:
    """Put the working tree's package into a folder, so that it may be edited meanwhile."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / PACKAGE, folder / PACKAGE, ignore=ignored)


def started(package: Path, results: Path, base: Path, only: str) -> subprocess.Popen:
    """The cases with one package."""
    results.mkdir(parents=True)
    env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    env |= {"PYTHONPATH": f"{package}{os.pathsep}{TESTS}", "XLA_FLAGS": FLAGS}
    env |= {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, "-P", str(TESTS / "same_as_probe.py"), f"--package={package}"]
    command += [f"--folder={results}", f"--base={base}", f"--only={only}"]
    with (results / "log").open("w") as log:
        return subprocess.Popen(command, env=env, cwd=package, stdout=log, stderr=log)


def read(results: Path) -> dict[str, dict]:
    """What a side has found so far, by case."""
    file = results / "results.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return {found["case"]: found["found"] for found in map(json.loads, lines)}


def flat(found: dict[str, dict]) -> dict[str, object]:
    """`{"first": {"losses": ...}}` -> `{"first losses": ...}`"""
    return {f"{part} {name}": value for part, of in found.items() for name, value in of.items()}


def differences(base: dict[str, dict] | None, head: dict[str, dict] | None) -> list[str]:
    """What one case came to that is not the same on both sides; empty = all is.

    Args:
      base, head: part -> name -> number or digest; a case that failed has the part `error`. What
        follows a restored checkpoint (`restored`) must be what followed in the run that was saved
        (`later`). None = it did not run.
    """
    sides = {"BASE": base, "the working tree": head}
    missing = [f"did not run with {name}" for name, found in sides.items() if found is None]
    failed = [
        f"fails with {name}: {found['error']['type']}: {found['error']['message']}"
        for name, found in sides.items()
        if found is not None and "error" in found
    ]
    if missing or failed:
        return missing + failed
    resumed = {"restored": base["later"]} if "restored" in base else {}
    expected, got = flat({**base, **resumed}), flat(head)
    return [
        f"{name} {expected.get(name, NOT_HERE)} -> {got.get(name, NOT_HERE)}"
        for name in dict.fromkeys([*expected, *got])
        if name not in expected or name not in got or expected[name] != got[name]
    ]


def line(name: str, differing: list[str]) -> str:
    return f"{name:<48}{'; '.join(differing) or 'same'}"


def both(folder: Path, only: str) -> Iterator[str]:
    """Run the two sides; gives the name of every case as soon as both have done it."""
    base, head = folder / "base", folder / "head"
    sides = [started(folder / f"{side.name}_package", side, base, only) for side in (base, head)]
    given: set[str] = set()
    try:
        running = True
        while running:
            running = any([side.poll() is None for side in sides])
            if sides[0].poll() is not None:
                (base / "saved").touch()  # nobody need wait for its checkpoints any more
            theirs = read(head)
            done = [name for name in read(base) if name in theirs and name not in given]
            given.update(done)
            yield from done
            time.sleep(0.2)
    finally:
        for side in sides:
            side.kill()
            side.wait()
    broken = [side for side, one in zip((base, head), sides) if one.returncode]
    for side in broken:
        print(
            f"{side.name} ended early:", *(side / "log").read_text().splitlines()[-3:], sep="\n  "
        )
    yield from [name for name in {**read(base), **read(head)} if name not in given]
    if broken:
        yield "(the rest)"


def compare(folder: Path, only: str) -> int:
    """Run both sides and print what differs; the exit status."""
    began, differing, count = time.monotonic(), [], 0
    for name in both(folder, only):
        count += 1
        base, head = read(folder / "base"), read(folder / "head")
        found = differences(base.get(name), head.get(name))
        differing += [name] if found else []
        print(line(name, found), flush=True)
    totals = [compiled(read(folder / side)) for side in ("base", "head")]
    print(f"\n{count} cases in {time.monotonic() - began:.0f} s; compiled: ", end="")
    print(f"{totals[0]} programs with BASE, {totals[1]} with the working tree")
    if not count:
        print(f"no case is named like {only!r}")
    if differing:
        print(f"{len(differing)} differ: {', '.join(differing)}")
    return int(bool(differing) or not count)


def compiled(results: dict[str, dict]) -> int:
    return sum(sum(found.get("compiled", {}).values()) for found in results.values())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", metavar="BASE", help="a git revision")
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="cases whose name contains it"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave results and logs there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="same_as_") as temporary:
        folder = (args.keep or Path(temporary)).resolve()
        if any((folder / name).exists() for name in ("base", "head")):
            raise SystemExit(f"{folder} holds the results of another comparison")
        extract(args.base, folder / "base_package")
        copy(folder / "head_package")
        return compare(folder, args.only)


if __name__ == "__main__":
    sys.exit(main())
