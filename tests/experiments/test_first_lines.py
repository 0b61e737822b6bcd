"""What a user sees of a run: no seconds of silence, what trains and travels, and how fast."""

import dataclasses
import os
import pty
import re
import subprocess
import sys

import jax
import pytest

from experiments.__main__ import main
from experiments.metrics import read_records
from lowcomm_jax.aot import ACCELERATORS


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
def test_what_trains_and_travels_and_how_fast(
    tiny, root, capsys, monkeypatch, method, more, trained, payload
):
    """Of a device whose peak is known, also its share of that."""
    kind, peak = jax.devices()[0].device_kind, 1e9
    known = dataclasses.replace(ACCELERATORS["h100"], kind=kind, flops=peak)
    monkeypatch.setitem(ACCELERATORS, "this processor", known)
    more = ("steps=4", "log.every=2", "eval.every=0", "checkpoint.every=0", *more)
    flags = [f"--config={method}", *(f"--config.{x}" for x in more), f"--workdir={root / method}"]
    assert main(["train", *tiny.arguments(root, *flags)]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert f"trains   {trained}; a region's payload: {payload}" in lines
    assert lines.index("compiling ...") < next(i for i, x in enumerate(lines) if "step 4/4" in x)
    header = read_records(root / method / "metrics.jsonl")[0]
    speeds = re.findall(r"([\d,]+) tokens/s \(([\d.]+)% MFU\)", shown)
    assert len(speeds) == 2
    for tokens, share in speeds:
        flops = float(tokens.replace(",", "")) * header["flops_per_token"]
        assert float(share) == pytest.approx(100 * flops / peak, rel=0.02, abs=0.06)
