"""Minutes to N steps: what the same deaths cost jobs, and a run that is restarted as a whole.

    python tests/minutes.py FOLDER [--steps=600 --step_seconds=0.4 --kills=120,260,400 --regions=3]

The figure that users of fault-tolerant systems read first. Three runs of `configs/diloco.py`, with
H = 30 and inner steps that last `step_seconds` longer:

- `none`: without faults;
- `jobs`: the last region is killed at these steps of the run, and started again at once;
- `restart`: all jobs are killed there, and started again from the newest checkpoints.

Of each it prints the seconds from the first step to the last one and how many landings counted each
region; of each death in `jobs`, where its seconds go. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))  # a script has its own folder there

from experiments.processes import last_line

PERIOD, SAVES = 30, 60
PHASES = {
    "reading the corpus": "Python, its imports, the config",
    "run   ": "corpus, model, engine, checkpoint",
    "waits for the others": "first state, what is evaluated on",
    "programs are compiled": "meeting",
    "programs are ready": "programs, from the cache",
    "a state of": "state transfer",
    "came into the run": "catching up",
}
"""What a job prints -> what has taken the time until then."""


def command(folder: pathlib.Path, args: argparse.Namespace) -> list[str]:
    given = {
        "regions": args.regions,
        "exchange": "store",
        "workdir": folder / "run",
        "faults": folder / "faults.yaml",
        "config": "configs/diloco.py",
        "config.steps": args.steps,
        "config.method.period": PERIOD,
        "config.checkpoint.every": SAVES,
        "config.eval.every": 0,
        "config.eval.sequences": 16,
        "config.log.every": 1,  # by which the launcher sees how far regions are
    }
    flags = [f"--{name}={value}" for name, value in given.items()]
    return [sys.executable, "-m", "experiments", "launch", *flags]


def started(folder: pathlib.Path, args: argparse.Namespace) -> subprocess.Popen:
    # Python keeps what it compiles of our sources, as it does where nothing is set.
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.Popen(
        command(folder, args),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**kept, "PYTHONUNBUFFERED": "1"},
    )


def lines_of(process: subprocess.Popen) -> Iterator[tuple[float, str]]:
    """(seconds, line) of all that a process prints; an empty line where nothing came for 50 ms."""
    came: queue.SimpleQueue[tuple[float, str] | None] = queue.SimpleQueue()

    def read() -> None:
        for line in process.stdout:
            came.put((time.monotonic(), line.rstrip()))
        came.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            one = came.get(timeout=0.05)
        except queue.Empty:
            one = time.monotonic(), ""
        if one is None:
            return
        yield one


def records(path: pathlib.Path) -> list[dict]:
    """The whole records of a file; none where it is not there."""
    if not path.is_file():
        return []
    return [json.loads(x) for x in path.read_text().split("\n")[:-1] if x.endswith("}")]


def steps_made(folder: pathlib.Path) -> int:
    """Inner steps of region 0, as the last line of its log says: it is looked at often."""
    path = folder / "run/region0/metrics.jsonl"
    line = last_line(path) if path.is_file() else ""
    return json.loads(line).get("step", 0) if line else 0


def counted(folder: pathlib.Path, args: argparse.Namespace) -> dict[int, list[bool]]:
    """Who was counted in the landings during the run, by the step of the send."""
    found = {}
    for record in records(folder / "run/region0/landings.jsonl"):
        if record["kind"] == "landing" and not record["last"] and record["step"] <= args.steps:
            found[record["step"]] = record["counted"]
    return found


def trained(folder: pathlib.Path, args: argparse.Namespace, ends: tuple[int, ...]) -> float:
    """Seconds from the first step to the last; everything is killed and restarted at `ends`."""
    began = None
    for end in (*ends, None):
        process = started(folder, args)
        for now, _ in lines_of(process):
            made = steps_made(folder)
            if made and began is None:
                began = now
            if made >= args.steps:
                ended = now
                break
            if end is not None and made >= end:
                break
        if end is None:
            process.wait()
            return ended - began
        kill(folder, process)
    raise AssertionError


def kill(folder: pathlib.Path, process: subprocess.Popen) -> None:
    """Kill a launch and all its jobs, which have groups of their own."""
    os.killpg(process.pid, signal.SIGKILL)
    shown = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True)
    for line in shown.stdout.splitlines():
        if str(folder) in line and "experiments" in line:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)
    process.wait()


def killed(folder: pathlib.Path, args: argparse.Namespace) -> tuple[float, list[dict[str, float]]]:
    """(seconds from the first step to the last, of each death what its seconds went to)."""
    began, ended, deaths, death = None, None, [], None
    own = folder / f"run/region{args.regions - 1}"
    process = started(folder, args)
    for now, line in lines_of(process):
        made = steps_made(folder) if ended is None else args.steps
        began = now if made and began is None else began
        ended = now if made >= args.steps and ended is None else ended
        if f"kill of region {args.regions - 1} begins" in line:
            death = Death(own, now)
        if death is not None and f"kill of region {args.regions - 1} ends" in line:
            death.restarted(now)
        if death is not None and death.over(now):
            deaths.append(death.phases)
            death = None
    process.wait()
    return ended - began, deaths


class Death:
    """What the seconds of one death go to, as the job in its place says.

    Attributes:
      phases: seconds by name.
    """

    def __init__(self, own: pathlib.Path, now: float):
        self.phases: dict[str, float] = {}
        self._output, self._landings = own / "output.txt", own / "landings.jsonl"
        self._read, self._known = self._output.stat().st_size, len(records(self._landings))
        self._began = self._since = now

    def restarted(self, now: float) -> None:
        """The launcher has started the job again, which the script lets it do a step later."""
        self.phases["started again after"] = now - self._began
        self._since = now

    def over(self, now: float) -> bool:
        """Look what it says by now; whether it was counted again."""
        with self._output.open() as file:
            file.seek(self._read)
            said = file.read()
        self._read += len(said)
        for line in said.splitlines():
            for text, phase in PHASES.items():
                if text in line:
                    self.phases[phase] = self.phases.get(phase, 0.0) + now - self._since
                    self._since = now
        for record in records(self._landings)[self._known :]:
            self._known += 1
            if record["kind"] == "rejoin":
                self.phases["back in the run after"] = now - self._began
            elif record["counted"][-1] and "back in the run after" in self.phases:
                self.phases["counted again after"] = now - self._began
                return True
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--step_seconds", type=float, default=0.4)
    parser.add_argument("--kills", default="120,260,400")
    parser.add_argument("--regions", type=int, default=3)
    parser.add_argument("--runs", default="none,jobs,restart")
    args = parser.parse_args()
    kills = [int(step) for step in args.kills.split(",")]
    paced = [
        {"step": 1, "kind": "straggle", "region": r, "steps": args.steps}
        | {"delay": args.step_seconds}
        for r in range(args.regions)
    ]
    deaths = [
        {"step": step, "kind": "kill", "region": args.regions - 1, "steps": 1} for step in kills
    ]
    for name in args.runs.split(","):
        folder = args.folder.absolute() / name
        folder.mkdir(parents=True)
        script = paced + (deaths if name == "jobs" else [])
        (folder / "faults.yaml").write_text(json.dumps(script))
        each: list[dict[str, float]] = []
        if name == "jobs":
            seconds, each = killed(folder, args)
        else:
            seconds = trained(folder, args, tuple(kills) if name == "restart" else ())
        landings = list(counted(folder, args).values())
        took = [sum(row) for row in itertools.zip_longest(*landings, fillvalue=False)]
        print(f"{name:8} {seconds:6.1f} s; counted in {took} of {len(landings)} landings")
        for phases in each:
            print("   ", ", ".join(f"{phase} {s:.1f} s" for phase, s in phases.items()))


if __name__ == "__main__":
    main()
