"""Whoever starts a run signals a whole process group: all of it saves, and nothing is left behind.

Terminals (Ctrl-C, a closed window), `timeout`, systemd and Slurm do that; shells and `launch` then
pass on what their children have already.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from experiments.metrics import read_records
from experiments.processes import free_port
from experiments.workdir import CHECKPOINTS, METRICS
from lowcomm_jax.interrupt import EXIT_INTERRUPTED

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_device")]

ROOT = pathlib.Path(__file__).resolve().parents[2]
TRAIN = ["-m", "experiments", "train", "--config=diloco"]
LAUNCH = ["-m", "experiments", "launch", "--config=diloco", "--config.method.period=6"]


def newest(workdir):
    """The last step written, 0 before there is one."""
    path = workdir / METRICS
    return max((r.get("step", 0) for r in read_records(path)), default=0) if path.is_file() else 0


def reach(process, regions, step):
    """Wait until the run of a process has written this step in all of these folders."""
    until = time.monotonic() + 300
    while min(map(newest, regions)) < step:
        assert time.monotonic() < until and process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def of_run(workdir):
    """Processes that name a folder in their arguments: (number, group)."""
    found = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.fsencode(workdir) in (folder / "cmdline").read_bytes():
                found[int(folder.name)] = os.getpgid(int(folder.name))
    return found


def started(command, given):
    return subprocess.Popen(
        [*command, *given],
        cwd=ROOT,
        process_group=0,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            **os.environ,
            "PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PORT": str(free_port()),
        },
    )


def killed_at_last(workdir, process):
    for number in of_run(workdir):
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    process.kill()


def test_jobs_in_their_last_evaluation_save(tiny, root):
    """A signal is not kept waiting, and what goes on only evaluates."""
    workdir = root / "last"
    given = [a for a in tiny.arguments(root) if "regions" not in a]
    given += ["--config.regions=2", "--config.steps=6", "--config.eval.every=0"]
    # Batches that take long enough.
    given += ["--config.model.layers=4", "--config.model.width=256", "--config.eval.batch=1"]
    given += ["--config.model.mlp_width=1024", "--config.eval.sequences=100"]
    given += [f"--workdir={workdir}"]
    regions = [workdir / f"region{region}" for region in range(2)]

    def ends():
        return [[r for r in read_records(x / METRICS) if r["kind"] == "end"] for x in regions]

    process = started([sys.executable, *LAUNCH], given)
    try:
        reach(process, regions, 6)
        for one in of_run(workdir):
            os.kill(one, signal.SIGTERM)
        shown = process.communicate(timeout=100)[0]
        assert [] in ends(), "the evaluation was too short for this test"
        assert process.returncode == EXIT_INTERRUPTED, shown
        process = started([sys.executable, *LAUNCH], given)
        shown = process.communicate(timeout=300)[0]
        assert process.returncode == 0, shown
        assert [len(found) for found in ends()] == [1, 1]
        assert newest(regions[0]) == newest(regions[1]) == 6
    finally:
        killed_at_last(workdir, process)


def test_a_launcher_that_is_killed_lets_its_jobs_save_and_a_second_one_waits_for_them(tiny, root):
    """Nothing is lost, and nobody takes what runs there for their own."""
    workdir = root / "killed"
    given = [a for a in tiny.arguments(root) if "regions" not in a and ".mesh." not in a]
    given += ["--config.regions=2", "--config.log.every=6", f"--workdir={workdir}"]
    given += ["--config.steps=4000"]
    regions = [workdir / f"region{region}" for region in range(2)]
    command = [sys.executable, *LAUNCH]

    def second():
        process = started(command, given)
        shown = process.communicate(timeout=100)[0]
        assert "in use by process" in shown and "region 0" not in shown, shown
        return process.returncode, shown

    process = started(command, given)
    try:
        reach(process, regions, 12)
        code, shown = second()
        assert code == 2 and f"--workdir={workdir} is in use by process {process.pid}" in shown
        assert process.poll() is None
        jobs = of_run(workdir).keys() - {process.pid}
        for one in jobs:
            os.kill(one, signal.SIGSTOP)  # so that they are seen after their launcher
        process.kill()
        process.wait()
        code, shown = second()
        assert code == 2 and all(f"--workdir={x} is in use by process" in shown for x in regions)
        for one in jobs:
            os.kill(one, signal.SIGCONT)
        until = time.monotonic() + 100
        while of_run(workdir):
            assert time.monotonic() < until, (regions[0] / "output.txt").read_text()
            time.sleep(0.1)
        for folder in regions:
            assert "interrupted and saved" in (folder / "output.txt").read_text()
            steps = [int(path.name) for path in (folder / CHECKPOINTS).iterdir()]
            assert max(steps) == newest(folder) >= 12
        process = started(command, given)
        shown = process.communicate(timeout=300)[0]
        assert process.returncode == 0, shown
        assert [newest(folder) for folder in regions] == [4000, 4000]
    finally:
        killed_at_last(workdir, process)


@pytest.mark.parametrize(
    ("command", "numbers"),
    [
        pytest.param(["examples/two_processes.sh", "{0}"], [signal.SIGINT], id="processes-INT"),
        pytest.param(["examples/two_processes.sh", "{0}"], [signal.SIGTERM], id="processes-TERM"),
        pytest.param(["examples/two_sites.sh", "{0}"], [signal.SIGINT], id="sites-INT"),
        pytest.param([sys.executable, *LAUNCH], [signal.SIGHUP], id="launch-HUP"),
        pytest.param([sys.executable, *LAUNCH], [signal.SIGUSR1], id="launch-USR1"),
        pytest.param([sys.executable, *LAUNCH], "all", id="launch-systemd"),
        pytest.param(
            ["bash", "-c", 'set -o pipefail; python $0 "$@" | tee {0}.txt', *TRAIN],
            [signal.SIGINT],
            id="tee-INT",
        ),
    ],
)
def test_a_run_in_a_group_saves(tiny, root, request, command, numbers):
    workdir = root / request.node.callspec.id
    given = [a for a in tiny.arguments(root) if "regions" not in a and ".mesh." not in a]
    given += ["--config.regions=2", "--config.steps=100000", "--config.log.every=6"]
    script = command[0].startswith("examples")
    given += [] if script else [f"--workdir={workdir}"]
    process = started([word.format(workdir) for word in command], given)
    regions = [workdir / f"region{region}" for region in range(2)]
    regions = regions if "sites" in command[0] or command[1:] == LAUNCH else [workdir]
    try:
        reach(process, regions, 12)
        if numbers == "all":  # as systemd does, with all of a unit
            for number in of_run(workdir):
                os.kill(number, signal.SIGTERM)
        else:
            os.killpg(process.pid, *numbers)
        shown = process.communicate(timeout=120)[0]
        # bash ends as its foreground does, which `tee` has left by then.
        code = 130 if "tee" in str(command) else EXIT_INTERRUPTED
        assert process.returncode == code, shown
        assert not of_run(workdir)
        for folder in regions:
            steps = [int(path.name) for path in (folder / CHECKPOINTS).iterdir()]
            assert max(steps) == newest(folder) >= 12, shown
    finally:
        killed_at_last(workdir, process)
