"""Commands: `python -m experiments COMMAND`; without a command, the quick comparison."""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TextIO

from experiments.cli import EXIT_REFUSED, EndedError, HelpShown, RefusedError, closest
from experiments.processes import end_with_parent


class Command(NamedTuple):
    """A command of `python -m experiments`.

    Attributes:
      module: inside this package; its main(argv) gives the exit code.
      about: what it does, as the list of commands shows it; the module's docstring begins so.
    """

    module: str
    about: str


COMMANDS = {  # in the order in which they are shown
    "quick": Command(
        "compare.quick",
        "The quick comparison: every method on one small model and a named network, in minutes.",
    ),
    "train": Command("train.main", "Train a model in several regions."),
    "launch": Command(
        "regions.main", "Train with one job per region, all started on this machine."
    ),
    "watch": Command(
        "watch.main",
        "Watch a run: loss, participation, staleness, bytes and link use per region, and alarms.",
    ),
    "report": Command(
        "report.main", "Compare runs: a table and a picture from their metrics files."
    ),
    "sample": Command("trained.sample", "Print text from a trained run."),
    "export": Command(
        "trained.export",
        "Write the anchor of a run as a LLaMA-shaped safetensors checkpoint, or what changed in "
        "it.",
    ),
    "compare": Command(
        "compare.main",
        "Compare methods: variants x seeds at equal tokens (or bytes, or time), with intervals.",
    ),
    "plan": Command(
        "plan.main",
        "Plan a run before paying for it: bytes, utilisation, hours, memory and expected loss per "
        "method.",
    ),
    "bench": Command(
        "bench.main",
        "Measure speed: bench engine, bench codec, ...; each compares within one run.",
    ),
}
# Ctrl-C ends these at once wherever they have nothing to save, as SIGTERM does. A KeyboardInterrupt
# would be lost in a callback of JAX's, or leave a compilation half done.
_END_AT_ONCE = ("train", "plan", "report", "sample", "export")
EXIT_CTRL_C = 128 + signal.SIGINT
# Paths that do not lead where a file can be read or written; the path says enough.
_ABOUT_A_PATH = (
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)


def main(argv: Sequence[str]) -> int:
    """Run one command.

    Args:
      argv: the command and its flags, without the program's name.

    Returns:
      The exit code; 2: refused, with every problem listed on stderr; 130: ended by Ctrl-C.
    """
    command, *rest = argv or ["quick"]
    if command in ("help", "--help", "-h"):
        print(_overview())
        return 0
    if command.startswith("-"):
        command, rest = "quick", list(argv)
    return answered(command, lambda: _run(command, rest))


def answered(command: str, run: Callable[[], int]) -> int:
    """The exit code of a command; what is refused, and what else ends it, is a line on stderr."""
    try:
        return run()
    except HelpShown:
        return 0
    except RefusedError as error:
        print(error, file=sys.stderr)
        return EXIT_REFUSED
    except EndedError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return error.code
    except OSError as error:
        if error.filename is None or not (
            isinstance(error, _ABOUT_A_PATH) or error.errno == errno.EROFS
        ):
            raise
        print(f"{command}: {error.filename}: {error.strerror}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        print(f"{command}: interrupted", file=sys.stderr)
        return EXIT_CTRL_C


def _run(command: str, rest: Sequence[str]) -> int:
    if command not in COMMANDS:
        hint = closest(command, sorted(COMMANDS))
        raise RefusedError([f"unknown command {command!r}{hint}"], "python -m experiments")
    with _starting():
        module = importlib.import_module(f"experiments.{_module(command, rest)}")
    return module.main(rest)


@contextlib.contextmanager
def _starting() -> Iterator[None]:
    """Say in a terminal that a command starts: its libraries take seconds to load.

    What they make lives as long as the process. Looked through for garbage again and again, it
    would take a fifth of their loading, and of tracing programs after that.
    """
    shown = sys.stderr.isatty()
    if shown:
        print("starting ...", end="", file=sys.stderr, flush=True)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def let_ctrl_c_end(argv: Sequence[str]) -> None:
    """Where the command of a process may be ended at any time, do so without a traceback.

    What a command installs later (`lowcomm_jax.interrupt`: save, then end) takes its place.
    """
    ignored = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    if argv and argv[0] in _END_AT_ONCE and not ignored:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


class Outliving:
    """An output that goes nowhere once whoever read it has ended, or its terminal is gone.

    After Ctrl-C `tee` is often gone first: what a command prints then must not keep it from saving.
    """

    def __init__(self, file: TextIO):
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        self._try(lambda: self._file.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._file.flush)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._file.fileno())
            os.close(nowhere)


def _module(command: str, argv: Sequence[str]) -> str:
    """The module of a command; `plan --target` and `plan --goodput` have modules of their own."""
    for flag in ("target", "goodput") if command == "plan" else ():
        if any(argument.startswith((f"--{flag}", f"-{flag}")) for argument in argv):
            return f"plan.{flag}"
    return COMMANDS[command].module


def _overview() -> str:
    lines = ["python -m experiments [COMMAND] [FLAGS]", ""]
    lines += [f"  {name:8} {command.about}" for name, command in COMMANDS.items()]
    lines += ["", "Without a command: quick. COMMAND --help shows a command's flags."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout, sys.stderr = Outliving(sys.stdout), Outliving(sys.stderr)
    let_ctrl_c_end(sys.argv[1:])
    end_with_parent()
    code = main(sys.argv[1:])
    if code == EXIT_CTRL_C:  # now: an ordinary exit waits for what is queued on the device
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
