"""Writes the pages of the reference: one a room, and in some rooms one a file.

They lie in `reference/` beside this file, and are no part of the repository.
"""

import importlib
import inspect
import pathlib
import shutil

REFERENCE = pathlib.Path(__file__).resolve().parent / "reference"
# Rooms whose names stay as they are (versions.md), and the other public ones.
STABLE = {
    "lowcomm_jax": "the engine, and what a program calls around it",
    "lowcomm_jax.methods": "published methods",
    "lowcomm_jax.rules.outer": "how the anchor moves: `lc.outer`",
    "lowcomm_jax.rules.landing": "how a region adopts the anchor: `lc.landing`",
    "lowcomm_jax.schedule": "which fragment leaves and lands when",
    "lowcomm_jax.compression": "what travels",
    "lowcomm_jax.rules.merge": "how payloads become one direction: `lc.merge`",
    "lowcomm_jax.checkpoint": "the training state on disk",
    "lowcomm_jax.models.weights": "export: LLaMA-shaped weights out and in",
}
OTHERS = {
    "lowcomm_jax.rules.batching": "batch sizes that grow: `lc.batching`",
    "lowcomm_jax.rules.topology": "who averages with whom: `lc.topology`",
    "lowcomm_jax.params.roles": "which rows of which leaves a region trains: `lc.roles`",
    "lowcomm_jax.rules.consensus": "how far regions are apart: `lc.consensus`",
    "lowcomm_jax.exchange": "how payloads travel",
    "lowcomm_jax.network": "the virtual network and its clock",
    "lowcomm_jax.data": "text as batches",
    "lowcomm_jax.models": "a transformer and its pipeline",
}
# A file of these rooms is one rule; its docstring has the formula, the symbols and the source.
BY_FILE = ("methods", "schedule", "compression")
# What is public in rooms that do not list it.
NAMED = {
    "lowcomm_jax.models.weights": ["save_llama", "load_llama"],
}


def write() -> None:
    """Write every page anew."""
    shutil.rmtree(REFERENCE, ignore_errors=True)
    REFERENCE.mkdir()
    index = _title("Reference")
    index += ['Made of the docstrings. What "stable" promises: :doc:`../versions`.', ""]
    for title, rooms in (("Stable", STABLE), ("Public, and may still change", OTHERS)):
        index += [*_title(title, "-"), *_table([(f":doc:`{room}`", rooms[room]) for room in rooms])]
        index += _contents(rooms)
        for room in rooms:
            _write_room(room)
    _save("index", index)


def _write_room(room: str) -> None:
    by_file: dict[str, list[str]] = {}
    module = importlib.import_module(room)
    for name in NAMED.get(room) or module.__all__:
        if not inspect.ismodule(getattr(module, name)):
            by_file.setdefault(getattr(getattr(module, name), "__module__", room), []).append(name)
    page = [*_title(room), *_docstring(room)]
    if room.rpartition(".")[2] not in BY_FILE:
        for file, names in by_file.items():
            # Of a rule's own file beside a room of one file: its docstring has the formula.
            page += _docstring(file) if file != room and not hasattr(module, "__path__") else []
            page += _entries(room, names)
        _save(room, page)
        return
    files = {file: names for file, names in sorted(by_file.items()) if file.startswith(f"{room}.")}
    short = {file: file.removeprefix(f"{room}.") for file in files}
    page += _table([(f":doc:`{short[file]} <{file}>`", _first_line(file)) for file in files])
    page += _contents(files)
    for file, names in files.items():
        _save(file, [*_title(short[file]), *_docstring(file), *_entries(room, names)])
    others = [name for file in by_file.keys() - files for name in by_file[file]]
    _save(room, page + _entries(room, others))


def _first_line(module: str) -> str:
    return inspect.getdoc(importlib.import_module(module)).partition("\n")[0]


def _save(page: str, lines: list[str]) -> None:
    (REFERENCE / f"{page}.rst").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _title(text: str, mark: str = "=") -> list[str]:
    return [text, mark * len(text), ""]


def _table(rows: list[tuple[str, str]]) -> list[str]:
    lines = [".. list-table::", "   :widths: 30 70", ""]
    return lines + [line for a, b in rows for line in (f"   * - {a}", f"     - {b}")] + [""]


def _contents(pages) -> list[str]:
    return [".. toctree::", "   :hidden:", "", *(f"   {page}" for page in pages), ""]


def _docstring(module: str) -> list[str]:
    return [f".. automodule:: {module}", "   :no-members:", "   :no-index:", ""]


def _entries(room: str, names: list[str]) -> list[str]:
    lines = [f".. currentmodule:: {room}", ""]
    for name in names:
        thing = getattr(importlib.import_module(room), name)
        if inspect.isclass(thing):
            lines += [f".. autoclass:: {name}", "   :members:", ""]
        elif inspect.isfunction(thing):
            lines += [f".. autofunction:: {name}", ""]
        else:
            shown = ", ".join(thing) if isinstance(thing, dict) else thing
            lines += [f".. py:data:: {name}", "", f"   ``{shown}``", ""]
    return lines
