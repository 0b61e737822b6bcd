"""Texts, tables, numbers and names as pages show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_TEXTS = Path(__file__).parent / "text"


def filled(name: str, **parts: Any) -> str:
    """The text `name` of the folder text/, with these parts in their places."""
    return (_TEXTS / f"{name}.md").read_text(encoding="utf-8").format(**parts).strip()


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """The lines of a table."""
    lines = (heads, ["---"] * len(heads), *rows)
    return [f"| {' | '.join(map(str, row))} |".replace("|  |", "| |") for row in lines]


def count(params: float) -> str:
    """Parameters for people: 0.18M, 10M, 121M, 1B."""
    return f"{short(params / 1e9)}B" if params >= 1e9 else f"{short(params / 1e6)}M"


def short(value: float, digits: int = 2) -> str:
    """A number in so many significant digits, but never with an exponent for its size."""
    rounded = f"{value:.{digits}g}"
    return f"{value:,.0f}" if "e+" in rounded else rounded


def kind(split: str) -> str:
    """A split for people."""
    return {"iid": "i.i.d.", "topic": "by topic"}.get(split, split)
