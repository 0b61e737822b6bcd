"""`python tests/same_as.py BASE`: shows that no number has moved since the git revision BASE.

Trains every method on one device, on eight, and on a mesh of FSDP x tensor; codecs, meshes, engine
settings, and regions that are jobs of their own, for a few rounds: once as BASE does, once as the
working tree does. Compares bit for bit losses, metrics, events and their bytes, anchors, the
regions' parameters, virtual clocks, and how many programs are compiled. One line a case; where
arrays differ it says by how much. Exits with 1, naming them, where cases differ or fail.

Each side runs its own revision's package and cases (`same_as_cases`, `same_as_probe`), side by
side, so that public names may change between the two. What must stay is what this file reads: names
of cases, keys and types of their records (`Record`), and the probe's arguments.

Of every method the working tree also restores BASE's checkpoint, payloads in flight included, and
must go on exactly as BASE did. `--own-checkpoints` restores each side's own, for when BASE's can no
longer be read.

Programs are not kept between runs, as compilations are counted. They are optimised little, as in
the tests: what differs, differs before the compiler sees it.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from rounding import same_rounding

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent

FOLDERS = ("lowcomm_jax", "experiments", "tests")
FLAGS = (
    f"--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 {same_rounding()}"
)
SIDES = {"base": "BASE", "head": "the working tree"}
# "PART NAME" -> numbers, or text as an array of one string; a case that failed has `error` alone.
Record = Mapping[str, np.ndarray]


def extract(base: str, folder: Path) -> None:
    """Put a revision into a folder."""
    command = ["git", "-C", str(ROOT), "archive", "--format=tar", base, *FOLDERS]
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        raise SystemExit(f"{base} cannot be compared with: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        # As an attribute: `extractall(filter=)` is unknown to Python 3.11.2.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)


def copy(folder: Path) -> None:
    """Put the working tree into a folder, so that it may be edited meanwhile."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)


