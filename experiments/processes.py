"""Start commands of this project as child processes, and end them with the parent.

A parent that is killed ends nothing by itself. So its children read the end of a pipe that closes
with it, and then interrupt themselves (`end_with_parent`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

POLL_SECONDS = 0.1
_CHILD = "LOWCOMM_JAX_CHILD"
"""Set in the environment of a child that `start` has started: its stdin closes with its parent."""
_TAIL_BYTES = 1 << 20  # an evaluation of many documents is one line


def cores() -> int:
    """How many this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # there is no such thing on macOS
        return os.cpu_count() or 1


SETTINGS = {
    # The threads of OpenBLAS wait for one another by spinning. Where another process uses the
    # cores, the factorisations of a low-rank codec then take a hundred times as long.
    "OPENBLAS_NUM_THREADS": "1",
    # XLA runs programs and transfers on as many threads as it sees cores: with a single thread, a
    # payload that arrives while a job trains waits for its steps.
    "PJRT_NPROC": str(max(2, cores())),
    # Else the first process on a GPU takes three quarters of its memory, whatever it needs.
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}


def start(module: str, arguments: Sequence[str], output: Path) -> subprocess.Popen:
    """Run `python -m MODULE ARGUMENTS` in a session that the terminal's Ctrl-C does not reach.

    It gets the environment, and those of `SETTINGS` that the environment does not have.

    Args:
      output: file to which its output is appended.
    """
    paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    settings = {**SETTINGS, **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    settings[_CHILD] = "1"
    with output.open("ab") as opened:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=_life(),
            stdout=opened,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=settings,
        )


@functools.cache
def _life() -> int:
    """An end of a pipe whose other end closes when this process ends, however it does."""
    here, _ = os.pipe()
    return here


def end_with_parent() -> None:
    """In a child of `start`: interrupt this process once its parent has ended, by SIGINT.

    `ended_at_last` sends SIGTERM. A second SIGTERM would mean "at once".
    """
    if os.environ.pop(_CHILD, None):
        threading.Thread(target=_interrupt_at_last, daemon=True).start()


def _interrupt_at_last() -> None:
    while os.read(0, 1):
        pass
    # A script's shell lets what it starts in the background ignore it, until a run handles it.
    while signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGINT)


def free_port() -> int:
    """A port of this machine that nobody uses just now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextlib.contextmanager
def ended_at_last(processes: Iterable[subprocess.Popen]) -> Iterator[None]:
    """A context that ends processes: at its end those that live get SIGTERM, save, and are awaited.

    Args:
      processes: read when the block is left.
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


def last_line(file: Path) -> str:
    """The last whole line of a file that is being written, empty if there is none."""
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - _TAIL_BYTES))
        text = opened.read().decode(errors="replace")
    whole, _, _ = text.rpartition("\n")  # the line being written is left out
    return whole.rpartition("\n")[2].strip()
