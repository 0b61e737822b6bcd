"""Train with one job per region, all started on this machine.

    python -m experiments launch --regions=4 --config=configs/diloco.py --workdir=runs/regions

Every region is a program of its own, as it would be in another place: WORKDIR/region<i> is its run
folder (output.txt is what it printed), WORKDIR/rendezvous the folder through which the jobs find
one another. Overrides (--config.FIELD=VALUE) go to all of them. Ctrl-C lets every region save and
exits with code 75; the same command then continues. A region that dies does not stop the others;
with --restarts it is started again and catches up. --faults=FILE kills, stops and cuts off regions,
damages, delays and slows what they send, by a script (experiments/faults.py).
"""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from experiments import report
from experiments.between import BETWEEN
from experiments.board import Board, last_line
from experiments.cli import Flags, RefusedError, load_config, parse_flags, show_help, split_config
from experiments.job import resolve
from experiments.processes import POLL_SECONDS, ended_at_last, start
from experiments.striking import Striker, door, open_door
from lowcomm_jax.interrupt import EXIT_INTERRUPTED, Interrupt

OUTPUT, RENDEZVOUS = "output.txt", "rendezvous"
EXIT_LOST = 1


def main(argv: Sequence[str]) -> int:
    """Start the jobs and wait for them; returns the exit code."""
    path, overrides, others = split_config(argv)
    options = Flags()
    options.whole("regions", None, "how many jobs (default: the config's regions)")
    options.text("exchange", "peers", f"how payloads travel: {' or '.join(BETWEEN)}")
    options.whole("restarts", 0, "times a region that died is started again")
    options.text("faults", None, "script of faults, or random:SEED:COUNT")
    options.text("workdir", None, "folder of the run (default runs/CONFIG-regions)")
    options.text("compile_cache", None, "folder of compiled programs, or off")
    values = options.values
    rest = parse_flags("launch", others, values)
    if values.help:
        show_help(values, __doc__)
        return 0
    if path is None:
        raise RefusedError(["which method? give --config=configs/diloco.py (or another)"], "launch")
    workdir = Path(values.workdir or f"runs/{Path(path.partition(':')[0]).stem}-regions").absolute()
    given = [] if values.regions is None else [("regions", str(values.regions))]
    shared = [*overrides, *given, ("exchange", values.exchange)]
    shared += [] if values.faults is None else [("faults", values.faults)]
    rendezvous = workdir / RENDEZVOUS
    problems = [f"unexpected argument {argument!r}" for argument in rest]
    regions, faults = _check(
        path, [*shared, ("rendezvous", f"file://{rendezvous}")], workdir, problems
    )
    cache = [] if values.compile_cache is None else [f"--compile_cache={values.compile_cache}"]
    jobs = [
        _Job(path, shared, r, workdir, door(rendezvous, r), cache, values.restarts)
        for r in range(regions)
    ]
    rendezvous.mkdir(parents=True, exist_ok=True)
    for region in range(regions):
        open_door(rendezvous, region)
    console = Console()
    code = run(jobs, console, Striker(faults, jobs, rendezvous))
    complete = [job.workdir for job in jobs if job.code == 0]
    if complete and code != EXIT_INTERRUPTED:
        report.show([workdir], console)
    return code


def _check(path: str, shared, workdir: Path, problems: list[str]):
    """Refuse what any region would refuse, before any is started; (how many there are, faults)."""
    config, found = load_config(path, [*shared, ("region", "0")])
    problems = problems + found
    try:
        job = resolve(config, workdir / "region0")
    except RefusedError as error:
        raise RefusedError(problems + error.problems, "launch") from error
    if problems:
        raise RefusedError(problems, "launch")
    return job.regions, job.faults


@dataclasses.dataclass
class _Job:
    """One region's process.

    Attributes:
      restarts: how many are left.
      code: exit code once it has ended for good.
      held: a fault is on it: it is not lost.
    """

    config: str
    shared: list[tuple[str, str]]
    region: int
    folder: Path
    rendezvous: Path
    more: list[str]
    restarts: int
    process: subprocess.Popen | None = None
    code: int | None = None
    held: bool = False

    @property
    def name(self) -> str:
        return f"region {self.region}"

    @property
    def workdir(self) -> Path:
        return self.folder / f"region{self.region}"

    @property
    def output(self) -> Path:
        return self.workdir / OUTPUT

    def start(self) -> None:
        self.workdir.mkdir(parents=True, exist_ok=True)
        fields = [f"--config.{name}={value}" for name, value in self.shared]
        fields += [f"--config.rendezvous=file://{self.rendezvous}"]
        fields += [f"--config.region={self.region}", f"--workdir={self.workdir}"]
        arguments = ["train", f"--config={self.config}", *fields, *self.more]
        self.process = start("experiments", arguments, self.output)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


def run(jobs: list[_Job], console: Console, striker: Striker) -> int:
    """Watch the jobs until all have ended; returns the launcher's exit code."""
    processes: list[subprocess.Popen] = []
    with Interrupt() as interrupt, ended_at_last(processes), Board(console) as board:
        for job in jobs:
            job.start()
            processes.append(job.process)
        while any(job.code is None for job in jobs) and not interrupt.requested:
            over = all(job.code is not None for job in jobs if not job.held)
            for line in striker.act(over):
                board.print(line)
            for job in [job for job in jobs if job.code is None and not job.held]:
                board.say(job.name, last_line(job.output) or "starts")
                if job.process.poll() is not None:
                    _ended(job, board)
            processes += [job.process for job in jobs if job.process not in processes]
            time.sleep(POLL_SECONDS)
        striker.end_all()
    if interrupt.requested or any(job.code == EXIT_INTERRUPTED for job in jobs):
        console.print("interrupted and saved; run the same command to continue", highlight=False)
        return EXIT_INTERRUPTED
    return EXIT_LOST if any(job.code for job in jobs) else 0


def _ended(job: _Job, board: Board) -> None:
    """Start a job again that died, if that is wanted; else note how it ended."""
    code = job.process.returncode
    if code in (0, EXIT_INTERRUPTED):
        job.code = code
        return
    reason = f"{job.name} ended with code {code}: {last_line(job.output)}"
    if job.restarts == 0:
        job.code = code
        board.print(f"{reason}; the others go on ({job.output})")
        return
    job.restarts -= 1
    board.print(f"{reason}; it is started again, {job.restarts} restarts are left")
    job.start()