def started(side: Path, results: Path, base: Path, only: str) -> subprocess.Popen:
    """The cases of one side; `base`: whose checkpoints are restored."""
    results.mkdir(parents=True)
    env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    env |= {"PYTHONPATH": f"{side}{os.pathsep}{side / 'tests'}", "XLA_FLAGS": FLAGS}
    env |= {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    env["NPROC"] = "16"  # threads for eight devices that wait for one another (as in conftest.py)
    command = [sys.executable, "-P", str(side / "tests" / "same_as_probe.py")]
    command += [f"--folder={results}", f"--base={base}", f"--only={only}"]
    with (results / "log").open("w") as log:
        return subprocess.Popen(command, env=env, cwd=side, stdout=log, stderr=log)


def read(results: Path, name: str) -> Record | None:
    """What a case came to; None = it did not run."""
    file = results / f"{name}.npz"
    if not file.exists():
        return None
    with np.load(file) as record:
        return dict(record)


def done(results: Path) -> list[str]:
    """Names of the cases that a side has done, in order."""
    return [file.stem for file in sorted(results.glob("*.npz"), key=lambda f: f.stat().st_mtime_ns)]


def differences(base: Record | None, head: Record | None) -> list[str]:
    """What one case came to that is not the same on both sides; empty = all is.

    What follows a restored checkpoint (`restored`) must be what followed in the run that was saved
    (`later`).
    """
    sides = dict(zip(SIDES.values(), (base, head)))
    missing = [f"did not run with {side}" for side, found in sides.items() if found is None]
    failed = [f"fails with {s}: {f['error']}" for s, f in sides.items() if f and "error" in f]
    if missing or failed:
        return missing + failed
    saved = any(name.startswith("restored ") for name in base)
    later = {k: v for k, v in base.items() if saved and k.startswith("later ")}
    base = {**base, **{k.replace("later", "restored", 1): v for k, v in later.items()}}
    names = dict.fromkeys([*base, *head])
    told = {name: difference(base.get(name), head.get(name)) for name in names}
    return [f"{name} {how}" for name, how in told.items() if how]


def difference(base: np.ndarray | None, head: np.ndarray | None) -> str:
    """How far two values are apart, arrays in units of BASE's largest magnitude; "" = equal."""
    if base is None or head is None:
        return "only with the working tree" if base is None else "only with BASE"
    if (base.dtype.kind, base.shape) != (head.dtype.kind, head.shape):
        return f"{base.dtype}{base.shape} -> {head.dtype}{head.shape}"
    if base.tobytes() == head.tobytes():
        return ""
    if base.dtype.kind == "U":
        first = next(i for i, (a, b) in enumerate(zip(f"{base}\0", f"{head}\0")) if a != b)
        shown = [str(text)[max(0, first - 30) : first + 30] for text in (base, head)]
        return f"...{shown[0]}... -> ...{shown[1]}..."
    if base.ndim == 0:
        return f"{base} -> {head}"
    apart = np.abs(base.astype(float) - head.astype(float)).max()
    return f"by {apart / max(np.abs(base.astype(float)).max(), 1e-300):.1e}"


def both(folder: Path, only: str, own_checkpoints: bool) -> Iterator[str]:
    """Run the two sides; gives the name of every case as soon as both have done it."""
    base, head = (folder / side for side in SIDES)
    processes = [
        started(folder / f"{side.name}_tree", side, side if own_checkpoints else base, only)
        for side in (base, head)
    ]
    given: set[str] = set()
    try:
        running = True
        while running:
            running = any([process.poll() is None for process in processes])
            if processes[0].poll() is not None:
                (base / "saved").touch()  # nobody need wait for its checkpoints any more
            theirs = done(head)
            new = [name for name in done(base) if name in theirs and name not in given]
            given.update(new)
            yield from new
            time.sleep(0.2)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    broken = [side for side, process in zip((base, head), processes) if process.returncode]
    for side in broken:
        last = (side / "log").read_text().splitlines()[-3:]
        print(f"{side.name} ended early:", *last, sep="\n  ")
    yield from [name for name in dict.fromkeys([*done(base), *done(head)]) if name not in given]
    if broken:
        yield "(the rest)"


def compare(folder: Path, only: str, own_checkpoints: bool = False) -> int:
    """Run both sides, whose trees lie in `base_tree` and `head_tree`; print what differs.

    Returns the exit status.
    """
    began, differing, count = time.monotonic(), [], 0
    compiled = dict.fromkeys(SIDES, 0)
    for name in both(folder, only, own_checkpoints):
        count += 1
        records = {side: read(folder / side, name) for side in SIDES}
        for side, record in records.items():
            parts = [v for k, v in (record or {}).items() if k.startswith("compiled ")]
            compiled[side] += int(sum(parts))
        found = differences(*records.values())
        differing += [name] if found else []
        print(f"{name:<56}{'; '.join(found) or 'same'}", flush=True)
    print(f"\n{count} cases in {time.monotonic() - began:.0f} s; programs compiled: {compiled}")
    if not count:
        print(f"no case is named like {only!r}")
    if differing:
        print(f"{len(differing)} differ: {'; '.join(differing)}")
    return int(bool(differing) or not count)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", metavar="BASE", help="a git revision")
    parser.add_argument("--only", default="", metavar="PATTERN", help="cases, as `jobs|sparta`")
    parser.add_argument("--own-checkpoints", action="store_true", help="see above")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave results and logs there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="same_as_") as temporary:
        folder = (args.keep or Path(temporary)).resolve()
        if any((folder / side).exists() for side in SIDES):
            raise SystemExit(f"{folder} holds the results of another comparison")
        extract(args.base, folder / "base_tree")
        copy(folder / "head_tree")
        return compare(folder, args.only, args.own_checkpoints)


if __name__ == "__main__":
    sys.exit(main())
