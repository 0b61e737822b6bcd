"""Lines and tables for the terminal, by Rich."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Column


def say(console: Console, *lines: str) -> None:
    """Print lines as they are: no markup, no colours of numbers, folded by the terminal alone."""
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def right(headings: Iterable[str], **how: Any) -> list[Column]:
    """Columns of a table whose cells lie to the right; `how`: other fields of `Column`."""
    return [Column(heading, justify="right", **how) for heading in headings]
