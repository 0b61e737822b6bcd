"""Jobs of a run on one machine: the launcher, what it shows, and the merged report."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from experiments.__main__ import main
from experiments.runlog import read_run, summarise

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


@pytest.mark.slow
def test_a_killed_region_comes_back_and_ends_with_the_others(tiny, root):
    steps = 3000
    arguments = command(tiny, root, f"--workdir={root / 'killed'}", "--restarts=1")
    arguments += [f"--config.steps={steps}", "--config.log.every=10"]
    launcher = subprocess.Popen(
        [sys.executable, "-m", "experiments", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ},
    )
    metrics = root / "killed" / "region1" / "metrics.jsonl"
    until = time.monotonic() + 120
    while not (metrics.is_file() and '"step": 40,' in metrics.read_text()):
        assert time.monotonic() < until and launcher.poll() is None
        time.sleep(0.2)
    subprocess.run(["pkill", "-KILL", "-f", f"workdir={root / 'killed' / 'region1'}"], check=True)
    shown = launcher.communicate(timeout=300)[0]
    assert launcher.returncode == 0, shown
    assert f"ended with code {-signal.SIGKILL}" in shown and "came into the run at step" in shown
    ends = [
        json.loads((root / "killed" / f"region{r}" / "metrics.jsonl").read_text().splitlines()[-1])
        for r in range(2)
    ]
    assert [end["step"] for end in ends] == [steps, steps]
    losses = [read_run(root / "killed" / f"region{r}").evals[-1]["anchor"] for r in range(2)]
    assert losses[0] == losses[1]
