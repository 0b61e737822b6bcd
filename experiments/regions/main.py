"""Train with one job per region, all started on this machine.

    python -m experiments launch --regions=4 --config=configs/diloco.py --workdir=runs/regions

Every region is a program of its own, as if it ran at another site.

- WORKDIR/region<i> is its run folder; output.txt there holds its output.
- WORKDIR/rendezvous is the folder through which the jobs find one another.
- With --processes=N a region is N processes, which share a mesh as processes on several hosts do;
  output.1.txt holds the output of the second one.
- Overrides (--config.FIELD=VALUE) go to all regions.

Ctrl-C, or another signal that stops `train`, lets every region save, and the exit code is 75. The
same command then continues. Where the launcher is killed, its regions save and end, too. A region
that dies does not stop the others; with --restarts the launcher starts it again, and it catches up.

--faults=FILE injects faults by a script (experiments/faults/fault.py). They kill, stop and cut off
regions, and damage, delay and slow the payloads that regions send. WORKDIR/faults.yaml is a copy of
the script.

WORKDIR/happened.yaml says who took part in every exchange, and which region came back at which
step. `train --config.faults=WORKDIR/happened.yaml` repeats that in one process. Where the records
of the regions are incomplete there is no such file, and the exit code is not 0.
"""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from experiments.cli import (
    Flags,
    RefusedError,
    bare_name,
    config_of,
    refuse_any,
    split_config,
)
from experiments.config import plain
from experiments.faults import happened
from experiments.faults.injector import Injector
from experiments.faults.landings import gathered
from experiments.faults.rendezvous_cut import folder_problems, make_ready, region_link
from experiments.faults.scripts import write
from experiments.processes import POLL_SECONDS, ended_at_last, free_port, last_line, start
from experiments.progress import LiveLines, plain_console, say
from experiments.refusals import LAUNCH, Asked, checked_flags, run_problems
from experiments.regions.transports import NAMES
from experiments.report import main as report
from experiments.train import devices
from experiments.train.job import Job
from experiments.train.main import judged
from experiments.train.resolve import fit_warm_up, refuse_unreadable, resolve
from experiments.workdir import METRICS, occupied, occupied_problems
from lowcomm_jax.interrupt import EXIT_INTERRUPTED, Interrupt

RENDEZVOUS, SCRIPT = "rendezvous", "faults.yaml"
EXIT_LOST = 1
_GRACE_SECONDS = 10.0


def main(argv: Sequence[str]) -> int:
    """Start the jobs and wait for them; returns the exit code."""
    path, overrides, others = split_config(argv)
    options = Flags()
    options.whole("regions", None, "number of jobs (default: the config's regions)")
    options.whole("processes", None, "processes of every region (default: the config's, 1)")
    options.text("exchange", "peers", f"how payloads travel: {', '.join(NAMES)} or module:Class")
    options.whole("restarts", 0, "how often a region that died is started again")
    options.text("faults", None, "file with a script of faults, or random:SEED:COUNT")
    options.text("workdir", None, "folder of the run (default runs/CONFIG-regions)")
    options.text("compile_cache", None, "folder of compiled programs, or off")
    values = options.values
    rest = checked_flags("launch", others, values, __doc__, config=path)
    workdir = Path(values.workdir or f"runs/{bare_name(path)}-regions").absolute()
    given = {name: values[name].value for name in ("regions", "processes", "faults")}
    shared = [*overrides, ("exchange", values.exchange)]
    shared += [(name, str(value)) for name, value in given.items() if value is not None]
    rendezvous = workdir / RENDEZVOUS
    job, count = _check(path, [*shared, ("rendezvous", rendezvous.as_uri())], workdir, rest)
    cache = [] if values.compile_cache is None else [f"--compile_cache={values.compile_cache}"]
    links = [region_link(rendezvous, r) for r in range(job.regions)]
    jobs = [
        RegionJob(path, shared, r, count, workdir, link, cache, values.restarts)
        for r, link in enumerate(links)
    ]
    console = plain_console()
    with occupied(workdir):
        # Left by a launcher that was killed.
        refuse_any(occupied_problems(one.workdir for one in jobs))
        make_ready(rendezvous, job.regions)
        if job.faults:
            write(workdir / SCRIPT, job.faults)
        code = run(jobs, console, Injector(job.faults, jobs, rendezvous))
    complete = [job.workdir for job in jobs if job.code == 0]
    if complete and code != EXIT_INTERRUPTED:
        report.show([workdir], console)
    # A script by steps does not repeat learners in one process, whose steps are not alike, nor
    # trainers, whose batches decide how many there are.
    told = job.by_rounds or job.method.adapts
    known = told or _write_happened(job, jobs, workdir / happened.FILE, console)
    return code if known else code or EXIT_LOST


