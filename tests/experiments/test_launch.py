"""Jobs of a run on one machine: the launcher, what it shows, and the merged report."""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from experiments.__main__ import main
from experiments.metrics import read_records
from experiments.runlog import read_run, summarise
from experiments.workdir import METRICS

STEPS = 24


@pytest.fixture(scope="module")
def root(tmp_path_factory, tiny):
    folder = tmp_path_factory.mktemp("launch")
    tiny.corpus(folder / "texts")
    return folder


def command(tiny, root, *more):
    return [
        "launch",
        "--config=diloco",
        *tiny.arguments(root),
        "--config.regions=2",
        "--config.method.period=6",
        f"--config.steps={STEPS}",
        "--config.log.every=6",
        *more,
    ]


def test_two_jobs_end_with_the_loss_of_one_process(tiny, root, capfd):
    assert main(command(tiny, root, f"--workdir={root / 'jobs'}", "--config.eval.every=12")) == 0
    shown = capfd.readouterr().out
    assert "region 1" in shown and f"step {STEPS}/{STEPS}" in shown
    alone = ["train", *command(tiny, root)[1:], "--config.eval.every=12", "--quiet"]
    assert main([*alone, f"--workdir={root / 'alone'}"]) == 0
    jobs, one = summarise(read_run(root / "jobs")), summarise(read_run(root / "alone"))
    assert jobs.complete and jobs.loss == one.loss and jobs.tokens == one.tokens
    assert jobs.bytes_sent == one.bytes_sent  # of two regions, two-shot and all-gather are alike
    run, whole = read_run(root / "jobs"), read_run(root / "alone")
    assert [step["loss"] for step in run.steps] == [step["loss"] for step in whole.steps]
    sends = [e for step in run.steps for e in step["events"] if e["kind"] == "send"]
    assert all(event["participants"] == [True, True] for event in sends)


def test_refused_before_any_job_starts(tiny, root, capsys):
    arguments = command(
        tiny, root, f"--workdir={root / 'none'}", "--config.method.name=eager_diloco"
    )
    assert main([*arguments, "--exchange=pigeons"]) == 2
    shown = capsys.readouterr().err
    assert "pigeons" in shown and not (root / "none").exists()


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "experiments", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ},
    )


def reached(launcher, workdir, step):
    """Wait until a run has written this step."""

    def there():
        records = read_records(workdir / METRICS) if (workdir / METRICS).is_file() else []
        return any(record.get("step", 0) >= step for record in records)

    until = time.monotonic() + 120
    while not there():
        assert time.monotonic() < until and launcher.poll() is None
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["store", "peers"])
def test_an_interrupted_run_continues_as_if_it_had_never_stopped(tiny, root, exchange):
    more = [f"--exchange={exchange}", "--config.steps=1200"]
    more += ["--config.log.every=5", "--config.inner.warmup_steps=3"]

    def arguments(name):
        given = [a for a in command(tiny, root, *more) if a != "--config=diloco"]
        return [*given, "--config=streaming_diloco", f"--workdir={root / name}"]

    stopped = f"stopped-{exchange}"
    launcher = start(*arguments(stopped))
    reached(launcher, root / stopped / "region0", 30)
    launcher.send_signal(signal.SIGTERM)
    shown = launcher.communicate(timeout=120)[0]
    assert launcher.returncode == 75, shown
    steps = [read_run(root / stopped / f"region{r}").steps[-1]["step"] for r in range(2)]
    assert 30 <= steps[0] == steps[1] < 1200
    for name in (stopped, f"whole-{exchange}"):
        again = start(*arguments(name))
        shown = again.communicate(timeout=300)[0]
        assert again.returncode == 0, shown
    for region in range(2):
        one, other = (
            read_run(root / f"{name}-{exchange}" / f"region{region}")
            for name in ("stopped", "whole")
        )
        assert [s["loss"] for s in one.steps] == [s["loss"] for s in other.steps]
        assert one.evals[-1]["anchor"] == other.evals[-1]["anchor"]


