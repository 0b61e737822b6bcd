"""Real jobs: one is stopped, one is killed, and one comes back while the others go on."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
LAST = 10_000


class Job:
    """A region's process and what it has printed."""

    def __init__(self, kind: str, url: str, region: int, count: int):
        env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
        env |= {"JAX_PLATFORMS": "cpu"}
        numbers = map(str, (region, count, LAST))
        command = [sys.executable, "-m", "regions.region_job", kind, url, *numbers]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True)
        self.lines: list[dict] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(json.loads(line))

    @property
    def landed(self) -> dict[int, dict]:
        """What has landed, by number."""
        return {line["number"]: line for line in list(self.lines) if line["event"] == "landed"}

    def wait_for(self, condition, seconds: float = 60.0):
        """Wait until something is true of what has landed."""
        until = time.monotonic() + seconds
        while not condition(self.landed):
            assert self.process.poll() is None, "the job has ended"
            assert time.monotonic() < until, self.lines[-3:]
            time.sleep(0.02)

    def end(self) -> None:
        """Kill it, if it still runs."""
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def start():
    """Starts jobs, and ends them after the test."""
    jobs: list[Job] = []

    def one(*arguments) -> Job:
        jobs.append(Job(*arguments))
        return jobs[-1]

    yield one
    for job in jobs:
        job.end()


def first_without(landed: dict[int, dict], region: int) -> dict | None:
    """The first exchange that went on without a region."""
    found = [line for _, line in sorted(landed.items()) if region not in line["part"]]
    return found[0] if found else None


@pytest.mark.parametrize("kind", ["store", pytest.param("peers", marks=pytest.mark.slow)])
def test_stopped_and_killed_regions_are_left_out_in_time_and_a_new_job_comes_in(
    start, kind, tmp_path
):
    url = f"file://{tmp_path}/meet"
    jobs = [start(kind, url, region, 3) for region in range(3)]
    jobs[0].wait_for(lambda landed: len(landed) >= 5)
    for region, number in ((1, signal.SIGSTOP), (2, signal.SIGKILL)):
        struck = time.time()
        jobs[region].process.send_signal(number)
        jobs[0].wait_for(lambda landed, r=region: first_without(landed, r) is not None)
        assert first_without(jobs[0].landed, region)["time"] - struck < 5.0
    # The stopped one wakes up far behind, and a new job takes the place of the killed one.
    jobs[1].process.send_signal(signal.SIGCONT)
    again = start(kind, url, 2, 3)
    again.wait_for(lambda landed: sum(line["part"] == [0, 1, 2] for line in landed.values()) > 3)
    for other in (jobs[0], jobs[1]):
        common = again.landed.keys() & other.landed.keys()
        assert common
        for number in common:
            assert again.landed[number]["digest"] == other.landed[number]["digest"]
    both = jobs[0].landed.keys() & jobs[1].landed.keys()
    assert all(jobs[0].landed[n]["digest"] == jobs[1].landed[n]["digest"] for n in both)


FAILING = """
import sys
from regions.party import KINDS, SECRET, TIMING, at_once, payload, send
every = []
for kind, make in KINDS.items():
    url = f"{sys.argv[1]}/{kind}"
    regions = [make(url, r, 2, "run", SECRET, timing=TIMING) for r in range(2)]
    every.append(regions)
    at_once(lambda x: x.join(20.0), regions)
    send(regions[:1], "never finished")
sys.exit(3)
"""


def test_a_job_that_ends_without_closing_ends_as_it_should(tmp_path):
    """Threads inside a library when the interpreter ends would abort the process."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    command = [sys.executable, "-c", FAILING, f"file://{tmp_path}"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    # A plug-in without its device (extra `aot`) says so when it is imported. On a busy machine the
    # exchange goes on without the other region before the interpreter has ended, and says so.
    expected = ("cudart_stub", "absl::InitializeLog", "goes on without region 1")
    said = [x for x in done.stderr.splitlines() if not any(word in x for word in expected)]
    assert (done.returncode, said) == (3, [])
