"""Watch a run: loss, participation, staleness, bytes and link use per region, and alarms.

    python -m experiments watch runs/a [--port=8000] [--every=2]

Reads the metrics files of a run, live or finished, of one process or of one job per region
(`launch`), and writes nothing. It can start and end at any time, on any machine that sees the
folder.

- In a terminal it shows the newest state until the run is complete, or until Ctrl-C.
- Elsewhere, or with --once, it prints the present state and ends.
- --port serves the run's report on this machine alone (127.0.0.1), with state and alarms, made anew
  at each request, until Ctrl-C; port 0 takes a free one. It may start before the run does.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live

from experiments.cli import Flags, values_refused
from experiments.progress import plain_console
from experiments.refusals import checked_flags
from experiments.watch.terminal import screen
from experiments.watch.view import Watch
from lowcomm_jax.network import parse


def main(argv: Sequence[str]) -> int:
    """Watch the run of the command line; returns the exit code."""
    options = Flags()
    options.whole("port", None, "serve the report on this port of 127.0.0.1; 0 = a free one")
    options.real("every", 2.0, "seconds between two reads of the files, or requests of the page")
    options.text("network", None, "network for a run of one process (default: its own)")
    options.switch("once", "print the present state, and end")
    values = options.values
    [folder] = checked_flags("watch", argv, values, __doc__)
    network = None if values.network is None else parse(values.network)
    watch, console = Watch(Path(folder), network), plain_console()
    # What a damaged file raises is refused, too.
    with contextlib.suppress(KeyboardInterrupt), values_refused("watch"):
        if values.port is not None:
            from experiments.watch.page import serve

            serve(watch, values.port, values.every, console)
        elif values.once or not console.is_terminal:
            console.print(screen(watch.look()))
        else:
            live(watch, values.every, console)
    return 0


def live(watch: Watch, every: float, console: Console) -> None:
    """Show the newest state until the run is complete."""
    view = watch.look()
    with Live(screen(view), console=console, auto_refresh=False) as shown:
        while not view["complete"]:
            time.sleep(every)
            view = watch.look()
            shown.update(screen(view), refresh=True)