@pytest.mark.slow
def test_a_region_that_has_lost_its_newest_checkpoint_comes_in_late(tiny, root):
    steps, workdir = 1200, root / "behind"
    arguments = command(tiny, root, f"--workdir={workdir}", f"--config.steps={steps}")
    arguments += ["--config.log.every=10", "--config.checkpoint.every=30"]
    launcher = start(*arguments)
    reached(launcher, workdir / "region1", 70)
    launcher.send_signal(signal.SIGTERM)
    shown = launcher.communicate(timeout=120)[0]
    assert launcher.returncode == 75, shown
    newest = max((workdir / "region1" / "checkpoints").iterdir(), key=lambda x: int(x.name))
    shutil.rmtree(newest)
    again = start(*arguments)
    shown = again.communicate(timeout=300)[0]
    assert again.returncode == 0, shown
    assert "came into the run at step" in shown
    ends = [read_run(workdir / f"region{r}") for r in range(2)]
    assert [end.end["step"] for end in ends] == [steps, steps]
    assert ends[0].evals[-1]["anchor"] == ends[1].evals[-1]["anchor"]


@pytest.mark.slow
def test_a_script_of_faults(tiny, root):
    # A new job takes as long to start as hundreds of these steps.
    script, steps = root / "script.yaml", 3000
    script.write_text("""
    - {step: 60, kind: kill, region: 1, steps: 60}
    - {step: 1000, kind: stop, region: 2, steps: 30}
    - {step: 1200, kind: corrupt, region: 0, steps: 30}
    - {step: 1300, kind: late, region: 1, steps: 12, seconds: 1}
    - {step: 1400, kind: slow, region: 2, steps: 12, mbit: 1}
    - {step: 1600, kind: partition, region: 0, steps: 60}
    - {step: 2300, kind: outage, seconds: 4}
    """)
    workdir = root / "faults"
    arguments = command(tiny, root, f"--workdir={workdir}", f"--faults={script}")
    arguments += ["--config.regions=3", f"--config.steps={steps}", "--config.log.every=10"]
    arguments += ["--config.batch=64"]
    launcher = start(*arguments)
    shown = launcher.communicate(timeout=400)[0]
    assert launcher.returncode == 0, shown
    for fault in ("kill of region 1", "outage", "stop of region 2", "partition of region 0"):
        assert f"{fault} begins" in shown and f"{fault} ends" in shown, shown
    assert "came into the run at step" in shown
    ends = [read_run(workdir / f"region{r}") for r in range(3)]
    assert [end.end["step"] for end in ends] == [steps] * 3
    assert all(end.evals[-1]["anchor"] == ends[0].evals[-1]["anchor"] for end in ends)


def assert_logged_once(workdir, shown):
    """All steps that a region made, before it was lost and after, and what they cost."""
    records = read_records(workdir / METRICS)
    assert [r["kind"] for r in records if r["kind"] in ("header", "resume", "end")] == [
        "header",
        "resume",
        "end",
    ]
    entered = int(re.search(r"came into the run at step (\d+)", shown)[1])
    steps = [r for r in records if r["kind"] == "step"]
    before = [r["step"] for r in steps if r["step"] <= entered]
    assert before == list(range(1, len(before) + 1)) and len(before) >= 40
    assert [r["step"] for r in steps[len(before) :]] == list(
        range(entered + 1, 1 + records[-1]["step"])
    )
    tokens = [0, *(r["tokens"] for r in steps)]
    assert all(0 < now - then <= 2 * 32 for then, now in itertools.pairwise(tokens))
    for name in ("seconds", "bytes_sent", "bytes_received"):
        column = [r[name] for r in [*steps, records[-1]]]
        assert column == sorted(column), name
    sent = sum(e["bytes_sent"][0] for r in steps for e in r["events"])
    assert steps[-1]["bytes_sent"] == [sent] and records[-1]["tokens"] == steps[-1]["tokens"]


@pytest.mark.slow
def test_a_killed_region_comes_back_and_ends_with_the_others(tiny, root):
    steps = 3000
    arguments = command(tiny, root, f"--workdir={root / 'killed'}", "--restarts=1")
    arguments += [f"--config.steps={steps}", "--config.log.every=10"]
    launcher = start(*arguments)
    reached(launcher, root / "killed" / "region1", 40)
    subprocess.run(["pkill", "-KILL", "-f", f"workdir={root / 'killed' / 'region1'}"], check=True)
    shown = launcher.communicate(timeout=300)[0]
    assert launcher.returncode == 0, shown
    assert f"ended with code {-signal.SIGKILL}" in shown and "came into the run at step" in shown
    assert_logged_once(root / "killed" / "region1", shown)
    ends = [read_run(root / "killed" / f"region{r}") for r in range(2)]
    assert [end.end["step"] for end in ends] == [steps, steps]
    assert ends[0].evals[-1]["anchor"] == ends[1].evals[-1]["anchor"]
