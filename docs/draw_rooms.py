"""Draw the rooms of lowcomm_jax and the arrows between them, from the code's own imports.

    python docs/draw_rooms.py [FILE]        writes docs/rooms.png, or FILE

Rooms stand in the layers that `pyproject.toml` holds them to; the number is lines of Python. An
arrow A -> B says that A imports B. Arrows that follow from others (A -> B -> C) are left out.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import grimp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "lowcomm_jax"
_COLOURS = ("#e8eef7", "#f4f0e6")
# Where rooms stand from left to right, so that long arrows do not cross boxes; others are centred.
_COLUMN = {
    "recovery": 5.4,
    "checkpoint": -1.2,
    "interrupt": 5.4,
    "models": 2.4,
    "data": -5.8,
    "planner": -4.4,
    "network": -4.2,
    "jobs": 0.9,
    "loops": 3.4,
    "rounds": 3.6,
    "store": 5.2,
    "sync": -0.9,
    "setup": -2.6,
    "settings": -3.6,
    "train": -0.6,
    "history": 1.6,
    "exchange": 1.6,
    "methods": -1.5,
    "params_view": 3.4,
    "state": 0.4,
    "params": -0.6,
    "mesh": 0.6,
    "compat": -1.2,
    "refused": 1.4,
    "refusals": -2.4,
}


def layers() -> list[list[str]]:
    """Rooms of every layer, the highest layer first, as the import contract names them."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = config["tool"]["importlinter"]["contracts"]
    rows = next(c["layers"] for c in contracts if c["type"] == "layers")
    return [[name.strip() for name in row.split(":")] for row in rows]


def arrows() -> dict[str, set[str]]:
    """Room -> the rooms that it imports."""
    sys.path.insert(0, str(ROOT))  # this checkout, wherever the command is started
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    rooms = [room for row in layers() for room in row]
    found: dict[str, set[str]] = {room: set() for room in rooms}
    for module in graph.modules - {PACKAGE}:
        room = module.split(".")[1]
        for target in graph.find_modules_directly_imported_by(module) - {PACKAGE}:
            if (other := target.split(".")[1]) != room:
                found[room].add(other)
    return found


def reduced(found: dict[str, set[str]]) -> dict[str, set[str]]:
    """Without the arrows that follow from others; `found` must have no circles."""

    def reached(room: str) -> set[str]:
        return set().union(*({other} | reached(other) for other in found[room]))

    return {
        room: {b for b in targets if not any(b in reached(c) for c in targets - {b})}
        for room, targets in found.items()
    }


def lines_of(room: str) -> int:
    """Lines of Python in a room: a folder, or one file."""
    folder = ROOT / PACKAGE / room
    files = folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def draw(target: Path) -> None:
    """Write the picture."""
    rows, found = layers(), reduced(arrows())
    figure, axes = plt.subplots(figsize=(13, 0.78 * len(rows) + 0.6))
    places: dict[str, tuple[float, float]] = {}
    for y, row in enumerate(rows):
        for x, room in enumerate(row):
            column = 1.8 * (x - (len(row) - 1) / 2)
            places[room] = (_COLUMN.get(room, column), -float(y))
    for room, targets in found.items():
        for other in targets:
            axes.annotate(
                "",
                xy=places[other],
                xytext=places[room],
                arrowprops={
                    "arrowstyle": "-|>",
                    "color": "#7a8699",
                    "lw": 0.9,
                    "shrinkA": 14,
                    "shrinkB": 14,
                    "connectionstyle": "arc3,rad=0.06",
                },
            )
    for y, row in enumerate(rows):
        for room in row:
            axes.text(
                *places[room],
                f"{room}  {lines_of(room)}",
                ha="center",
                va="center",
                fontsize=10,
                bbox={"boxstyle": "round,pad=0.35", "fc": _COLOURS[y % 2], "ec": "#41506b"},
            )
    axes.set_xlim(-6.8, 6.8)
    axes.set_ylim(-len(rows) + 0.4, 0.6)
    axes.axis("off")
    figure.savefig(target, dpi=110, bbox_inches="tight")
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "rooms.png")
