"""Orbax for the first of several processes: in a process of its own.

In a job of several processes Orbax meets all of them by collectives of the devices, at every save;
here the first one reads and writes alone, beside the training.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import jax

T = TypeVar("T")


def alone(act: Callable[..., T], *args: Any) -> T:
    """`act(*args)`; where this job is several processes, in one that knows nothing of them.

    Args:
      act: a function of a module.

    Raises:
      RuntimeError: that process ended without an answer; and whatever `act` raises.
    """
    if jax.process_count() == 1:
        return act(*args)
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import main; main()"],
        input=pickle.dumps((act, args)),
        stdout=subprocess.PIPE,
        env=env,
        start_new_session=True,  # out of the reach of the terminal's Ctrl-C
    )
    if done.returncode:
        raise RuntimeError(f"{act.__name__} ended with code {done.returncode}, in its own process")
    result, error = pickle.loads(done.stdout)
    if error is not None:
        raise error
    return result


def main() -> None:
    """Do what is asked for on stdin; whatever prints goes to stderr."""
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    act, args = pickle.load(sys.stdin.buffer)
    try:
        outcome = act(*args), None
    except Exception as error:
        outcome = None, error
    with answer:
        pickle.dump(outcome, answer)
