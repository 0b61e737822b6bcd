"""One region's job on this machine: start its processes, watch them, signal them."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import time
from pathlib import Path

from experiments.processes import free_port, last_line, start
from lowcomm_jax.interrupt import EXIT_INTERRUPTED

_GRACE_SECONDS = 10.0


@dataclasses.dataclass
class RegionJob:
    """One region's processes.

    Attributes:
      config, shared: config file and overrides of all regions.
      region: its number.
      count: its number of processes.
      folder: of the run.
      rendezvous: folder in which this region meets the others.
      more: further arguments.
      restarts: how many are left.
      processes: those that were started last.
      code: exit code once it has ended for good.
      held: whether an injected fault is on it; its end then counts as no loss.
    """

    config: str
    shared: list[tuple[str, str]]
    region: int
    count: int
    folder: Path
    rendezvous: Path
    more: list[str]
    restarts: int
    processes: list[subprocess.Popen] = dataclasses.field(default_factory=list)
    code: int | None = None
    held: bool = False
    _failed: tuple[int, float] | None = None  # the first process that has, and when it was seen

    @property
    def name(self) -> str:
        return f"region {self.region}"

    @property
    def workdir(self) -> Path:
        return self.folder / f"region{self.region}"

    def output(self, process: int = 0) -> Path:
        """What a process prints."""
        return self.workdir / ("output.txt" if process == 0 else f"output.{process}.txt")

    @property
    def says(self) -> str:
        """The last line of the process that failed first, or of the leading one."""
        return last_line(self.output(self._failed[0] if self._failed else 0))

    def start(self) -> None:
        """Start all processes."""
        self.workdir.mkdir(parents=True, exist_ok=True)
        fields = [*self.shared, ("rendezvous", f"file://{self.rendezvous}")]
        fields += [("region", self.region)]
        if self.count > 1:
            fields += [("coordinator", f"127.0.0.1:{free_port()}")]
        self.processes = [self._start(fields, process) for process in range(self.count)]
        self._failed = None

    def _start(self, fields: list[tuple], process: int) -> subprocess.Popen:
        own = [("process", process)] if self.count > 1 else []
        given = [f"--config.{name}={value}" for name, value in [*fields, *own]]
        arguments = ["train", f"--config={self.config}", *given, f"--workdir={self.workdir}"]
        return start("experiments", [*arguments, *self.more], self.output(process))

    def signal(self, number: signal.Signals) -> None:
        """To all processes that live."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def poll(self) -> int | None:
        """The exit code once all processes have ended: that of the first one that failed.

        Where one has failed the others end, too; those that do not are killed after a while.
        """
        codes = [process.poll() for process in self.processes]
        failed = [i for i, code in enumerate(codes) if code not in (None, 0, EXIT_INTERRUPTED)]
        if failed and self._failed is None:
            self._failed = failed[0], time.monotonic()
        if None not in codes:
            return codes[self._failed[0]] if self._failed else max(codes)
        if self._failed and time.monotonic() > self._failed[1] + _GRACE_SECONDS:
            self.signal(signal.SIGKILL)
        return None
