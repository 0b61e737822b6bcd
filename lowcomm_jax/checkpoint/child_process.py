"""Lets Orbax write outside a job of several processes, in a child of one of them.

Inside such a job each save of Orbax 0.12.8 begins with collectives of the devices, whatever its
options say, and processes but the first write no NumPy arrays. Here each process writes its own
part, or the leader all of it, beside the training and without waiting for a device.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar

import jax

from lowcomm_jax.interrupt import ALWAYS, IF_FREE

T = TypeVar("T")


def outside_job(act: Callable[..., T], *args: Any) -> T:
    """Call `act(*args)`; where this job is several processes, in a child process.

    Args:
      act: a function of a module.

    Raises:
      RuntimeError: the child process ended without an answer. An error of `act` is raised here.
    """
    if jax.process_count() == 1:
        return act(*args)
    return in_child_process(act, *args)


def in_child_process(act: Callable[..., T], *args: Any) -> T:
    """`act(*args)` in a new child process; see `outside_job`."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    child = subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import main; main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
        start_new_session=True,
    )
    try:
        with child:  # which writes what is left when it closes
            _write(child.stdin, (act, args))
            result, error = _read(child.stdout)
    except (BrokenPipeError, EOFError):
        raise RuntimeError(
            f"{act.__name__} ended with code {child.wait()}, in its own process"
        ) from None
    if error is not None:
        raise error
    return result


def main() -> None:
    """Serve the request on stdin; prints of the called function go to stderr.

    Signals are the job's to handle, which systemd and Slurm send to every process: it saves.
    """
    for number in (*ALWAYS, *IF_FREE):
        signal.signal(number, signal.SIG_IGN)
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    act, args = _read(sys.stdin.buffer)
    try:
        outcome = act(*args), None
    except Exception as error:
        outcome = None, error
    with answer:
        _write(answer, outcome)


def _write(pipe: BinaryIO, value: Any) -> None:
    """Pickled, but its arrays as they lie in memory: a state is not copied on its way."""
    buffers: list[pickle.PickleBuffer] = []
    structure = pickle.dumps(value, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append)
    arrays = [buffer.raw() for buffer in buffers]
    pickle.dump([len(structure), *(array.nbytes for array in arrays)], pipe)
    for data in (structure, *arrays):
        pipe.write(data)
    pipe.flush()


def _read(pipe: BinaryIO) -> Any:
    structure, *arrays = (_exactly(pipe, size) for size in pickle.load(pipe))
    return pickle.loads(structure, buffers=arrays)


def _exactly(pipe: BinaryIO, size: int) -> bytearray:
    data = bytearray(size)
    if pipe.readinto(data) != size:
        raise EOFError
    return data
