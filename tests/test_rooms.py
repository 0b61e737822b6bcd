"""The rooms: imports point down the list of docs/architecture.md, and never in a circle."""

import ast
import functools
import graphlib
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from lowcomm_jax.schedule import Staggered

grimp = pytest.importorskip("grimp", reason="import-linter is a dependency of the extra `test`")

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("lowcomm_jax", "experiments")
LOOSE = 10  # modules on the top level of a package that are no rooms
FLOORS = 8  # modules of a room in the longest chain of imports within it


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


def test_a_room_of_the_library_has_few_floors(graph):
    rooms = [m for m in graph.find_children("lowcomm_jax") if graph.find_children(m)]
    chains = {room: longest_chain(graph, room) for room in sorted(rooms)}
    assert {room: chain for room, chain in chains.items() if len(chain) > FLOORS} == {}


def longest_chain(graph, room):
    """Modules of a room, each of which imports the next one; its `__init__` hands names on."""
    every = graph.find_descendants(room)
    own = {m for m in every if not graph.find_children(m)}
    imports = {m: graph.find_modules_directly_imported_by(m) & own for m in own}
    chains = {}
    for module in graphlib.TopologicalSorter(imports).static_order():
        below = max((chains[m] for m in imports[module]), key=len, default=[])
        chains[module] = [module, *below]
    return max(chains.values(), key=len)


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


HELPERS = sorted(path.stem for path in (ROOT / "tests").glob("*.py"))


@pytest.mark.parametrize("name", [n for n in HELPERS if not n.startswith(("test_", "conftest"))])
def test_every_helper_and_script_of_tests_can_be_imported(name):
    """Also those that no test runs, as `minutes`: nothing else would see what they lack."""
    importlib.import_module(name)


def test_what_the_evidence_imports_of_the_product_is_there():
    """Its own tests need its own packages: nothing else would see a name that is gone."""
    for file in sorted((ROOT / "evidence").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module.startswith(PRODUCT):
                exec(compile(ast.Module([node], []), str(file), "exec"), {})  # or an ImportError


OF_OTHER_LOOPS = {"channels", "servers", "local_servers", "gradient"}


def test_the_loop_of_acts_names_nothing_of_a_loop_beside_it():
    """No field of a method that such a loop alone reads, and no signal of theirs."""
    core = ROOT / "lowcomm_jax"
    for file in (core / "engine.py", *sorted((core / "sync").glob("*.py"))):
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        named = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        named |= {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
        assert named.isdisjoint(OF_OTHER_LOOPS), file.name


METHODS = (types.FunctionType, classmethod, staticmethod, property, functools.cached_property)
WITHOUT_OVERRIDES = ("schedule", "sync", "loops", "jobs", "adloco", "train", "recovery")


def kinds_of(package):
    """The classes of a room."""
    room = importlib.import_module(package)
    for found in pkgutil.iter_modules(room.__path__):
        module = importlib.import_module(f"{package}.{found.name}")
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if kind.__module__ == module.__name__:
                yield kind


def overrides(kind):
    """Names of a class that hide a method or an attribute by a method, or a method by a value.

    Abstract methods, which are there to be implemented, and special ones do not count.
    """
    bases = [base for base in kind.__mro__[1:] if base.__module__.startswith("lowcomm_jax")]
    for name, value in vars(kind).items():
        hidden = [vars(base)[name] for base in bases if name in vars(base)]
        methods = any(isinstance(x, METHODS) for x in (value, *hidden))
        abstract = all(getattr(x, "__isabstractmethod__", False) for x in hidden)
        if hidden and methods and not abstract and not name.startswith("__"):
            yield f"{kind.__name__}.{name}"


@pytest.mark.parametrize("room", WITHOUT_OVERRIDES)
def test_no_method_overrides_one_that_is_not_abstract(room):
    found = [name for kind in kinds_of(f"lowcomm_jax.{room}") for name in overrides(kind)]
    assert found == []


def test_every_way_to_override_is_seen():
    class Hides(Staggered):
        uneven = True

        def due(self, step, counters):
            return ()

        @property
        def by_steps(self):
            return False

        @property
        def unknown(self):
            return 1

    assert sorted(overrides(Hides)) == ["Hides.by_steps", "Hides.due", "Hides.uneven"]
    assert list(overrides(Staggered)) == []
