"""What is done beside a region while the run goes on, and which the run must not notice.

`stranger`: bytes of no sense, to the region's port (`peers`) and under keys that the run will use.
`version`: records of another version, where those of the region will stand.
`seed`: a job in the region's place that was started with another seed, and so is of another run.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from experiments.faults.fault import Fault
from experiments.processes import last_line
from lowcomm_jax.store.records import FORMAT
from lowcomm_jax.store.secret import Seal

EVERY_SECONDS = 0.5
WAITS = "waits for the others"
"""What a job prints once it has registered."""
_TO_START_SECONDS = 120.0
_AHEAD = (1, 2, 3)  # exchanges
_TIMEOUT_SECONDS = 0.2


class Odd(msgspec.Struct):
    """A record of another version."""

    incarnation: int
    region: int
    payload: dict[str, str]
    step: str


class RegionTarget(Protocol):
    """One region's job.

    Attributes:
      held: whether an injected fault is on it; its end then counts as no loss.
      code: exit code once it has ended for good.
    """

    workdir: Path
    held: bool
    code: int | None

    def start(self) -> None: ...

    def signal(self, number: signal.Signals) -> None: ...

    def output(self) -> Path: ...

    def impostor(self) -> RegionTarget:
        """A job in this region's place that has another seed, and so is not of the run."""
        ...


class Strangers:
    """Does what the active faults of kinds `BESIDE` say; call `act` at intervals.

    Args:
      rendezvous: folder in which the jobs meet.
    """

    def __init__(self, rendezvous: Path):
        self._rendezvous, self._rng = rendezvous, np.random.default_rng(0)
        self._acts_at = 0.0
        self._impostors: dict[Fault, tuple[RegionTarget, float]] = {}

    def begin(self, fault: Fault, impostor: RegionTarget) -> None:
        """Begin a fault; impostor: the job that `seed` starts."""
        if fault.kind == "seed":
            impostor.start()
            self._impostors[fault] = impostor, time.monotonic()

    def end(self, fault: Fault) -> None:
        """End a fault."""
        if fault in self._impostors:
            self._impostors.pop(fault)[0].signal(signal.SIGKILL)

    def has_begun(self, fault: Fault) -> bool:
        """Whether it was there at all: a job takes a while to start."""
        if fault not in self._impostors:
            return True
        impostor, since = self._impostors[fault]
        waits = impostor.output().is_file() and WAITS in last_line(impostor.output())
        return waits or time.monotonic() > since + _TO_START_SECONDS

    def act(self, running: Sequence[Fault]) -> None:
        """Write and send what is due; not while the folder is away, nor more than it can take."""
        active = [fault for fault in running if fault.kind in ("stranger", "version")]
        if not active or time.monotonic() < self._acts_at or not self._rendezvous.is_dir():
            return
        self._acts_at = time.monotonic() + EVERY_SECONDS
        for run in filter(Path.is_dir, self._rendezvous.iterdir()):
            for fault in active:
                self._write(run, fault)
        for fault in active:
            if fault.kind == "stranger":
                self._knock(fault.region)

    # -- the store ------------------------------------------------------------------------------

    def _write(self, run: Path, fault: Fault) -> None:
        """Records under keys that exchanges will use soon, and a heartbeat (`version`)."""
        exchange = _newest(run)
        if exchange is None:
            return
        epoch, prefix, number = exchange
        folders = [f"round/{epoch}/{prefix}{number + n}" for n in _AHEAD]
        job = f"{fault.region}.{_incarnation(run, fault.region)}"
        keys = [
            f"{folder}/{kind}.{job}.0" for folder in folders for kind in ("announce", "confirm")
        ]
        if fault.kind == "stranger":
            keys += [f"{folder}/commit.0" for folder in folders]
            keys += ["epoch/none", f"beat/{fault.region}.txt", "born/0/x"]
            self._put(run, {key: self._rng.bytes(int(self._rng.integers(1, 99))) for key in keys})
            return
        seal = Seal(run.name, b"")
        record = Odd(incarnation=10**6, region=fault.region, payload={"sha3": "0"}, step="1")

        def sealed(key: str) -> dict[str, bytes]:
            return {key: seal.close(key, record, FORMAT + 1)}

        for key in [*keys, f"{folders[1]}/commit.0"]:
            self._put(run, sealed(key))
        # It stands there until the region's next heartbeat.
        self._put(run, sealed(f"beat/{fault.region}"), over=True)

    def _put(self, run: Path, values: dict[str, bytes], over: bool = False) -> None:
        for key, data in values.items():
            path = run / key
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                new = path.with_name(f"{path.name}.{self._rng.integers(1 << 60)}.__lock")
                new.write_bytes(data)
                if over or not path.exists():
                    new.replace(path)
                else:
                    new.unlink()

    # -- the port -------------------------------------------------------------------------------

    def _knock(self, region: int) -> None:
        """Send bytes of no sense to the region's port, if it has one."""
        junk = [bytes(4), bytes(16), (1 << 62).to_bytes(8, "little"), self._rng.bytes(64),
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9)]  # fmt: skip
        for host, port in self._ports(region):
            data = junk[int(self._rng.integers(len(junk)))]
            with (
                contextlib.suppress(OSError),
                socket.create_connection((host, port), _TIMEOUT_SECONDS) as one,
            ):
                one.sendall(data)

    def _ports(self, region: int) -> list[tuple[str, int]]:
        found = []
        for beat in self._rendezvous.glob(f"*/beat/{region}"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                address = json.loads(beat.read_bytes().partition(b"\n")[2])["address"]
                match = re.search(r"([\w.\-]+):(\d+)/?$", address)
                if match:
                    found.append((match[1], int(match[2])))
        return found


def _newest(run: Path) -> tuple[int, str, int] | None:
    """The newest exchange that has a record; None = there is none.

    Returns:
      (epoch, what its name begins with where a region has several trainers, its number).
    """
    committed = (path.parent.relative_to(run / "round") for path in run.glob("round/*/*/commit.0"))
    names = (re.fullmatch(r"(\d+)/((?:\d+\.)?)(\d+)", path.as_posix()) for path in committed)
    found = [(int(match[1]), int(match[3]), match[2]) for match in names if match]
    if not found:
        return None
    epoch, number, prefix = max(found)
    return epoch, prefix, number


def _incarnation(run: Path, region: int) -> int:
    """The newest job in a region's place; 1 = nobody has taken it."""
    taken = (path.name.partition(".")[0] for path in run.glob(f"born/{region}/*.0"))
    return max((int(number) for number in taken if number.isdecimal()), default=1)
