"""The rooms: imports point down the list of docs/architecture.md, and never in a circle."""

import graphlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

grimp = pytest.importorskip("grimp", reason="import-linter is a dependency of the extra `test`")

ROOT = Path(__file__).resolve().parent.parent
FLOORS = 8
LOOSE = 10  # modules on the top level of a package that are no rooms


@pytest.fixture(scope="module")
def graph():
    return grimp.build_graph("lowcomm_jax", "experiments", "evidence", cache_dir=None)


def test_imports_point_down():
    """The contracts of pyproject.toml; what is broken is in the output."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    done = subprocess.run(
        [*command, "--no-cache"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_circles(graph):
    packages = {m for m in graph.modules if graph.find_children(m)}  # their __init__ hands names on
    modules = graph.modules - packages
    imports = {m: graph.find_modules_directly_imported_by(m) & modules for m in modules}
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle


def test_no_room_has_more_than_eight_floors(graph):
    """A module is one floor above the highest of its room that it imports."""
    for room in graph.find_children("lowcomm_jax"):
        modules = graph.find_children(room)
        below = {m: graph.find_modules_directly_imported_by(m) & modules for m in modules}
        floors = {}
        for module in graphlib.TopologicalSorter(below).static_order():
            floors[module] = 1 + max((floors[m] for m in below[module]), default=0)
        highest = max(floors.values(), default=0)
        assert highest <= FLOORS, sorted(m for m in floors if floors[m] == highest)


@pytest.mark.parametrize("package", ["lowcomm_jax", "experiments", "evidence"])
def test_few_modules_are_loose(graph, package):
    children = graph.find_children(package)
    loose = sorted(m for m in children if not graph.find_children(m))
    assert len(loose) <= LOOSE, loose


@pytest.mark.parametrize("package", ["lowcomm_jax", "experiments", "evidence"])
def test_every_room_says_what_it_is_for(package):
    silent = [
        folder.name
        for folder in (ROOT / package).iterdir()
        if (folder / "__init__.py").is_file()
        and not (folder / "__init__.py").read_text(encoding="utf-8").startswith('"""')
    ]
    assert not silent
