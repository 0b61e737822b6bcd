"""How many files a region's job has open, and the limit of them, raised where that is allowed."""

from __future__ import annotations

import resource

PAYLOADS_KEPT = 128
"""Newest payloads that a new server process is given, where one has ended: each takes a file."""

_OWN = 96
"""Of Python, JAX, the run's files and the store: 31 were seen."""
_A_REGION = 16
"""Connections to and from each other region, and what watches them."""
_ENOUGH = 4096


def file_handle_problems(count: int, peers: bool) -> list[str]:
    """Raise this process's limit of open files where it is low; a line where it cannot be enough.

    Args:
      count: number of regions.
      peers: whether payloads go from region to region: each that is held takes a file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    most = _ENOUGH if hard == unlimited else min(hard, _ENOUGH)
    if soft != unlimited and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    needed = _OWN + (PAYLOADS_KEPT + _A_REGION * (count - 1) if peers else 0)
    if hard == unlimited or hard >= needed:
        return []
    return [
        f"this process may open {hard} files, and one of {count} regions needs {needed}: raise the "
        f"hard limit, `ulimit -Hn {needed}` or more (LimitNOFILE= of systemd, --ulimit nofile= of "
        "Docker)"
    ]
