"""Commands of this project as processes of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

POLL_SECONDS = 0.1


def start(
    module: str, arguments: Sequence[str], output: Path, before: Sequence[str] = ()
) -> subprocess.Popen:
    """Run `python -m MODULE ARGUMENTS`, out of the reach of the terminal's Ctrl-C.

    Args:
      output: what it prints is appended to this file.
      before: a command that runs this one.
    """
    paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    with output.open("ab") as opened:
        return subprocess.Popen(
            [*before, sys.executable, "-m", module, *arguments],
            stdout=opened,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )


def free_port() -> int:
    """A port of this machine that nobody uses just now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextlib.contextmanager
def ended_at_last(processes: Iterable[subprocess.Popen]) -> Iterator[None]:
    """No process outlives the block: those left save, as after any SIGTERM, and are waited for.

    Args:
      processes: looked at when the block is left.
    """
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)  # one that was stopped could not end
                process.terminate()
        for process in processes:
            process.wait()
