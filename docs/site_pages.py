"""Writes the pages of the reference: one a room with public names, one a method, one an example.

They lie in `reference/` and `listings/` beside this file, and are no part of the repository.
"""

import importlib
import inspect
import pathlib
import shutil

DOCS = pathlib.Path(__file__).resolve().parent
EXAMPLES = DOCS.parent / "examples"
REFERENCE, LISTINGS = DOCS / "reference", DOCS / "listings"
# Rooms whose names stay as they are (docs/versions.md), and the other public ones.
STABLE = {
    "lowcomm_jax": "the engine, and what a program calls around it",
    "lowcomm_jax.methods": "one published method a page",
    "lowcomm_jax.outer": "how the anchor moves",
    "lowcomm_jax.landing": "how a region adopts the anchor",
    "lowcomm_jax.schedule": "which fragment leaves and lands when",
    "lowcomm_jax.compression": "what travels",
    "lowcomm_jax.checkpoint": "the training state on disk",
    "lowcomm_jax.models.weights": "export: LLaMA-shaped weights out and in",
}
OTHERS = {
    "lowcomm_jax.batching": "batch sizes that grow",
    "lowcomm_jax.consensus": "how far regions are apart",
    "lowcomm_jax.data": "text as batches",
    "lowcomm_jax.exchange": "how payloads travel",
    "lowcomm_jax.models": "a transformer and its pipeline",
    "lowcomm_jax.network": "the virtual network and its clock",
    "lowcomm_jax.topology": "who averages with whom",
}
ROOMS = STABLE | OTHERS
# Their files hold one rule each, whose docstring has formula, symbols and source.
_BY_RULE = ("outer", "landing", "schedule", "compression")
# Of rooms that list no names: what is public in them.
_NAMED = {
    "lowcomm_jax.topology": ["Gossip", "groups"],
    "lowcomm_jax.consensus": ["Judgement", "contraction", "judge", "variance"],
    "lowcomm_jax.models.weights": ["save_llama", "load_llama"],
}
_LANGUAGES = {".py": "python", ".sh": "bash", ".slurm": "bash", ".yaml": "yaml"}


def write(app) -> None:
    """Sphinx's `builder-inited`: write every page anew."""
    del app
    for folder in (REFERENCE, LISTINGS):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    _page(REFERENCE / "index.rst", _index())
    for room in ROOMS:
        if room == "lowcomm_jax.methods":
            for path, lines in method_pages().items():
                _page(REFERENCE / path, lines)
        else:
            _page(REFERENCE / f"{room}.rst", _room(room))
    for path in sorted(EXAMPLES.iterdir()):
        if path.suffix in _LANGUAGES:
            _page(LISTINGS / f"{path.name}.rst", _listing(path))


def _page(path: pathlib.Path, lines: list[str]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _title(text: str, mark: str = "=") -> list[str]:
    return [text, mark * len(text), ""]


def _contents(entries: list[str], *options: str) -> list[str]:
    return ["", ".. toctree::", *(f"   :{o}:" for o in options), "", *(f"   {e}" for e in entries)]


def _index() -> list[str]:
    lines = _title("Reference")
    lines += ["Made of the docstrings. What \"stable\" promises: :doc:`../versions`.", ""]
    for title, rooms in (("Stable", STABLE), ("Public, and may still change", OTHERS)):
        lines += _title(title, "-")
        lines += [".. list-table::", "   :widths: 40 60", ""]
        for room, about in rooms.items():
            lines += [f"   * - :doc:`{room}`", f"     - {about}"]
        lines += _contents([*rooms], "hidden")
        lines.append("")
    return lines


def _room(room: str) -> list[str]:
    """Its docstring, then its names, file by file in the order of the room's `__all__`."""
    lines = [*_title(room), *_docstring(_importable(room))]
    by_file: dict[str, list[str]] = {}
    for name in names(room):
        thing = getattr(_module(room), name)
        if not inspect.ismodule(thing):
            by_file.setdefault(getattr(thing, "__module__", room), []).append(name)
    for file, found in by_file.items():
        if room.rpartition(".")[2] in _BY_RULE and file.startswith(room):
            lines += [*_title(file.rpartition(".")[2], "-"), *_docstring(file)]
        lines += [line for name in found for line in _entry(room, name)]
    return lines


def method_pages() -> dict[str, list[str]]:
    """The pages of methods: those of `lowcomm_jax.methods`, each with what its file offers."""
    room = "lowcomm_jax.methods"
    factories = [name for name in names(room) if name.islower()]
    pages = {
        f"{room}.rst": [
            *_title(room),
            *_docstring(room),
            "Side by side, with their tests: :doc:`../methods`.",
            *_contents([f"methods/{name}" for name in factories], "maxdepth: 1"),
            "",
            *_entry(room, "Method"),
        ]
    }
    for factory in factories:
        file = f"{room}.{factory}"
        beside = [n for n in names(room) if n != factory and _file(room, n) == file]
        pages[f"methods/{factory}.rst"] = [
            *_title(factory),
            *_docstring(file),
            *_entry(room, factory),
            *[line for name in beside for line in _entry(room, name)],
        ]
    return pages


def _listing(path: pathlib.Path) -> list[str]:
    return [
        *_title(path.name),
        f":download:`Download <../../examples/{path.name}>`. All of them: :doc:`../examples`.",
        "",
        f".. literalinclude:: ../../examples/{path.name}",
        f"   :language: {_LANGUAGES[path.suffix]}",
        "",
        ":orphan:",
    ]


def names(room: str) -> list[str]:
    """The public names of a room."""
    return _NAMED.get(room) or list(_module(room).__all__)


def _importable(room: str) -> str:
    """`lc.consensus` is a module of another name."""
    return _module(room).__name__


def _module(room: str):
    if room == "lowcomm_jax.consensus":
        return importlib.import_module("lowcomm_jax").consensus
    return importlib.import_module(room)


def _file(room: str, name: str) -> str:
    return getattr(getattr(_module(room), name), "__module__", room)


def _docstring(module: str) -> list[str]:
    return [f".. automodule:: {module}", "   :no-members:", "   :no-index:", ""]


def _entry(room: str, name: str) -> list[str]:
    thing = getattr(_module(room), name)
    lines = [f".. currentmodule:: {_importable(room)}", ""]
    if inspect.isclass(thing):
        return [*lines, f".. autoclass:: {name}", "   :members:", ""]
    kind = "autofunction" if inspect.isfunction(thing) else "autodata"
    return [*lines, f".. {kind}:: {name}", *(["   :no-value:"] * (kind == "autodata")), ""]