def _write_happened(job: Job, jobs: Sequence[RegionJob], path: Path, console: Console) -> bool:
    """Write what happened, if any region has been in the run; returns whether it is known."""
    path.unlink(missing_ok=True)  # of an earlier start
    workdirs = [one.workdir for one in jobs]
    if not any((folder / METRICS).is_file() for folder in workdirs):
        return True
    try:
        gathered(workdirs, happened.settings(job.config, job.steps)).write(path)
    except ValueError as error:
        say(console, f"{path} cannot be written: {error}")
        return False
    return True


def _check(path: str, shared, workdir: Path, rest: Sequence[str]) -> tuple[Job, int]:
    """Refuse, before any region starts, what one of them would refuse.

    Args:
      rest: positional arguments, of which the command takes none.

    Returns:
      (the job, number of processes of each region).
    """
    config, problems = config_of("launch", path, [*shared, ("region", "0")], rest)
    refuse_unreadable(config)  # which lacks the fields of the flags, too
    problems += folder_problems(workdir / RENDEZVOUS)
    problems += run_problems(Asked(plain(config)), LAUNCH)
    fit_warm_up(config, shared)
    count = 1 if config.processes is None else config.processes
    # Looked at as one process with the devices of all.
    config.processes, mesh = 1, plain(config.mesh)
    devices.provide({**mesh, "fsdp": mesh["fsdp"] or max(count, 1)})
    try:
        job = resolve(config, workdir / "region0")
    except RefusedError as error:
        raise RefusedError(problems + error.problems, "launch") from error
    refuse_any(problems, "launch")
    return job, count


def run(jobs: list[RegionJob], console: Console, injector: Injector) -> int:
    """Watch the jobs until all have ended; returns the launcher's exit code."""
    processes: list[subprocess.Popen] = []
    with Interrupt() as interrupt, ended_at_last(processes), LiveLines(console) as table:
        for job in jobs:
            job.start()
            processes += job.processes
        try:
            while any(job.code is None for job in jobs) and not interrupt.requested:
                over = all(job.code is not None for job in jobs if not job.held)
                for line in injector.act(over):
                    table.print(line)
                    table.say("faults", injector.progress)
                for job in [job for job in jobs if job.code is None and not job.held]:
                    table.say(job.name, job.says or "starts")
                    if (code := job.poll()) is not None:
                        _ended(job, code, table)
                started = [process for job in jobs for process in job.processes]
                processes += [process for process in started if process not in processes]
                time.sleep(POLL_SECONDS)
        finally:
            injector.end_all()
    if interrupt.requested or any(job.code == EXIT_INTERRUPTED for job in jobs):
        console.print("interrupted and saved; run the same command to continue", highlight=False)
        return EXIT_INTERRUPTED
    return EXIT_LOST if any(job.code for job in jobs) else 0


def _ended(job: RegionJob, code: int, table: LiveLines) -> None:
    """Start a job that died again, if restarts are left; else note how it ended.

    One that is complete, and was not counted, ends with 1, too: it would only say so again.
    """
    if code in (0, EXIT_INTERRUPTED):
        job.code = code
        return
    reason = f"{job.name} ended with code {code}: {job.says}"
    if job.restarts == 0 or judged(job.workdir):
        job.code = code
        table.print(f"{reason}; the others go on ({job.workdir})")
        return
    job.restarts -= 1
    table.print(f"{reason}; it is started again, {job.restarts} restarts are left")
    job.start()


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
        fields = [*self.shared, ("rendezvous", self.rendezvous.as_uri())]
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

    def impostor(self) -> RegionJob:
        """A job in this region's place, beside it, that has another seed."""
        seed = next((int(value) for name, value in reversed(self.shared) if name == "seed"), 0)
        shared = [*self.shared, ("seed", str(seed + 1))]
        folder = self.folder / "impostors"
        return dataclasses.replace(self, shared=shared, folder=folder, restarts=0, processes=[])

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
