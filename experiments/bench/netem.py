"""Two network namespaces on one machine, joined by a veth pair that token buckets hold to a rate.

Needs Linux and root; `problems` says what is missing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_TOOLS = (("ip", "iproute2"), ("tc", "iproute2"), ("sysctl", "procps"))
NAMES = ("lowcomm0", "lowcomm1")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
# What TCP with time stamps carries: of an Ethernet frame, and an answer to every sixth.
GOODPUT = 1448 / (1514 + 66 / 6)
# Bytes leave in pieces of 1 to 4 ms, and a full bucket lets as many through at once. Single frames,
# each with a timer, would cost CPU time for splitting and merging that the jobs should have; on a
# real link routers and network cards do that work.
_BUCKET_SECONDS, _SMALLEST_BUCKET = 2e-3, 12_500
_LARGEST_PIECE = 65_536
_PIECE = 0.9  # of a bucket: the headers of its frames must fit, too, or the kernel splits it
# The kernel's default differs between machines, and one of them, BBR, slows down where both
# directions are busy: at 25 Mbit/s a payload took up to 0.78 s, with this 0.68.
_CONGESTION_CONTROL = "net.ipv4.tcp_congestion_control"
_SETTINGS = Path("/proc/sys")
# Longer queues hold up the answers to what travels the other way.
_QUEUE_SECONDS, _SHORTEST_QUEUE = 0.02, 32_000


def problems() -> list[str]:
    """Why no such link can be made here, one line each."""
    if not sys.platform.startswith("linux"):
        return ["network namespaces need Linux"]
    found = [f"{name} is missing: install {package}" for name, package in _TOOLS if not _has(name)]
    if os.geteuid():
        found.append("network namespaces and token buckets need root")
    elif not os.access(_SETTINGS / _CONGESTION_CONTROL.replace(".", "/"), os.W_OK):
        found.append(f"{_SETTINGS} cannot be written")
    return found


def _has(name: str) -> bool:
    return shutil.which(name) is not None


@contextlib.contextmanager
def link(rate_mbit: float | None) -> Iterator[list[list[str]]]:
    """Make the two network namespaces, and remove them at the end.

    Args:
      rate_mbit: Mbit/s in each direction, Ethernet headers included; None = not limited.

    Yields:
      for each namespace, the words that run a command in it.

    Raises:
      RuntimeError: the system refuses, with what it says.
    """
    _remove_link()
    try:
        for name in NAMES:
            _run("ip", "netns", "add", name)
        ends = [f"{name}v" for name in NAMES]
        _run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(NAMES, ends, ADDRESSES):
            _run("ip", "link", "set", end, "netns", name)
            inside = ["ip", "netns", "exec", name]
            _run(*inside, "sysctl", "-qw", f"{_CONGESTION_CONTROL}=reno")
            _run(*inside, "ip", "address", "add", f"{address}/24", "dev", end)
            for device in ("lo", end):
                _run(*inside, "ip", "link", "set", device, "up")
            if rate_mbit is not None:
                for command in _bucket(end, rate_mbit):
                    _run(*inside, *command)
        yield [["ip", "netns", "exec", name] for name in NAMES]
    finally:
        _remove_link()


def _bucket(device: str, rate_mbit: float) -> list[list[str]]:
    """A bucket so small that a payload gains only milliseconds from a full one."""
    bytes_per_second = rate_mbit * 1e6 / 8
    burst = max(_SMALLEST_BUCKET, int(bytes_per_second * _BUCKET_SECONDS))
    queue = max(_SHORTEST_QUEUE, int(bytes_per_second * _QUEUE_SECONDS))
    shape = ["rate", f"{rate_mbit}mbit", "burst", str(burst), "limit", str(queue)]
    piece = min(_LARGEST_PIECE, int(_PIECE * burst))
    return [
        ["tc", "qdisc", "add", "dev", device, "root", "tbf", *shape],
        ["ip", "link", "set", device, "gso_max_size", str(piece)],
    ]


def _remove_link() -> None:
    for name in NAMES:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
