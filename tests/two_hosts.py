"""Two network namespaces on one machine, joined by a veth pair; needs Linux and root."""

import contextlib
import os
import shutil
import subprocess
import sys

NAMES = ("lowcomm0", "lowcomm1")
ADDRESSES = ("10.213.7.1", "10.213.7.2")


def problems() -> list[str]:
    """Why there can be none here."""
    if not sys.platform.startswith("linux"):
        return ["network namespaces need Linux"]
    found = [] if shutil.which("ip") else ["ip is missing: install iproute2"]
    return [*found, "network namespaces need root"] if os.geteuid() else found


@contextlib.contextmanager
def two_hosts():
    """Make them, and remove them at the end; for each, the words that run a command in it."""
    _remove()
    try:
        for name in NAMES:
            _ip("netns", "add", name)
        ends = [f"{name}v" for name in NAMES]
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(NAMES, ends, ADDRESSES, strict=True):
            _ip("link", "set", end, "netns", name)
            _ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            for device in ("lo", end):
                _ip("-n", name, "link", "set", device, "up")
        yield [["ip", "netns", "exec", name] for name in NAMES]
    finally:
        _remove()


def _remove() -> None:
    for name in NAMES:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
