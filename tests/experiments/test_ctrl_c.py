"""Ctrl-C ends every command without a traceback, whatever it is at."""

import os
import signal
import subprocess
import sys
import time

import pytest

from experiments import __main__ as commands


@pytest.fixture
def handler():
    """Puts back what a test installs; a test itself may run where SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("command", ["train", "plan", "report", "sample", "export"])
def test_commands_with_nothing_to_undo_are_ended_by_the_system(command, handler):
    commands.let_ctrl_c_end([command, "--help"])
    assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL


@pytest.mark.parametrize("argv", [[], ["--workdir=a"], ["compare"], ["launch"], ["bench"]])
def test_commands_that_end_others_keep_their_handler(argv, handler):
    commands.let_ctrl_c_end(argv)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_job_in_the_background_stays_deaf(handler):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    commands.let_ctrl_c_end(["train"])
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_an_interrupt_is_one_line(monkeypatch, capsys):
    def stop(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr("experiments.bench.main.main", stop)
    assert commands.main(["bench", "codec"]) == 130
    assert capsys.readouterr().err == "bench: interrupted\n"


@pytest.mark.slow
@pytest.mark.parametrize("after", [1.0, 2.0, 4.0])
def test_a_run_that_has_not_begun_ends_at_once(after, handler, tmp_path):
    command = [sys.executable, "-m", "experiments", "train", "--config=diloco"]
    ended = subprocess.Popen(
        [*command, "--config.model.layers=24", f"--workdir={tmp_path / 'run'}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    time.sleep(after)
    ended.send_signal(signal.SIGINT)
    said, _ = ended.communicate(timeout=10)
    assert ended.returncode in (-signal.SIGINT, 75) and "Traceback" not in said, said


def test_what_nobody_reads_any_more_does_not_end_a_command(tmp_path):
    """After Ctrl-C `tee` is often gone before the command has saved."""
    script = "set -o pipefail; { sleep 0.2; python -m experiments help; } 2>$1/said | true"
    done = subprocess.run(["bash", "-c", script, "bash", tmp_path], check=False)
    assert done.returncode == 0 and (tmp_path / "said").read_text() == ""
