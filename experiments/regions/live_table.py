"""The newest line of several runs: a live table in a terminal, printed lines elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.live import Live
from rich.text import Text


class LiveTable:
    """The newest line of each run, by name. Close it, or use it as a context."""

    def __init__(self, console: Console):
        self.console = console
        self._lines: dict[str, str] = {}
        self._live = None
        if console.is_terminal:
            self._live = Live(console=console, refresh_per_second=4, transient=True)
            self._live.start()

    def __enter__(self) -> LiveTable:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, name: str, line: str) -> None:
        """Replace the line of `name`."""
        if self._lines.get(name) == line:
            return
        self._lines[name] = line
        if self._live is None:
            self.print(f"{name:14} {line}")
            return
        shown = "\n".join(f"{name:14} {line}" for name, line in self._lines.items())
        self._live.update(Text(shown, no_wrap=True, overflow="ellipsis"))

    def drop(self, name: str) -> None:
        """Show `name` no longer."""
        self._lines.pop(name, None)

    def print(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
