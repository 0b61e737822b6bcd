"""Keeps state that is read once a round in pinned host memory instead of on the device.

Before a program that needs them, `around` copies a fragment's anchor, outer state, residuals and
snapshot to the device, and after it back to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

PyTree = Any
HOST = "pinned_host"


def unstow(tree: PyTree) -> PyTree:
    """Arrays on their devices; those that lie there already stay as they are. May be traced."""
    return jax.device_put(tree, jax.memory.Space.Device)


def stow(tree: PyTree) -> PyTree:
    """Arrays in the pinned memory of the host, sharded as they are."""
    return jax.device_put(tree, jax.memory.Space.Host)


def around(
    program: Callable, fetches: Sequence[int], stows: Callable[[Any], Any] = lambda out: out
) -> Callable:
    """A program some of whose arguments and results live on the host.

    Args:
      fetches: positions of the arguments that are copied to the device; the program may donate
        the copies.
      stows: puts what belongs there back to the host, given all results.
    """

    def run(*args, **kwargs):
        copied = [unstow(arg) if i in fetches else arg for i, arg in enumerate(args)]
        return stows(program(*copied, **kwargs))

    return run


def stow_sent(out: dict[str, Any]) -> dict[str, Any]:
    """The result of a send with residuals and snapshot on the host; the payload stays."""
    return {**out, "codec_state": stow(out["codec_state"]), "snapshot": stow(out["snapshot"])}


def stow_anchor_update(out: tuple) -> tuple:
    """The result of an anchor update with anchor, outer and codec state on the host."""
    held, metrics = out
    return stow(held), metrics
