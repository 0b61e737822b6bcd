"""What a user sees before the first step: what trains and travels, and no seconds of silence."""

import os
import pty
import subprocess
import sys

import pytest

from experiments.__main__ import main


def test_a_terminal_sees_at_once_that_a_command_starts():
    """Its libraries take seconds to load. The line goes when they are there; a file has none."""
    command = [sys.executable, "-m", "experiments", "report", "--help"]
    ours, theirs = pty.openpty()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, check=True)
    os.close(theirs)
    seen = os.read(ours, 10_000).decode()
    os.close(ours)
    assert seen.startswith("starting ...") and "\r\x1b[K" in seen and b"starting" not in done.stdout
    assert "starting" not in subprocess.run(command, capture_output=True, text=True).stderr


ALL = "7,088 parameters, 0 frozen"
BUT_TABLE = "1,968 parameters, 5,120 frozen"  # of 320 tokens x 16


@pytest.mark.parametrize(
    "method, more, trained, payload",
    [
        ("diloco", ("frozen=('embedding',)",), BUT_TABLE, "7.87 kB a synchronisation"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("ddp", (), ALL, "28.4 kB a step"),
                ("sparta", (), ALL, "what channel sparta selects"),
            ]
        ),
    ],
)
def test_what_trains_and_travels(tiny, tmp_path, capsys, method, more, trained, payload):
    tiny.corpus(tmp_path / "texts")
    flags = [f"--config={method}", "--config.steps=3", "--config.eval.every=0"]
    flags += [f"--config.{x}" for x in more]
    flags += ["--config.checkpoint.every=0", f"--workdir={tmp_path / 'run'}"]
    assert main(["train", *tiny.arguments(tmp_path, *flags)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"trains   {trained}; a region's payload: {payload}" in lines
    assert lines.index("compiling ...") < next(i for i, x in enumerate(lines) if "step 3/3" in x)
